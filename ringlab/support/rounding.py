"""How far a right answer may be from the exact one: the one bound of this project, derived and not tuned.

`exact_attention` computes full attention in float64 by its definition. Beside each number it computes how far rounding
can move it in a right implementation. docs/rounding.md derives each term below; the letters are the same.

A mistake smaller than these roundings, as a sum in 16 bits behind a kernel with 16-bit operands, is not seen. The tests
look for it with inputs that need no rounding.

Source: Higham & Mary 2019, "A new approach to probabilistic rounding error analysis", for the sums; Higham 2002,
"Accuracy and Stability of Numerical Algorithms", section 3, for the rest.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

SLICE = 2**20  # numbers of one slice of the matrix of weights, in float64: 8 MiB


@dataclass(frozen=True)
class Right:
    """An exact result, and how far from it a right one may be."""

    exact: Tensor  # float64
    sums: Tensor  # float64, how far it may be before it is stored
    dtype: torch.dtype  # of the result that is stored
    why: str  # which roundings `sums` allows for

    @property
    def allowed(self) -> Tensor:
        """How far from `exact` each number may be, in all."""
        return self.sums + half_step(self.exact.abs() + self.sums, self.dtype)

    def error(self, x: Tensor) -> Tensor:
        """How far each number of x is from `exact`. Raises ValueError when x has another shape or dtype."""
        if (x.shape, x.dtype) != (shape := self.exact.shape, self.dtype):
            given = f"the result is {x.dtype} of shape {tuple(x.shape)}"
            raise ValueError(f"{given}; expected {self.dtype} of shape {tuple(shape)}")
        x = x.double()
        return torch.where(x == self.exact, 0.0, (x - self.exact).abs())  # -inf - (-inf) would be NaN

    def accepts(self, x: Tensor) -> bool:
        """Whether every number of x is as near to `exact` as rounding allows. NaN is not."""
        return bool((self.error(x) <= self.allowed).all())


def half_step(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Half the distance from |x| (float64) to the next number of `dtype`: how far storing x can move it."""
    limits = torch.finfo(dtype)
    _, exponent = torch.frexp(x.abs().clamp(limits.smallest_normal, limits.max))  # |x| = m 2^exponent, 1/2 <= m < 1
    return limits.eps / 2 * torch.exp2(exponent.double() - 1)


def exact_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    d_out: Tensor | None = None,
    *,
    causal: bool = False,
    visible: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    fused_blocks: int = 0,
) -> dict[str, Right]:
    """Full attention by its definition in float64, and how far from it a right answer in q's dtype may be.

    q, d_out (B, H, Sq, D), k and v (B, G, Sk, D), H a multiple of G: query head h uses K/V head h // (H/G). `causal`
    hides key j from query i when j > i; `visible` (True: the query sees the key) broadcasts to (B, H, Sq, Sk).
    A query that sees no key gives 0 and lse -inf. `softcap` c makes scores c·tanh(score/c), before the mask.
    `fused_blocks`: how many blocks of keys fused kernels computed and `merge` put together; 0 stands for plain code.

    Returns {"out" (B, H, Sq, D), "lse" (B, H, Sq)}, and with d_out also {"dq", "dk", "dv"}, shaped like q, k and v.
    """
    (B, H, Sq, D), (_, G, Sk, _) = q.shape, k.shape
    options = (1 / math.sqrt(D) if scale is None else scale, softcap, fused_blocks, max(Sk, Sq * H // G))
    by_query = [x.detach().unflatten(1, (G, H // G)) for x in (q, d_out) if x is not None]  # (B, G, H/G, Sq, D)
    k, v = (x.detach().double().unsqueeze(2) for x in (k, v))  # (B, G, 1, Sk, D)
    rows = max(1, SLICE // (B * H * Sk))
    parts: dict[str, list[tuple[Tensor, Tensor]]] = {}
    for start in range(0, Sq, rows):
        q_i, *d_out_i = (x[..., start : start + rows, :] for x in by_query)
        seen = torch.ones(B, H, q_i.shape[3], Sk, dtype=torch.bool, device=q.device)
        if causal:
            seen = seen.tril(start)
        if visible is not None:
            seen = seen & visible.expand(B, H, Sq, Sk)[:, :, start : start + rows]
        seen = seen.unflatten(1, (G, H // G))
        for name, (exact, sums) in _rows(*options, seen, q_i, k, v, *d_out_i).items():
            if name in ("dk", "dv") and name in parts:  # every slice of queries adds to them
                parts[name] = [(parts[name][0][0] + exact, parts[name][0][1] + sums)]
            else:
                parts.setdefault(name, []).append((exact, sums))

    wide = torch.promote_types(q.dtype, torch.float32)
    why = f"{_name(wide)} sums" + (f", {_name(q.dtype)} operands" if fused_blocks and q.dtype != wide else "")
    results = {}
    for name, part in parts.items():
        if name in ("dk", "dv"):  # every head of a group adds to them
            exact, sums = (x.sum(dim=2) for x in part[0])
        else:
            exact, sums = (torch.cat(x, dim=3).flatten(1, 2) for x in zip(*part, strict=True))
        results[name] = Right(exact, sums, wide if name == "lse" else q.dtype, why)
    return results


def _rows(
    scale: float,
    softcap: float | None,
    fused_blocks: int,
    terms: int,
    seen: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    d_out: Tensor | None = None,
) -> dict[str, tuple[Tensor, Tensor]]:
    """(exact, allowed before storage) of all results, from some rows of the matrix of weights.

    q, d_out (B, G, H/G, rows, D), k and v (B, G, 1, Sk, D), seen (B, G, H/G, rows, Sk). dk and dv are what these rows
    and each of these heads add to them. `terms`: of the longest sum over keys or queries.
    """
    dtype, wide = q.dtype, torch.promote_types(q.dtype, torch.float32)
    stored, sums = torch.finfo(dtype), torch.finfo(wide)
    u = sums.eps / 2 + torch.finfo(torch.float64).eps / 2
    flushed = sums.smallest_normal  # anything below it may become 0
    u_16 = stored.eps / 2 if fused_blocks and stored.bits == 16 else 0.0
    flushed_16 = stored.smallest_normal * u_16  # half the smallest number of 16 bits
    products, merges = 2 + math.sqrt(q.shape[-1]), max(0, fused_blocks - 1)

    def in_16_bits(terms: Tensor, seen: Tensor, factors: Tensor, *, times: int) -> Tensor:
        """terms @ factors, where the terms and what becomes of them are rounded to 16 bits so many times in all."""
        lost = (u_16 * terms.abs() + flushed_16 * seen) @ factors.abs()
        return times * (lost + flushed_16 * terms.shape[-1])

    q, d_out, some = q.double(), None if d_out is None else d_out.double(), seen.any(dim=-1, keepdim=True)
    s, off_s = scale * q @ k.mT, products * abs(scale) * (q.abs() @ k.abs().mT)  # off_s: in u
    slope: Tensor | float = 1.0
    off_slope: Tensor | float = 0.0
    if softcap is not None:
        t = torch.tanh(s / softcap)
        s, slope, off_s = softcap * t, 1 - t * t, (1 - t * t) * off_s + 4 * softcap * t.abs()
        off_slope = u * (2 * t.abs() * off_s / softcap + 1 + t * t)
    s = s.masked_fill(~seen, -math.inf)
    lse = s.logsumexp(dim=-1, keepdim=True)
    known_lse = lse.masked_fill(~some, 0.0)
    p = torch.exp(s - known_lse)
    out = p @ v

    w = u * p * (off_s + s.masked_fill(~seen, 0.0).abs() + known_lse.abs() + 4 + math.sqrt(terms)) + flushed * seen
    off_sum = w.sum(dim=-1, keepdim=True) + flushed
    off_lse = off_sum + u * (1 + math.sqrt(3 * merges)) * known_lse.abs() + u_16
    off_out = w @ v.abs() + off_sum * out.abs() + in_16_bits(p, seen, v, times=3) + flushed
    if merges:
        off_out += u * some * v.abs().amax(dim=-2, keepdim=True)
    results = {"out": (out, off_out), "lse": (lse[..., 0], off_lse[..., 0])}
    if d_out is None:
        return results

    d_p, delta = d_out @ v.mT, (d_out * out).sum(dim=-1, keepdim=True)
    d_s = scale * p * (d_p - delta) * slope
    w = w + p * off_lse
    w_s = w * (d_p - delta).abs()
    w_s += products * u * p * (d_out.abs() @ v.abs().mT + (d_out * out).abs().sum(dim=-1, keepdim=True))
    w_s = w_s * slope + p * (d_p - delta).abs() * off_slope
    off_delta = (d_out.abs() * (off_out + half_step(out.abs() + off_out, dtype))).sum(dim=-1, keepdim=True)

    off_q = abs(scale) * (w_s @ k.abs() + off_delta * ((p * slope) @ k).abs())
    off_k = abs(scale) * (w_s.mT @ q.abs() + (p * slope).mT @ (off_delta * q.abs()))
    gradients = {
        "dq": (d_s @ k, off_q + in_16_bits(d_s, seen, k, times=4)),
        "dk": (d_s.mT @ q, off_k + in_16_bits(d_s.mT, seen.mT, q, times=4)),
        "dv": (p.mT @ d_out, w.mT @ d_out.abs() + in_16_bits(p.mT, seen.mT, d_out, times=4)),
    }
    return results | {name: (exact, off + flushed) for name, (exact, off) in gradients.items()}


def report(name: str, x: Tensor, right: Right) -> bool:
    """Print the largest error of x beside what rounding allows there, and say whether all of x is right.

    When x is wrong, it is the error that exceeds what is allowed the most.
    """
    error, allowed, ok = right.error(x), right.allowed, right.accepts(x)
    worst = (error if ok else (error / allowed).nan_to_num(nan=math.inf)).argmax()
    print(
        f"{'ok   ' if ok else 'WRONG'} {name}: largest error {error.flatten()[worst]:.1e}, "
        f"rounding allows {allowed.flatten()[worst]:.1e} ({right.why})"
    )
    return ok


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
