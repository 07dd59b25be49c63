"""Checks of chapter 1: a softmax that does not overflow, one running update, a merge of two results."""

from collections.abc import Callable

import torch
from torch import Tensor

from notebooks.checks.answers import NotYet, difference, exercise


@exercise
def check_safe_softmax(answer: Callable[[Tensor], Tensor]) -> str | None:
    """Softmax of scores (n,) of any size."""
    small = torch.tensor([0.0, 1.0, 2.0])
    out = answer(small)
    if problem := difference(out, torch.softmax(small, 0)):
        raise NotYet(problem + ", already for the small scores 0, 1, 2: each weight is e^score over the sum of all")
    big = torch.tensor([1000.0, 1001.0, 1002.0])
    if difference(answer(big), torch.softmax(big, 0)):
        raise NotYet("scores near 1000 overflow; subtract the largest score before exp")
    low = torch.tensor([-1000.0, -1001.0, -1002.0])
    if difference(answer(low), torch.softmax(low, 0)):
        raise NotYet("scores near -1000 all become 0; subtract the largest score, not its absolute value and not 1000")


@exercise
def check_running_update(answer: Callable[..., tuple[Tensor, Tensor, Tensor]]) -> str | None:
    """(m, l, o), scores (n,), v (n, D) -> (m, l, o), for one query."""
    m, l, o = torch.tensor(1.0), torch.tensor(2.0), torch.tensor([3.0, 4.0])
    v = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    for scores in (torch.tensor([0.0, 0.5]), torch.tensor([3.0, 2.0])):  # the max stays; the max grows
        out = answer(m, l, o, scores, v)
        m_new = torch.maximum(m, scores.max())
        p, f = torch.exp(scores - m_new), torch.exp(m - m_new)
        for name, given, expected in zip("mlo", out, (m_new, f * l + p.sum(), f * o + p @ v), strict=True):
            if problem := difference(given, expected):
                grows = "grows to 3" if m_new > m else "stays at 1"
                hint = " (is the old part rescaled by e^(m - m_new)?)" if m_new > m and name != "m" else ""
                raise NotYet(f"{problem}: {name} is wrong when the max {grows}{hint}")


@exercise
def check_merge_two(answer: Callable[..., tuple[Tensor, Tensor]]) -> str | None:
    """Merge (out (n, D), lse (n,)) of two sets of keys."""
    generator = torch.Generator().manual_seed(0)
    scores, v = torch.randn(3, 5, generator=generator), torch.randn(5, 2, generator=generator)
    parts = [(torch.softmax(scores[:, k], 1) @ v[k], scores[:, k].logsumexp(1)) for k in (slice(0, 1), slice(1, 5))]
    given = answer(*parts[0], *parts[1])
    out, lse = given
    if problem := difference(lse, scores.logsumexp(1)):
        raise NotYet(problem + " in lse: it is log(e^lse_a + e^lse_b)")
    if difference(out, (parts[0][0] + parts[1][0]) / 2) is None:
        raise NotYet("that is the plain average; 1 key and 4 keys do not weigh the same")
    if problem := difference(out, torch.softmax(scores, 1) @ v):
        raise NotYet(problem + " in out: weigh out_a by e^(lse_a - lse) and out_b by e^(lse_b - lse)")
