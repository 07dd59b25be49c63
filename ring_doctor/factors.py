"""Wrong results that are the right ones times a factor: one factor, or one for each rank, head or row.

    P times: a sum over ranks counts too much.    1/scale times: the scale is missing.    a row's own factor: l is wrong

Shapes: those of wrong_answer.py.

Before: patterns.py. After: contents.py, all that a wrong result may hold.
Source: none.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from ring_doctor.patterns import Found, pattern
from ring_doctor.wrong_answer import WrongAnswer


def _factors(wrong: WrongAnswer) -> dict[str, tuple[float, str]]:
    """Factors with a meaning: (value, where to look)."""
    case = wrong.case
    P, n = case.world_size, case.heads // case.kv_heads
    scale = wrong.scale
    copies = "a sum or a mean over ranks: it counts a rank's part P times, or divides where nothing was added"
    scales = "the scale: it is forgotten in this result, or applied twice"
    base = "e^x and log beside 2^x and log2: a factor of log 2 is missing or too many"
    group = "the sum over the query heads that share a K/V head"
    return {
        "-1": (-1.0, "a sign"),
        "P": (float(P), copies),
        "1/P": (1 / P, copies),
        "√P": (P**0.5, copies),
        "1/√P": (P**-0.5, copies),
        "scale": (scale, scales),
        "1/scale": (1 / scale, scales),
        "log 2": (math.log(2), base),
        "1/log 2": (1 / math.log(2), base),
        "H/G": (float(n), group),
        "G/H": (1 / n, group),
        "2": (2.0, "a sum that starts from a number that it also adds"),
        "1/2": (0.5, "a mean of two"),
    }


def _ratio(x: Tensor, right: Tensor) -> float:
    """The c with the smallest squares of x - c right."""
    finite = x.isfinite() & right.isfinite()
    return float((x * right)[finite].sum() / right[finite].square().sum().clamp(1e-300))


@pattern("In {x} all numbers are {words} times the right numbers")
def factor(wrong: WrongAnswer, name: str) -> Iterator[Found]:
    """P times is 2 times where P = 2: all that fit are found, and other answers decide."""
    exact = wrong.exact(name)
    for words, (c, look) in _factors(wrong).items():
        if c != 1 and wrong.near(name, c * exact):
            yield Found(words, look)
    c = _ratio(wrong.seen(name), exact)
    if wrong.near(name, c * exact):
        yield Found("c", "what this result is multiplied by", 1, f"{wrong.case.words()}: c = {c:.3g}")


@pattern("In {x} all numbers are {words}")
def shifted_lse(wrong: WrongAnswer, name: str) -> Iterator[Found]:
    if name != "lse":
        return
    case, seen, exact = wrong.case, wrong.seen(name), wrong.exact(name)
    q, k, *_ = wrong.inputs.values()
    scores = wrong.scale * q @ k.repeat_interleave(case.heads // case.kv_heads, dim=1).mT
    largest = scores.masked_fill(~case.visible(), -torch.inf).amax(dim=-1)
    if wrong.near(name, largest):
        yield Found("m, the largest score of the row: log l is not added", "lse = m + log l")
    if wrong.near(name, (exact - largest).exp()):
        yield Found("l and not m + log l", "lse = m + log l")
    for words, c in {"log P too large": 1.0, "log P too small": -1.0}.items():
        if case.world_size > 1 and wrong.near(name, exact + c * math.log(case.world_size)):
            yield Found(words, "the sums l of the ranks: one is counted P times, or divided by P")
    finite = seen.isfinite() & exact.isfinite()
    off = float((seen - exact)[finite].mean()) if finite.any() else 0.0
    if wrong.near(name, exact + off):
        yield Found(
            "off by one number",
            "l = e^(lse - m), which is multiplied by something",
            1,
            f"{wrong.case.words()}: {off:.3g}",
        )


@pattern("In {x} the right numbers of rank r are multiplied by {words}")
def factor_of_the_rank(wrong: WrongAnswer, name: str) -> Iterator[Found]:
    case, exact = wrong.case, wrong.chunks(wrong.exact(name))
    P = case.world_size
    if P == 1:
        return
    known = {
        "0 on rank 0, and 1 elsewhere": lambda r: float(r > 0),
        "0 on the last rank, and 1 elsewhere": lambda r: float(r < P - 1),
        "1 on rank 0, and 0 elsewhere": lambda r: float(r == 0),
        "1 on the last rank, and 0 elsewhere": lambda r: float(r == P - 1),
        "r + 1": lambda r: r + 1.0,
        "1 / (r + 1)": lambda r: 1 / (r + 1.0),
        "P - r": lambda r: float(P - r),
        "1 / (P - r)": lambda r: 1 / (P - r),
    }
    look = "what is counted by the number of rounds that a rank computes, or returned by some ranks only"
    for words, c in known.items():
        if wrong.near(name, case.join([c(r) * x for r, x in enumerate(exact)])):
            yield Found(words, look)
    own = [_ratio(x, y) for x, y in zip(wrong.chunks(wrong.seen(name)), exact, strict=True)]
    if wrong.near(name, case.join([c * x for c, x in zip(own, exact, strict=True)])):
        example = f"{case.words()}: {', '.join(f'{c:.3g}' for c in own)}"
        yield Found("a number of its own for each rank", look, order=1, example=example)


@pattern("In {x} the right numbers of each head are multiplied by {words}")
def factor_of_the_head(wrong: WrongAnswer, name: str) -> Iterator[Found]:
    seen, exact = wrong.seen(name), wrong.exact(name)
    own = [_ratio(seen[:, h], exact[:, h]) for h in range(exact.shape[1])]
    c = torch.tensor(own, dtype=torch.float64).view(1, -1, *[1] * (exact.dim() - 2))
    if len(own) > 1 and wrong.near(name, c * exact):
        example = f"{wrong.case.words()}: {', '.join(f'{c:.3g}' for c in own)}"
        yield Found("a number of its own", "what is kept for each head: l, the scale, the sum over a group", 0, example)


@pattern("In {x} each row is the right row times a number of its own: {words}")
def factor_of_the_row(wrong: WrongAnswer, name: str) -> Iterator[Found] | None:
    if name not in ("out", "dq") or wrong.case.head_dim < 3:
        return None
    seen, exact = wrong.seen(name), wrong.exact(name)
    c = (seen * exact).sum(dim=-1, keepdim=True) / exact.square().sum(dim=-1, keepdim=True).clamp(1e-300)
    if not wrong.near(name, c * exact):
        return iter(())
    if name == "out":
        look = "l: how it is rescaled, summed over blocks, and where out is divided by it"
        return iter([Found("the numerators are right, and what divides them is not", look)])
    return iter([Found("dS is wrong by a factor of its row", "the lse that the backward pass gets: p = e^(s - lse)")])
