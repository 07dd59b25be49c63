"""Answers to the exercises: wrong ones, with words of what each is told, and right ones in other forms.

What is wrong in one call only, the last one for example, is made from the right answer in test_exercises.py.
"""

import math
from dataclasses import replace
from itertools import accumulate

import numpy as np
import torch
import torch.nn.functional as F

from notebooks.source.checks.the_fused_ring import plain_kernel
from ring_doctor.catalogue import CATALOGUE
from ringlab.basics.blocking_messages import Recv, Send
from ringlab.basics.online_softmax import merge
from ringlab.ring.layouts import positions
from tests.wrong.readers_rings import WRONG_RINGS


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


WRONG_ANSWERS = {
    "check_safe_softmax": [
        (naive_softmax, "subtract the largest score"),
        (lambda s: naive_softmax(s.clamp(-80, 80)), "e^1000 overflows"),
        (lambda s: naive_softmax(s - s.abs().max()), "its absolute value"),
        (lambda s: naive_softmax(s - s.min()), "not the smallest"),
        (lambda s: naive_softmax(s - s[-1]), "the mean or the last"),
        (lambda s: s.exp(), "small scores"),
        (lambda s: None, "expected a tensor"),
        (lambda s: s / 0 + s.nonsense, "your answer ends in AttributeError"),
        (lambda s: naive_softmax(s - 1000), "already for the small scores"),
        (lambda s: naive_softmax(s - (1000 if s.max() > 500 else s.max())), "scores near"),
    ],
    "check_running_update": [
        (updates(rescale_l=False, rescale_o=False), "l is wrong when the max grows from 1 to 3: the old"),
        (updates(rescale_o=False), "o is wrong when the max grows"),
        (updates(invert=True), "wrong way round"),
        (updates(keep=0.0), "l is wrong when the max stays at 1: the old part is lost"),
        (updates(normalise=True), "o stays unnormalised"),
        (updates(new=lambda p, v: p.sum()), "the values, each times its weight"),
        (max_by_products, "m is wrong when these are the first keys"),
        (lambda m, l, o, s, v: (s.max(), l, o), "m is wrong when the max stays"),
        (lambda m, l, o, s, v: (m, l), "expected 3 values (m, l, o), got 2 value(s)"),
        (lambda *given: updates()(*given)[::-1], "another order, o, l, m: return m, l, o"),
        (lambda *given: [updates()(*given)[i] for i in (1, 0, 2)], "another order, l, m, o"),
    ],
    "check_merge_two": [
        (lambda out_a, lse_a, out_b, lse_b: (out_a + out_b, lse_a + lse_b), "in lse"),
        (lambda a, la, b, lb: ((a + b) / 2, torch.logaddexp(la, lb)), "plain average"),
        (lambda a, la, b, lb: (a + b, torch.logaddexp(la, lb)), "plain sum"),
        (lambda a, la, b, lb: (a, torch.logaddexp(la, lb)), "in out: weigh out_a"),
        (lambda a, la, b, lb: shares_merge(share, share)(b, la, a, lb), "swapped"),
        (shares_merge(lambda lse_j, lse: lse_j.exp(), lambda lse_j, lse: lse_j.exp()), "divide by the sum"),
        (unstabilised_merge, "e^1000 overflows"),
        (merge_below_zero, "e^-1000 is 0"),
        (merge_relative_to_a, "a part that saw no key (out = 0, lse = -inf): it changes nothing"),
        (shares_merge(share, share), "twice no key (lse = -inf for both): -inf - (-inf) is NaN"),
    ],
}


def whole(q, k, v, block_size):
    """Full attention at once: right, and not in blocks."""
    return torch.softmax(q @ k.T / math.sqrt(q.shape[1]), 1) @ v


def without_max(q, k, v, block_size):
    """Blocks of keys, sums of e^s as they are."""
    l, o = 0, 0
    for k_block, v_block in zip(k.split(block_size), v.split(block_size), strict=True):
        p = torch.exp(q @ k_block.T / math.sqrt(q.shape[1]))
        l, o = l + p.sum(1, keepdim=True), o + p @ v_block
    return o / l


def row_by_row(q, k, v, block_size):
    """Little memory, and no blocks of keys."""
    return torch.stack([torch.softmax(k @ row / math.sqrt(len(row)), 0) @ v for row in q])


WRONG_ANSWERS |= {
    "check_blockwise": [
        (lambda q, k, v, block_size: whole(q, k[:block_size], v[:block_size], 0), "in blocks of 1"),
        (whole, "the scores of one block of keys at a time"),
        (without_max, "keep a running max"),
        (
            lambda q, k, v, block_size: torch.softmax(q @ k.T, 1) @ v,
            "not divided by sqrt(D), with 7 keys in blocks of 7",
        ),
        (row_by_row, "you took 256 keys at once into a product"),
    ],
    "check_largest_tensor": [
        (8 * 256 * 256 * 4, "tile of scores"),
        (8 * 10**12 * 4, "never made"),
        (8 * 10**6 * 64, "each is 4 bytes"),
        (10**6 * 64 * 4, "one head of 8"),
        (4 * 8 * 10**6 * 64 * 4, "the largest single one"),
        (17, "you say 17"),
    ],
}


WRONG_ANSWERS |= {
    "check_blocks_of_gpu": [
        (2, "expected a list of four numbers, got int"),
        ([2, 1, 0], "got 3 value(s)"),
        ([2, 3, 0, 1], "the other way"),
        ([0, 1, 2, 3], "its own block"),
        ([2, 1, 0, -1], "there is no block -1"),
        ([2, 2, 2, 2], "its own block in all rounds"),
    ],
    "check_token_two_in_round_two": [
        ((0.120, 4.243, 3.222), "l: rescale the old l = 1.979 by f first"),
        ((0.120, 4.243, 1.243), "l: add the old l too"),
        ((0.120, 4.243, 0.237), "l: that is the old part"),
        ((0.120, 4.243, 3.5), "l: rescale the old l = 1.979 by f, then add"),
        ((8.342, 4.243, 1.480), "f: turned over"),
        ((1.0, 4.243, 1.480), "f: the old max is 2.121"),
        ((0.120, 2.828, 1.480), "m is the larger one"),
        ((0.120, 6, 1.480), "divide by sqrt(2)"),
        ((0.12, 4.24, 1.48), "4.24 is right but not exact enough: give 3 decimals"),
        ((4.243, 0.120, 1.480), "another order, m, f, l: return f, m, l"),
    ],
    "check_mended_sum": [
        (lambda outs, lses: outs.sum(0), "published sum"),
        (lambda outs, lses: outs.mean(0), "average of averages"),
        (lambda outs, lses: lses @ outs, "not lse itself"),
        (lambda outs, lses: lses.exp() @ outs, "must add up to 1"),
        (lambda outs, lses: lses.exp() / lses.exp().sum() @ outs, "e^1000 overflows"),
        (lambda outs, lses: torch.softmax(lses, 0) @ outs if len(outs) == 4 else outs[0], "off by up to"),
    ],
}


HOP = 2 * 32 * 131072 * 128 * 2  # bytes of a K and a V block


def right_order(rank, P):
    steps = [Send((rank + 1) % P), Recv((rank - 1) % P)]
    return steps if rank % 2 == 0 else steps[::-1]


WRONG_ANSWERS |= {
    "check_block_in_hand": [
        (lambda rank, t, P: (rank + t) % P, "the other way"),
        (lambda rank, t, P: rank - t, "take the remainder"),
        (lambda rank, t, P: (rank - t) % 5 if P == 5 else (rank - t) % 4, "with rank = "),
        (lambda rank, t, P: (rank - t) % P + (P == 5 and t == 4), "P = 5, round 4: rank 0"),
    ],
    "check_ring_order": [
        (lambda r, P: [Send((r + 1) % P), Recv((r - 1) % P)], "circle: [0, 1]"),
        (lambda r, P: right_order(r, P) if P % 2 == 0 else right_order(0, P)[:1] * 2, "rank 0 of 3"),
        (lambda r, P: right_order(r if P % 2 == 0 else 0, P), "Recv(source=0)"),
        (lambda r, P: right_order(r, P)[:: -1 if P > 5 and r % 2 else 1], "ranks deadlock"),
        (lambda r, P: ["send", "recv"], "one Send and one Recv, got a str in it"),
    ],
    "check_bytes_sent": [
        (8 * HOP, "8 hops"),
        (7 * HOP // 2, "K and V travel"),
        (HOP, "that is one hop"),
        (14 * HOP, "a bfloat16 has 2 bytes"),
        (56 * HOP, "not the whole sequence"),
        (7 * HOP + 1, "hops x"),
        (14, "not GiB"),
    ],
    "check_ring": WRONG_RINGS,
}


def delta(out, d_out):
    return (out * d_out).sum(-1, keepdim=True)


def right_for_two_keys(p, dp, out, d_out):
    return p[:, :2] * (dp[:, :2] - delta(out, d_out))


WRONG_ANSWERS |= {
    "check_softmax_backward": [
        (lambda p, dp, out, d_out: p * dp, "delta is missing"),
        (lambda p, dp, out, d_out: dp - delta(out, d_out), "multiply by the weights"),
        (lambda p, dp, out, d_out: p * (dp + delta(out, d_out)), "subtracted"),
        (lambda p, dp, out, d_out: p * (dp - delta(p, dp)), "keys of this block only"),
        (lambda p, dp, out, d_out: p * (dp - (d_out * out).sum()), "one delta for all rows"),
        (
            lambda p, dp, out, d_out: p * (dp - (delta(out, d_out) if len(p) == 3 else (d_out * out).sum(-1))),
            "n = 4 queries, c = 4 keys, D = 4: delta belongs to rows",
        ),
        (right_for_two_keys, "n = 4 queries, c = 4 keys, D = 4: expected shape (4, 4), got (4, 2)"),
        (lambda p, dp, out, d_out: p * (dp - (d_out * out).mean(-1, keepdim=True)), "not the mean"),
    ],
    "check_added_so_far": [
        (lambda rank, t, P: {(rank - i) % P for i in range(t + 1)}, "the share of rank 3 stays at home"),
        (lambda rank, t, P: {(rank + i) % P for i in range(max(t, 1))}, "the other way"),
        (lambda rank, t, P: {(rank - i) % P for i in range(1, max(t, 1))}, "has just computed"),
        (lambda rank, t, P: {rank - i for i in range(max(t, 1))}, "remainder by P"),
        (lambda rank, t, P: {(rank - i) % 4 for i in range(max(t, 1))}, "P = 5, round 0, rank 4, you say [0]"),
    ],
    "check_bytes_sent_back": [
        (lambda P, n, w: 14 * n * (w + max(w, 4)), "wrong in 3 of 4 cases; with P = 5"),
        (42 * 2**30, "expected a function, got int"),
    ],
}


def steps(world_size, *whats):
    """The steps of a rank of the overlapped ring, round by round, in this order in each round."""
    return [(what, t) for t in range(world_size - 1) for what in whats] + [("compute", world_size - 1)]


def all_posts_first(step):
    return step[0] != "post", step[1], step[0]


def computes_last(step):
    return step[0] == "compute", step[1], step[0]


KNOWN = [(0.5, 2.0), (2.0, 2.0), (3.0, 2.0), (2.0, 5.0)]


WRONG_ANSWERS |= {
    "check_overlap_order": [
        (lambda P: steps(P, "post", "wait", "compute"), "P = 3: this is exact and hides nothing"),
        (lambda P: steps(P, "wait", "post", "compute"), "wait for nothing"),
        (lambda P: [*steps(P, "post", "compute", "wait"), ("post", P - 1)], "nobody sends"),
        (lambda P: steps(P, "post", "wait"), "is there 0 times"),
        (lambda P: [*steps(P, "post", "compute", "wait"), ("rest", 0)], "no step ('rest', 0)"),
        (lambda P: sorted(steps(P, "post", "compute", "wait")), "may not be there"),
        (lambda P: sorted(steps(P, "post", "compute", "wait"), key=all_posts_first), "cannot be sent"),
        (lambda P: sorted(steps(P, "post", "compute", "wait"), key=computes_last), "fills the buffer"),
        (lambda P: steps(3, "post", "compute", "wait"), "P = 4: ('post', 2) is there 0 times"),
        (lambda P: [("post",)], 'expected steps such as ("post", 0), got'),
    ],
    "check_hidden_by_overlap": [
        (lambda computing, messages: 100 * min(1, computing / messages), "not per cent"),
        (lambda c, m: min(1, c / m) if (c, m) in KNOWN else 0.5, "right in 4 cases, but with"),
    ],
}


def added(rank, block, C, hidden):
    """A mask that is added to the scores."""
    return torch.zeros(C, C).masked_fill(torch.ones(C, C).tril(-(block > rank)) == 0, hidden)


WRONG_ANSWERS |= {
    "check_zigzag_positions": [
        (lambda r, S, P: [2 * r, 2 * r + 1, 8 + 2 * r, 9 + 2 * r], "counted from the end"),
        (lambda r, S, P: list(range(r * S // P, (r + 1) * S // P)), "contiguous layout"),
        (lambda r, S, P: range(r, S, P), "striped layout"),
        (lambda r, S, P: [14, 15, 0, 1], "rising order"),
        (lambda r, S, P: [r], "2 early and 2 late"),
    ],
    "check_striped_mask": [
        (lambda rank, block, C: torch.ones(C, C).tril().bool(), "the diagonal is hidden"),
        (lambda rank, block, C: torch.ones(C, C).tril(-(block != rank)).bool(), "is visible"),
        (lambda rank, block, C: torch.ones(C, C).triu(1).bool(), "True for the hidden pairs"),
        (lambda rank, block, C: torch.ones(C, C).triu().bool(), "turned over"),
        (lambda rank, block, C: torch.ones(C, C).bool(), "every tile is a triangle"),
        (lambda rank, block, C: torch.ones(C, C + 1).bool(), "expected shape (4, 4), got (4, 5)"),
        (lambda rank, block, C: torch.eye(C).bool(), "must not be later"),
        (lambda rank, block, C: [[True] * C] * C, "every tile is a triangle"),
        (lambda rank, block, C: added(rank, block, C, -torch.inf), "not numbers to add to scores"),
        (lambda rank, block, C: torch.ones(C, C).tril(-1).bool(), "the diagonal is visible"),
    ],
    "check_idle_limit": [
        (7 / 8, "rank 7 never waits"),
        (7 / 16, "round 0 is half"),
        (0.5, "limit of many"),
        (8 / 15, "in which they work"),
        (3 / 7, "limit of 4 ranks"),
        (math.nan, "32 blocks of work"),
    ],
}


def outs_of(kernel, q, k, v, blocks):
    return [kernel(q, k_j, v_j)[0] for k_j, v_j in zip(k.chunk(blocks), v.chunk(blocks), strict=True)]


def merged_blocks(kernel, q, blocks, total=torch.logaddexp):
    """Right, for a list of blocks and with `logaddexp`."""
    out, lse = kernel(q, *blocks[0])
    for block in blocks[1:]:
        out_j, lse_j = kernel(q, *block)
        out, lse = out.lerp(out_j, torch.sigmoid(lse_j - lse)[:, None]), total(lse, lse_j)
    return out


def overflowing(kernel, q, k, v, blocks):
    pairs = list(zip(k.chunk(blocks), v.chunk(blocks), strict=True))
    return merged_blocks(kernel, q, pairs, lambda a, b: torch.log(a.exp() + b.exp()))


def natural(factor):
    """An answer that multiplies every lse by the factor, whatever the kernel."""

    def answer(kernel, q, k, v):
        out, lse = kernel(q, k, v)
        return out, factor * lse

    return answer


def mends_out_too(kernel, q, k, v):
    one = torch.ones(1, 1)
    factor = 1 / kernel(one, one, one)[1]
    out, lse = kernel(q, k, v)
    return factor * out, factor * lse


def right_for_four_numbers(kernel, q, k, v):
    one = torch.ones(1, q.shape[1])  # the score is √D, and so is the natural lse
    factor = 2 / kernel(one, one, one)[1]
    out, lse = kernel(q, k, v)
    return out, factor * lse


def besides_the_kernel(kernel, q, k, v, blocks):
    """Calls the kernel, and computes by itself."""
    outs_of(kernel, q, k, v, blocks)
    return torch.softmax(q @ k.T / math.sqrt(q.shape[1]), dim=1) @ v


WRONG_ANSWERS |= {
    "check_merging_share": [
        (lambda lse, lse_j: torch.sigmoid(lse - lse_j), "merged before"),
        (lambda lse, lse_j: lse_j.exp(), "divide by the sum"),
        (lambda lse, lse_j: (lse_j - lse).exp(), "that is e^lse_j / e^lse"),
        (lambda lse, lse_j: lse_j.exp() / (lse.exp() + lse_j.exp()), "lse near 1000: e^1000 overflows"),
        (lambda lse, lse_j: lse_j - lse, "e^lse_j / (e^lse + e^lse_j)"),
        (lambda lse, lse_j: torch.sigmoid((lse_j - lse).clamp(-2, 2)), "with 7 queries"),
    ],
    "check_attention_on_a_kernel": [
        (lambda kernel, q, k, v, n: kernel(q, k, v)[0], "kernel saw [12] keys; expected 3"),
        (lambda kernel, q, k, v, n: sum(outs_of(kernel, q, k, v, n)) / n, "the average"),
        (lambda kernel, q, k, v, n: sum(outs_of(kernel, q, k, v, n)), "the sum of"),
        (lambda kernel, q, k, v, n: outs_of(kernel, q, k, v, n)[0], "after each merge"),
        (overflowing, "S = 20, 5 block(s), large scores"),
        (besides_the_kernel, "not the attention of the kernel"),
    ],
    "check_natural_lse": [
        (natural(math.log(2)), "natural: it was natural already"),
        (natural(1.0), "in base 2: you return it as it came"),
        (right_for_four_numbers, "S = 3, D = 2, a kernel whose lse is natural: off by"),
        (mends_out_too, "in base 2: off by"),
        (lambda kernel, q, k, v: plain_kernel(q, k, v), "not what the kernel returns, whose causal mask is its own"),
    ],
}


IGNORED = -100


def rank_input(tokens=None, labels=None, positions_=None, layout="zigzag"):
    """The right answer with a part of it changed; each part is a function of (text, at, rank)."""

    def answer(text, rank, P):
        at = positions(layout, len(text) - 1, rank, P)
        parts = text[at], text[at + 1], at
        changed = zip((tokens, labels, positions_), parts, strict=True)
        return tuple(part if change is None else change(text, at, rank) for change, part in changed)

    return answer


def shares_out_the_whole_text(text, rank, P):
    at = positions("contiguous", len(text), rank, P)
    return text[at], text[at].roll(-1), at


def ignores_the_ends_of_pieces(text, at, rank):
    labels = text[at + 1].clone()
    labels[len(at) // 2 - 1] = IGNORED
    return labels


def losses(logits, labels, reduction="sum"):
    return [F.cross_entropy(x, y, reduction=reduction) for x, y in zip(logits, labels, strict=True)]


def real(labels):
    return sum((wanted != IGNORED).sum() for wanted in labels)


def counts_as_0(logits, labels):
    return sum(losses(logits, [wanted.clamp(min=0) for wanted in labels]))


def of_rank_0(logits, labels):
    return sum(losses(logits, labels)) / (labels[0] != IGNORED).sum()


WRONG_ANSWERS |= {
    "check_peak_memory_backward": [(lambda H, G: H, "is called with 5 argument(s); yours takes 2 (H, G)")],
    "check_rank_input": [
        (rank_input(labels=lambda text, at, rank: text[at].roll(-1)), "got a token of another piece"),
        (
            rank_input(labels=lambda text, at, rank: F.pad(text[at][1:], (0, 1), value=IGNORED)),
            "its last token lost its label",
        ),
        (rank_input(labels=lambda text, at, rank: text[at]), "yours are the tokens themselves"),
        (rank_input(labels=lambda text, at, rank: text[(at + 2).clamp(max=len(text) - 1)]), "you shifted twice"),
        (rank_input(labels=lambda text, at, rank: text[(at - 1).clamp(min=0)]), "the wrong way"),
        (rank_input(labels=ignores_the_ends_of_pieces), "the label of text[i] is text[i + 1]"),
        (rank_input(positions_=lambda text, at, rank: torch.arange(len(at))), "you counted from 0 on this rank"),
        (
            rank_input(positions_=lambda text, at, rank: torch.arange(len(at)) + rank * len(at)),
            "you counted on from r · C",
        ),
        (rank_input(positions_=lambda text, at, rank: at + 1), "off by one"),
        (rank_input(positions_=lambda text, at, rank: at.flip(0)), "positions: off by up to"),
        (rank_input(layout="contiguous"), "the tokens of the contiguous layout"),
        (rank_input(layout="striped"), "the tokens of the striped layout"),
        (rank_input(tokens=lambda text, at, rank: text[at + 1]), "yours begin with text[1]"),
        (shares_out_the_whole_text, "in the tokens; expected those at places [6, 7, 8, 9]"),
    ],
    "check_batch_loss": [
        (lambda logits, labels: sum(losses(logits, labels, "mean")) / len(labels), "the ranks' means; a"),
        (lambda logits, labels: sum(losses(logits, labels, "mean")), "the sum of the ranks' means"),
        (lambda logits, labels: sum(losses(logits, labels)), "that is the sum; divide it"),
        (
            lambda logits, labels: sum(losses(logits, labels)) / sum(map(len, labels)),
            "you divided by all 12 tokens; 5 of them have no label",
        ),
        (of_rank_0, "divided by the labels of rank 0"),
        (lambda logits, labels: counts_as_0(logits, labels) / sum(map(len, labels)), "as label 0"),
        (
            lambda logits, labels: (
                sum((y != IGNORED).sum() * x for x, y in zip(losses(logits, labels, "mean"), labels, strict=True))
                / real(labels)
            ),
            "4 rank(s) with 2, 0, 3, 3 labels: a rank without labels has no mean",
        ),
    ],
}


def norm_of_rank(slices):
    return torch.stack([torch.cat(mine).norm() for mine in slices])


WRONG_ANSWERS |= {
    "check_rank_loss": [
        (lambda s, n, N, dp, cp, tp: s / n * n / N * dp * cp, "ZeroDivisionError"),
        (lambda s, n, N, dp, cp, tp: s / N * dp * cp if n else 1.0, "only padding"),
        (lambda *given: torch.zeros(2), "expected one number, got a Tensor of shape (2,)"),
    ],
    "check_gradient_norm": [
        (lambda slices: norm_of_rank(slices)[0], "the slices of rank 0"),
        (lambda slices: norm_of_rank(slices)[-1], "the slices of the last rank"),
        (lambda slices: norm_of_rank(slices).max(), "the largest norm"),
        (lambda slices: norm_of_rank(slices).sum(), "norms do not add up"),
        (lambda slices: sum(x.norm() for mine in slices for x in mine), "those of slices neither"),
        (lambda slices: norm_of_rank(slices).mean(), "the mean of the norms"),
        (lambda slices: norm_of_rank(slices).square().sum(), "root is missing"),
        (lambda slices: norm_of_rank(slices).square().mean().sqrt(), "not averaged"),
        (lambda slices: norm_of_rank(slices).sum().sqrt(), "squared before they are added"),
        (lambda slices: torch.cat([mine[0] for mine in slices]).norm(), "every slice of every rank"),
        (lambda slices: sum((x**2).mean() * 6 for mine in slices for x in mine) ** 0.5, "every slice"),
    ],
}


def right_attention(ring, q, k, v, scaling):
    return ring(q, k, v, scale=scaling).transpose(1, 2), None


def repeated(ring, q, k, v, scaling):
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    return right_attention(ring, q, k, v, scaling)


def reshaped(ring, q, k, v, scaling):
    B, H, C, D = q.shape
    return ring(q, k, v, scale=scaling).reshape(B, C, H, D), None


def without_the_ring(ring, q, k, v, scaling):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True).transpose(1, 2), None


def twice_called(ring, q, k, v, scaling):
    ring(q, k, v)
    return right_attention(ring, q, k, v, scaling)


def beside_the_ring(ring, q, k, v, scaling):
    ring(q, k, v, scale=scaling)
    return without_the_ring(ring, q, k, v, scaling)


def scaled_twice(ring, q, k, v, scaling):
    return right_attention(ring, q * (scaling or q.shape[-1] ** -0.5), k, v, None)


def all_passed(passed):
    return sorted(passed)


def not_none(passed):
    return sorted(name for name, x in passed.items() if x is not None)


def known(passed):
    names = {"sliding_window", "softcap", "dropout", "attention_mask", "s_aux", "cu_seq_lens_q", "max_length_q"}
    lost = [name for name in understood(passed) if name in names]
    return [*lost, *(["is_causal"] if passed.get("is_causal") is False else [])]


def understood(passed, names=("scaling", "position_ids", "is_causal")):
    rest = {name: x for name, x in passed.items() if name not in names and x is not None}
    return [name for name, x in rest.items() if isinstance(x, torch.Tensor) or x != 0]


def refuses_none(passed):
    lost = [name for name in understood(passed) if name != "is_causal"]
    return [*lost, *(["is_causal"] if not passed.get("is_causal", True) else [])]


def all_names_that_the_check_has(passed):
    lost = [name for name in understood(passed) if name == "position_bias"]
    return [*known(passed), *lost]


def not_zero(passed):
    """Zeros in a tensor are taken for nothing."""
    return [name for name in understood(passed) if not isinstance(passed[name], torch.Tensor) or passed[name].any()]


WRONG_ANSWERS |= {
    "check_attention_function": [
        (lambda ring, q, k, v, scaling: (ring(q, k, v, scale=scaling), None), "as it leaves the"),
        (lambda ring, q, k, v, scaling: (ring(q, k, v).transpose(1, 2), None), "not passed on"),
        (scaled_twice, "scaled twice"),
        (repeated, "K and V have 2 heads, and you send 4"),
        (reshaped, "mixes heads and tokens"),
        (without_the_ring, "was not called"),
        (twice_called, "called 2 times"),
        (beside_the_ring, "not what the ring returned"),
        (lambda *given: (right_attention(*given)[0],) * 2, "return None in its place"),
    ],
    "check_what_is_refused": [
        (all_passed, "attention_mask is None, so nothing is lost"),
        (not_none, "dropout is 0.0, so nothing is lost"),
        (lambda passed: [], "you accept sliding_window: the ring would drop it"),
        (not_zero, "a sink of 0 is a sink"),
        (understood, "asks for both directions"),
        (known, "no list of what is wrong is complete"),
        (lambda passed: [1], "expected a list of names, got [1]"),
        (refuses_none, "is_causal is None, so nothing is lost"),
        (all_names_that_the_check_has, "the ring would drop it"),
    ],
}


def start_of(position, lengths):
    return max(start for start in [0, *accumulate(lengths)] if start <= position)


def first(move):
    """Right where there is no window; `move` away where there is one."""
    return lambda p, lengths, w: start_of(p, lengths) if w is None else max(start_of(p, lengths), p + 1 - w + move)


def last_of_the_document_before(p, lengths, w):
    """The first query of a document is counted to the document before."""
    return max((start for start in [0, *accumulate(lengths)] if start < p), default=0)


def negative(p, lengths, w):
    """A window of the first document reaches back before key 0."""
    return first(0)(p, lengths, w) if w is None or start_of(p, lengths) else p + 1 - w


WRONG_ANSWERS |= {
    "check_first_key": [
        (lambda p, lengths, w: 0, "of another document"),
        (lambda p, lengths, w: p - start_of(p, lengths), "place in its own document"),
        (lambda p, lengths, w: start_of(p, lengths), "the window begins later"),
        (lambda p, lengths, w: start_of(p, lengths) if w is None else p + 1 - w, "of another document"),
        (negative, "back before key 0"),
        (first(-1), "the window has 2"),
        (first(1), "counts the query's own"),
        (last_of_the_document_before, "sees itself only"),
        (lambda p, lengths, w: p, "whichever is later"),
    ]
}


def in_turn(C, stored, P):
    return [C + len(range(rank, stored, P)) for rank in range(P)]


WRONG_ANSWERS |= {
    "check_caches": [
        (lambda C, N, P: [C + (N - 1) / P] * P, "rank n mod P stores"),
        (lambda C, N, P: C + N - 1, "expected a list of 4 numbers"),
        (lambda C, N, P: in_turn(C, N - 1, P) if P <= 5 else [C] * P, "you say"),
    ]
}


def pairs(before):
    """The right tokens, beside the ones that `before` gives for (texts, at)."""
    return lambda texts, at: torch.stack([texts[:, at + 1], before(texts, at)], dim=2)


def own_chunk(texts, at):
    own = texts[:, at + 1]
    return torch.cat([texts[:, :1], own[:, :-1]], dim=1)


WRONG_ANSWERS |= {
    "check_pairs": [
        (lambda texts, at: torch.stack([texts[:, at], texts[:, at + 1]], dim=2), "the one after it"),
        (pairs(lambda texts, at: texts[:, at + 1].roll(1, dims=1)), "is on another rank"),
        (pairs(own_chunk), "START on one rank only"),
        (pairs(lambda texts, at: texts[:, 1:].roll(1, dims=1)[:, at]), "START does"),
    ]
}


NAMES = {
    "A": "stale_first_block",
    "B": "gradients_not_sent_home",
    "C": "averages_averaged",
    "D": "chunk_index_under_zigzag",
    "E": "lse_of_the_block",
}

WRONG_ANSWERS |= {
    "check_xrays": [
        (NAMES | {"A": "own_block_twice"}, "KV1 would be right, and the X-ray shows it as missing"),
        (NAMES | {"A": "last_block_skipped"}, "KV0 would be right, and the X-ray shows it as counted twice"),
        (NAMES | {"B": "gradients_travel_other_way"}, "shows it as what belongs to KV(j + 1)"),
        (NAMES | {"B": "stale_first_block"}, "W forward, rank 0, KV0 would be counted twice"),
        (NAMES | {"C": "averages_added"}, "rows would sum to another number, and the X-ray shows 1"),
        (NAMES | {"C": "base_2_as_natural"}, "W backward, rank 0, KV0 would be scaled"),
        (NAMES | {"D": "causal_per_block"}, "KV1 would be a triangle instead of the last half of the queries"),
        (NAMES | {"D": "never_called"}, "rank 1, KV0 would be missing"),
        (NAMES | {"E": "the merge"}, "'the merge' is not in the list"),
        (NAMES | {"E": ...}, "A, B, C, D right; E still open"),
        (list(NAMES.values()), "a dict with the keys A, B, C, D, E"),
        (NAMES | {"A": 7}, "A: 7 is not in the list"),
    ],
    "check_new_mistake": [
        (lambda steps: steps, "you replaced no step"),
        (lambda steps: replace(steps, add_q=lambda case, total, part: steps.add_q(case, total, part)), "is right"),
        (lambda steps: replace(steps, scale=lambda case: 1.0), "the doctor knows it: scale_missing"),
        (lambda steps: CATALOGUE["base_2_as_natural"].variants[0](steps), "the doctor knows it: base_2_as_natural"),
        (lambda steps: 1.0, "expected Steps"),
    ],
}


def meshes(possible):
    """An answer to check_meshes: the divisors g of P for which possible(H, G, g)."""
    return lambda P, H, G: [(P // g, g) for g in range(1, P + 1) if P % g == 0 and possible(H, G, g)]


def grouped(copies, G):
    return copies.unflatten(0, (G, -1))


WRONG_ANSWERS |= {
    "check_copies": [
        (lambda copies, G: grouped(copies, G).mean(dim=1).transpose(0, 1), "do not average"),
        (lambda copies, G: grouped(copies, G)[:, 0].transpose(0, 1), "the first copy"),
        (lambda copies, G: grouped(copies, G)[:, -1].transpose(0, 1), "the last copy"),
        (lambda copies, G: copies.unflatten(0, (-1, G)).sum(dim=0).transpose(0, 1), "on neighbouring ranks"),
        (lambda copies, G: copies.sum(dim=0)[:, None].expand(-1, G, -1, -1), "its own copies only"),
        (lambda copies, G: grouped(copies, G).sum(dim=1), "B is the first dimension"),
    ],
    "check_meshes": [
        (meshes(lambda H, G, g: g <= H), "all meshes that work"),
        (meshes(lambda H, G, g: H % g == 0), "needed by several ranks of a row"),
        (meshes(lambda H, G, g: g <= G), "not enough"),
        (meshes(lambda H, G, g: G % g == 0 and g > 1), "the flat ring"),
        (meshes(lambda H, G, g: G % g == 0 and g < 8), "there are more"),
        (meshes(lambda H, G, g: True), "not equal, or with copies"),
        (lambda P, H, G: [(g, P // g) for g in range(1, P + 1) if P % g == 0 == G % g], "wrong way round"),
        (lambda P, H, G: [(1, P), (P, P)], "must be P"),
        (lambda P, H, G: [g for g in range(1, P + 1) if P % g == 0 == G % g], "pairs"),
    ],
}


def block(host, device):
    """Rank r in round t: host(a, i, u, s, n, g) and device(...) of the block, with a, i = r's and t = u·g + s."""

    def answer(rank, t, n, g):
        numbers = *divmod(rank, g), *divmod(t, g), n, g
        return host(*numbers) % n * g + device(*numbers) % g

    return answer


WRONG_ANSWERS |= {
    "check_two_maps": [
        (lambda a, x, b, y: (a @ b, b @ x + y), "a's matrix stands next to the state"),
        (lambda a, x, b, y: (a * b, b @ x + y), "these are matrices"),
        (lambda a, x, b, y: (b @ a, x + y), "what a has added goes through b too"),
        (lambda a, x, b, y: (b @ x + y, b @ a), "in another order"),
        (lambda a, x, b, y: b @ a, "expected shape (2, 2), got (2,)"),
    ],
    "check_state_gradient": [
        (lambda keep, d_after, d_read: d_read, "nothing comes back from later ranks"),
        (lambda keep, d_after, d_read: keep.T @ d_after, "own tokens read this state too"),
        (lambda keep, d_after, d_read: keep @ d_after + d_read, "transposed"),
        (lambda keep, d_after, d_read: keep.T @ (d_after + d_read), "through no map of this rank"),
        (lambda keep, d_after, d_read: d_after + d_read, "through this rank's map"),
    ],
}


# Of a formula: arguments, and there the right number and those of the common mistakes, in the order of the check. They
# were computed by formulas that were written apart from those of the checks.
# fmt: off
FORMULAS = {
    ("check_block", (26, 22, 9, 5)): [9, 4, 9, 29, 6, 5, 3, 4, 19, 9, 8, 20],
    ("check_block", (10, 7, 4, 8)): [11, 3, 19, 11, 10, 4, 9, 11, 3, 3, 11, 19],
    ("check_blocks_of_a_nic", (8, 20, 4)): [35, 159, 40, 7, 140, 39.75, 5, 1.4],
    ("check_bytes_of_a_token", (44, 77, 7, 14, 1, 73, 20)): [284592, 94864, 189728, 569184, 526305472, 20775216,
        5691840, 5407248, 3696, 6468, 71148, 142296],
    ("check_bytes_sent_back", (4, 96, 8)): [9216, 4608, 4608, 10752, 12288, 7680, 9216, 9216, 6912, 4608, 11520,
        13824],
    ("check_bytes_sent_back", (3, 40, 2)): [960, 320, 640, 1280, 1440, 640, 640, 1280, 960, 480, 1280, 1440],
    ("check_caches", (10, 7, 5)): [[12, 11, 11, 11, 11], [12, 12, 11, 11, 11], [11, 11, 11, 11, 12],
        [11, 12, 11, 11, 11], [16, 10, 10, 10, 10], [10, 10, 10, 10, 16], [16] * 5, [17] * 5, [10] * 5, [12] * 5,
        [11] * 5],
    ("check_end", (3.5, 2, 7)): [26.5, 38.5, 14.0, 17.5, 24.5, 26.5, 24.5, 5.5],
    ("check_end", (1.25, 6, 4)): [25.25, 29.0, 24.0, 25.25, 5.0, 11.0, 24.0, 7.25],
    ("check_hidden_by_overlap", (0.5, 2)): [0.25, 0.25, 4, 1, 25, 0.75, 0.5, 0.2, 0],
    ("check_hidden_by_overlap", (3, 2)): [1, 1.5, 0.666667, 0.666667, 100, 0, 2, 0.4, 1],
    ("check_hops", (26, 15, 6)): [2, 2, 1, 1, 2, 5, 2, 3],
    ("check_hops", (9, 8, 2)): [1, 1, 1, 1, 1, 1, 1, 2],
    ("check_hops", (3, 8, 5)): [1, 1, 0, 0, 1, 4, 1, 2],
    ("check_longest_text", (500, 120, 11, 3)): [102, 34, 135, 125, 103, 11],
    ("check_peak_memory_backward", (2, 2, 2, 39, 8)): [21216, 21216, 18096, 2652, 21216, 18720, 18720, 19968, 17472,
        19968, 7488],
    ("check_peak_memory_backward", (9, 1, 33, 16, 2)): [73920, 60192, 73920, 30096, 209088, 71808, 69696, 54912, 62304,
        64416, 23232],
    ("check_rank_loss", (87.83, 23, 73, 8, 6, 3)): [57.7512, 1.20315, 0.0250656, 7.2189, 9.62521, 173.254, 3.8187,
        183.297, 4215.84, 87.83],
    ("check_smallest_chunk", (740000000000000, 25000000000, 96, 16, 8)): [19733.3, 29600, 118400, 710400, 4933.33,
        9866.67, 39466.7, 2.25225e-05],
    ("check_visible_tiles", (5,)): [15, 25, 10, 12.5, 12, 5],
    ("check_tflops", (3, 700, 20, False, 0.5)): [1.176e-4, 2.352e-4, 5.88e-5, 1.176e-4, 1.176e-4, 1.176e-4,
        117600000, 1.68e-7],
    ("check_tflops", (2, 900, 8, True, 0.25)): [2.592e-4, 5.184e-4, 1.296e-4, 1.0368e-4, 2.0736e-4, 3.6288e-4,
        259200000, 2.88e-7],
}
# fmt: on


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


def one_rank_receives_first(rank, P):
    steps = [Send((rank + 1) % P), Recv((rank - 1) % P)]
    return reversed(steps) if rank == 0 else iter(steps)


RIGHT_ANSWERS = {
    "check_safe_softmax": [
        lambda s: s.sub_(s.max()).exp_().div_(s.sum()),  # in place
        lambda s: 1 / torch.exp(s[None, :] - s[:, None]).sum(1),
    ],
    "check_blockwise": [blocks_in_numpy, blocks_on_a_kernel],
    "check_blocks_of_gpu": [((2 - t) % 4 for t in range(4)), torch.tensor([2, 1, 0, 3])],
    "check_ring_order": [
        odd_ranks_send_first,
        one_rank_receives_first,
        lambda r, P: {Send((r + 1) % P): 0, Recv((r - 1) % P): 0}.keys() if r else list(odd_ranks_send_first(0, P)),
    ],
    "check_zigzag_positions": [lambda r, S, P: np.arange(S).reshape(2 * P, -1)[[r, -1 - r]].flatten()],
    "check_striped_mask": [lambda r, b, C: torch.ones(C, C, dtype=torch.int).tril(-int(b > r))],
    "check_idle_limit": [0.467, 0.4667, torch.tensor(7 / 15)],
    "check_merging_share": [lambda a, b: torch.exp(b - torch.logaddexp(a, b)), lambda a, b: 1 / (1 + torch.exp(a - b))],
    "check_batch_loss": [lambda x, y: F.cross_entropy(torch.cat(x), torch.cat(y))[None]],  # of one element
    "check_meshes": [lambda P, H, G: [[P // g, g] for g in range(math.gcd(P, G), 0, -1) if math.gcd(P, G) % g == 0]],
}
