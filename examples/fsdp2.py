"""Sharded weights, activation checkpointing, and a run that goes on: torchrun --nproc_per_node=4 examples/fsdp2.py

Stop it, and start it again, on any number of ranks: it goes on after the last step that was saved.
"""

import tiny
import torch
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import clip_grad_norm_

from ringlab import backward, join_ring, shard_batch, use_ring
from ringlab.models.checkpoint import Checkpoints, last_checkpoint, locked
from ringlab.support.processes import RankContext


def train(context: RankContext) -> None:
    model = tiny.model().to(context.device)
    model.activation_checkpointing_enable()
    use_ring(model)  # before fully_shard
    for module in (*model.model.layers, model):
        fully_shard(module)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    checkpoints, done, losses = Checkpoints(tiny.FOLDER, {"data": "tiny"}), 0, []
    if last_checkpoint(tiny.FOLDER):
        done, losses, _ = checkpoints.load(model, optimizer)  # weights and moments, in the slices of this mesh
    for step, batch in enumerate(tiny.batches()[done:], done + 1):  # the same batch on every rank
        shard = shard_batch(batch).to(context.device)
        loss = backward(model(**shard).loss)  # of this rank's part; gradients are averaged, and parts must be summed
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())  # that of the batch, the same on every rank
        checkpoints.save(step, model, optimizer, losses)  # a copy, written while the next step computes
    checkpoints.finish()
    tiny.keep(losses, model)


with join_ring(tiny.DEVICE) as context, locked(tiny.FOLDER):  # its folder is made, and other runs are kept out
    train(context)  # the model is freed before the group: the other order may hang at the end
