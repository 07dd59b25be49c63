"""Wrong answers to the exercises of chapter 1, and what each must be told."""

import torch

from notebooks.checks.attention_to_online_softmax import check_merge_two, check_running_update, check_safe_softmax


def naive_softmax(scores):
    return scores.exp() / scores.exp().sum()


def updates(rescale_l=True, rescale_o=True, invert=False, keep=1.0, normalise=False, new=lambda p, v: p @ v):
    """A running update, right unless told otherwise."""

    def update(m, l, o, scores, v):
        m_new = torch.maximum(m, scores.max())
        p, f = torch.exp(scores - m_new), torch.exp(m_new - m if invert else m - m_new)
        l_new = keep * (f if rescale_l else 1) * l + p.sum()
        o_new = keep * (f if rescale_o else 1) * o + new(p, v)
        return m_new, l_new, o_new / l_new if normalise else o_new

    return update


def max_by_products(m, l, o, scores, v):
    """-inf * 0 is NaN."""
    grows = scores.max() > m
    m_new = ~grows * m + grows * scores.max()
    f, p = torch.exp(m - m_new), torch.exp(scores - m_new)
    return m_new, f * l + p.sum(), f * o + p @ v


def merge_relative_to_a(out_a, lse_a, out_b, lse_b):
    """Right while part a has seen a key."""
    b = torch.exp(lse_b - lse_a)
    return (out_a + b[:, None] * out_b) / (1 + b)[:, None], lse_a + torch.log1p(b)


def merge_below_zero(out_a, lse_a, out_b, lse_b):
    """Subtracts the larger lse only where it is positive."""
    m = torch.maximum(lse_a, lse_b).clamp(min=0)
    a, b = torch.exp(lse_a - m)[:, None], torch.exp(lse_b - m)[:, None]
    return (a * out_a + b * out_b) / (a + b), m + torch.log(a + b)[:, 0]


def shares_merge(share_a, share_b):
    """out = share_a(...) out_a + share_b(...) out_b, with the right lse."""

    def merge(out_a, lse_a, out_b, lse_b):
        lse = torch.logaddexp(lse_a, lse_b)
        return share_a(lse_a, lse)[:, None] * out_a + share_b(lse_b, lse)[:, None] * out_b, lse

    return merge


def share(lse_j, lse):
    return torch.exp(lse_j - lse)


def unstabilised_merge(out_a, lse_a, out_b, lse_b):
    """Overflows for a large lse."""
    a, b = lse_a.exp()[:, None], lse_b.exp()[:, None]
    return (a * out_a + b * out_b) / (a + b), torch.log(lse_a.exp() + lse_b.exp())


WRONG_ANSWERS = [
    (check_safe_softmax, naive_softmax, "subtract the largest score"),
    (check_safe_softmax, lambda s: torch.softmax(s.clamp(-80, 80), 0), "e^1000 overflows"),
    (check_safe_softmax, lambda s: naive_softmax(s - s.abs().max()), "its absolute value"),
    (check_safe_softmax, lambda s: naive_softmax(s - s.min()), "not the smallest"),
    (check_safe_softmax, lambda s: naive_softmax(s - s.mean()), "not the smallest, the mean"),
    (check_safe_softmax, lambda s: naive_softmax(s - s[0]), "the mean or the first"),
    (check_safe_softmax, lambda s: naive_softmax(s - s[-1]), "the mean or the last"),
    (check_safe_softmax, lambda s: s.exp(), "small scores"),
    (check_safe_softmax, lambda s: torch.softmax(s, 0) + 1e-4, "off by up to 0.0001"),
    (check_safe_softmax, lambda s: torch.softmax(s, 0) if len(s) == 3 else s, "small scores [1.0, 0.5"),
    (check_safe_softmax, lambda s: torch.softmax(s, 0) if len(s) > 1 else s, "small scores [2.0]"),
    (check_safe_softmax, lambda s: None, "expected a tensor"),
    (check_safe_softmax, lambda s: s / 0 + s.nonsense, "your answer ends in AttributeError"),
    (
        check_running_update,
        updates(rescale_l=False, rescale_o=False),
        "l is wrong when the max grows from 1 to 3: the old",
    ),
    (check_running_update, updates(rescale_l=False), "l is wrong when the max grows"),
    (check_running_update, updates(rescale_o=False), "o is wrong when the max grows"),
    (check_running_update, updates(invert=True), "wrong way round"),
    (check_running_update, updates(keep=0.0), "l is wrong when the max stays at 1: the old part is lost"),
    (check_running_update, updates(normalise=True), "o stays unnormalised"),
    (check_running_update, updates(new=lambda p, v: p.sum()), "the values, each times its weight"),
    (
        check_running_update,
        updates(new=lambda p, v: p[0] * v[0] + p[1] * v[1]),
        "o is wrong when the max grows from 1 to 4",
    ),
    (check_running_update, max_by_products, "m is wrong when these are the first keys"),
    (check_running_update, lambda m, l, o, s, v: (s.max(), l, o), "m is wrong when the max stays"),
    (check_running_update, lambda m, l, o, s, v: (torch.maximum(m, s.max()), l, o), "l is wrong when the max stays"),
    (check_running_update, lambda m, l, o, s, v: (m, l), "expected 3 values (m, l, o), got 2 value(s)"),
    (check_running_update, lambda m, l, o, s, v: o, "expected 3 values (m, l, o), got 2 value(s)"),
    (check_merge_two, lambda out_a, lse_a, out_b, lse_b: (out_a + out_b, lse_a + lse_b), "in lse"),
    (check_merge_two, lambda out_a, lse_a, out_b, lse_b: out_a, "expected 2 values (out, lse), got 3 value(s)"),
    (check_merge_two, lambda a, la, b, lb: ((a + b) / 2, torch.logaddexp(la, lb)), "plain average"),
    (check_merge_two, lambda a, la, b, lb: (a + b, torch.logaddexp(la, lb)), "plain sum"),
    (check_merge_two, lambda a, la, b, lb: (a, torch.logaddexp(la, lb)), "in out: weigh out_a"),
    (check_merge_two, lambda a, la, b, lb: shares_merge(share, share)(b, la, a, lb), "swapped"),
    (
        check_merge_two,
        shares_merge(lambda lse_j, lse: lse_j.exp(), lambda lse_j, lse: lse_j.exp()),
        "divide by the sum",
    ),
    (check_merge_two, unstabilised_merge, "e^1000 overflows"),
    (check_merge_two, merge_below_zero, "e^-1000 is 0"),
    (check_merge_two, merge_relative_to_a, "a part that saw no key (out = 0, lse = -inf): it changes nothing"),
    (
        check_merge_two,
        lambda a, la, b, lb: merge_relative_to_a(b, lb, a, la),
        "a part that saw no key (out = 0, lse = -inf): it changes nothing",
    ),
    (check_merge_two, shares_merge(share, share), "twice no key (lse = -inf for both): -inf - (-inf) is NaN"),
    (
        check_merge_two,
        lambda a, la, b, lb: shares_merge(share, share)(a, la, b, lb) if len(a) == 3 else (a, la),
        "in lse: it is log",
    ),
    (check_safe_softmax, lambda s: naive_softmax(s - 1000), "already for the small scores"),
    (check_safe_softmax, lambda s: naive_softmax(s - (1000 if s.max() > 500 else s.max())), "scores near"),
    (check_safe_softmax, lambda s: torch.softmax(s, 0).half(), "off by up to"),
    (check_safe_softmax, lambda s: torch.log_softmax(s, 0), "small scores"),
    (check_safe_softmax, lambda s: torch.sigmoid(s), "small scores"),
    (check_safe_softmax, lambda s: torch.softmax(s, 0)[:3], "small scores [1.0, 0.5"),
    (check_safe_softmax, lambda s: torch.softmax(s, 0)[None], "expected shape (3,), got (1, 3)"),
    (check_safe_softmax, lambda s: 1, "expected shape (3,), got ()"),
    (check_running_update, lambda *given: updates()(*given)[::-1], "another order, o, l, m: return m, l, o"),
    (check_running_update, lambda *given: [updates()(*given)[i] for i in (1, 0, 2)], "another order, l, m, o"),
    (check_running_update, lambda m, l, o, s, v: updates()(s.max(), l, o, s, v), "m is wrong when the max stays at 1"),
    (check_running_update, lambda *given: (*updates()(*given)[:2], given[2]), "o is wrong when the max stays at 1"),
    (check_running_update, lambda m, l, o, s, v: updates()(*(x.half() for x in (m, l, o, s, v))), "off by up to"),
    (check_running_update, lambda *given: [x.reshape(-1) for x in updates()(*given)], "expected shape (), got (1,)"),
    (check_merge_two, lambda *given: shares_merge(share, share)(*given)[::-1], "another order, lse, out"),
    (check_merge_two, lambda a, la, b, lb: (a, la), "in lse: it is log"),
    (check_merge_two, lambda a, la, b, lb: (torch.where((la > lb)[:, None], a, b), torch.maximum(la, lb)), "in lse"),
    (
        check_merge_two,
        lambda a, la, b, lb: (torch.where((la > lb)[:, None], a, b), torch.logaddexp(la, lb)),
        "in out: weigh out_a",
    ),
]
