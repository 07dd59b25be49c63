"""Checks of chapter 1: a softmax that does not overflow, one running update, a merge of two results."""

import math

import torch

from notebooks.source.checks.answers import Exercise, torch_generator
from ringlab.basics.online_softmax import merge


def _scores(*scores):
    return [(torch.tensor(each, dtype=torch.float64),) for each in scores]  # float32 would round large ones


def _many_scores(random):
    n, place = random.randint(1, 9), random.choice((5000, -5000, 0, 10**6))
    return (place + 3 * torch.randn(n, dtype=torch.float64, generator=torch_generator(random)),)


STILL = "the largest score still overflows; subtract the largest score, not the smallest, the mean or the"
check_safe_softmax = Exercise(  # scores (n,) of any size -> weights (n,)
    right=lambda scores: torch.softmax(scores, 0),
    cases={
        "each weight is e^score, divided by the sum of all e^score, already for the small scores": _scores(
            [0.0, 1.0, 2.0], [1.0, 0.5, 0.0, -1.0], [2.0]
        ),
        "e^1000 overflows; subtract the largest score from all scores before exp": _scores([1000.0, 1001.0, 1002.0]),
        "e^-1000 is 0, so the sum is 0; subtract the largest score itself, which is -1000 (its absolute value, or a "
        "fixed number, does not help here)": _scores([-1000.0, -1001.0, -1002.0]),
        f"{STILL} first": _scores([0.0, 1.0, 2.0, 1000.0]),
        f"{STILL} last": _scores([1000.0, 2.0, 1.0, 0.0]),
    },
    draw=_many_scores,
)


def _update(sums):
    """A running update whose new l and o are sums(old, new, f)."""

    def update(m, l, o, scores, v):
        m_new = torch.maximum(m, scores.max())
        p, f = torch.exp(scores - m_new), torch.exp(m - m_new)
        return {"m": m_new, "l": sums(l, p.sum(), f), "o": sums(o, p @ v, f)}

    return update


def _more_keys(random):
    (n, D), generator = (random.randint(1, 7), random.randint(1, 6)), torch_generator(random)
    m, l, o, scores = (torch.randn(size, generator=generator) for size in ((), (), D, n))
    return m, 1 + l.abs(), o, 2 * scores, torch.randn(n, D, generator=generator)


VALUES = torch.tensor([[1.0, 0.0], [0.0, 1.0], [2.0, 5.0]])
OLD = torch.tensor(1.0), torch.tensor(2.5), torch.tensor([3.0, 4.0])
RIGHT = _update(lambda old, new, f: f * old + new)
ONLY = "only the old part is rescaled by e^(m - m_new); the new part has the new max already"
check_running_update = Exercise(  # (m, l, o), scores (n,), v (n, D) -> (m, l, o), for one query
    right=lambda m, l, o, scores, v: RIGHT(m, l, o, scores, v),
    wrong={
        "m is the largest score of all so far: compare the old m with the new scores": (
            lambda m, l, o, scores, v: {"m": scores.max()}
        ),
        "the old part is not rescaled: multiply it by e^(m - m_new)": _update(lambda old, new, f: old + new),
        "the old part is lost: add it, rescaled by e^(m - m_new)": _update(lambda old, new, f: new),
        "the old part is rescaled the wrong way round: e^(m - m_new), not e^(m_new - m)": _update(
            lambda old, new, f: old / f + new
        ),
        ONLY: _update(lambda old, new, f: f * (old + new)),
        "the new part of o is p @ v: the values, each times its weight": lambda m, l, o, scores, v: {
            "o": RIGHT(m, l, o, scores, torch.ones_like(v))["o"]
        },
        "o stays unnormalised; divide by l at the end only": lambda m, l, o, scores, v: {
            "o": RIGHT(m, l, o, scores, v)["o"] / RIGHT(m, l, o, scores, v)["l"]
        },
    },
    cases={
        "the max stays at 1": [(*OLD, torch.tensor([0.0, 0.5]), VALUES[:2])],
        "the max grows": [
            (*OLD, torch.tensor([3.0, 2.0]), VALUES[:2]),
            (*OLD, torch.tensor([4.0, -1.0, 2.0]), VALUES),
        ],
        "these are the first keys, so m was -inf": [
            (torch.tensor(-math.inf), torch.tensor(0.0), torch.zeros(2), torch.tensor([3.0, 2.0]), VALUES[:2])
        ],
    },
    draw=_more_keys,
)


def _two_parts(n, keys, D, generator, shift=0.0):
    """(out, lse) of the first key, and of the others; the scores are so much larger."""
    scores, v = (torch.randn(*size, dtype=torch.float64, generator=generator) for size in ((n, keys), (keys, D)))
    parts = ((scores[:, k], v[k]) for k in (slice(0, 1), slice(1, keys)))
    return [x for s, values in parts for x in (torch.softmax(s, 1) @ values, s.logsumexp(1) + shift)]


def _merged(out_a, lse_a, out_b, lse_b):
    return dict(zip(("out", "lse"), merge(out_a, lse_a, out_b, lse_b), strict=True))


def _drawn_parts(random):
    size = random.randint(1, 6), random.randint(2, 9), 5
    return tuple(_two_parts(*size, torch_generator(random), random.choice((0, -1, 1)) * random.uniform(800, 9000)))


GENERATOR = torch.Generator().manual_seed(0)
PART, NOTHING = _two_parts(3, 5, 2, GENERATOR)[:2], [torch.zeros(3, 2).double(), torch.full((3,), -math.inf).double()]
STABLE = "use torch.logaddexp, or subtract the larger lse before exp"
check_merge_two = Exercise(  # (out (n, D), lse (n,)) of two sets of keys -> (out, lse) of both
    right=_merged,
    wrong={
        "out is the plain average; a part with more weight, a larger lse, counts more": (
            lambda out_a, lse_a, out_b, lse_b: {"out": (out_a + out_b) / 2}
        ),
        "out is the plain sum, so its weights add up to 2": lambda out_a, lse_a, out_b, lse_b: {"out": out_a + out_b},
        "the two shares are swapped: out_a has the share e^(lse_a - lse)": lambda out_a, lse_a, out_b, lse_b: {
            "out": _merged(out_b, lse_a, out_a, lse_b)["out"]
        },
        "divide by the sum of both, e^lse": lambda out_a, lse_a, out_b, lse_b: {
            "out": lse_a.exp()[:, None] * out_a + lse_b.exp()[:, None] * out_b
        },
    },
    cases={
        "weigh out_a by e^(lse_a - lse) and out_b by e^(lse_b - lse); lse is log(e^lse_a + e^lse_b)": [
            tuple(_two_parts(*size, GENERATOR)) for size in ((3, 5, 2), (4, 9, 3), (1, 2, 1))
        ],
        f"right for small lse, but e^1000 overflows; {STABLE}": [tuple(_two_parts(3, 5, 2, GENERATOR, 1000.0))],
        f"right for small lse, but e^-1000 is 0; {STABLE}": [tuple(_two_parts(3, 5, 2, GENERATOR, -1000.0))],
        "a part that saw no key (out = 0, lse = -inf) changes nothing": [(*PART, *NOTHING), (*NOTHING, *PART)],
        "twice no key (lse = -inf for both): -inf - (-inf) is NaN; the result is out = 0 and lse = -inf": [
            (*NOTHING, *NOTHING)
        ],
    },
    draw=_drawn_parts,
)
