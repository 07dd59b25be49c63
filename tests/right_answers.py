"""Right answers to the exercises, written in other ways than the solutions: loops, numpy, torch, other formulas."""

import math
from fractions import Fraction
from itertools import accumulate, pairwise

import numpy as np
import torch
import torch.nn.functional as F

from notebooks.checks.a_model_in_the_ring import check_batch_loss, check_hops_of_a_step, check_rank_input
from notebooks.checks.attention_to_online_softmax import check_merge_two, check_running_update, check_safe_softmax
from notebooks.checks.backward import check_added_so_far, check_bytes_sent_back, check_softmax_backward
from notebooks.checks.blockwise_attention import check_blockwise, check_largest_tensor, check_visible_tiles
from notebooks.checks.causal_balance import check_idle_limit, check_striped_mask, check_zigzag_positions
from notebooks.checks.documents_and_windows import check_first_key, check_hops, check_labels
from notebooks.checks.generation import check_bytes_of_a_token, check_caches, check_merge
from notebooks.checks.hidden_communication import (
    check_longest_sequence,
    check_peak_memory_backward,
    check_smallest_chunk,
    check_training_chunk,
)
from notebooks.checks.meshes import check_gradient_norm, check_place, check_rank_loss
from notebooks.checks.overlap import check_hidden_by_overlap, check_overlap_order
from notebooks.checks.rings_that_were_wrong import check_new_mistake, check_ranks, check_xrays
from notebooks.checks.the_fused_ring import check_attention_on_a_kernel, check_merging_share, check_natural_lse
from notebooks.checks.the_other_ways_round import check_copies, check_kv_head, check_meshes, check_sent
from notebooks.checks.the_ring import check_block_in_hand, check_bytes_sent, check_ring_order
from notebooks.checks.two_speeds_of_wire import check_block, check_blocks_of_a_nic, check_seconds
from notebooks.checks.what_context_is_for import check_longest_text, check_pairs
from notebooks.checks.worked_example import check_blocks_of_gpu, check_mended_sum, check_token_two_in_round_two
from notebooks.checks.your_own_model import check_attention_function, check_shard_by_hand, check_what_is_refused
from ringlab.basics.blocking_messages import Recv, Send
from ringlab.basics.online_softmax import merge
from ringlab.training.layouts import positions
from tests.wrong_answers.rings_that_were_wrong import NAMES, RANKS


# 1 and 2
def softmax_in_numpy(scores):
    p = np.exp(scores.numpy() - scores.numpy().max())
    return p / p.sum()


def softmax_of_lists(scores):
    largest = max(scores.tolist())
    p = [math.exp(s - largest) for s in scores.tolist()]
    return [x / sum(p) for x in p]


def softmax_in_place(scores):
    scores -= scores.max()
    return scores.exp_().div_(scores.sum())


def update_key_by_key(m, l, o, scores, v):
    for s, value in zip(scores, v, strict=True):
        m_new = max(m, s)
        f, p = torch.exp(m - m_new), torch.exp(s - m_new)
        m, l, o = m_new, f * l + p, f * o + p * value
    return m, l, o


def update_in_numpy(m, l, o, scores, v):
    m, l, o, scores, v = (np.asarray(x) for x in (m, l, o, scores, v))
    m_new = max(m, scores.max())
    return (
        m_new,
        np.exp(m - m_new) * l + np.exp(scores - m_new).sum(),
        np.exp(m - m_new) * o + np.exp(scores - m_new) @ v,
    )


def update_in_place(m, l, o, scores, v):
    m_new = torch.maximum(m, scores.max())
    l *= torch.exp(m - m_new)
    o *= torch.exp(m - m_new)
    p = torch.exp(scores - m_new)
    l += p.sum()
    o += p @ v
    return m_new, l, o


def merge_by_shares(out_a, lse_a, out_b, lse_b):
    largest = torch.maximum(lse_a, lse_b)
    largest = torch.where(largest == -torch.inf, 0.0, largest)
    a, b = torch.exp(lse_a - largest), torch.exp(lse_b - largest)
    total = torch.where(a + b == 0, 1.0, a + b)
    return (a / total)[:, None] * out_a + (b / total)[:, None] * out_b, torch.log(a + b) + largest


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


def blocks_of_queries_too(q, k, v, block_size):
    rows = []
    for q_i in q.split(block_size):
        m, l, o = torch.full((len(q_i), 1), -math.inf), 0, 0
        for k_j, v_j in zip(k.split(block_size), v.split(block_size), strict=True):
            s = q_i @ k_j.T * q.shape[1] ** -0.5
            m_new = torch.maximum(m, s.max(dim=1, keepdim=True).values)
            f, p = torch.exp(m - m_new), torch.exp(s - m_new)
            m, l, o = m_new, f * l + p.sum(dim=1, keepdim=True), f * o + p @ v_j
        rows.append(o / l)
    return torch.cat(rows)


def blocks_in_numpy(q, k, v, block_size):
    q, k, v = q.numpy().astype(float), k.numpy(), v.numpy()
    m, l, o = np.full((len(q), 1), -np.inf), 0.0, 0.0
    for i in range(0, len(k), block_size):
        s = q @ k[i : i + block_size].T / q.shape[1] ** 0.5
        m_new = np.maximum(m, s.max(1, keepdims=True))
        f, p = np.exp(m - m_new), np.exp(s - m_new)
        m, l, o = m_new, f * l + p.sum(1, keepdims=True), f * o + p @ v[i : i + block_size]
    return o / l


def blocks_by_lse(q, k, v, block_size):
    out, lse = torch.zeros_like(q), torch.full((len(q),), -math.inf)
    for k_j, v_j in zip(k.split(block_size), v.split(block_size), strict=True):
        s = q @ k_j.T / math.sqrt(q.shape[1])
        out, lse = merge(out, lse, s.softmax(1) @ v_j, s.logsumexp(1))
    return out


def blocks_on_a_kernel(q, k, v, block_size):
    """Two ways to compute the same scores: they round differently where scores are large."""
    out, lse = torch.zeros_like(q), torch.full((len(q),), -math.inf)
    for k_j, v_j in zip(k.split(block_size), v.split(block_size), strict=True):
        out_j = F.scaled_dot_product_attention(q[None], k_j[None], v_j[None])[0]
        out, lse = merge(out, lse, out_j, torch.einsum("qd,kd->qk", q / q.shape[1] ** 0.5, k_j).logsumexp(1))
    return out


# 3 and 4
def mended_in_numpy(outs, lses):
    shares = np.exp(lses.numpy() - lses.numpy().max())
    return shares @ outs.numpy() / shares.sum()


def mended_by_merging(outs, lses):
    out, lse = outs[0], lses[0]
    for out_j, lse_j in zip(outs[1:], lses[1:], strict=True):
        out, lse = merge(out, lse, out_j, lse_j)
    return out


def odd_ranks_send_first(rank, P):
    """Some rank must receive first, and some must send first: it need not be rank 0 that sends."""
    steps = [Recv((rank - 1) % P), Send((rank + 1) % P)]
    return tuple(steps if rank % 2 == 0 else steps[::-1])


def one_rank_receives_first(rank, P):
    steps = [Send((rank + 1) % P), Recv((rank - 1) % P)]
    return reversed(steps) if rank == 0 else iter(steps)


# 5, 6 and 7
def ds_by_autograd(p, dp, out, d_out):
    rows = [p_i * (dp_i - o_i @ g_i) for p_i, dp_i, o_i, g_i in zip(p, dp, out, d_out, strict=True)]
    return rows


def added_by_a_walk(rank, t, P):
    ranks = [rank]
    for _ in range(t):
        ranks.append(ranks[-1] - 1 if ranks[-1] else P - 1)
    return ranks


def bytes_back_hop_by_hop(P, numbers, itemsize):
    total = 0
    for t in range(P):
        total += 2 * numbers * itemsize if t < P - 1 else 0
        total += 2 * numbers * (8 if itemsize == 8 else 4)
    return total


def steps_as_pairs(P):
    for t in range(P):
        if t < P - 1:
            yield ["post", t]
        yield ["compute", t]
        if t < P - 1:
            yield ["wait", t]


def steps_backwards_written(P):
    steps = [("compute", P - 1)]
    for t in reversed(range(P - 1)):
        steps = [("post", t), ("compute", t), ("wait", t), *steps]
    return tuple(steps)


def zigzag_in_torch(rank, S, P):
    return torch.cat([torch.arange(S).chunk(2 * P)[i] for i in (rank, 2 * P - 1 - rank)])


def zigzag_by_a_test(rank, S, P):
    half = S // (2 * P)
    return [i for i in range(S) if i // half in (rank, 2 * P - 1 - rank)]


def striped_by_loops(rank, block, C):
    return [[key < query or (key == query and block <= rank) for key in range(C)] for query in range(C)]


def striped_by_positions(rank, block, C):
    P = max(rank, block) + 1
    query, key = rank + P * np.arange(C), block + P * np.arange(C)
    return key <= query[:, None]


# 8
def share_by_softmax(lse, lse_j):
    return torch.stack([lse, lse_j]).softmax(dim=0)[1]


def share_in_numpy(lse, lse_j):
    largest = np.maximum(lse, lse_j)
    return np.exp(lse_j - largest) / (np.exp(lse - largest) + np.exp(lse_j - largest))


def on_a_kernel_all_at_once(kernel, q, k, v, blocks):
    parts = [kernel(q, k_j, v_j) for k_j, v_j in zip(k.tensor_split(blocks), v.tensor_split(blocks), strict=True)]
    outs, lses = torch.stack([out for out, _ in parts]), torch.stack([lse for _, lse in parts])
    return (lses.softmax(dim=0)[..., None] * outs).sum(dim=0)


def on_a_kernel_from_the_first(kernel, q, k, v, blocks):
    out, lse = None, None
    for k_j, v_j in zip(k.chunk(blocks), v.chunk(blocks), strict=True):
        new = kernel(q, k_j, v_j)
        out, lse = new if out is None else merge(out, lse, *new)
    return out


def natural_by_two_keys(kernel, q, k, v):
    """Two equal keys add log 2 to the lse."""
    D = q.shape[1]
    one, two = torch.zeros(1, D), torch.zeros(2, D)
    out, lse = kernel(q, k, v)
    return out, lse * (math.log(2) / (kernel(one, two, two)[1] - kernel(one, one, one)[1]))


def natural_by_the_scores(kernel, q, k, v):
    out, lse = kernel(q, k, v)
    natural = (q @ k.T / q.shape[1] ** 0.5).logsumexp(dim=1)
    return out, lse if torch.allclose(lse, natural) else lse * 0.6931471805599453


# 9
def peak_by_a_list(H, G, C, D, w):
    wide = 8 if w == 8 else 4
    tensors = [*[(H, w)] * 4, *[(G, w)] * 8, (H, wide), *[(G, wide)] * 4]
    return sum(heads * C * D * size for heads, size in tensors)


# 10, 11 and 12
def input_by_halves(text, rank, P):
    half = (len(text) - 1) // (2 * P)
    at = [*range(rank * half, (rank + 1) * half), *range((2 * P - 1 - rank) * half, (2 * P - rank) * half)]
    return [text[i] for i in at], [text[i + 1] for i in at], at


def input_in_one_tensor(text, rank, P):
    at = positions("zigzag", len(text) - 1, rank, P)
    return torch.stack((text[at], text[at + 1], at))


def loss_of_all_at_once(logits, labels):
    return F.cross_entropy(torch.cat(logits), torch.cat(labels)).item()


def loss_by_loops(logits, labels):
    total, count = 0.0, 0
    for x, y in zip(logits, labels, strict=True):
        for row, wanted in zip(x.log_softmax(dim=1), y.tolist(), strict=True):
            if wanted != -100:
                total, count = total - row[wanted], count + 1
    return torch.tensor([total / count])  # of one element


def place_on_a_grid(rank, dp, cp, B, S):
    mesh = torch.arange(dp * cp).view(dp, cp)
    row, column = (mesh == rank).nonzero()[0].tolist()
    return mesh[row], torch.arange(B).chunk(dp)[row], np.split(np.arange(S), cp)[column]


def place_by_a_test(rank, dp, cp, B, S):
    ring = [i for i in range(dp * cp) if i // cp == rank // cp]
    return ring, [i for i in range(B) if i * dp // B == rank // cp], {i for i in range(S) if i * cp // S == rank % cp}


def norm_of_all(slices):
    return torch.cat([part.flatten() for mine in slices for part in mine]).norm()


def norm_by_loops(slices):
    return math.sqrt(sum(x * x for mine in slices for part in mine for x in part.flatten().tolist()))


def attention_by_movedim(ring, query, key, value, scaling):
    return [torch.movedim(ring(query, key, value, scale=scaling), 1, 2).contiguous(), None]


def attention_scaled_outside(ring, query, key, value, scaling):
    """The ring's own scale is 1/√D; the rest is multiplied into q."""
    D = query.shape[-1]
    return ring(query * (1 if scaling is None else scaling * D**0.5), key, value).transpose(1, 2), None


def shard_in_lists(tokens, labels, rank, P):
    at = positions("zigzag", tokens.shape[1], rank, P).tolist()
    shifted = [[*row[1:], -100] for row in labels.tolist()]
    count = sum(label != -100 for row in shifted for label in row)
    return [[row[i] for i in at] for row in tokens.tolist()], [[row[i] for i in at] for row in shifted], [at], count


def refused_in_a_set(passed):
    lost = {name for name, x in passed.items() if x is not None and (isinstance(x, torch.Tensor) or x)}
    lost -= {"scaling", "position_ids", "is_causal"}
    return lost | ({"is_causal"} if passed.get("is_causal", True) is False else set())


# 13, 14 and 15
def first_key_by_a_search(position, lengths, window):
    document = [number for number, length in enumerate(lengths) for _ in range(length)]
    return min(
        key
        for key in range(position + 1)
        if document[key] == document[position] and (window is None or position - key < window)
    )


def labels_by_documents(tokens, lengths, padded):
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    same = torch.cat([document[1:] == document[:-1], torch.tensor([False])])
    labels = torch.where(same, torch.tensor(tokens).roll(-1), -100)
    return labels.masked_fill(document == len(lengths) - 1, -100) if padded else labels


def labels_by_ends(tokens, lengths, padded):
    ends = [0, *accumulate(lengths)]
    parts = [[*tokens[a + 1 : b], -100] for a, b in pairwise(ends)]
    if padded:
        parts[-1] = [-100] * lengths[-1]
    return (label for part in parts for label in part)


def hops_by_counting(w, C, P):
    """From block to block, as long as the first query of a chunk sees a key of the block."""
    hops = 0
    while hops < P - 1 and hops * C < w - 1:
        hops += 1
    return hops


def merge_rank_by_rank(m, l, o):
    M, L, O = m[0], l[0], o[0]
    for m_r, l_r, o_r in zip(m[1:], l[1:], o[1:], strict=True):
        new = torch.maximum(M, m_r)
        a, b = torch.exp(M - new), torch.exp(m_r - new)
        M, L, O = new, a * L + b * l_r, a[:, None] * O + b[:, None] * o_r
    return (O / L[:, None]).numpy()


def merge_by_lse(m, l, o):
    shares = torch.softmax(m + torch.log(l), dim=0)
    outs = torch.nan_to_num(o / l[..., None])
    return (shares[..., None] * outs).sum(dim=0).tolist()


def caches_one_by_one(C, N, P):
    held = [C] * P
    for n in range(N - 1):
        held[n % P] += 1
    return held


def pairs_by_unfold(texts, at):
    return texts.unfold(1, 2, 1)[:, at].flip(2)


# 17 and 18
def copies_by_loops(copies, G):
    share = len(copies) // G
    return torch.stack([sum(copies[g * share + i] for i in range(share)) for g in range(G)], dim=1)


def meshes_by_loops(P, H, G):
    return {(rows, g) for rows in range(1, P + 1) for g in range(1, P + 1) if rows * g == P and G % g == 0}


def block_by_walking(rank, t, n, g):
    """Round by round: a block comes from the device before, and after a turn from the host before."""
    host, device = rank // g, rank % g
    for u in range(1, t + 1):
        device = (device - 1) % g
        if u % g == 0:
            host = (host - 1) % n
    return host * g + device


def seconds_turn_by_turn(n, g, computing, fast, slow):
    total = 0.0
    for turn in range(n):
        seconds = sum(max(computing, fast) if s < g - 1 else computing for s in range(g))
        total += max(seconds, slow) if turn < n - 1 else seconds
    return total


RIGHT_ANSWERS = [
    (check_safe_softmax, softmax_in_numpy),
    (check_safe_softmax, softmax_of_lists),
    (check_safe_softmax, softmax_in_place),
    (check_safe_softmax, lambda s: torch.softmax(s, -1)),
    (check_safe_softmax, lambda s: torch.exp(s - torch.logsumexp(s, 0))),
    (check_safe_softmax, lambda s: 1 / torch.exp(s[None, :] - s[:, None]).sum(1)),
    (check_running_update, update_key_by_key),
    (check_running_update, update_in_numpy),
    (check_running_update, update_in_place),
    (check_merge_two, merge_by_shares),
    (check_merge_two, merge_row_by_row),
    (check_merge_two, merge),
    (check_blockwise, blocks_of_queries_too),
    (check_blockwise, blocks_in_numpy),
    (check_blockwise, blocks_by_lse),
    (check_blockwise, blocks_on_a_kernel),
    (check_visible_tiles, lambda n: sum(range(1, n + 1))),
    (check_visible_tiles, lambda n: (n * n + n) / 2),
    (check_visible_tiles, lambda n: torch.ones(n, n).tril().sum()),
    (check_visible_tiles, lambda n: math.comb(n + 1, 2)),
    (check_largest_tensor, 2_048_000_000),
    (check_largest_tensor, 2.048e9),
    (check_largest_tensor, torch.tensor(1 * 8 * 1_000_000 * 64 * 4)),
    (check_largest_tensor, np.int64(2_048_000_000)),
    (check_blocks_of_gpu, (2, 1, 0, 3)),
    (check_blocks_of_gpu, np.array([2, 1, 0, 3])),
    (check_blocks_of_gpu, torch.tensor([2, 1, 0, 3])),
    (check_blocks_of_gpu, [2.0, 1.0, 0.0, 3.0]),
    (check_blocks_of_gpu, ((2 - t) % 4 for t in range(4))),
    (check_token_two_in_round_two, [0.12, 4.243, 1.48]),
    (check_token_two_in_round_two, np.array([0.1199, 4.2426, 1.4803])),
    (check_token_two_in_round_two, torch.tensor([0.1199, 4.2426, 1.4803])),
    (check_token_two_in_round_two, (math.exp(-3 / 2**0.5), 6 / 2**0.5, torch.tensor(1.480))),
    (check_mended_sum, mended_in_numpy),
    (check_mended_sum, mended_by_merging),
    (check_mended_sum, lambda o, w: torch.exp(w - w.logsumexp(0)) @ o),
    (check_mended_sum, lambda o, w: sum(x * y for x, y in zip(w.softmax(0), o, strict=True))),
    (check_block_in_hand, lambda rank, t, P: rank - t if rank >= t else rank - t + P),
    (check_block_in_hand, lambda rank, t, P: torch.arange(P).roll(t)[rank]),
    (check_block_in_hand, lambda r, i, n: np.roll(np.arange(n), i)[r]),
    (check_ring_order, odd_ranks_send_first),
    (check_ring_order, one_rank_receives_first),
    (
        check_ring_order,
        lambda r, P: {Send((r + 1) % P): 0, Recv((r - 1) % P): 0}.keys() if r else list(odd_ranks_send_first(0, P)),
    ),
    (check_bytes_sent, 15_032_385_536),
    (check_bytes_sent, 14 * 2.0**30),
    (check_bytes_sent, np.float64(14 * 2**30)),
    (check_bytes_sent, Fraction(14 * 2**30)),
    (check_softmax_backward, ds_by_autograd),
    (check_softmax_backward, lambda p, dp, o, g: p * dp - p * torch.einsum("nd,nd->n", o, g)[:, None]),
    (
        check_softmax_backward,
        lambda p, dp, o, g: np.asarray(p) * (np.asarray(dp) - (np.asarray(o) * np.asarray(g)).sum(1)[:, None]),
    ),
    (check_added_so_far, added_by_a_walk),
    (check_added_so_far, lambda r, t, P: frozenset((r - i) % P for i in range(t + 1))),
    (check_added_so_far, lambda r, t, P: torch.arange(r - t, r + 1) % P),
    (check_added_so_far, lambda r, t, P: {(r - i) % P: True for i in range(t + 1)}.keys()),
    (check_bytes_sent_back, bytes_back_hop_by_hop),
    (check_bytes_sent_back, lambda P, n, w: 2 * n * ((P - 1) * w + P * max(4.0, w))),
    (check_overlap_order, steps_as_pairs),
    (check_overlap_order, steps_backwards_written),
    (check_hidden_by_overlap, lambda c, m: min(c, m) / m),
    (check_hidden_by_overlap, lambda c, m: 1 if c >= m else c / m),
    (check_hidden_by_overlap, lambda c, m: 1 - max(0, m - c) / m),
    (check_hidden_by_overlap, lambda c, m: torch.tensor(c / m, dtype=torch.float64).clamp(max=1)),
    (check_zigzag_positions, zigzag_in_torch),
    (check_zigzag_positions, zigzag_by_a_test),
    (check_zigzag_positions, lambda r, S, P: positions("zigzag", S, r, P).numpy()),
    (check_striped_mask, striped_by_loops),
    (check_striped_mask, striped_by_positions),
    (check_striped_mask, lambda r, b, C: torch.arange(C)[None] * 99 + b <= torch.arange(C)[:, None] * 99 + r),
    (check_striped_mask, lambda r, b, C: torch.ones(C, C, dtype=torch.int).tril(-int(b > r))),
    (check_idle_limit, 7 / 15),
    (check_idle_limit, 0.467),
    (check_idle_limit, 0.4667),
    (check_idle_limit, Fraction(7, 15)),
    (check_idle_limit, torch.tensor(7 / 15)),
    (check_merging_share, share_by_softmax),
    (check_merging_share, share_in_numpy),
    (check_merging_share, lambda a, b: torch.exp(b - torch.logaddexp(a, b))),
    (check_merging_share, lambda a, b: 1 / (1 + torch.exp(a - b))),
    (check_attention_on_a_kernel, on_a_kernel_all_at_once),
    (check_attention_on_a_kernel, on_a_kernel_from_the_first),
    (check_natural_lse, natural_by_two_keys),
    (check_natural_lse, natural_by_the_scores),
    (check_smallest_chunk, lambda f, b, H, G, w: 2 * G * w / (4 * H) * (f / b)),
    (check_smallest_chunk, lambda f, b, H, G, w: np.float64(f) / b * w * G / (2 * H)),
    (check_training_chunk, lambda r, H, G, w: r * G / H * (w if w > 8 / 3 else (2 * w + 8) / 5)),
    (check_training_chunk, lambda r, H, G, w: torch.tensor([w, 0.4 * (w + 4)], dtype=torch.float64).max() * G / H * r),
    (check_peak_memory_backward, peak_by_a_list),
    (check_peak_memory_backward, lambda H, G, C, D, w: float(C * D * ((4 * H + 8 * G) * w + (H + 4 * G) * max(4, w)))),
    (check_longest_sequence, lambda m, s, t, P: max(0, int((m * P - s) // (P * t))) * P),
    (check_longest_sequence, lambda m, s, t, P: P * math.floor((m - s / P) / t) if m * P > s else 0),
    (check_rank_input, input_by_halves),
    (check_rank_input, input_in_one_tensor),
    (check_batch_loss, loss_of_all_at_once),
    (check_batch_loss, loss_by_loops),
    (check_batch_loss, lambda x, y: F.cross_entropy(torch.cat(x), torch.cat(y)).numpy()),
    (check_hops_of_a_step, lambda P, n, c: n * (3 * P - 2 + c * (P - 1))),
    (check_hops_of_a_step, lambda P, n, c: sum((P - 1) + ((P - 1) if c else 0) + (P - 1) + P for _ in range(n))),
    (check_rank_loss, lambda s, n, N, dp, cp, tp: torch.tensor(s * dp * cp / N, dtype=torch.float64)),
    (check_rank_loss, lambda s, n, N, dp, cp, tp: torch.tensor([s]) * (dp * cp) / N),
    (check_rank_loss, lambda s, n, N, dp, cp, tp: np.float32(s) / np.float32(N) * dp * cp),
    (check_place, place_on_a_grid),
    (check_place, place_by_a_test),
    (check_gradient_norm, norm_of_all),
    (check_gradient_norm, norm_by_loops),
    (check_gradient_norm, lambda slices: np.sqrt(sum((p.numpy() ** 2).sum() for mine in slices for p in mine))),
    (check_attention_function, attention_by_movedim),
    (check_attention_function, attention_scaled_outside),
    (check_shard_by_hand, shard_in_lists),
    (check_what_is_refused, refused_in_a_set),
    (check_first_key, first_key_by_a_search),
    (check_labels, labels_by_documents),
    (check_labels, labels_by_ends),
    (check_hops, hops_by_counting),
    (check_hops, lambda w, C, P: min(-((1 - w) // C), P - 1)),
    (check_hops, lambda w, C, P: min((w + C - 2) // C, P - 1)),
    (check_merge, merge_rank_by_rank),
    (check_merge, merge_by_lse),
    (check_caches, caches_one_by_one),
    (check_caches, lambda C, N, P: torch.tensor([C + (N - 1 - r + P - 1) // P for r in range(P)])),
    (check_bytes_of_a_token, lambda n, B, H, *_, D=None: n * B * H * 8 + n * B * H * _[1] * 4),
    (check_pairs, pairs_by_unfold),
    (check_pairs, lambda texts, at: [[[row[i + 1], row[i]] for i in at.tolist()] for row in texts.tolist()]),
    (check_longest_text, lambda m, w, k, P: math.floor((m - w) / k) * P),
    (check_xrays, dict(reversed(NAMES.items()))),
    (check_ranks, {name: float(P) for name, P in RANKS.items()}),
    (check_ranks, {name: np.int64(P) for name, P in RANKS.items()}),
    (check_new_mistake, lambda steps: type(steps)(**{**vars(steps), "scale": lambda case: 2.0})),
    (check_kv_head, lambda r, G, P: r // (P // G)),
    (check_kv_head, lambda r, G, P: [h for h in range(G) for _ in range(P // G)][r]),
    (check_kv_head, lambda r, G, P: torch.arange(G).repeat_interleave(P // G)[r]),
    (check_copies, copies_by_loops),
    (check_copies, lambda copies, G: torch.stack([part.sum(0) for part in copies.chunk(G)], 1).numpy()),
    (check_sent, lambda P, H, G, C, D, w: (P - 1) * sum(heads * C * D * w / P for heads in (H, G, G, H))),
    (check_meshes, meshes_by_loops),
    (check_meshes, lambda P, H, G: [[P // g, g] for g in range(math.gcd(P, G), 0, -1) if math.gcd(P, G) % g == 0]),
    (check_block, block_by_walking),
    (check_blocks_of_a_nic, lambda n, g, nics: (n - 1) * (g / nics)),
    (check_blocks_of_a_nic, lambda n, g, nics: sum(g // nics for _ in range(n - 1))),
    (check_seconds, seconds_turn_by_turn),
]
