"""Answers to the exercises that no row of a check has: wrong ones with words of what each is told, and right ones in
other forms. The common mistakes are in the rows of notebooks/source/checks: test_exercises.py gives each as an answer.
"""

import math
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F

from ringlab.basics.blocking_messages import Recv, Send
from ringlab.basics.online_softmax import merge


def naive_softmax(scores):
    return scores.exp() / scores.exp().sum()


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


def merge_by_shares(out_a, lse_a, out_b, lse_b):
    """-inf - (-inf) is NaN."""
    lse = torch.logaddexp(lse_a, lse_b)
    return sum(torch.exp(lse_j - lse)[:, None] * out_j for out_j, lse_j in ((out_a, lse_a), (out_b, lse_b))), lse


def unstabilised_merge(out_a, lse_a, out_b, lse_b):
    """Overflows for a large lse."""
    a, b = lse_a.exp()[:, None], lse_b.exp()[:, None]
    return (a * out_a + b * out_b) / (a + b), torch.log(lse_a.exp() + lse_b.exp())


def whole(q, k, v, block_size):
    """Full attention at once, in as little memory as it takes: right, and not in blocks."""
    scores = (q @ k.T).div_(math.sqrt(q.shape[1]))
    weights = scores.sub_(scores.amax(1, keepdim=True)).exp_()
    return weights.div_(weights.sum(1, keepdim=True)) @ v


def without_max(q, k, v, block_size):
    """Blocks of keys, sums of e^s as they are."""
    l, o = 0, 0
    for k_block, v_block in zip(k.split(block_size), v.split(block_size), strict=True):
        p = torch.exp(q @ k_block.T / math.sqrt(q.shape[1]))
        l, o = l + p.sum(1, keepdim=True), o + p @ v_block
    return o / l


def right_order(rank, P):
    steps = [Send((rank + 1) % P), Recv((rank - 1) % P)]
    return steps if rank % 2 == 0 else steps[::-1]


def merged_blocks(kernel, q, k, v, blocks):
    """e^lse overflows."""
    first, *rest = zip(k.chunk(blocks), v.chunk(blocks), strict=True)
    out, lse = kernel(q, *first)
    for block in rest:
        out_j, lse_j = kernel(q, *block)
        out, lse = out.lerp(out_j, torch.sigmoid(lse_j - lse)[:, None]), torch.log(lse.exp() + lse_j.exp())
    return out


def right_attention(ring, q, k, v, scaling):
    return ring(q, k, v, scale=scaling).transpose(1, 2), None


def repeated(ring, q, k, v, scaling):
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    return right_attention(ring, q, k, v, scaling)


def twice_called(ring, q, k, v, scaling):
    ring(q, k, v)
    return right_attention(ring, q, k, v, scaling)


def of_own_chunk(ring, q, k, v, scaling):
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2), None


NAMES = {
    "A": "stale_first_block",
    "B": "gradients_not_sent_home",
    "C": "averages_averaged",
    "D": "chunk_index_under_zigzag",
    "E": "lse_of_the_block",
}


WRONG_ANSWERS = {
    "check_safe_softmax": [
        (naive_softmax, "e^1000 overflows"),
        (lambda s: naive_softmax(s.clamp(-80, 80)), "e^1000 overflows"),
        (lambda s: naive_softmax(s - s.abs().max()), "its absolute value"),
        (lambda s: naive_softmax(s - s.min()), "not the smallest"),
        (lambda s: naive_softmax(s - s[-1]), "the mean or the last"),
        (lambda s: s.exp(), "small scores"),
        (lambda s: naive_softmax(s - (1000 if s.max() > 500 else s.max())), "e^1000 overflows"),
    ],
    "check_running_update": [(max_by_products, "these are the first keys, so m was -inf")],
    "check_merge_two": [
        (lambda a, la, b, lb: (a, torch.logaddexp(la, lb)), "weigh out_a"),
        (unstabilised_merge, "e^1000 overflows"),
        (merge_below_zero, "e^-1000 is 0"),
        (merge_relative_to_a, "a part that saw no key (out = 0, lse = -inf) changes nothing"),
        (merge_by_shares, "twice no key (lse = -inf for both): -inf - (-inf) is NaN"),
    ],
    "check_blockwise": [
        (lambda q, k, v, block_size: whole(q, k[:block_size], v[:block_size], 0), "block_size = 1: off by"),
        (whole, "bytes at once. All scores have 262,144 bytes"),
        (without_max, "keep a running max"),
    ],
    "check_mended_sum": [(lambda outs, lses: lses.exp() / lses.exp().sum() @ outs, "e^1000 overflows")],
    "check_ring_order": [
        (lambda r, P: [Send((r + 1) % P), Recv((r - 1) % P)], "circle: [0, 1]"),
        (lambda r, P: right_order(r, P) if P % 2 == 0 else right_order(0, P)[:1] * 2, "rank 0 of 3"),
        (lambda r, P: right_order(r, P)[:: -1 if P > 5 and r % 2 else 1], "ranks deadlock"),
        (lambda r, P: ["send", "recv"], "one Send and one Recv, got a str in it"),
    ],
    "check_merging_share": [
        (lambda lse, lse_j: lse_j.exp() / (lse.exp() + lse_j.exp()), "lse near 1000: e^1000 overflows"),
        (lambda lse, lse_j: torch.sigmoid((lse_j - lse).clamp(-2, 2)), "with 7 queries"),
    ],
    "check_attention_on_a_kernel": [
        (lambda kernel, q, k, v, n: kernel(q, k, v)[0], "kernel saw [12] keys; expected 3"),
        (merged_blocks, "large scores"),
    ],
    "check_rank_loss": [
        (lambda s, n, N, dp, cp, tp: s / n * n / N * dp * cp, "ZeroDivisionError"),
        (lambda s, n, N, dp, cp, tp: s / N * dp * cp if n else 1.0, "only padding"),
    ],
    "check_attention_function": [
        (repeated, "K and V have 2 heads, and you send 4"),
        (twice_called, "called 2 times"),
        (of_own_chunk, "a rank sees its own chunk: call the ring"),
    ],
    "check_xrays": [
        (NAMES | {"A": "own_block_twice"}, "KV1 would be right, and the X-ray shows it as missing"),
        (NAMES | {"B": "gradients_travel_other_way"}, "shows it as what belongs to KV(j + 1)"),
        (NAMES | {"C": "averages_added"}, "rows would sum to another number, and the X-ray shows 1"),
        (NAMES | {"D": "causal_per_block"}, "KV1 would be a triangle instead of the last half of the queries"),
        (NAMES | {"E": "the merge"}, "'the merge' is not in the list"),
        (NAMES | {"E": ...}, "A, B, C, D right; E still open"),
        (list(NAMES.values()), "a dict with the keys A, B, C, D, E"),
    ],
    "check_new_mistake": [
        (lambda steps: steps, "you replaced no step"),
        (lambda steps: replace(steps, add_q=lambda case, total, part: steps.add_q(case, total, part)), "is right"),
        (lambda steps: replace(steps, scale=lambda case: 1.0), "the doctor knows it: scale_missing"),
        (lambda steps: 1.0, "expected Steps"),
    ],
}


# Right answers in other forms: loops, numpy, other formulas ----------------------------------------------------------


def blocks_in_numpy(q, k, v, block_size):
    q, k, v = q.numpy().astype(float), k.numpy(), v.numpy()
    m, l, o = np.full((len(q), 1), -np.inf), 0.0, 0.0
    for i in range(0, len(k), block_size):
        s = q @ k[i : i + block_size].T / q.shape[1] ** 0.5
        m_new = np.maximum(m, s.max(1, keepdims=True))
        f, p = np.exp(m - m_new), np.exp(s - m_new)
        m, l, o = m_new, f * l + p.sum(1, keepdims=True), f * o + p @ v[i : i + block_size]
    return o / l


def blocks_on_a_kernel(q, k, v, block_size):
    """Two ways to compute the same scores: they round differently where scores are large."""
    out, lse = torch.zeros_like(q), torch.full((len(q),), -math.inf)
    for k_j, v_j in zip(k.split(block_size), v.split(block_size), strict=True):
        out_j = F.scaled_dot_product_attention(q[None], k_j[None], v_j[None])[0]
        out, lse = merge(out, lse, out_j, torch.einsum("qd,kd->qk", q / q.shape[1] ** 0.5, k_j).logsumexp(1))
    return out


def odd_ranks_send_first(rank, P):
    """Some rank must receive first, and some must send first: it need not be rank 0 that sends."""
    steps = [Recv((rank - 1) % P), Send((rank + 1) % P)]
    return tuple(steps if rank % 2 == 0 else steps[::-1])


def every_third_receives_first(rank, P):
    steps = [Send((rank + 1) % P), Recv((rank - 1) % P)]
    return steps if rank % 3 else steps[::-1]


RIGHT_ANSWERS = {
    "check_safe_softmax": [lambda s: s.sub_(s.max()).exp_().div_(s.sum())],  # in place
    "check_blockwise": [blocks_in_numpy, blocks_on_a_kernel],
    "check_ring_order": [odd_ranks_send_first, every_third_receives_first],
    "check_striped_mask": [lambda r, b, C: torch.ones(C, C, dtype=torch.int).tril(-int(b > r))],
}
