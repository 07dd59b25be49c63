"""Rings with mistakes that the catalogue does not hold, and rings with two mistakes that it holds."""

import torch

from ringlab.training.flash_ring import ring_backward, ring_flash_attention
from ringlab.training.fused_block import fused_backward
from tests.sick import backward, heads, masks, merge, other_ways, travel
from tests.sick.merge import flash
from tests.sick.plain_ring import ByAutograd, PlainRing, moved
from tests.sick.ring import CAUSAL, MASKED, SickRing, always
from tests.sick.travel import last_block_skipped, pieces


def d_out_of_another_rank(q, k, v, out, lse, d_out, ring):
    return ring_backward(q, k, v, out, lse, moved(d_out, d_out.shape, ring.group), ring)


def heads_of_v_reversed(q, k, v, **options):
    return ring_flash_attention(q, k, v.flip(1), **options)


def queries_one_token_on(q, k, v, **options):
    return ring_flash_attention(q.roll(1, dims=2), k, v, **options)


def keys_and_values_exchanged(q, k, v, **options):
    return ring_flash_attention(q, v, k, **options)


class SoftmaxTwice(PlainRing):
    def attend(self, q, k, v, seen):
        _, lse = super().attend(q, k, v, seen)
        p = self.scores(q, k, seen).softmax(dim=-1).masked_fill(~seen, -torch.inf).softmax(dim=-1)
        return p.nan_to_num() @ v.repeat_interleave(q.shape[1] // v.shape[1], dim=1), lse


class DividedTwice(ByAutograd):
    """By l at the end, though the blocks' results were averages already."""

    def forward(self, q, k, v):
        out, lse = super().forward(q, k, v)
        return out / self.P, lse


class ReceivedKeysReversed(PlainRing):
    """The keys of a received block lie in another order than its values."""

    def in_hand(self, kv, own, t):
        return torch.stack((kv[0].flip(-2), kv[1])) if t else kv


class OwnBlockNotCounted(PlainRing):
    def seen(self, block):
        return super().seen(block) & (block != self.rank)


class NoMergeOnRank0(PlainRing):
    def merge(self, out, lse, out_j, lse_j, t):
        return (out, lse) if self.rank == 0 else super().merge(out, lse, out_j, lse_j, t)


def delta_added(q, k, v, out, lse, d_out, **options):
    return fused_backward(q, k, v, -out, lse, d_out, **options)


FLASH = ring_flash_attention
KNOWN = {
    **merge.SICK,
    **travel.SICK,
    **masks.SICK,
    **heads.SICK,
    **backward.SICK,
    **other_ways.SICK,
    "own_block_skipped": SickRing(OwnBlockNotCounted.attention, shows=always),
    "block_left_out_in_backward/pieces": SickRing(FLASH, pieces(last_block_skipped), takes=CAUSAL, in_forward=False),
    "keys_and_values_exchanged/by_the_caller": SickRing(keys_and_values_exchanged, shows=always, takes=MASKED),
}
SICK = {
    "d_out_of_another_rank": SickRing(
        FLASH, flash("ring_backward", d_out_of_another_rank), takes=CAUSAL, equal_chunks=True
    ),
    "heads_of_v_reversed": SickRing(heads_of_v_reversed, shows=lambda case: case.kv_heads > 1, takes=MASKED),
    "queries_one_token_on": SickRing(
        queries_one_token_on, shows=lambda case: case.seq_len > case.world_size, takes=CAUSAL
    ),
    "softmax_twice": SickRing(SoftmaxTwice.attention, shows=always, takes=CAUSAL),
    "divided_twice": SickRing(DividedTwice.attention, takes=CAUSAL),
    "received_keys_reversed": SickRing(ReceivedKeysReversed.attention, equal_chunks=True),
    "no_merge_on_rank_0": SickRing(NoMergeOnRank0.attention, equals=("never_called",)),  # on rank 0 only
    "delta_added": SickRing(FLASH, flash("fused_backward", delta_added), always, MASKED),
}
