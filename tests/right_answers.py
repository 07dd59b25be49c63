"""Right answers to the exercises, written in other ways than the solutions: loops, numpy, other formulas."""

import math
from fractions import Fraction

import numpy as np
import torch
import torch.nn.functional as F

from ringlab.basics.blocking_messages import Recv, Send
from ringlab.basics.online_softmax import merge
from ringlab.training.layouts import positions


def update_in_place(m, l, o, scores, v):
    m_new = torch.maximum(m, scores.max())
    l *= torch.exp(m - m_new)
    o *= torch.exp(m - m_new)
    p = torch.exp(scores - m_new)
    l += p.sum()
    o += p @ v
    return m_new, l, o


def merge_row_by_row(out_a, lse_a, out_b, lse_b):
    outs, lses = [], []
    for row in zip(out_a.tolist(), lse_a.tolist(), out_b.tolist(), lse_b.tolist(), strict=True):
        a, x, b, y = row
        largest = max(x, y)
        if largest == -math.inf:
            outs, lses = [*outs, a], [*lses, largest]
            continue
        p, q = math.exp(x - largest), math.exp(y - largest)
        outs.append([(p * i + q * j) / (p + q) for i, j in zip(a, b, strict=True)])
        lses.append(largest + math.log(p + q))
    return outs, lses


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


def one_rank_receives_first(rank, P):
    steps = [Send((rank + 1) % P), Recv((rank - 1) % P)]
    return reversed(steps) if rank == 0 else iter(steps)


def steps_as_pairs(P):
    for t in range(P):
        if t < P - 1:
            yield ["post", t]
        yield ["compute", t]
        if t < P - 1:
            yield ["wait", t]


RIGHT_ANSWERS = {
    "check_safe_softmax": [
        lambda s: s.sub_(s.max()).exp_().div_(s.sum()),  # in place
        lambda s: 1 / torch.exp(s[None, :] - s[:, None]).sum(1),
    ],
    "check_running_update": [update_in_place],
    "check_merge_two": [merge, merge_row_by_row],
    "check_blockwise": [blocks_in_numpy, blocks_on_a_kernel],
    "check_visible_tiles": [lambda n: torch.ones(n, n).tril().sum()],
    "check_largest_tensor": [np.int64(2_048_000_000)],
    "check_blocks_of_gpu": [((2 - t) % 4 for t in range(4)), torch.tensor([2, 1, 0, 3])],
    "check_token_two_in_round_two": [np.array([0.1199, 4.2426, 1.4803])],
    "check_mended_sum": [lambda o, w: torch.exp(w - w.logsumexp(0)) @ o],
    "check_block_in_hand": [lambda rank, t, P: np.roll(np.arange(P), t)[rank]],
    "check_ring_order": [
        odd_ranks_send_first,
        one_rank_receives_first,
        lambda r, P: {Send((r + 1) % P): 0, Recv((r - 1) % P): 0}.keys() if r else list(odd_ranks_send_first(0, P)),
    ],
    "check_bytes_sent": [14 * 2.0**30, Fraction(14 * 2**30)],
    "check_softmax_backward": [lambda p, dp, o, g: p * dp - p * torch.einsum("nd,nd->n", o, g)[:, None]],
    "check_added_so_far": [
        lambda r, t, P: frozenset((r - i) % P for i in range(max(t, 1))),
        lambda r, t, P: torch.arange(r - max(t, 1) + 1, r + 1) % P,
        lambda r, t, P: {(r - i) % P: True for i in range(max(t, 1))}.keys(),
    ],
    "check_bytes_sent_back": [lambda P, n, w: 2 * n * (P - 1) * (w + max(4.0, w))],
    "check_overlap_order": [steps_as_pairs],
    "check_hidden_by_overlap": [lambda c, m: 1 - max(0, m - c) / m],
    "check_zigzag_positions": [lambda r, S, P: positions("zigzag", S, r, P).numpy()],
    "check_striped_mask": [lambda r, b, C: torch.ones(C, C, dtype=torch.int).tril(-int(b > r))],
    "check_idle_limit": [0.467, 0.4667, torch.tensor(7 / 15)],
    "check_merging_share": [lambda a, b: torch.exp(b - torch.logaddexp(a, b)), lambda a, b: 1 / (1 + torch.exp(a - b))],
    "check_smallest_chunk": [lambda f, b, H, G, w: np.float64(f) / b * w * G / (2 * H)],
    "check_training_chunk": [lambda r, H, G, w: r * G / H * (w if w > 8 / 3 else (2 * w + 8) / 5)],
    "check_longest_sequence": [lambda m, s, t, P: P * math.floor((m - s / P) / t) if m * P > s else 0],
    "check_batch_loss": [lambda x, y: F.cross_entropy(torch.cat(x), torch.cat(y))[None]],  # of one element
    "check_rank_loss": [lambda s, n, N, dp, cp, tp: np.float32(s) / np.float32(N) * dp * cp],
    "check_gradient_norm": [lambda slices: torch.cat([part.flatten() for mine in slices for part in mine]).norm()],
    "check_caches": [lambda C, N, P: torch.tensor([C + (N - 1 - r + P - 1) // P for r in range(P)])],
    "check_bytes_of_a_token": [lambda n, B, H, *_, D=None: n * B * H * 8 + n * B * H * _[1] * 4],
    "check_pairs": [lambda texts, at: texts.unfold(1, 2, 1)[:, at].flip(2)],
    "check_kv_head": [lambda r, G, P: torch.arange(G).repeat_interleave(P // G)[r]],
    "check_meshes": [lambda P, H, G: [[P // g, g] for g in range(math.gcd(P, G), 0, -1) if math.gcd(P, G) % g == 0]],
}
