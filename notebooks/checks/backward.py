"""Checks of chapter 5: the backward pass of softmax, who added to the gradients, the bytes sent."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from notebooks.checks.answers import NotYet, difference, exercise


@exercise
def check_softmax_backward(answer: Callable[..., Tensor]) -> str | None:
    """Weights and d_weights (n, c) of one block, out and d_out (n, D) of the whole rows -> d_scores (n, c)."""
    generator = torch.Generator().manual_seed(0)
    scores, v, d_out = (torch.randn(3, 6, generator=generator), *torch.randn(2, 6, 4, generator=generator))
    d_out = d_out[:3]
    weights, d_weights = torch.softmax(scores, 1), d_out @ v.T
    out, block = weights @ v, slice(2, 4)  # 2 of 6 keys
    of_block = weights[:, block], d_weights[:, block]
    given = answer(of_block[0], of_block[1], out, d_out)
    delta = (d_out * out).sum(1, keepdim=True)
    hints = [
        (of_block[0] * of_block[1], "delta is missing; softmax pulls the other scores down when one goes up"),
        (of_block[1] - delta, "multiply by the weights"),
        (of_block[0] * (of_block[1] + delta), "delta is subtracted"),
        (
            of_block[0] * (of_block[1] - (of_block[0] * of_block[1]).sum(1, keepdim=True)),
            "your delta has only the keys of this block; the sum over all keys is the row sum of d_out * out",
        ),
        (
            of_block[0] * (of_block[1] - (d_out * out).sum()),
            "you took one delta for all rows; sum over D only, each row for itself",
        ),
    ]
    for wrong, hint in hints:
        if isinstance(given, Tensor) and difference(given, wrong) is None:
            raise NotYet(hint)
    if problem := difference(given, of_block[0] * (of_block[1] - delta)):
        raise NotYet(problem)


@exercise
def check_added_so_far(answer: Callable[[int, int, int], set[int]]) -> str | None:
    """(rank, round, P) -> the ranks that have added to the gradients in hand, this one included."""
    for world_size in (4, 5):
        for t in range(world_size):
            for rank in range(world_size):
                given = answer(rank, t, world_size)
                given, expected = set(given), {(rank - i) % world_size for i in range(t + 1)}
                if given == expected:
                    continue
                hint = f"the block came from rank {(rank - 1) % world_size}, and before that from the one before it"
                if given == {(rank + i) % world_size for i in range(t + 1)}:
                    hint = f"your ring turns the other way: {hint}"
                elif given == expected - {rank}:
                    hint = "this rank has just computed, so it has added its part too"
                elif any(not 0 <= other < world_size for other in given):
                    hint = f"ranks go from 0 to {world_size - 1}: take the remainder by P"
                where = f"P = {world_size}, round {t}, rank {rank}"
                raise NotYet(f"{where}, you say {sorted(given)}: {hint}")


@exercise
def check_bytes_sent_back(answer: Any) -> str | None:
    """Bytes one rank sends in the backward pass: P = 8, S = 1,048,576, B = 1, H = 32, D = 128, bfloat16."""
    pair = 2 * 32 * (1_048_576 // 8) * 128  # numbers in the K and the V of a block
    right = 7 * pair * 2 + 8 * pair * 4
    hints = {
        7 * pair * 2: "that is the forward pass; dK and dV travel too",
        8 * pair * 4: "that is dK and dV; K and V travel too",
        7 * pair * (2 + 4): "dK and dV have one hop more: home",
        8 * pair * (2 + 4): "K and V need not come home: 7 hops for them",
        7 * pair * 2 + 8 * pair * 2: "dK and dV are sums, kept in float32: 4 bytes",
        7 * pair * 4 + 8 * pair * 4: "K and V are bfloat16: 2 bytes",
        right // 2: "K and V travel, and dK and dV: count both of each",
    }
    if answer == right:
        return f"{right / 2**30:g} GiB, where the forward pass sends {7 * pair * 2 / 2**30:g}"
    raise NotYet(hints.get(answer, "7 hops of K and V in 2 bytes a number, 8 hops of dK and dV in 4"))
