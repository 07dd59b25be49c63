"""Steps of the real rings with one mistake each, of which tests/doctor/sick makes rings for the doctor."""

from dataclasses import replace
from unittest import mock

import torch

from ringlab.basics.ranks import neighbours
from ringlab.training import flash_ring, grouped_query
from ringlab.training.all_to_all import Exchange
from ringlab.training.partition import Partition
from tests.mistakes import patch


def interleaved_fold(q, kv_heads):
    return q.unflatten(1, (-1, kv_heads)).transpose(1, 2).flatten(2, 3)


def interleaved_unfold(x, heads):
    return x.unflatten(2, (heads // x.shape[1], -1)).transpose(1, 2).flatten(1, 2)


GROUPED = {
    "head h uses K/V head h mod G": lambda: mock.patch.multiple(
        grouped_query, fold=interleaved_fold, unfold=interleaved_unfold
    )
}


class OwnQueriesOnly:
    """A backward pass of blocks in which each rank keeps what its queries add to one block, its first one."""

    calls = 0

    def __call__(self, *block, **options):
        self.calls += 1
        d_q, d_k, d_v = right_backward(*block, **options)
        return (d_q, d_k, d_v) if self.calls == 1 else (d_q, 0 * d_k, 0 * d_v)


right_backward, right_pieces = flash_ring.fused_backward, Partition.pieces
FLASH = {
    "OwnQueriesOnly": patch(flash_ring, "fused_backward", OwnQueriesOnly),
    "contiguous_slices": patch(
        Partition, "pieces", lambda it, rank, block: right_pieces(replace(it, layout="contiguous"), rank, block)
    ),
}

right_to_tokens = Exchange.to_tokens


def back_as_they_came(exchange, wholes):
    """Out goes back as if its tokens were in order of rank."""
    if len(wholes) == 3:
        return right_to_tokens(exchange, wholes)
    lengths = [len(at) for at in exchange.order]
    return right_to_tokens(replace(exchange, order=torch.arange(sum(lengths)).split(lengths)), wholes)


def not_added(total, parts, *, group, async_op):
    """Each rank keeps what its own queries found for its block."""
    rank, world_size, _, _ = neighbours(group)
    total.copy_(parts.view(world_size, -1)[rank])
    return mock.Mock()
