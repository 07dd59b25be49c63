"""Checks of chapter 3: the blocks of a GPU, one round by hand, block outputs merged rightly."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from notebooks.source.checks.answers import (
    NotYet,
    compare_number,
    difference,
    draws,
    exercise,
    in_order,
    numbers,
    several,
    torch_generator,
)
from ringlab.basics.naive_attention import TOKENS


@exercise
def check_blocks_of_gpu(answer: Any) -> str | None:
    """The blocks that GPU 2 computes on in rounds 0, 1, 2, 3."""
    given = several(numbers(answer, "a list of four numbers"), ("round 0", "round 1", "round 2", "round 3"))
    if given == [2, 3, 0, 1]:
        raise NotYet("that is a ring that turns the other way; GPU 2 receives from GPU 1")
    if given == [2, 1, 0, -1]:
        raise NotYet("there is no block -1: after KV0 comes KV3, which went round")
    if given == [2, 2, 2, 2]:
        raise NotYet("that is its own block in all rounds; the blocks move on")
    if given != [2, 1, 0, 3]:
        raise NotYet(f"GPU 2 starts with its own block and then takes what GPU 1 had; you say {given}")


@exercise
def check_token_two_in_round_two(answer: Any) -> str | None:
    """(f, m, l) of token 2 in round 2, three decimals."""
    f, m, l = several(answer, ("f", "m", "l"))
    before, after, l_before = 3 / math.sqrt(2), 6 / math.sqrt(2), 1.979
    new = math.exp(4 / math.sqrt(2) - after) + 1
    right = {"f": math.exp(before - after), "m": after, "l": math.exp(before - after) * l_before + new}
    in_order((f, m, l), {name: torch.tensor(value) for name, value in right.items()})
    compare_number(
        m,
        after,
        {4 / math.sqrt(2): "that is the first of the two scores; m is the larger one", 6: "divide by sqrt(2)"},
        "m: the scores are [1 1].[3 1]/sqrt(2) and [1 1].[3 3]/sqrt(2), and m is the largest so far",
        decimals=3,
    )
    compare_number(
        f,
        math.exp(before - after),
        {math.exp(after - before): "f: turned over; the old sums get smaller, f = e^(old m - new m)"},
        "f: the old max is 2.121, the new one 4.243: f = e^(2.121 - 4.243)",
        decimals=3,
    )
    compare_number(
        l,
        math.exp(before - after) * l_before + new,
        {
            l_before + new: "l: rescale the old l = 1.979 by f first",
            new: "l: add the old l too, rescaled by f",
            math.exp(before - after) * l_before: "l: that is the old part; add e^(2.828 - m) and e^(4.243 - m)",
        },
        "l: rescale the old l = 1.979 by f, then add e^(2.828 - m) and e^(4.243 - m)",
        decimals=3,
    )


@exercise
def check_mended_sum(answer: Callable[..., Tensor]) -> str | None:
    """outs (P, D) and lses (P,) of the blocks of one query -> its attention (D,)."""
    generator = torch.Generator().manual_seed(0)
    random = torch.randn(9, 4, dtype=torch.float64, generator=generator)
    for scores, values, chunk in (
        (TOKENS[0] @ TOKENS.T / 2**0.5, TOKENS, 2),
        (random[:, 0], random[:, 1:], 3),
        (1000 + random[:, 0], random[:, 1:], 3),
        *(_drawn(r.randint(1, 9), r.randint(1, 4), torch_generator(r)) for r in draws()),
    ):
        outs = torch.stack(
            [torch.softmax(s, 0) @ v for s, v in zip(scores.split(chunk), values.split(chunk), strict=True)]
        )
        lses = torch.stack([s.logsumexp(0) for s in scores.split(chunk)])
        given = answer(outs, lses)
        wrong = [
            (outs.sum(0), "that is the published sum of averages; each block counts by its share e^lse of the whole"),
            (outs.mean(0), "that is the average of averages; each block counts by its share e^lse of the whole"),
            (lses @ outs, "the share of a block is e^lse over the sum of all e^lse, not lse itself"),
            (lses.exp() @ outs, "divide by the sum of all e^lse: the shares must add up to 1"),
            (lses / lses.sum() @ outs, "the share of a block is e^lse over the sum of all e^lse, not lse itself"),
        ]
        if problem := difference(given, torch.softmax(scores, 0) @ values):
            hint = next((hint for value, hint in wrong if difference(given, value) is None), None)
            if hint is None and lses.max() > 999:
                hint = "right for small lses, but e^1000 overflows: torch.softmax(lses, 0) does not"
            raise NotYet(hint or f"{problem}; the shares are softmax(lses)")


def _drawn(blocks: int, chunk: int, generator: torch.Generator) -> tuple[Tensor, Tensor, int]:
    """Scores and values (blocks * chunk keys) that nobody has seen, and the chunk."""
    random = torch.randn(blocks * chunk, 5, dtype=torch.float64, generator=generator)
    return 3 * random[:, 0], random[:, 1:], chunk
