"""Wrong answers to the exercises of chapter 1, and what each must be told."""

import torch

from notebooks.checks.attention_to_online_softmax import check_merge_two, check_running_update, check_safe_softmax


def naive_softmax(scores):
    return scores.exp() / scores.exp().sum()


def no_rescale(m, l, o, scores, v):
    m_new = torch.maximum(m, scores.max())
    p = torch.exp(scores - m_new)
    return m_new, l + p.sum(), o + p @ v


WRONG_ANSWERS = [
    (check_safe_softmax, naive_softmax, "subtract the largest score"),
    (check_safe_softmax, lambda s: torch.softmax(s.clamp(-80, 80), 0), "near 1000"),
    (check_safe_softmax, lambda s: naive_softmax(s - s.abs().max()), "near -1000"),
    (check_safe_softmax, lambda s: s.exp(), "small scores"),
    (check_safe_softmax, lambda s: None, "expected a tensor"),
    (check_running_update, no_rescale, "rescaled by"),
    (check_running_update, lambda m, l, o, s, v: (s.max(), l, o), "m is wrong when the max stays"),
    (check_merge_two, lambda out_a, lse_a, out_b, lse_b: (out_a + out_b, lse_a + lse_b), "in lse"),
    (check_merge_two, lambda out_a, lse_a, out_b, lse_b: out_a, "not the kind of answer"),
    (check_merge_two, lambda a, la, b, lb: ((a + b) / 2, torch.logaddexp(la, lb)), "plain average"),
    (check_merge_two, lambda a, la, b, lb: (a + b, torch.logaddexp(la, lb)), "in out"),
]
