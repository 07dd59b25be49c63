"""torch.compile: torchrun --nproc_per_node=4 examples/compiled.py"""

import tiny
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from ringlab import backward, join_ring, shard_batch, use_ring
from ringlab.support.processes import RankContext


def train(context: RankContext) -> None:
    model = tiny.model().to(context.device)
    use_ring(model)
    parallel = torch.compile(DistributedDataParallel(model))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for batch in tiny.batches():  # the same batch on every rank
        shard = shard_batch(batch).to(context.device)
        loss = backward(parallel(**shard).loss)  # of this rank's part; gradients are averaged, and parts must be summed
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())  # that of the batch, the same on every rank
    tiny.keep(losses, model)


with join_ring(tiny.DEVICE) as context:
    train(context)  # the model is freed before the group: the other order may hang at the end
