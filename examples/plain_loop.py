"""A training loop of your own, with DistributedDataParallel: torchrun --nproc_per_node=4 examples/plain_loop.py"""

import tiny
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from ringlab import shard_batch, use_ring
from ringlab.support.processes import RankContext, join_ring


def train(context: RankContext) -> None:
    model = tiny.model().to(context.device)
    use_ring(model)
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for batch in tiny.batches():  # the same batch on every rank
        shard = shard_batch(batch).to(context.device)
        loss = parallel(**shard).loss  # this rank's part of the loss of the batch
        (loss * dist.get_world_size()).backward()  # DDP averages gradients; parts must be summed
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total := loss.detach())  # the sum of the parts, the same on every rank
        losses.append(total.item())
    tiny.keep(losses, model)


with join_ring() as context:
    train(context)  # the model is freed before the group: the other order may hang at the end
