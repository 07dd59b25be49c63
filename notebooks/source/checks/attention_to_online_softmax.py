"""Checks of chapter 1: a softmax that does not overflow, one running update, a merge of two results."""

import math
from collections.abc import Callable
from itertools import cycle

import torch
from torch import Tensor

from notebooks.source.checks.answers import (
    NotYet,
    as_tensor,
    difference,
    draws,
    exercise,
    in_order,
    several,
    torch_generator,
)


@exercise
def check_safe_softmax(answer: Callable[[Tensor], Tensor]) -> str | None:
    """Softmax of scores (n,) of any size."""
    for small in (torch.tensor([0.0, 1.0, 2.0]), torch.tensor([1.0, 0.5, 0.0, -1.0]), torch.tensor([2.0])):
        if problem := difference(answer(small), torch.softmax(small, 0)):
            hint = "each weight is e^score, divided by the sum of all e^score"
            raise NotYet(f"{problem}, already for the small scores {small.tolist()}: {hint}")
    hints = {
        (1000.0, 1001.0, 1002.0): "e^1000 overflows; subtract the largest score from all scores before exp",
        (-1000.0, -1001.0, -1002.0): "e^-1000 is 0, so the sum is 0; subtract the largest score itself, which is -1000 "
        "(its absolute value, or a fixed number, does not help here)",
        (0.0, 1.0, 2.0, 1000.0): "the largest score still overflows; subtract the largest score, not the smallest, the "
        "mean or the first",
        (1000.0, 2.0, 1.0, 0.0): "the largest score still overflows; subtract the largest score, not the smallest, the "
        "mean or the last",
    }
    for scores, hint in hints.items():
        large = torch.tensor(scores, dtype=torch.float64)  # float32 would round them
        if problem := difference(answer(large), torch.softmax(large, 0)):
            raise NotYet(f"{problem}, for the scores {list(scores)}: {hint}")
    places = cycle((5000, -5000, 0, 10**6))  # below and above what a fixed number can be subtracted from
    for random, place in zip(draws(), places, strict=False):
        n = random.randint(1, 9)
        drawn = place + 3 * torch.randn(n, dtype=torch.float64, generator=torch_generator(random))
        if problem := difference(answer(drawn), torch.softmax(drawn, 0)):
            raise NotYet(f"{problem}, for {n} scores near {place}: subtract the largest of them before exp")


@exercise
def check_running_update(answer: Callable[..., tuple[Tensor, Tensor, Tensor]]) -> str | None:
    """(m, l, o), scores (n,), v (n, D) -> (m, l, o), for one query."""
    old = torch.tensor(1.0), torch.tensor(2.5), torch.tensor([3.0, 4.0])
    nothing = torch.tensor(-math.inf), torch.tensor(0.0), torch.zeros(2)
    v = torch.tensor([[1.0, 0.0], [0.0, 1.0], [2.0, 5.0]])
    cases = [
        ("the max stays at 1", old, [0.0, 0.5]),
        ("the max grows from 1 to 3", old, [3.0, 2.0]),
        ("the max grows from 1 to 4, with 3 keys", old, [4.0, -1.0, 2.0]),
        ("these are the first keys, so m was -inf", nothing, [3.0, 2.0]),
    ]
    tried = [(when, old, torch.tensor(scores), v[: len(scores)]) for when, old, scores in cases]
    for random in draws():
        (n, D), generator = (random.randint(1, 7), random.randint(1, 6)), torch_generator(random)
        drawn = (
            torch.randn((), generator=generator),
            1 + torch.rand((), generator=generator),
            torch.randn(D, generator=generator),
        )
        keys = 2 * torch.randn(n, generator=generator), torch.randn(n, D, generator=generator)
        tried.append((f"there are {n} new keys, D = {D}", drawn, *keys))
    for when, (m, l, o), s, values in tried:
        given = several(answer(m, l, o, s, values), ("m", "l", "o"))
        m_new = torch.maximum(m, s.max())
        p, f = torch.exp(s - m_new), torch.exp(m - m_new)
        expected = {"m": m_new, "l": f * l + p.sum(), "o": f * o + p @ values}
        in_order(given, expected)
        for (name, right), value in zip(expected.items(), given, strict=True):
            if problem := difference(value, right):
                known = as_tensor(value).shape == right.shape
                hint = _update_hint(name, value, m, l, o, s, values) if known else None
                raise NotYet(f"{name} is wrong when {when}: {hint or problem}")


def _update_hint(name: str, given: Tensor, m: Tensor, l: Tensor, o: Tensor, s: Tensor, v: Tensor) -> str | None:
    """What the common mistakes give for m, l or o."""
    m_new = torch.maximum(m, s.max())
    p, f = torch.exp(s - m_new), torch.exp(m - m_new)
    if name == "m":
        return "m is the largest score of all so far: compare the old m with the new scores"
    old, new = (l, p.sum()) if name == "l" else (o, p @ v)
    wrong = [
        (old + new, "the old part is not rescaled: multiply it by e^(m - m_new)"),
        (new, "the old part is lost: add it, rescaled by e^(m - m_new)"),
        (old / f + new, "the old part is rescaled the wrong way round: e^(m - m_new), not e^(m_new - m)"),
        (f * (old + new), "only the old part is rescaled by e^(m - m_new); the new part has the new max already"),
        (f * old + f * new, "only the old part is rescaled by e^(m - m_new); the new part has the new max already"),
    ]
    if name == "o":
        wrong.append((f * o + p.sum(), "the new part of o is p @ v: the values, each times its weight"))
        wrong.append(((f * o + p @ v) / (f * l + p.sum()), "o stays unnormalised; divide by l at the end only"))
    return next((hint for value, hint in wrong if difference(given, value) is None), None)


@exercise
def check_merge_two(answer: Callable[..., tuple[Tensor, Tensor]]) -> str | None:
    """Merge (out (n, D), lse (n,)) of two sets of keys."""
    generator = torch.Generator().manual_seed(0)
    for n, keys, D in ((3, 5, 2), (4, 9, 3), (1, 2, 1), *((r.randint(1, 6), r.randint(2, 9), 5) for r in draws())):
        scores = torch.randn(n, keys, dtype=torch.float64, generator=generator)
        v = torch.randn(keys, D, dtype=torch.float64, generator=generator)
        parts = [
            (torch.softmax(scores[:, k], 1) @ v[k], scores[:, k].logsumexp(1)) for k in (slice(0, 1), slice(1, keys))
        ]
        expected = torch.softmax(scores, 1) @ v, scores.logsumexp(1)
        given = several(answer(*parts[0], *parts[1]), ("out", "lse"))
        in_order(given, dict(zip(("out", "lse"), expected, strict=True)))
        _compare_merged(given, *parts, expected)

    nothing = torch.zeros_like(expected[0]), torch.full_like(expected[1], -math.inf)
    for shift in (
        1000.0,
        -1000.0,
        *(r.choice((-1, 1)) * r.uniform(800, 9000) for r in draws()),
    ):  # larger scores: the lse moves, the shares stay
        shifted = [(out, lse + shift) for out, lse in parts]
        out, lse = several(answer(*shifted[0], *shifted[1]), ("out", "lse"))
        if difference(lse, expected[1] + shift) or difference(out, expected[0]):
            fails = "e^1000 overflows" if shift > 0 else "e^-1000 is 0"
            raise NotYet(
                f"right for small lse, wrong for lse near {shift:g}: {fails}; use torch.logaddexp, or subtract "
                "the larger lse before exp"
            )
    for a, b, merged in ((parts[0], nothing, parts[0]), (nothing, parts[0], parts[0]), (nothing, nothing, nothing)):
        out, lse = several(answer(*a, *b), ("out", "lse"))
        if difference(lse, merged[1]) or difference(out, merged[0]):
            both = "twice no key (lse = -inf for both)" if a is b else "a part that saw no key (out = 0, lse = -inf)"
            hint = "-inf - (-inf) is NaN; the result is out = 0 and lse = -inf" if a is b else "it changes nothing"
            raise NotYet(f"right, but not for {both}: {hint}")


def _compare_merged(
    given: list[Tensor], a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]
) -> None:
    out, lse = given
    if problem := difference(lse, expected[1]):
        raise NotYet(f"{problem} in lse: it is log(e^lse_a + e^lse_b)")
    share = torch.exp(a[1] - expected[1])[:, None]
    wrong = [
        ((a[0] + b[0]) / 2, "out is the plain average; a part with more weight, a larger lse, counts more"),
        (a[0] + b[0], "out is the plain sum, so its weights add up to 2"),
        (share * b[0] + (1 - share) * a[0], "the two shares are swapped: out_a has the share e^(lse_a - lse)"),
        (a[0] * a[1].exp()[:, None] + b[0] * b[1].exp()[:, None], "divide by the sum of both, e^lse"),
    ]
    if problem := difference(out, expected[0]):
        hint = next((hint for value, hint in wrong if difference(out, value) is None), None)
        raise NotYet(hint or f"{problem} in out: weigh out_a by e^(lse_a - lse) and out_b by e^(lse_b - lse)")
