"""Checks of chapters 5 to 8."""

from functools import partial

import torch

from notebooks.source.checks.answers import Exercise, NotYet, difference
from notebooks.source.checks.kernels_and_wires import plain_kernel
from ringlab.ring.layouts import positions

# Chapter 5: the backward pass of softmax, who added to the gradients, the bytes sent ---------------------------------


def _block(n, keys, D, block, generator):
    """p and dp (n, c) of one block, out and d_out (n, D) of the whole rows."""
    sizes = (n, keys), (n, D), (keys, D)
    scores, d_out, v = (torch.randn(size, generator=generator) for size in sizes)
    weights = torch.softmax(scores, dim=1)
    return weights[:, block], (d_out @ v.T)[:, block], weights @ v, d_out


def _with(delta):
    """ds for a delta(p, dp, of the numbers d_out * out (n, D))."""
    return lambda p, dp, out, d_out: p * (dp - delta(p, dp, d_out * out))


def _of_rows(p, dp, x):
    return x.sum(dim=1, keepdim=True)


GENERATOR = torch.Generator().manual_seed(0)
check_softmax_backward = Exercise(  # p, dp (n, c), out, d_out (n, D) -> ds (n, c)
    right=_with(_of_rows),
    wrong={
        "delta is missing; when one weight goes up, softmax pulls the others down": _with(lambda p, dp, x: 0),
        "multiply by the weights": lambda p, dp, out, d_out: dp - _of_rows(p, dp, d_out * out),
        "delta is subtracted": _with(lambda p, dp, x: -_of_rows(p, dp, x)),
        "delta sums over all keys, not over this block's": _with(lambda p, dp, x: (p * dp).sum(dim=1, keepdim=True)),
        "delta is the sum over D of d_out * out, not the mean": _with(lambda p, dp, x: x.mean(dim=1, keepdim=True)),
        "you took one delta for all rows; sum over D only, each row for itself": _with(lambda p, dp, x: x.sum()),
        "delta belongs to rows, and you subtract it from columns: keepdim=True": _with(lambda p, dp, x: x.sum(dim=1)),
    },
    cases={
        "ds = p * (dp - delta)": [_block(4, 9, 4, slice(0, 4), GENERATOR)],  # n = c: what is of columns is computed
        "with another number of queries and keys": [
            _block(3, 6, 4, slice(2, 4), GENERATOR),
            _block(1, 5, 2, slice(0, 5), GENERATOR),
        ],
    },
)

check_added_so_far = Exercise(  # -> the ranks that have added to the gradients in hand, this one included
    right=lambda rank, t, P: {(rank - i) % P for i in range(max(t, 1))},
    wrong={
        "the share of the block's own rank stays at home": "{(rank - i) % P for i in range(t + 1)}",
        "your ring turns the other way: the block came from rank r - 1": "{(rank + i) % P for i in range(max(t, 1))}",
        "this rank has just computed, so it has added its share too": "{(rank - i) % P for i in range(1, max(t, 1))}",
        "ranks go from 0 to P - 1: take the remainder by P": "{rank - i for i in range(max(t, 1))}",
    },
    said="the block came from rank r - 1, and before that from the rank before it",
    cases=[(rank, t, P) for P in (4, 5, 1, 2, 3, 8) for t in range(P) for rank in range(P)],
)


# Chapter 6: the order of the overlapped ring, the hidden share -------------------------------------------------------


def _by_round(*whats, hops=-1):
    """The steps of a round in this order, for P rounds and so many hops more, and the last block."""
    return lambda P: [(what, t) for t in range(P + hops) for what in whats] + [("compute", P - 1)] * -hops


def _first(*whats):
    """All steps of one kind before all of the next."""
    return lambda P: [(what, t) for what in whats for t in range(P if what == "compute" else P - 1)]


check_overlap_order = Exercise(  # P -> the ("post", t), ("compute", t), ("wait", t) of one rank, with two buffers
    right=_by_round("post", "compute", "wait"),
    wrong={
        "exact, and hides nothing: compute on block t between post and wait": _by_round("post", "wait", "compute"),
        "exact, and hides nothing: compute on block t after its post": _by_round("compute", "post", "wait"),
        "('wait', t) comes before ('post', t): it would wait for nothing": _by_round("wait", "post", "compute"),
        "after the last round nobody sends: P - 1 hops": _by_round("post", "compute", "wait", hops=0),
        "each block is computed on, too": _by_round("post", "wait"),
        "('compute', t + 1) comes before ('wait', t): block t + 1 may not be there": _first("compute", "post", "wait"),
        "('post', t + 1) comes before ('wait', t): block t + 1 cannot be sent yet": _first("post", "compute", "wait"),
        "('post', t + 1) fills a buffer still in use": "_by_round('post', 'wait')(P)[:-1] + _first('compute')(P)",
    },
    said="in each round post, compute, wait, and after P - 1 hops the last block",
    cases=[(P,) for P in (3, 4, 5, 2, 1, 8)],
)

check_hidden_by_overlap = Exercise(  # seconds of a round -> the share of the messages' time that is hidden
    right=lambda computing, messages: min(1.0, computing / messages),
    wrong={
        "no more than all of it can be hidden": "computing / messages",
        "turned over: divide the computing by the messages": "messages / computing",
        "turned over: the computing covers the messages": "min(1, messages / computing)",
        "give a share from 0 to 1, not per cent": "100 * min(1.0, computing / messages)",
        "that is the share that is not hidden": "max(0.0, 1 - computing / messages)",
        "that is the time that is hidden; divide it by the messages' time": min,
        "divide by the messages' time, not by the time of both": "min(computing, messages) / (computing + messages)",
        "computing may cover a part of the messages; it need not be all or nothing": "float(computing >= messages)",
    },
    said="computing covers as many seconds of the messages as it lasts, and no more than there are",
    cases=[(0.5, 2.0), (2.0, 2.0), (3.0, 2.0), (2.0, 5.0)],
)


# Chapter 7: zigzag positions, the mask of a striped tile, the idle share ---------------------------------------------


def _positions(layout):
    return lambda rank, S, P: positions(layout, S, rank, P).tolist()


def _late_half_first(rank, S, P):
    at = _positions("zigzag")(rank, S, P)
    return at[len(at) // 2 :] + at[: len(at) // 2]


def _late_half_from_the_end(rank, S, P):
    half = S // (2 * P)
    return [start + i for start in (rank * half, (rank + P) * half) for i in range(half)]


check_zigzag_positions = Exercise(  # -> where the tokens of this rank stand in the sequence
    right=lambda rank, S, P: _positions("zigzag")(rank, S, P),
    wrong={
        "the late half is counted from the end: rank r holds halves r and 2P - 1 - r": _late_half_from_the_end,
        "these are the right tokens; give them in rising order": _late_half_first,
        "that is the contiguous layout": _positions("contiguous"),
        "that is the striped layout": _positions("striped"),
    },
    said="a rank holds as many early as late tokens: halves r and 2P - 1 - r",
    cases=[(rank, S, P) for S, P in ((16, 4), (24, 3), (30, 5), (4, 1), (12, 2)) for rank in range(P)],
)


def _tril(rank, block, C, diagonal=0):
    return torch.ones(C, C).tril(diagonal) == 1


def _striped(rank, block, C):
    return _tril(rank, block, C, -int(block > rank))


check_striped_mask = Exercise(  # -> (C, C) bool: which pairs the causal mask leaves in the striped layout
    right=_striped,
    wrong={
        "where a key comes after its query, in a later block, the diagonal is hidden": _tril,
        "a query sees itself and what is before it: the diagonal is visible": "_tril(rank, block, C, -1)",
        "key i of an earlier block comes before query i": "_tril(rank, block, C, -int(block != rank))",
        "True means computed here; yours is True for the hidden pairs": lambda *case: ~_striped(*case),
        "rows are queries and columns are keys; yours is turned over": lambda *case: _striped(*case).T,
        "all or nothing is the contiguous layout; here every tile is a triangle": "torch.ones(C, C, dtype=torch.bool)",
        "return True for the pairs that are computed and False for others, not numbers to add to scores": (
            lambda *case: torch.zeros_like(_striped(*case), dtype=float).masked_fill(~_striped(*case), -torch.inf)
        ),
    },
    said="query i stands at rank + i P and key i at block + i P; a key must not be later",
    cases=[(rank, block, C) for P, C in ((3, 4), (4, 5), (2, 1), (5, 2)) for rank in range(P) for block in range(P)],
)


# Chapter 8: attention on a kernel, the gradient of a shared head -----------------------------------------------------


def _outs(kernel, q, k, v, blocks):
    return [kernel(q, *pair)[0] for pair in zip(k.chunk(blocks), v.chunk(blocks), strict=True)]


def _blocks(S, D, blocks, generator, size=1.0, scale=1.0):
    """A kernel and its inputs; `size` 1000: scores in the thousands."""
    q, k, v = torch.randn(3, S, D, generator=generator).unbind()
    return partial(plain_kernel, scale=scale), q * size, k, v, blocks


def _each_block_once(answer):
    """Raise NotYet when the kernel sees other keys than a block at a time."""
    seen, (_, q, k, v, blocks) = [], _blocks(12, 4, 3, torch.Generator().manual_seed(0))

    def kernel(q, k, v):
        seen.append(len(k))
        return plain_kernel(q, k, v)

    if problem := difference(answer(kernel, q, k, v, blocks), plain_kernel(q, k, v)[0]):
        raise NotYet(problem)
    if seen != [4, 4, 4]:
        raise NotYet(f"right numbers, but the kernel saw {seen} keys; expected {blocks} block(s) of 12")


check_attention_on_a_kernel = Exercise(  # kernel, q, k, v (S, D), blocks -> attention, of a kernel's (out, lse)
    right=lambda kernel, q, k, v, blocks: kernel(q, k, v)[0],
    wrong={
        "that is the sum of the blocks; each has the share e^lse_j of the whole": lambda *case: sum(_outs(*case)),
        "that is the average; each has the share e^lse_j": lambda *case: torch.stack(_outs(*case)).mean(dim=0),
        "this kernel has a scale of its own; merge what it returns": "plain_kernel(q, k, v)[0]",
    },
    cases={
        "after each merge lse becomes log(e^lse + e^lse_j)": [
            _blocks(*size, GENERATOR) for size in ((12, 4, 3), (10, 2, 4), (7, 3, 1))
        ],
        "large scores: log(e^lse + e^lse_j) without e^lse itself, which overflows": [
            _blocks(20, 4, 5, GENERATOR, size=1000.0)
        ],
        "a kernel of another scale": [_blocks(12, 4, 3, GENERATOR, scale=0.4)],
    },
    then=_each_block_once,
)


def _heads(B, G, N, S, D, generator):
    return torch.randn(B, G * N, S, D, generator=generator), G


check_group_gradient = Exercise(  # dk (B, H, S, D) of repeated heads, G -> dk (B, G, S, D)
    right=lambda dk, G: dk.unflatten(1, (G, -1)).sum(dim=2),
    wrong={
        "query head h used head h // (H/G), so neighbours share a head": "dk.unflatten(1, (-1, G)).sum(dim=1)",
        "each query head adds its part: a sum, not the mean": "dk.unflatten(1, (G, -1)).mean(dim=2)",
        "that is the part of the first query head of each group": "dk.unflatten(1, (G, -1))[:, :, 0]",
    },
    cases={
        "the sum over the query heads that share a head": [
            _heads(1, 2, 2, 3, 4, GENERATOR),
            _heads(2, 2, 3, 5, 1, GENERATOR),
        ],
        "with one head": [_heads(1, 1, 4, 2, 3, GENERATOR)],
        "without groups it stays as it is": [_heads(1, 3, 1, 2, 3, GENERATOR)],
    },
)
