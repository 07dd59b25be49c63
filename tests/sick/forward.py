"""Rings whose forward pass is wrong: the merge, the blocks that arrive, the mask, the scale and the heads."""

import math
from functools import partial

import torch
import torch.nn.functional as F

import ring_attn
from bench.gradients_home import Circle
from ringlab.training import backward, flash_ring, grouped_query, overlap, schedule
from ringlab.training.flash_ring import merge_into, ring_flash_attention
from ringlab.training.fused_block import fused_forward
from ringlab.training.overlap import post
from ringlab.training.partition import Partition
from tests.planted import patch
from tests.sick.plain_ring import PlainRing
from tests.sick.ring import CAUSAL, MASKED, SickRing, always
from tests.wrong_rings import FLASH as WRONG
from tests.wrong_rings import GROUPED

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


def base_2_forward(*block, **options):
    out, lse = fused_forward(*block, **options)
    return out, lse / math.log(2)


def unstabilised(out, lse, out_j, lse_j):
    a, b = lse.exp(), lse_j.exp()
    out.copy_((a[..., None] * out + b[..., None] * out_j.to(out.dtype)) / (a + b)[..., None])
    lse.copy_((a + b).log())


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


def pieces(mistake):
    return patch(Partition, "pieces", mistake)


def last_block_skipped(partition, rank, block):
    """Nothing is computed of the block that arrives last, from rank r + 1."""
    world_size = len(partition.lengths)
    return () if world_size > 1 and block == (rank + 1) % world_size else right_pieces(partition, rank, block)


def own_chunk(q, k, v, *, causal=False, layout="contiguous", scale=None, group=None):
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=True)


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


SICK = {
    "base_2_as_natural": SickRing(ring_flash_attention, flash("fused_forward", base_2_forward), always, CAUSAL),
    "unstabilised": SickRing(
        ring_flash_attention,
        flash("merge_into", unstabilised),
        lambda case: case.world_size > 1 and case.inputs == "large",
    ),
    "sums_in_16_bits/always": SickRing(FLASH, flash("merge_into", out_always_in_16_bits), wide, CAUSAL),
    "lse_in_16_bits/dtype_of_q": plain(LseInTheDtypeOfQ, narrow, MASKED, plain=True),
    "gradients_in_16_bits/dtype_of_q": SickRing(
        **BACKWARD, patch=patch(backward, "hop", GradientsInTheDtypeOfK), shows=narrow, plain=True
    ),
    "float32_inside": SickRing(in_float32, shows=lambda case: case.dtype == torch.float64, takes=MASKED),
    "last_block_skipped": SickRing(ring_flash_attention, pieces(last_block_skipped), takes=CAUSAL),
    "sent_in_16_bits": SickRing(
        ring_flash_attention, patch(overlap, "post", sent_in_16_bits), wide, CAUSAL, equal_chunks=True
    ),
    "never_called": SickRing(own_chunk, takes=CAUSAL),
    "chunk_index_under_zigzag": SickRing(
        ring_flash_attention,
        WRONG["contiguous_slices"],
        in_layout("zigzag", "striped"),
        CAUSAL,
        equals=("chunk_index_under_zigzag", "positions_of_contiguous"),
    ),
    "nan_of_unseen_rows": plain(NaNOfUnseenRows, in_layout("zigzag", "striped")),
    "heads_interleaved": SickRing(
        grouped_query.ring_attention,
        GROUPED["head h uses K/V head h mod G"],
        lambda case: 1 < case.kv_heads < case.heads,
        equals=("kv_heads_dealt_in_turn",),  # on 4 ranks
    ),
}
