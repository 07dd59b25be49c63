"""What the tests of the trainable ring share: the ring on every rank, and the check of out, dq, dk and dv."""

import functools
from contextlib import nullcontext

import torch

from ringlab.training.flash_ring import ring_flash_attention
from ringlab.training.layouts import LAYOUTS, shard, unshard
from tests.gradients import gradients
from tests.grouped_queries import assert_four, expected, expected_of_inputs, grouped_inputs
from tests.rings import chunks
from tests.wrong_flash_rings import WRONG

CASES = [(causal, layout) for causal in (False, True) for layout in LAYOUTS]
SHAPE = (1, 8, 2, 720, 64)  # B, H, G, S, D: 720 is a multiple of 2P in every world


def cut(context, layout, lengths, *tensors):
    """This rank's chunks in this layout; or, if `lengths` are given, contiguous ones of these lengths."""
    if lengths:
        return chunks(context, lengths, *tensors)
    return [shard(x, layout, context.rank, context.world_size) for x in tensors]


def ring_gradients(context, q, k, v, d_out, options, lengths=None, wrong=None):
    """This rank's chunks of out, dq, dk, dv. The ring must leave its input as it was."""
    mine = cut(context, options.get("layout", "contiguous"), lengths, q, k, v, d_out)
    before = [x.clone() for x in mine]
    with WRONG[wrong]() if wrong else nullcontext():
        results = gradients(functools.partial(ring_flash_attention, **options), *mine)
    assert all(torch.equal(x, y) or x.isnan().any() for x, y in zip(mine, before, strict=True)), "the input changed"
    assert all(x.dtype == q.dtype for x in results)
    return results


def whole(per_rank, layout, lengths=None):
    """out, dq, dk, dv of the whole sequence from those of the ranks."""
    return [
        torch.cat(list(parts), dim=2) if lengths else unshard(list(parts), layout)
        for parts in zip(*per_rank, strict=True)
    ]


def assert_flash(ranks, world_size, four, right=None, *, lengths=None, wrong=None, **options):
    """out, dq, dk and dv are as near to float64 as rounding allows."""
    per_rank = ranks(world_size, ring_gradients, *four, options, lengths, wrong)
    right = right or expected(*four, causal=options.get("causal", False), scale=options.get("scale"))
    assert_four(whole(per_rank, options.get("layout", "contiguous"), lengths), right)


def assert_large(ranks, world_size, causal, layout, shape=SHAPE, dtype=torch.float32, wrong=None):
    right = expected_of_inputs(*shape, dtype, causal=causal)
    four = grouped_inputs(*shape, dtype)
    assert_flash(ranks, world_size, four, right, wrong=wrong, causal=causal, layout=layout)
