"""What the tests with H query heads on G key/value heads share: inputs, two oracles, and the check of four results.

The oracles are full attention in float64, by our definition and by torch's own kernel; the measure is torch's kernel in
the dtype of the input: whoever is as near to the oracles as it is has rounded, not erred.
"""

import functools

import torch
import torch.nn.functional as F

from basics.naive_attention import accumulation_dtype, naive_attention, resolve_scale
from tests.attention import random_qkv
from tests.gradients import NAMES, gradients


def grouped_inputs(B, H, G, S, D, dtype=torch.float32, *, seed=0):
    """q (B, H, S, D), k and v (B, G, S, D), d_out as q; normal."""
    q, d_out, _ = random_qkv((B, H, S, D), dtype, seed=seed)
    k, v, _ = random_qkv((B, G, S, D), dtype, seed=seed + 1000)
    return q, k, v, d_out


def full_attention(q, k, v, *, causal=False, scale=None):
    """Full attention by the definition: query head h uses K/V head h // (H/G)."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    return naive_attention(q, k, v, causal=causal, scale=scale)


def torchs_attention(q, k, v, *, causal=False, scale=None):
    """Full attention by torch, whose causal kernel gives NaN for a scale of 0 or less: the sign goes to q, exactly."""
    scale = resolve_scale(scale, q.shape[-1])
    sign = (scale > 0) - (scale < 0)
    return F.scaled_dot_product_attention(
        q if sign == 1 else q * sign, k, v, is_causal=causal, scale=abs(scale) or 1.0, enable_gqa=True
    )


def expected(q, k, v, d_out, *, causal=False, scale=None):
    """(out, dq, dk, dv in float64, the largest error of each by torch in q's dtype, the size of what each sums up).

    The first is what both oracles agree on. A sum may be small where its terms are not; they are what is rounded.
    """
    options = {"causal": causal, "scale": scale}
    wide = [x.double() for x in (q, k, v, d_out)]
    exact = gradients(functools.partial(full_attention, **options), *wide)
    second = gradients(functools.partial(torchs_attention, **options), *wide)
    theirs, threads = [], torch.get_num_threads()
    for of_them in (1, 2):  # the kernel cuts its work by their number, and rounds otherwise
        torch.set_num_threads(of_them)
        theirs.append(gradients(functools.partial(torchs_attention, **options), q, k, v, d_out))
    torch.set_num_threads(threads)
    q_max, k_max, v_max, d_max = (x.abs().max().item() for x in wide)
    slope = abs(resolve_scale(scale, q.shape[-1])) * d_max * v_max * q.shape[-1]
    sizes = (v_max, slope * k_max, slope * q_max, d_max)
    for x, y, size in zip(exact, second, sizes, strict=True):
        assert ((x - y).abs() <= 1e-12 * (1 + size)).all(), "the oracles disagree"
    errors = [[(x.double() - y).abs().max().item() for x, y in zip(each, exact, strict=True)] for each in theirs]
    return exact, [max(of_both) for of_both in zip(*errors, strict=True)], sizes


@functools.cache
def expected_of_inputs(*sizes_and_dtype, causal):
    """`expected` of `grouped_inputs`, computed once for all worlds and layouts."""
    return expected(*grouped_inputs(*sizes_and_dtype), causal=causal)


def assert_four(mine, right, *, factor=2.0, floor=4.0, noise=4.0):
    """Each of out, dq, dk, dv is off by `factor` times as much as torch's at most; or by `floor` eps of its largest
    number and `noise` eps, in the dtype that is summed up in, of its terms.

    For large inputs, take none of the last two. In small ones an error is one unlucky rounding, and the ratio of two
    of them is noise.
    """
    for name, x, exact, of_torch, size in zip(NAMES, mine, *right, strict=True):
        narrow, wide = (torch.finfo(dtype).eps for dtype in (x.dtype, accumulation_dtype(x.dtype)))
        allowed = factor * of_torch + floor * narrow * exact.abs().max().item() + noise * wide * size
        error = (x.double() - exact).abs()
        wrong = ~(error <= allowed)  # NaN is wrong
        assert x.shape == exact.shape, f"{name} has shape {tuple(x.shape)}; expected {tuple(exact.shape)}"
        assert not wrong.any(), (
            f"{name}: {int(wrong.sum())} of {wrong.numel()} numbers are wrong, by {error.max():.1e} at most; "
            f"torch's by {of_torch:.1e}"
        )
