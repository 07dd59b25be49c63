"""Checks of chapter 5: the backward pass of softmax, who added to the gradients, the bytes sent."""

from collections.abc import Callable

import torch
from torch import Tensor

from notebooks.source.checks.answers import NotYet, compare_formula, difference, draws, exercise, numbers


@exercise
def check_softmax_backward(answer: Callable[..., Tensor]) -> str | None:
    """p and dp (n, c) of one block, out and d_out (n, D) of the whole rows -> ds (n, c)."""
    generator = torch.Generator().manual_seed(0)
    cases = [(3, 6, 4, slice(2, 4)), (4, 9, 4, slice(0, 4)), (1, 5, 2, slice(0, 5))]
    cases += [(r.randint(2, 7), r.randint(5, 9), r.randint(2, 7), slice(1, r.randint(3, 5))) for r in draws()]
    for n, keys, D, block in cases:
        scores, d_out = torch.randn(n, keys, generator=generator), torch.randn(n, D, generator=generator)
        v = torch.randn(keys, D, generator=generator)
        weights = torch.softmax(scores, dim=1)
        out, p, dp = weights @ v, weights[:, block], (d_out @ v.T)[:, block]
        given = answer(p, dp, out, d_out)
        delta = (d_out * out).sum(dim=1, keepdim=True)
        if (problem := difference(given, p * (dp - delta))) is None:
            continue
        of_block = (p * dp).sum(dim=1, keepdim=True)
        hints = [
            (p * dp, "delta is missing; when one weight goes up, softmax pulls the others down"),
            (dp - delta, "multiply by the weights"),
            (p * (dp + delta), "delta is subtracted"),
            (
                p * (dp - of_block),
                "your delta sums over the keys of this block only; take all keys: row sums of d_out * out",
            ),
            (
                p * (dp - (d_out * out).mean(dim=1, keepdim=True)),
                "delta is the sum over D of d_out * out, not the mean",
            ),
            (p * (dp - (d_out * out).sum()), "you took one delta for all rows; sum over D only, each row for itself"),
        ]
        if n == p.shape[1]:
            hints.append((p * (dp - delta.T), "delta belongs to rows, and you subtract it from columns: keepdim=True"))
        for wrong, hint in hints:
            if difference(given, wrong) is None:
                problem = hint
                break
        raise NotYet(f"n = {n} queries, c = {p.shape[1]} keys, D = {D}: {problem}")


@exercise
def check_added_so_far(answer: Callable[[int, int, int], set[int]]) -> str | None:
    """(rank, round, P) -> the ranks that have added to the gradients in hand, this one included."""
    for P in (4, 5, 1, 2, 3, 8, *(random.randint(9, 12) for random in draws())):
        for t in range(P):
            for rank in range(P):
                given = set(numbers(answer(rank, t, P), "a set of numbers"))
                expected = {(rank - i) % P for i in range(max(t, 1))}
                if given == expected:
                    continue
                hint = f"the block came from rank {(rank - 1) % P}, and before that from the rank before it"
                if t and given == expected | {(rank - t) % P}:
                    hint = f"the share of rank {(rank - t) % P} stays at home: it is the rank of this block"
                elif given == {(rank + i) % P for i in range(max(t, 1))}:
                    hint = f"your ring turns the other way: {hint}"
                elif given == expected - {rank}:
                    hint = "this rank has just computed, so it has added its share too"
                elif any(not 0 <= other < P for other in given):
                    hint = f"ranks go from 0 to {P - 1}: take the remainder by P"
                raise NotYet(f"P = {P}, round {t}, rank {rank}, you say {sorted(given)}: {hint}")


@exercise
def check_bytes_sent_back(answer: Callable[[int, int, int], int]) -> str | None:
    """(P, numbers of a chunk, bytes of a number) -> bytes that a rank sends in the backward pass."""

    def wide(itemsize: int) -> int:
        return max(itemsize, 4)

    wrong = {
        "that is the forward pass; dK and dV travel too": lambda P, n, w: (P - 1) * 2 * n * w,
        "that is dK and dV; K and V travel too": lambda P, n, w: (P - 1) * 2 * n * wide(w),
        "that is the paper's closed circle; what a rank adds to its own dK and dV need not travel: P - 1 hops": (
            lambda P, n, w: (P - 1) * 2 * n * w + P * 2 * n * wide(w)
        ),
        "nothing needs P hops: K and V need not come home, and sums begin on the next rank": (
            lambda P, n, w: P * 2 * n * (w + wide(w))
        ),
        "the message home counts too: P - 1 hops": lambda P, n, w: 2 * n * ((P - 1) * w + (P - 2) * wide(w)),
        "dK and dV are sums in float32 at least: never fewer than 4 bytes": lambda P, n, w: (P - 1) * 4 * n * w,
        "K and V travel in their own dtype": lambda P, n, w: (P - 1) * 4 * n * wide(w),
        "sums of float64 are float64: 8 bytes, not 4": lambda P, n, w: (P - 1) * 2 * n * (w + 4),
        "K and V travel, and dK and dV: count both of each": lambda P, n, w: (P - 1) * n * (w + wide(w)),
        "dQ does not travel": lambda P, n, w: (P - 1) * n * (2 * w + 3 * wide(w)),
        "Q and dQ stay on their rank": lambda P, n, w: (P - 1) * 3 * n * (w + wide(w)),
    }
    compare_formula(
        answer,
        lambda P, numbers, itemsize: (P - 1) * 2 * numbers * (itemsize + wide(itemsize)),
        wrong,
        [(8, 2**29, 2), (5, 96, 4), (4, 96, 8), (3, 40, 2)],
        "P - 1 hops of K and V in their dtype, P - 1 hops of dK and dV in float32 at least",
        lambda random: (random.randint(1, 64), random.randint(1, 10**6), random.choice((2, 4, 8))),
    )
    return "with P = 8, 2^29 numbers and bfloat16 that is 42 GiB, where the forward pass sends 14 GiB"
