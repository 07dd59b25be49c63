"""Checks of chapter 3: the blocks of a GPU, one round by hand, block outputs merged rightly."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from basics.naive_attention import TOKENS
from notebooks.checks.answers import NotYet, difference, exercise


@exercise
def check_blocks_of_gpu(answer: Any) -> str | None:
    """The blocks that GPU 2 computes on in rounds 0, 1, 2, 3."""
    if list(answer) == [2, 3, 0, 1]:
        raise NotYet("that is a ring turning the other way; GPU 2 receives from GPU 1")
    if list(answer) != [2, 1, 0, 3]:
        raise NotYet(f"GPU 2 starts with its own block and then takes what GPU 1 had; you say {list(answer)}")


@exercise
def check_token_two_after_round_two(answer: Any) -> str | None:
    """(f, m, l) of token 2 in round 2, three decimals."""
    for name, given, expected in zip("fml", answer, (0.120, 4.243, 1.480), strict=True):
        if abs(given - expected) > 0.001:
            hint = {
                "f": "the old max is 2.121, the new one 4.243: f = e^(2.121 - 4.243)",
                "m": "the scores are [1 1].[3 1]/sqrt(2) and [1 1].[3 3]/sqrt(2)",
                "l": "rescale the old l = 1.979 by f, then add e^(2.828 - m) and e^(4.243 - m)",
            }
            raise NotYet(f"{name} is not {given:.3f}: {hint[name]}")


@exercise
def check_mended_sum(answer: Callable[..., Tensor]) -> str | None:
    """Outs (P, D) and lses (P,) of the blocks of one query -> its attention (D,)."""
    scores = TOKENS[0] @ TOKENS.T / 2**0.5
    outs = torch.stack([torch.softmax(scores[i : i + 2], 0) @ TOKENS[i : i + 2] for i in range(0, 8, 2)])
    lses = torch.stack([scores[i : i + 2].logsumexp(0) for i in range(0, 8, 2)])
    given = answer(outs, lses)
    for wrong, name in ((outs.sum(0), "the published sum of averages"), (outs.mean(0), "the average of averages")):
        if difference(given, wrong) is None:
            raise NotYet(f"that is {name}; each block counts by its share e^lse of the whole")
    if problem := difference(given, torch.softmax(scores, 0) @ TOKENS):
        raise NotYet(f"{problem}; the shares are softmax(lses)")
