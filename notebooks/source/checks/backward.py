"""Checks of chapter 5: the backward pass of softmax, who added to the gradients, the bytes sent."""

import torch

from notebooks.source.checks.answers import Exercise, torch_generator


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
        "your delta sums over the keys of this block only; take all keys: row sums of d_out * out": _with(
            lambda p, dp, x: (p * dp).sum(dim=1, keepdim=True)
        ),
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
    draw=lambda r: _block(
        r.randint(2, 7), r.randint(5, 9), r.randint(2, 7), slice(1, r.randint(3, 5)), torch_generator(r)
    ),
)

check_added_so_far = Exercise(  # -> the ranks that have added to the gradients in hand, this one included
    right=lambda rank, t, P: {(rank - i) % P for i in range(max(t, 1))},
    wrong={
        "the share of the block's own rank stays at home": lambda rank, t, P: {(rank - i) % P for i in range(t + 1)},
        "your ring turns the other way: the block came from rank r - 1": (
            lambda rank, t, P: {(rank + i) % P for i in range(max(t, 1))}
        ),
        "this rank has just computed, so it has added its share too": (
            lambda rank, t, P: {(rank - i) % P for i in range(1, max(t, 1))}
        ),
        "ranks go from 0 to P - 1: take the remainder by P": lambda rank, t, P: {rank - i for i in range(max(t, 1))},
    },
    cases={
        "the block came from rank r - 1, and before that from the rank before it": [
            (rank, t, P) for P in (4, 5, 1, 2, 3, 8) for t in range(P) for rank in range(P)
        ]
    },
    draw=lambda random: (random.randint(0, 8), random.randint(0, 8), random.randint(9, 12)),
)


def _wide(itemsize):
    return max(itemsize, 4)


check_bytes_sent_back = Exercise(  # P, the numbers of a chunk, the bytes of one -> bytes that a rank sends
    right=lambda P, n, w: (P - 1) * 2 * n * (w + _wide(w)),
    wrong={
        "that is the forward pass; dK and dV travel too": lambda P, n, w: (P - 1) * 2 * n * w,
        "that is dK and dV; K and V travel too": lambda P, n, w: (P - 1) * 2 * n * _wide(w),
        "that is the paper's closed circle; what a rank adds to its own dK and dV need not travel: P - 1 hops": (
            lambda P, n, w: (P - 1) * 2 * n * w + P * 2 * n * _wide(w)
        ),
        "nothing needs P hops: K and V need not come home, and sums begin on the next rank": (
            lambda P, n, w: P * 2 * n * (w + _wide(w))
        ),
        "the message home counts too: P - 1 hops": lambda P, n, w: 2 * n * ((P - 1) * w + (P - 2) * _wide(w)),
        "dK and dV are sums in float32 at least: never fewer than 4 bytes": lambda P, n, w: (P - 1) * 4 * n * w,
        "K and V travel in their own dtype": lambda P, n, w: (P - 1) * 4 * n * _wide(w),
        "sums of float64 are float64: 8 bytes, not 4": lambda P, n, w: (P - 1) * 2 * n * (w + 4),
        "K and V travel, and dK and dV: count both of each": lambda P, n, w: (P - 1) * n * (w + _wide(w)),
        "dQ does not travel": lambda P, n, w: (P - 1) * n * (2 * w + 3 * _wide(w)),
        "Q and dQ stay on their rank": lambda P, n, w: (P - 1) * 3 * n * (w + _wide(w)),
    },
    cases={
        "P - 1 hops of K and V in their dtype, P - 1 hops of dK and dV in float32 at least": [
            (8, 2**29, 2),
            (5, 96, 4),
            (4, 96, 8),
            (3, 40, 2),
        ]
    },
    draw=lambda random: (random.randint(1, 64), random.randint(1, 10**6), random.choice((2, 4, 8))),
    remark="with P = 8, 2^29 numbers and bfloat16 that is 42 GiB, where the forward pass sends 14 GiB",
)
