"""Rings whose forward pass is wrong: the merge, the blocks that arrive, the mask, the scale and the heads."""

import math
from contextlib import ExitStack
from functools import partial
from unittest import mock

import torch
import torch.nn.functional as F

import ring_attn
from bench.gradients_home import Circle
from ring_attn import ring_attention
from ringlab.basics.blockwise_attention import attend
from ringlab.basics.online_softmax import start
from ringlab.basics.ranks import neighbours
from ringlab.training import backward, flash_ring, grouped_query, overlap, schedule
from ringlab.training.flash_ring import merge_into, ring_flash_attention
from ringlab.training.fused_block import fused_backward, fused_forward
from ringlab.training.overlap import post
from ringlab.training.partition import Partition
from tests.planted import patch
from tests.sick.plain_ring import PlainRing, moved
from tests.sick.ring import CAUSAL, MASKED, SickRing, always, from_2, from_3
from tests.wrong_rings import BLOCKING, GROUPED
from tests.wrong_rings import FLASH as WRONG

BF16 = torch.bfloat16
FLASH = partial(ring_flash_attention, schedule=Circle)  # as other rings send sums: the catalogue tells their mistakes
FORWARD = {"gradients": False, "grouped": False, "equal_chunks": True}
BACKWARD = {"base": backward.ring_attention, "grouped": False}
right_pieces = Partition.pieces


def flash(name, mistake):
    """A function that patches the flash ring or its schedule; a class gives a new object to each pass."""
    module = flash_ring if hasattr(flash_ring, name) else schedule
    return patch(module, name, mistake)


# The merge -----------------------------------------------------------------------------------------------------------


def averages_added(out, lse, out_j, lse_j):
    out += out_j.to(out.dtype)
    torch.logaddexp(lse, lse_j, out=lse)


def shares_exchanged(out, lse, out_j, lse_j):
    merged = lse.logaddexp(lse_j)
    out.lerp_(out_j.to(out.dtype), torch.sigmoid(lse - lse_j)[..., None])
    lse.copy_(merged)


def base_2_forward(*block, **options):
    out, lse = fused_forward(*block, **options)
    return out, lse / math.log(2)


def base_2_backward(q, k, v, out, lse, d_out, **options):
    return fused_backward(q, k, v, out, lse * math.log(2), d_out, **options)


def base_2_in_both():
    return mock.patch.multiple(flash_ring, fused_forward=base_2_forward, fused_backward=base_2_backward)


def unstabilised(out, lse, out_j, lse_j):
    a, b = lse.exp(), lse_j.exp()
    out.copy_((a[..., None] * out + b[..., None] * out_j.to(out.dtype)) / (a + b)[..., None])
    lse.copy_((a + b).log())


def own_max(max_of):
    """m_j, l_j and o_j of the block, by themselves. What becomes of m counts for lse only, and so for the gradients."""

    def attend_by_itself(state, q, k, v, *, scale):
        m, l, o = state
        m_j, l_j, o_j = attend(start(q), q, k, v, scale=scale)
        return max_of(m, m_j), l + l_j, o + o_j

    return patch(ring_attn, "attend", attend_by_itself)


class SharesExchangedOfSeenBlocks(PlainRing):
    skips = True

    def merge(self, out, lse, out_j, lse_j, t):
        share = torch.sigmoid(lse - lse_j)[..., None]
        return out + share * (out_j - out), torch.logaddexp(lse, lse_j)


# 16 bits -------------------------------------------------------------------------------------------------------------


class LseInTheDtypeOfQ(PlainRing):
    def merge(self, out, lse, out_j, lse_j, t):
        out, lse = super().merge(out, lse, out_j, lse_j, t)
        return out, lse.to(self.dtype).to(lse.dtype)


def out_always_in_16_bits(out, lse, out_j, lse_j):
    merge_into(out, lse, out_j, lse_j)
    out.copy_(out.to(BF16))


class GradientsInTheDtypeOfK:
    """The first call of `hop` moves K and V; with their dtype the gradients travel."""

    dtype = None

    def __call__(self, block, length, group):
        self.dtype = self.dtype or block.dtype
        return ring_attn.hop(block.to(self.dtype), length, group).to(block.dtype)


def sent_in_16_bits(sent, received, group, **distance):
    return post([x.to(BF16).to(x.dtype) for x in sent], received, group, **distance)


def in_float32(q, k, v, **options):
    return ring_flash_attention(*(x.float() for x in (q, k, v)), **options).to(q.dtype)


def narrow(case):
    return case.world_size > 1 and case.dtype.itemsize == 2


def wide(case):
    """With 16-bit input a sum in 16 bits hides behind what fused kernels may round."""
    return case.world_size > 1 and case.dtype.itemsize > 2


# The blocks that arrive ----------------------------------------------------------------------------------------------


def several(*patches):
    """One context manager of several."""

    def enter():
        stack = ExitStack()
        for planted in patches:
            stack.enter_context(planted())
        return stack

    return enter


def pieces(mistake):
    return patch(Partition, "pieces", mistake)


def last_block_skipped(partition, rank, block):
    """Nothing is computed of the block that arrives last, from rank r + 1."""
    world_size = len(partition.lengths)
    return () if world_size > 1 and block == (rank + 1) % world_size else right_pieces(partition, rank, block)


def times_distance(factor, *modules):
    """Every message goes that many times as far."""

    def further(sent, received, group, *, distance=1):
        _, world_size, _, _ = neighbours(group)
        if distance * factor % world_size == 0:
            for x, y in zip(sent, received, strict=True):
                y.copy_(x)
            return []
        return post(sent, received, group, distance=distance * factor)

    return several(*(patch(module, "post", further) for module in modules))


def one_buffer(k, v, *, lengths, group, hops):
    """From round 1 on the next block lies in the buffer of the block in hand before the rank computes on that."""
    hand = torch.stack((k, v))
    for t in range(hops):
        arrived = moved(hand, hand.shape, group)
        yield tuple(arrived if t else hand)
        hand = arrived
    yield tuple(hand)


def own_chunk(q, k, v, *, causal=False, layout="contiguous", scale=None, group=None):
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=True)


def two_seats_show(case):
    """An odd number of ranks meets all blocks, in another order; two ranks meet their own only."""
    return case.world_size > 1 and (case.world_size % 2 == 0 or case.causal)


def ring(patch, shows=from_2, **facts):
    return SickRing(ring_flash_attention, patch, shows, CAUSAL, equal_chunks=True, **facts)


# The mask, rows that are lost, the scale, the heads ------------------------------------------------------------------


class NaNOfUnseenRows(PlainRing):
    def attend(self, q, k, v, seen):
        out, lse = super().attend(q, k, v, seen)
        if seen.any():
            out = out.masked_fill(~seen.any(dim=-1)[:, None], torch.nan)
        return out, lse


def blocks(case):
    return case.causal and case.world_size > 1


def in_layout(*layouts):
    return lambda case: blocks(case) and case.layout in layouts


def plain(ring, shows, takes=CAUSAL, **facts):
    return SickRing(ring.attention, shows=shows, takes=takes, **facts)


IN_ZIGZAG = {"takes": CAUSAL, "layouts": ("zigzag",)}
IN_STRIPED = {"takes": CAUSAL, "layouts": ("striped",), "equals": ("causal_per_block",)}
SICK = {
    "averages_added": SickRing(ring_flash_attention, flash("merge_into", averages_added), takes=CAUSAL),
    "shares_exchanged": SickRing(ring_flash_attention, flash("merge_into", shares_exchanged)),
    "shares_exchanged/seen_blocks": plain(SharesExchangedOfSeenBlocks, from_2),
    "base_2_as_natural": SickRing(ring_flash_attention, flash("fused_forward", base_2_forward), always, CAUSAL),
    "base_2_as_natural/kernel": SickRing(ring_flash_attention, base_2_in_both, takes=CAUSAL),
    "unstabilised": SickRing(
        ring_flash_attention,
        flash("merge_into", unstabilised),
        lambda case: case.world_size > 1 and case.inputs == "large",
    ),
    "own_max_per_block": SickRing(**BACKWARD, patch=own_max(torch.maximum)),
    "own_max_per_block/last_max": SickRing(**BACKWARD, patch=own_max(lambda m, m_j: m_j)),
    "sums_in_16_bits/always": SickRing(FLASH, flash("merge_into", out_always_in_16_bits), wide, CAUSAL),
    "lse_in_16_bits/dtype_of_q": plain(LseInTheDtypeOfQ, narrow, MASKED, plain=True),
    "gradients_in_16_bits/dtype_of_q": SickRing(
        **BACKWARD, patch=patch(backward, "hop", GradientsInTheDtypeOfK), shows=narrow, plain=True
    ),
    "float32_inside": SickRing(in_float32, shows=lambda case: case.dtype == torch.float64, takes=MASKED),
    "last_block_skipped": SickRing(ring_flash_attention, pieces(last_block_skipped), takes=CAUSAL),
    "two_seats": ring(times_distance(2, overlap, schedule), two_seats_show),
    "two_seats/ring_attn": SickRing(
        ring_attention, BLOCKING["two_seats"], lambda case: case.world_size % 2 == 0, **FORWARD
    ),
    "other_way": ring(times_distance(-1, overlap, schedule), lambda case: case.causal and case.world_size > 2),
    "stale_first_block": ring(WRONG["StaleBlock"]),
    "overwritten_in_hand": ring(patch(schedule, "arriving_blocks", one_buffer), from_3),
    "sent_in_16_bits": ring(patch(overlap, "post", sent_in_16_bits), wide),
    "keys_without_values": ring(WRONG["keys_without_values"]),
    "never_called": SickRing(own_chunk, takes=CAUSAL),
    "next_token_seen/triangles": SickRing(
        ring_flash_attention, WRONG["the_next_token_seen"], lambda case: case.causal, CAUSAL
    ),
    "chunk_index_under_zigzag": SickRing(
        ring_flash_attention,
        WRONG["contiguous_slices"],
        in_layout("zigzag", "striped"),
        CAUSAL,
        equals=("chunk_index_under_zigzag", "positions_of_contiguous"),
    ),
    "other_half_of_the_keys": SickRing(
        ring_flash_attention, WRONG["last_half_of_the_keys"], in_layout("zigzag"), **IN_ZIGZAG
    ),
    "striped_diagonal_kept": SickRing(
        ring_flash_attention, WRONG["first_query_kept"], in_layout("striped"), **IN_STRIPED
    ),
    "nan_of_unseen_rows": plain(NaNOfUnseenRows, in_layout("zigzag", "striped")),
    "heads_interleaved": SickRing(
        grouped_query.ring_attention,
        GROUPED["head h uses K/V head h mod G"],
        lambda case: 1 < case.kv_heads < case.heads,
    ),
}
