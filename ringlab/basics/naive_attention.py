"""Attention by its definition: every query looks at every key, so there is a matrix of S x S weights.

    out = softmax(Q Kᵀ / √D) V

Shapes: q, k, v and out are (B, H, S, D), as in scaled_dot_product_attention; the scores and the weights are
(B, H, S, S). Each row of this matrix belongs to one query and needs no other row, so the queries can be shared among
devices. The next files compute the same result without the matrix.

    $ python -m ringlab.basics.naive_attention
    token 0 looks at tokens 0 to 7 with the weights
        0.0634  0.0313  0.0634  0.0634  0.1286  0.1286  0.2607  0.2607
    the matrix of weights, one head in float32, at S =
                8:               256 bytes
            1,024:         4,194,304 bytes
           32,768:     4,294,967,296 bytes
        1,048,576: 4,398,046,511,104 bytes
    ok    all rows at once: largest error 1.8e-15, rounding allows 4.8e-14 (float64 sums)
    ok    each row alone: largest error 1.8e-15, rounding allows 4.8e-14 (float64 sums)
    ok    torch's scaled_dot_product_attention: largest error 2.2e-15, rounding allows 1.0e-13 (float64 sums)
    ok    causal: largest error 1.8e-15, rounding allows 1.0e-13 (float64 sums)
    ok    torch's, causal: largest error 2.2e-15, rounding allows 1.0e-13 (float64 sums)

Before: nothing, start here. After: online_softmax.py, which needs one block of scores at a time.
Source: Vaswani et al. 2017, equation 1; the memory of the matrix: Liu et al. 2024 (Ring Attention), Table 1, 'Vanilla'.
"""

import math
import sys

import torch
import torch.nn.functional as F
from torch import Tensor

# The worked example's 8 tokens (S = 8, D = 2). With identity projections they are the queries, the keys and the values.
TOKENS = torch.tensor([[1, 0], [0, 1], [1, 1], [1, 2], [2, 1], [2, 2], [3, 1], [3, 3]], dtype=torch.float64)

KERNELS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)  # matrix products of these exist


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype for scores, statistics and sums: float32 at least, float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise ValueError unless q, k and v have four dimensions each, one floating dtype and one device."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise ValueError(f"{name} is {x!r}; expected a tensor (B, H, S, D)")
        if x.dim() != 4:
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}; expected (B, H, S, D): add a missing dimension with x[None]"
            )
        if 0 in x.shape:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; expected every size to be 1 or more")
        if x.dtype not in KERNELS:
            raise ValueError(
                f"{name} has dtype {x.dtype}; expected a floating dtype with kernels, {', '.join(map(str, KERNELS))}: "
                f"convert it with x.float()"
            )
        if x.dtype != q.dtype or x.device != q.device:
            raise ValueError(
                f"{name} is {x.dtype} on {x.device} but q is {q.dtype} on {q.device}; expected one dtype and one "
                f"device for all three: convert them with x.to(q)"
            )
    if q.device.type == "meta":
        raise ValueError("q, k and v are on the device meta, so they have no numbers; expected another device")


def check_qkv(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise ValueError unless q is (B, H, Sq, D) and k, v are (B, H, Sk, D), of one floating dtype and one device."""
    check_tensors(q, k, v)
    if k.shape != v.shape:
        raise ValueError(
            f"k has shape {tuple(k.shape)} and v {tuple(v.shape)}; expected one shape (B, H, S, D) for both"
        )
    if q.shape[:2] + q.shape[3:] != k.shape[:2] + k.shape[3:]:
        raise ValueError(
            f"q has shape {tuple(q.shape)} and k {tuple(k.shape)}; expected the same B, H and D: only S may differ"
        )


def resolve_scale(scale: float | None, head_dim: int) -> float:
    """The factor on Q Kᵀ: 1/√D unless given. Raises ValueError when it is not a finite number."""
    if scale is None:
        return 1 / math.sqrt(head_dim)
    if not math.isfinite(scale):
        raise ValueError(f"scale is {scale}; expected a finite number, or None for 1/sqrt(D)")
    return float(scale)


def check_causal(q: Tensor, k: Tensor, causal: bool) -> None:
    """Raise ValueError for a causal mask with Sq != Sk: it would be unclear which keys a query may see."""
    if causal and q.shape[2] != k.shape[2]:
        raise ValueError(
            f"causal=True with {q.shape[2]} queries and {k.shape[2]} keys; expected as many of each, so that query i "
            f"stands at key i: pass causal=False or the whole sequence"
        )


def naive_attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None) -> Tensor:
    """Full attention, with the whole matrix of weights in memory. In float64 it is what every result is compared with.

    q (B, H, Sq, D), k and v (B, H, Sk, D) -> out (B, H, Sq, D), in q's dtype; computed in float32 at least.
    `causal` hides key j from query i when j > i, and needs Sq = Sk. A query that sees no key (all its scores are -inf)
    gives zeros. Raises ValueError for shapes, dtypes, devices or a scale that do not fit. Vaswani et al. 2017, eq. 1.
    """
    check_qkv(q, k, v)
    check_causal(q, k, causal)
    dtype = accumulation_dtype(q.dtype)
    scores = q.to(dtype) @ k.to(dtype).transpose(-2, -1) * resolve_scale(scale, q.shape[-1])  # (B, H, Sq, Sk)
    if causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(diagonal=1)
        scores = scores.masked_fill(future, -math.inf)
    fully_masked = (scores == -math.inf).all(dim=-1, keepdim=True)  # softmax of nothing would be 0/0
    weights = torch.softmax(scores.masked_fill(fully_masked, 0.0), dim=-1)  # (B, H, Sq, Sk)
    weights = weights.masked_fill(fully_masked, 0.0)
    return (weights @ v.to(dtype)).to(q.dtype)  # (B, H, Sq, D)


def main() -> int:
    from ringlab.support.rounding import exact_attention, report  # only here: a ring needs no check

    x = TOKENS[None, None]  # (B, H, S, D) = (1, 1, 8, 2)
    weights = torch.softmax(x @ x.transpose(-2, -1) / math.sqrt(2), dim=-1)  # (1, 1, 8, 8)
    print("token 0 looks at tokens 0 to 7 with the weights")
    print("   ", "  ".join(f"{weight:.4f}" for weight in weights[0, 0, 0].tolist()))
    print("the matrix of weights, one head in float32, at S =")
    for seq_len in (8, 1024, 32 * 1024, 1024 * 1024):
        print(f"    {seq_len:>9,}: {4 * seq_len**2:>17,} bytes")

    right = exact_attention(x, x, x)["out"]
    ok = report("all rows at once", naive_attention(x, x, x), right)
    alone = torch.cat([naive_attention(x[:, :, i : i + 1], x, x) for i in range(8)], dim=2)
    ok &= report("each row alone", alone, right)
    ok &= report("torch's scaled_dot_product_attention", F.scaled_dot_product_attention(x, x, x), right)
    causal = exact_attention(x, x, x, causal=True)["out"]
    ok &= report("causal", naive_attention(x, x, x, causal=True), causal)
    ok &= report("torch's, causal", F.scaled_dot_product_attention(x, x, x, is_causal=True), causal)
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
