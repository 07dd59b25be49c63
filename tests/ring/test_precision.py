"""A ring keeps its sums in float32 (float64 for float64), and rounds each result to the input's dtype once, at the end.

A bound for each number is too wide to see most mistakes of this kind. So the operations themselves are watched here,
and the root mean square (RMS) of the errors is compared with that of one rounding.
"""

import functools

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import ring_attn
from ringlab.basics.naive_attention import accumulation_dtype
from ringlab.ring import backward, flash_ring, grouped_query, overlap
from tests.attention import gradients, grouped_inputs
from tests.rings import chunks, even_lengths

RINGS = {
    "ring_attn": ring_attn.ring_attention,
    "overlap": overlap.ring_attention,
    "backward": backward.ring_attention,
    "grouped_query": grouped_query.ring_attention,
    "flash_ring": flash_ring.ring_flash_attention,
    "flash_ring, plain blocks": functools.partial(flash_ring.ring_flash_attention, scale=-0.5),
}
FORWARD_ONLY = {"ring_attn", "overlap"}
UNROUNDED = {"alias", "as_strided", "cat", "clone", "detach", "expand", "select", "slice", "stack", "transpose", "view"}
UNROUNDED |= {"unsqueeze", "_unsafe_view"}
UNROUNDED |= {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "zeros"}


class Watch(TorchDispatchMode):
    """Notes the operations with a result that is not `wide`, but for those that only move numbers; counts roundings."""

    def __init__(self, wide):
        super().__init__()
        self.wide, self.narrow, self.rounded = wide, set(), 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        if (
            isinstance(result, Tensor)
            and result.is_floating_point()
            and result.dtype != self.wide
            and name not in UNROUNDED
        ):
            if name in ("_to_copy", "copy_"):
                self.rounded += args[name == "copy_"].dtype == self.wide
            else:
                self.narrow.add(name)
        return result


def watched_ring(context, name, q, k, v, d_out):
    """The names of what this rank computes in 16 bits, and how many tensors it rounds to them."""
    mine = chunks(context, even_lengths(q.shape[2], context.world_size), q, k, v, d_out)
    with Watch(accumulation_dtype(q.dtype)) as watch:
        RINGS[name](*mine[:3]) if name in FORWARD_ONLY else gradients(RINGS[name], *mine)
    return watch.narrow, watch.rounded


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", RINGS)
def test_sums_are_wide_and_results_are_rounded_once(ranks, name, dtype):
    four = grouped_inputs(1, 2, 2, 600, 4, dtype)
    for size, tiles in ((2, 2), (3, 1)):  # in a chunk
        results = 1 if name in FORWARD_ONLY else 4
        if name == "flash_ring, plain blocks":  # out of a block has q's dtype, plain or fused
            results += size * tiles
        rounded = 0 if accumulation_dtype(dtype) == dtype else results
        assert ranks(size, watched_ring, name, *four) == [(set(), rounded)] * size


def test_the_watch_sees_a_narrow_sum_and_a_rounding():
    x = torch.ones(2, dtype=torch.bfloat16)
    with Watch(torch.float32) as watch:
        x.float().bfloat16()
        torch.zeros(2, dtype=torch.bfloat16).copy_(x.float())
    assert (watch.narrow, watch.rounded) == (set(), 2)
    with Watch(torch.float32) as watch:
        x += (x * x).sum()
    assert watch.narrow == {"mul", "sum", "add_"}
