"""How far a right answer may be from the exact one: the one bound of this project, derived and not tuned.

`exact_attention` computes full attention in float64 by its definition. Beside each number it computes how far rounding
can move it in a right implementation. The derivation:

u is the largest relative error of one rounding: half the eps of the dtype that sums are kept in, which is float32 at
least. The reference rounds too, so half the eps of float64 is added. |x| is x with every number made positive.

A sum of n products is off by (1 + √n) u Σ|x||y|. Each product rounds once. The sum rounds n times, up or down as if by
chance. In the worst case (one term after the other, all terms alike) this has a standard deviation of √n/3 u Σ|x||y|,
and three of them are allowed. Any other order errs less.

Weights. With s = scale q kᵀ and p = e^(s - lse), these errors move p, each by so many u of itself:
    (2 + √D) |scale||q||k|ᵀ    the score: its products, their sum, and the scale
    |s| + |lse|                the argument of exp: s - m, or s - lse
    3                          exp (1 ulp, which is 2 u), and the division by l, or the scale of a gradient
    1 + √n                     the sum that p goes into, over n keys or n queries
W is p times their sum, and a smallest normal number, because small weights may be flushed to 0.

out = Σ p v / Σ p: W moves both sums, by W|v| and by ΣW|out|. The merge of two blocks rounds a share, and with it what
the other block has left: u max|v|.
lse = log Σ e^s: ΣW, and one rounding of its own. n - 1 merges round it again, three standard deviations √(3(n - 1)).
dv = pᵀ dO: p comes from the lse, so W grows by p times the error of lse; then Wᵀ|dO|.
dS = scale p ∘ (dP - δ), dP = dO vᵀ, δ = Σ dO ∘ out: p adds W ∘ |dP - δ|, and the two sums over D add
(2 + √D) u p ∘ (|dO||v|ᵀ + Σ|dO||out|). dq = dS k and dk = dSᵀ q carry this on with |k| and |q|. They also carry the
error of the out in δ, which was stored in q's dtype. It is one number for a whole row of dS.

With a softcap c, t = tanh(s/c) and the scores are c·t. The slope 1 - t² carries the error of s over to them. Dividing
by c, tanh (1 ulp) and multiplying by c add 4 u |c·t|, because |s| (1 - t²) <= |c·t|. The slope is a factor of dS. Its
own error is 2|t| times the error of t, and u (1 + t²) for the square and the difference.

16-bit input. Plain code converts it to float32 before it computes, and rounds to 16 bits when it stores a result. Fused
kernels compute exp to 16 bits, and round p and dS before the second product, the result of each block, and with grouped
queries that of each head. Each time half a step of 16 bits is allowed for every term: three times in the forward pass,
and four times in the backward pass.

Storage. Storing a result moves it by up to half a step of its dtype. `Right.allowed` includes this. `Right.used` leaves
it out, because in a large tensor some number always needs all of it.

What this cannot see: a mistake smaller than these roundings, as a sum in 16 bits behind a kernel with 16-bit operands.
The tests look for it with inputs that need no rounding.

A reader of the ring may skip this file.
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
        if x.shape != self.exact.shape or x.dtype != self.dtype:
            raise ValueError(
                f"the result is {x.dtype} of shape {tuple(x.shape)}; expected {self.dtype} of shape "
                f"{tuple(self.exact.shape)}"
            )
        x = x.double()
        return torch.where(x == self.exact, 0.0, (x - self.exact).abs())  # -inf - (-inf) would be NaN

    def accepts(self, x: Tensor) -> bool:
        """Whether every number of x is as near to `exact` as rounding allows. NaN is not."""
        return bool((self.error(x) <= self.allowed).all())

    def used(self, x: Tensor) -> Tensor:
        """Which share of `sums` each number of x needs, after half a step for storage. More than 1 is wrong."""
        beyond = self.error(x) - half_step(self.exact.abs() + self.sums, self.dtype)
        return beyond.clamp(min=0) / self.sums  # NaN stays NaN


def half_step(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Half the distance from |x| (float64) to the next number of `dtype`: how far storing x can move it."""
    limits = torch.finfo(dtype)
    _, exponent = torch.frexp(x.abs().clamp(limits.smallest_normal, limits.max))  # |x| = m 2^exponent, 1/2 <= m < 1
    return limits.eps / 2 * torch.exp2(exponent.double() - 1)


@dataclass(frozen=True)
class _Roundings:
    """How large each kind of rounding is, for inputs of one dtype and shape."""

    u: float  # a rounding where sums are kept, as a share of the number
    flushed: float  # the smallest normal number there: anything below it may become 0
    u_16: float  # a rounding to 16 bits by a fused kernel, as a share of the number; 0 where there is none
    flushed_16: float  # half the smallest number of 16 bits
    products: float  # of sums over D, in u: 1 + √D, and 1 for the scale
    keys: float  # of sums over keys or over queries, in u
    merges: int

    def in_16_bits(self, terms: Tensor, seen: Tensor, factors: Tensor, *, times: int) -> Tensor:
        """terms @ factors, where the terms and what becomes of them are rounded to 16 bits so many times in all."""
        lost = (self.u_16 * terms.abs() + self.flushed_16 * seen) @ factors.abs()
        return times * (lost + self.flushed_16 * terms.shape[-1])


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
    dtype, wide = q.dtype, torch.promote_types(q.dtype, torch.float32)
    narrow = fused_blocks > 0 and dtype != wide
    size = _Roundings(
        u=torch.finfo(wide).eps / 2 + torch.finfo(torch.float64).eps / 2,
        flushed=torch.finfo(wide).smallest_normal,
        u_16=torch.finfo(dtype).eps / 2 if narrow else 0.0,
        flushed_16=torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps / 2 if narrow else 0.0,
        products=2 + math.sqrt(D),
        keys=1 + math.sqrt(max(Sk, Sq * H // G)),
        merges=max(0, fused_blocks - 1),
    )
    scale = 1 / math.sqrt(D) if scale is None else scale
    by_query = [x.detach().unflatten(1, (G, H // G)) for x in (q, d_out) if x is not None]  # (B, G, H/G, Sq, D)
    k, v = (x.detach().double().unsqueeze(2) for x in (k, v))  # (B, G, 1, Sk, D)
    rows = max(1, SLICE // (B * H * Sk))
    parts: dict[str, list[tuple[Tensor, Tensor]]] = {}
    for start in range(0, Sq, rows):
        q_i, *d_out_i = (x[..., start : start + rows, :].double() for x in by_query)
        seen = torch.ones(B, H, q_i.shape[3], Sk, dtype=torch.bool, device=q.device)
        if causal:
            seen = seen.tril(start)
        if visible is not None:
            seen = seen & visible.expand(B, H, Sq, Sk)[:, :, start : start + rows]
        seen = seen.unflatten(1, (G, H // G))
        for name, (exact, sums) in _rows(q_i, k, v, seen, scale, softcap, size, dtype, *d_out_i).items():
            if name in ("dk", "dv") and name in parts:  # every slice of queries adds to them
                parts[name] = [(parts[name][0][0] + exact, parts[name][0][1] + sums)]
            else:
                parts.setdefault(name, []).append((exact, sums))

    why = f"{_name(wide)} sums" + (f", {_name(dtype)} operands" if narrow else "")
    results = {}
    for name, part in parts.items():
        if name in ("dk", "dv"):  # every head of a group adds to them
            exact, sums = (x.sum(dim=2) for x in part[0])
        else:
            exact, sums = (torch.cat(x, dim=3).flatten(1, 2) for x in zip(*part, strict=True))
        results[name] = Right(exact, sums, wide if name == "lse" else dtype, why)
    return results


def _rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seen: Tensor,
    scale: float,
    softcap: float | None,
    size: _Roundings,
    dtype: torch.dtype,
    d_out: Tensor | None = None,
) -> dict[str, tuple[Tensor, Tensor]]:
    """(exact, allowed before storage) of all results, from some rows of the matrix of weights.

    q, d_out (B, G, H/G, rows, D), k and v (B, G, 1, Sk, D), seen (B, G, H/G, rows, Sk). dk and dv are what these rows
    and each of these heads add to them. The letters are those of this file's docstring.
    """
    u, some = size.u, seen.any(dim=-1, keepdim=True)
    s, off_s = scale * q @ k.mT, size.products * abs(scale) * (q.abs() @ k.abs().mT)  # off_s: in u
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

    w = u * p * (off_s + s.masked_fill(~seen, 0.0).abs() + known_lse.abs() + 3 + size.keys) + size.flushed * seen
    off_sum = w.sum(dim=-1, keepdim=True) + size.flushed
    off_lse = off_sum + u * (1 + math.sqrt(3 * size.merges)) * known_lse.abs() + size.u_16
    off_out = w @ v.abs() + off_sum * out.abs() + size.in_16_bits(p, seen, v, times=3) + size.flushed
    if size.merges:
        off_out += u * some * v.abs().amax(dim=-2, keepdim=True)
    results = {"out": (out, off_out), "lse": (lse[..., 0], off_lse[..., 0])}
    if d_out is None:
        return results

    d_p, delta = d_out @ v.mT, (d_out * out).sum(dim=-1, keepdim=True)
    d_s = scale * p * (d_p - delta) * slope
    w = w + p * off_lse
    w_s = w * (d_p - delta).abs()
    w_s += size.products * u * p * (d_out.abs() @ v.abs().mT + (d_out * out).abs().sum(dim=-1, keepdim=True))
    w_s = w_s * slope + p * (d_p - delta).abs() * off_slope
    off_delta = (d_out.abs() * (off_out + half_step(out.abs() + off_out, dtype))).sum(dim=-1, keepdim=True)

    off = {
        "dq": abs(scale) * (w_s @ k.abs() + off_delta * ((p * slope) @ k).abs())
        + size.in_16_bits(d_s, seen, k, times=4),
        "dk": abs(scale) * (w_s.mT @ q.abs() + (p * slope).mT @ (off_delta * q.abs()))
        + size.in_16_bits(d_s.mT, seen.mT, q, times=4),
        "dv": w.mT @ d_out.abs() + size.in_16_bits(p.mT, seen.mT, d_out, times=4),
    }
    exact = {"dq": d_s @ k, "dk": d_s.mT @ q, "dv": p.mT @ d_out}
    return results | {name: (exact[name], off[name] + size.flushed) for name in exact}


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
