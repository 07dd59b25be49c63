"""A ring keeps its sums in float32 (float64 for float64), and rounds each result to the input's dtype once, at the end.

A bound for each number is too wide to see most mistakes of this kind. So the operations themselves are watched here,
and the root mean square (RMS) of the errors is compared with that of one rounding. Under autocast every way to share a
sequence does what torch's own attention does, or refuses.
"""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import ring_attn
import trainable_ring
from ringlab.ring import backward, flash_ring, overlap
from ringlab.ring.latent_ring import ring_latent_attention
from tests.attention import assert_four, expected, gradients, grouped_inputs
from tests.every_way import attention_of, cut, name_of, ranks_of, whole
from tests.mistakes import assert_refused
from tests.rings import chunks, even_lengths


def of_latents(q, k, v):
    """With latents and rotated keys of one head of K and V. Weights of 1."""
    return ring_latent_attention(q, k[:, 0], v[:, 0, :, :2], q.new_ones(2, 2, 4), q.new_ones(2, 4, 4))


RINGS = {
    "ring_attn": ring_attn.ring_attention,
    "overlap": overlap.ring_attention,
    "backward": backward.ring_attention,
    "trainable_ring": trainable_ring.ring_attention,
    "flash_ring": flash_ring.ring_flash_attention,
    "latent_ring": of_latents,
    "flash_ring, plain blocks": functools.partial(flash_ring.ring_flash_attention, scale=-0.5),
}
FORWARD_ONLY = {"ring_attn", "overlap"}
UNROUNDED = {"alias", "as_strided", "cat", "clone", "detach", "expand", "select", "slice", "stack", "transpose", "view"}
UNROUNDED |= {"unsqueeze", "_unsafe_view", "new_ones", "select_backward", "slice_backward"}
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
                source = args[1] if name == "copy_" else args[0]
                self.rounded += int(source.dtype == self.wide)
            else:
                self.narrow.add(name)
        return result


def watched_ring(context, name, q, k, v, d_out):
    """The names of what this rank computes in 16 bits, and how many tensors it rounds to them."""
    mine = chunks(context, even_lengths(q.shape[2], context.world_size), q, k, v, d_out)
    with Watch(torch.float32) as watch:
        if name in FORWARD_ONLY:
            RINGS[name](*mine[:3])
        else:
            gradients(RINGS[name], *mine)
    return watch.narrow, watch.rounded


@pytest.mark.parametrize("name", RINGS)
def test_sums_are_wide_and_results_are_rounded_once(ranks, name):
    """In 16 bits. A sum of float64 in float32 is far beyond the bound of every test of values."""
    four = grouped_inputs(1, 2, 2, 600, 4, torch.bfloat16)
    for size, tiles in ((2, 2), (3, 1)):  # in a chunk
        rounded = 1 if name in FORWARD_ONLY else 4
        if name == "flash_ring, plain blocks":  # out of a block has q's dtype, plain or fused
            rounded += size * tiles
        rounded -= name == "trainable_ring"  # dK and dV are one tensor
        rounded += size * (name == "latent_ring")  # of each block the gradients of K and V, for two products in 16 bits
        products = {"mm"} if name == "latent_ring" else set()
        assert ranks(size, watched_ring, name, *four) == [(products, rounded)] * size


# Autocast ------------------------------------------------------------------------------------------------------------


def problem(dtypes):
    """q, k and v in these dtypes, as a model has them after rotary positions; d_out in double precision."""
    q, k, v, d_out = grouped_inputs(1, 6, 3, 48, 8)
    return [x.to(dtype) for x, dtype in zip((q, k, v), dtypes, strict=True)], d_out


def under_autocast(attention, qkv, d_out, dtype, *, checkpointed=False):
    """out, dq, dk and dv, each as autograd gives it, and the dtypes of the inputs."""
    inputs = [x.detach().clone().requires_grad_() for x in qkv]
    with torch.autocast("cpu", dtype):
        out = checkpoint(attention, *inputs, use_reentrant=False) if checkpointed else attention(*inputs)
    out.backward(d_out.to(out.dtype))
    return [out.detach(), *(x.grad for x in inputs)]


def on_rank(context, dtype, dtypes, checkpointed):
    qkv, d_out = problem(dtypes)
    *mine, d_out = cut(context, "zigzag", None, *qkv, d_out)
    causal = functools.partial(flash_ring.ring_flash_attention, causal=True, layout="zigzag")
    if checkpointed:  # and with torch's signature
        options = {"is_causal": True, "enable_gqa": True, "layout": "zigzag"}
        causal = functools.partial(flash_ring.scaled_dot_product_attention, **options)
    return under_autocast(causal, mine, d_out, dtype, checkpointed=checkpointed)


def assert_as_torch(of_ranks, dtype, dtypes):
    """The dtypes of torch's results, and values as near to float64 as rounding to the dtype of autocast allows."""
    qkv, d_out = problem(dtypes)
    cast = [x if x.dtype == torch.float64 else x.to(dtype) for x in (*qkv, d_out)]
    cast[3] = d_out.to(cast[0].dtype)
    right = expected(*cast, causal=True)

    def torch_attention(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    for results in (whole(of_ranks, "zigzag"), under_autocast(torch_attention, qkv, d_out, dtype)):
        assert [x.dtype for x in results] == [right[0].dtype, *dtypes]
        assert_four([x.to(right[0].dtype) for x in results], right)


CASES = [  # the dtype of autocast, and those of q, k and v
    (torch.bfloat16, (torch.float32, torch.float32, torch.bfloat16)),  # after rotary positions
    (torch.bfloat16, (torch.float16, torch.float32, torch.bfloat16)),
    (torch.float16, (torch.float32,) * 3),
    (torch.bfloat16, (torch.float64,) * 3),  # autocast leaves it as it is
]


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "dtypes"), CASES, ids=str)
def test_as_torch(ranks, dtype, dtypes):
    """In the ring; other ways are drawn: tests/ways/test_schedules.py."""
    for checkpointed in (False, True):
        assert_as_torch(ranks(3, on_rank, dtype, dtypes, checkpointed), dtype, dtypes)


def on_some_ranks(context, way, shape, dtypes, ranks_with_autocast):
    with torch.autocast("cpu", torch.bfloat16, enabled=context.rank in ranks_with_autocast):
        attention_of(context, way, shape)(*(torch.ones(1, 4, 4, 8, dtype=dtype) for dtype in dtypes))


REFUSED = {  # dtypes of q, k and v; the ranks with autocast; words
    "on one rank": ((torch.float32,) * 3, [1], ["rank 1: dtype=torch.bfloat16, autocast=True"]),
    "where it casts nothing": ((torch.bfloat16,) * 3, [1], ["rank 0: autocast=False", "rank 1: autocast=True"]),
    "nor are integers": ((torch.int64,) * 3, range(8), ["q has dtype torch.int64", "expected a floating dtype"]),
    "float64 is not cast": ((*[torch.float64] * 2, torch.float32), range(8), ["v is torch.bfloat16", "float64"]),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "shape", "case"), [("ring", 3, case) for case in REFUSED] + [("all-to-all", 3, "on one rank")], ids=name_of
)
def test_ranks_that_differ_are_refused_on_all(ranks, way, shape, case):
    dtypes, with_autocast, words = REFUSED[case]
    assert_refused(ranks, ranks_of(shape), words, on_some_ranks, way, shape, dtypes, with_autocast)
