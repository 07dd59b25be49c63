"""What the tests of attention share: inputs, and the one check that every right answer passes and no wrong one does."""

import functools
import math
import os
from itertools import accumulate, pairwise

import torch
import torch.nn.functional as F
from hypothesis import strategies as st

from ringlab.ring.layouts import LAYOUTS, Layout
from ringlab.ring.masks import Mask
from ringlab.ring.partition import Partition
from ringlab.support.rounding import exact_attention

SEED = int(os.environ.get("RING_SEED", "0"))  # moves every random input of the tests
WORLDS = (1, 2, 3, 5)  # the numbers of ranks that most tests try
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def random_qkv(shape, dtype=torch.float32, *, seed=0, largest_score=None):
    """q, k, v (B, H, S, D), normal; with `largest_score` q is scaled until some score is that large, up or down."""
    generator = torch.Generator().manual_seed(seed + 1_000_003 * SEED)
    q, k, v = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in "qkv")
    if largest_score is not None:
        q *= largest_score * shape[-1] ** 0.5 / (q @ k.transpose(-2, -1)).abs().max()
    return q.to(dtype), k.to(dtype), v.to(dtype)


def assert_right(x, right, name="out"):
    """Every number of x is as near to the exact one as rounding allows. NaN is wrong."""
    wrong = ~(right.error(x) <= right.allowed)
    assert not wrong.any(), (
        f"{name}: {int(wrong.sum())} of {wrong.numel()} numbers are wrong, by up to "
        f"{(right.error(x) / right.allowed).nan_to_num(nan=math.inf).max():.3g} times what rounding allows"
    )


def assert_attention(out, q, k, v, *, causal=False, scale=None, fused_blocks=0):
    """Every number of `out` is as near as rounding allows to full attention in float64."""
    assert_right(out, exact_attention(q, k, v, causal=causal, scale=scale, fused_blocks=fused_blocks)["out"])


def assert_lse(lse, q, k, *, causal=False, scale=None, fused_blocks=0):
    """lse (B, H, S) is log Σ e^score of each query, as in float64."""
    assert_right(lse, exact_attention(q, k, k, causal=causal, scale=scale, fused_blocks=fused_blocks)["lse"], "lse")


NAMES = ("out", "dq", "dk", "dv")


def gradients(attention, q, k, v, d_out):
    """out, dq, dk, dv of any attention."""
    q, k, v = (x.detach().clone().requires_grad_() for x in (q, k, v))
    out = attention(q, k, v)
    out.backward(d_out)
    return out.detach(), q.grad, k.grad, v.grad


def grouped_inputs(B, H, G, S, D, dtype=torch.float32, *, seed=0):
    """q (B, H, S, D), k and v (B, G, S, D), d_out as q; normal."""
    q, d_out, _ = random_qkv((B, H, S, D), dtype, seed=seed)
    k, v, _ = random_qkv((B, G, S, D), dtype, seed=seed + 1000)
    return q, k, v, d_out


def expected(q, k, v, d_out, *, fused_blocks=8, **options):
    """What out, dq, dk and dv must be, and how far from it rounding may move them."""
    right = exact_attention(q, k, v, d_out, fused_blocks=fused_blocks, **options)
    return [right[name] for name in NAMES]


@functools.cache
def expected_of_inputs(*sizes_and_dtype, **options):
    """`expected` of `grouped_inputs`, computed once for all worlds and layouts."""
    return expected(*grouped_inputs(*sizes_and_dtype), **options)


def assert_four(mine, right):
    """Each number of out, dq, dk, dv is as near to float64 as rounding allows."""
    for name, x, exact in zip(NAMES, mine, right, strict=True):
        assert_right(x, exact, name)


def columns(x):
    return x.transpose(2, 3).contiguous().transpose(2, 3)


def tokens_first(x):
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def every_second(x):
    return torch.stack([x, x.new_full((), 9.0).expand_as(x)], dim=-1)[..., 0]


def slices(x):
    return F.pad(x, (1, 2, 3, 4), value=9.0)[:, :, 3:-4, 1:-2]


def heads_last(x):
    return x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)  # F.pad keeps this order


def at_element_3(x):
    return F.pad(x.flatten(), (3, 0))[3:].view(x.shape)


def rows_of_three_more(x):
    return F.pad(x, (0, 3))[..., :-3]


VIEWS = [columns, tokens_first, every_second, slices, heads_last]


# Masks: a mask by its words, and masks of all kinds ------------------------------------------------------------------


def dense(mask, q_at, k_at):
    """The mask by its words: bool (queries, keys)."""
    q_at, k_at = q_at[:, None], k_at[None]
    seen = torch.ones(len(q_at), k_at.shape[1], dtype=torch.bool)
    if mask.documents is not None:
        numbers = torch.arange(len(mask.documents)).repeat_interleave(torch.tensor(mask.documents))
        seen &= numbers[q_at] == numbers[k_at]
    if mask.causal:
        seen &= k_at <= q_at
    if mask.window is not None:
        starts = [0, *accumulate(mask.documents or ())]
        begin = torch.tensor([max(start for start in starts if start <= at) for at in q_at.flatten().tolist()])
        seen &= (q_at - k_at < mask.window) | (k_at < begin[:, None] + mask.global_tokens)
    return seen


@st.composite
def masks(draw, world_size=None):
    """A mask, a layout and chunk lengths: a partition."""
    layout, P = draw(st.sampled_from((*LAYOUTS, PAIRS))), world_size or draw(st.integers(1, 8))
    if layout == "contiguous":
        lengths = draw(st.lists(st.integers(1, 12), min_size=P, max_size=P))
    else:
        lengths = [draw(st.integers(1, 6)) * 2] * P
    S, causal = sum(lengths), draw(st.booleans())
    ends = draw(st.none() | st.sets(st.integers(1, max(1, S - 1)), min_size=1, max_size=8)) if S > 1 else None
    documents = ends and [b - a for a, b in pairwise([0, *sorted(ends), S])]
    window = draw(st.none() | st.integers(1, S + 2)) if causal else None
    mask = Mask(causal, documents, window, draw(st.integers(0, S + 2)) if window else 0)
    return Partition(mask, layout, tuple(lengths))


def in_pairs_and_turned(seq_len, rank, world_size):
    """Pairs of tokens, dealt out from the last rank to the first."""
    return torch.arange(seq_len).view(-1, world_size, 2)[:, world_size - 1 - rank].flatten()


PAIRS = Layout("pairs, from the last rank on", in_pairs_and_turned, 2)
