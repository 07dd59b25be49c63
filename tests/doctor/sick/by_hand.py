"""Rings that share nothing with the catalogue: patches of this project's rings, and plain rings with another step."""

import math
from dataclasses import replace
from functools import partial

import torch

from bench.gradients_home import Circle
from ring_doctor.mistakes.paper_ring import block_out
from ringlab.ring import flash_ring, schedule
from ringlab.ring.flash_ring import flash_backward, ring_flash_attention
from ringlab.ring.fused_block import fused_forward
from ringlab.ring.overlap import post
from ringlab.ring.partition import Partition
from ringlab.ways import all_gather, all_to_all
from ringlab.ways.all_to_all import Exchange
from tests.basics.wrong_rings import back_as_they_came, not_added
from tests.doctor.sick.ring import CAUSAL, MASKED, SickRing, always, from_2
from tests.doctor.sick.table_ring import from_table, moved
from tests.mistakes import patch

all_gather_attention = partial(ring_flash_attention, schedule=all_gather.AllGather)
all_to_all_attention = partial(ring_flash_attention, schedule=all_to_all.AllToAll)
FLASH = partial(ring_flash_attention, schedule=Circle)  # as other rings send sums: the catalogue tells their mistakes
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


def in_float32(q, k, v, **options):
    return ring_flash_attention(*(x.float() for x in (q, k, v)), **options).to(q.dtype)


# The blocks that arrive ----------------------------------------------------------------------------------------------


def pieces(mistake):
    return patch(Partition, "pieces", mistake)


def last_block_skipped(partition, rank, block):
    """Nothing is computed of the block that arrives last, from rank r + 1."""
    world_size = len(partition.lengths)
    return () if world_size > 1 and block == (rank + 1) % world_size else right_pieces(partition, rank, block)


# Gradients -----------------------------------------------------------------------------------------------------------


def received_and_sent(sent, received, group, *, distance=1):
    """Of the last message both buffers are returned, the one for dk and the other for dv, each summed over its two."""
    works = post(sent, received, group, distance=distance)
    if distance == 1:
        return works
    for work in works:
        work.wait()
    came, went = (x[0].view(2, -1).sum(dim=0) for x in (received, sent))
    received[0].copy_(torch.cat((came, went)))
    return []


def own_kv(k, v, *, hops, **_):
    return ((k, v) for _ in range(hops + 1))


# Mistakes that the catalogue does not hold ----------------------------------------------------------------------------


def d_out_of_another_rank(q, k, v, out, lse, d_out, ring):
    return flash_backward(q, k, v, out, lse, moved(d_out, d_out.shape, ring.group), ring)


def softmax_twice(s, v):
    p = torch.softmax(s, dim=-1).masked_fill(s == -torch.inf, -torch.inf)
    return block_out(p, v)


EQUAL = {"takes": CAUSAL, "equal_chunks": True}
BY_HAND = {
    "base_2_as_natural": SickRing(ring_flash_attention, flash("fused_forward", base_2_forward), always, CAUSAL),
    "unstabilised": SickRing(
        ring_flash_attention,
        flash("merge_into", unstabilised),
        lambda case: case.world_size > 1 and case.inputs == "large",
    ),
    "float32_inside": SickRing(in_float32, shows=lambda case: case.dtype == torch.float64, takes=MASKED),
    "last_block_skipped": SickRing(ring_flash_attention, pieces(last_block_skipped), takes=CAUSAL),
    "received_and_sent": SickRing(FLASH, flash("post", received_and_sent), **EQUAL),
    "own_queries_only/all_gather": SickRing(
        all_gather_attention, patch(all_gather, "reduce_scatter", not_added), takes=CAUSAL
    ),
    "keys_of_hop_0": SickRing(FLASH, patch(schedule, "arriving_blocks", own_kv), in_forward=False, **EQUAL),
    "block_left_out_in_backward/pieces": SickRing(
        ring_flash_attention, pieces(last_block_skipped), takes=CAUSAL, in_forward=False
    ),
    "all_to_all_back_in_wrong_token_order": SickRing(
        all_to_all_attention,
        patch(Exchange, "to_tokens", back_as_they_came),
        lambda case: case.layout != "contiguous" and case.world_size > 1,
        CAUSAL,
        heads=4,
    ),
}
UNKNOWN = {  # the catalogue does not hold these
    "d_out_of_another_rank": SickRing(FLASH, flash("flash_backward", d_out_of_another_rank), **EQUAL),
    "softmax_twice": from_table(lambda steps: replace(steps, block_out=softmax_twice), takes=CAUSAL),
    "no_merge_on_rank_0": from_table(  # there it is as if the ring was never called
        lambda steps: replace(steps, rounds=lambda case, rank: case.world_size if rank else 1), from_2, ()
    ),
}
