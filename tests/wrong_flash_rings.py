"""Trainable rings with one mistake each. The check that the right ring passes must reject every one of them.

On each rank: with WRONG["swapped"](): ... SHOWS says in which cases a mistake shows.
"""

import math
from dataclasses import replace

import torch

from ringlab.basics.naive_attention import accumulation_dtype
from ringlab.training import flash_ring, overlap, schedule
from ringlab.training.causal import BlockSlice
from ringlab.training.flash_ring import merge_into
from ringlab.training.fused_block import fused_backward, fused_forward
from ringlab.training.overlap import arriving_blocks, post, two_buffers
from ringlab.training.partition import Partition
from tests.planted import Mistakes, mistakes_of_blocks, patch

WRONG, right_pieces = Mistakes(mistakes_of_blocks(flash_ring, "fused_backward")), Partition.pieces


@WRONG.replaces(flash_ring, "fused_backward")
def lse_of_the_block(q, k, v, out, lse, d_out, **options):
    return fused_backward(q, k, v, *fused_forward(q, k, v, **options), d_out, **options)


@WRONG.replaces(flash_ring, "fused_backward")
def backward_without_a_mask(*block, causal, **scores):
    return fused_backward(*block, **scores)


@WRONG.replaces(schedule, "post")
def OneHopShort(sent, received, group, *, distance=1):
    """The message home is left out: the gradients stay one rank from home."""
    if distance == 1:
        return post(sent, received, group)
    received[0].copy_(sent[0])
    return []


@WRONG.replaces(schedule, "post")
class GradientsNotWaitedFor:
    """A rank adds its part too early, and then the sums that arrive overwrite it: here, with the next message."""

    late = None

    def __call__(self, sent, received, group, **distance):
        if self.late:
            self.late[0].copy_(self.late[1])
        coming = torch.empty_like(received[0])
        for work in post(sent, [coming], group, **distance):
            work.wait()
        self.late = received[0], coming
        return []


@WRONG.replaces(schedule, "post")
def aliased_gradients(sent, received, group, **distance):
    """dk and dv arrive in one buffer, so the second overwrites the first."""
    for work in post(sent, received, group, **distance):
        work.wait()
    d_kv = received[0].view(2, -1)
    d_kv[0].copy_(d_kv[1])
    return []


def off_by_one(diagonal):
    def forward(q, k, v, *, scale, softcap=None, causal=False):
        if not causal:
            return fused_forward(q, k, v, scale=scale)
        dtype = q.dtype
        q, k, v = (
            x.to(accumulation_dtype(dtype)).repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (q, k, v)
        )
        scores = q @ k.transpose(-2, -1) * scale
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(diagonal), -torch.inf)
        return (scores.softmax(dim=-1).nan_to_num() @ v).to(dtype), scores.logsumexp(dim=-1)

    return forward


WRONG["the_diagonal_hidden"] = patch(flash_ring, "fused_forward", off_by_one(0))
WRONG["the_next_token_seen"] = patch(flash_ring, "fused_forward", off_by_one(2))


def replaces_pieces(mistake):
    """Note a mistake in what a rank computes of a block, for one piece a block: how each of them is changed."""

    def pieces(partition, rank, block):
        right = right_pieces(partition, rank, block)
        return tuple(mistake(partition, rank, block, piece) for piece in right) if partition.mask.causal else right

    WRONG[mistake.__name__] = patch(Partition, "pieces", pieces)
    return mistake


@replaces_pieces
def last_half_of_the_keys(partition, rank, block, piece):
    return BlockSlice(piece.queries, slice(partition.lengths[rank] // 2, None), False) if block < rank else piece


@replaces_pieces
def first_half_of_the_queries(partition, rank, block, piece):
    return BlockSlice(slice(0, partition.lengths[rank] // 2), piece.keys, False) if block > rank else piece


@replaces_pieces
def first_query_kept(partition, rank, block, piece):
    return BlockSlice(slice(None), slice(None), triangle=True)


def contiguous_slices(partition, rank, block, pieces=Partition.pieces):
    return pieces(replace(partition, layout="contiguous"), rank, block)


WRONG["contiguous_slices"] = patch(Partition, "pieces", contiguous_slices)


@WRONG.replaces(overlap, "post")
class StaleBlock:
    """The block in hand overwrites the first block that arrives."""

    calls = 0

    def __call__(self, sent, received, group):
        self.calls += 1
        for work in post(sent, received, group):
            work.wait()
        if self.calls == 1:
            for x, y in zip(sent, received, strict=True):
                y.copy_(x)
        return []


@WRONG.replaces(Partition, "pieces")
def last_block_skipped(partition, rank, block):
    """The last block arrives, and is not used."""
    return () if block == (rank + 1) % len(partition.lengths) else right_pieces(partition, rank, block)


@WRONG.replaces(schedule, "arriving_blocks")
def keys_without_values(k, v, **options):
    return ((k_j, v) for k_j, _ in arriving_blocks(k, v, **options))


@WRONG.replaces(flash_ring, "merge_into")
def average(out, lse, out_j, lse_j):
    out.lerp_(out_j.to(out.dtype), 0.5)
    torch.logaddexp(lse, lse_j, out=lse)


@WRONG.replaces(flash_ring, "merge_into")
def merge_in_base_2(out, lse, out_j, lse_j):
    share = torch.sigmoid((lse_j - lse) * math.log(2))
    out.lerp_(out_j.to(out.dtype), share[..., None])
    torch.logaddexp2(lse, lse_j, out=lse)


@WRONG.replaces(flash_ring, "merge_into")
def lse_left_behind(out, lse, out_j, lse_j):
    out.lerp_(out_j.to(out.dtype), torch.sigmoid(lse_j - lse)[..., None])


@WRONG.replaces(flash_ring, "merge_into")
def output_in_the_dtype_of_q(out, lse, out_j, lse_j):
    merge_into(out, lse, out_j, lse_j)
    out.copy_(out.to(out_j.dtype))


@WRONG.replaces(schedule, "two_buffers")
def gradients_in_float32(k, v, lengths, rank, dtype):
    """In float64 too. (In bfloat16, torch's own error hides what a sum in bfloat16 adds; see the bytes.)"""
    return two_buffers(k, v, lengths, rank, torch.float32)


ZIGZAG, STRIPED, FULL = (True, "zigzag"), (True, "striped"), (False, "contiguous")
# fmt: off
SOMETIMES = {  # the mistake: the cases in which it shows, where not in all
    "backward_without_a_mask": [ZIGZAG, STRIPED], "contiguous_slices": [ZIGZAG, STRIPED],
    "the_diagonal_hidden": [ZIGZAG, STRIPED], "the_next_token_seen": [ZIGZAG, STRIPED],
    "last_half_of_the_keys": [ZIGZAG], "first_half_of_the_queries": [ZIGZAG], "first_query_kept": [STRIPED],
    "output_in_the_dtype_of_q": [], "gradients_in_float32": [],  # tests/test_precision.py, in other dtypes
}
# fmt: on
SHOWS = {  # the mistake: (a way, its ranks, a problem)
    wrong: [
        ("ring", 4, (4, 2, 48, {"causal": causal, "layout": layout}, None, torch.float32, 1, 16))
        for causal, layout in SOMETIMES.get(wrong, [ZIGZAG, STRIPED, FULL])
    ]
    for wrong in WRONG
}
