"""Checks of chapter 3: the blocks of a GPU, one round by hand, block outputs merged rightly."""

import math

import torch

from notebooks.source.checks.answers import Exercise, torch_generator
from ringlab.basics.naive_attention import TOKENS

check_blocks_of_gpu = Exercise(  # the blocks that GPU 2 computes on in rounds 0, 1, 2, 3
    right=[2, 1, 0, 3],
    wrong={
        "that is a ring that turns the other way; GPU 2 receives from GPU 1": [2, 3, 0, 1],
        "there is no block -1: after KV0 comes KV3, which went round": [2, 1, 0, -1],
        "that is its own block in all rounds; the blocks move on": [2, 2, 2, 2],
    },
    cases={"GPU 2 starts with its own block and then takes what GPU 1 had": [()]},
)

OLD_L, OLD_M, M = 1.979, 3 / math.sqrt(2), 6 / math.sqrt(2)
F, NEW = math.exp(OLD_M - M), math.exp(4 / math.sqrt(2) - M) + 1
check_token_two_in_round_two = Exercise(  # three decimals
    right={"f": F, "m": M, "l": F * OLD_L + NEW},
    wrong={
        "turned over; the old sums get smaller, f = e^(old m - new m)": {"f": 1 / F},
        "that is the first of the two scores; m is the larger one": {"m": 4 / math.sqrt(2)},
        "divide by sqrt(2)": {"m": 6},
        "rescale the old l = 1.979 by f first": {"l": OLD_L + NEW},
        "add the old l too, rescaled by f": {"l": NEW},
        "that is the old part; add e^(2.828 - m) and e^(4.243 - m)": {"l": F * OLD_L},
    },
    cases={
        "the scores are [1 1].[3 1]/sqrt(2) and [1 1].[3 3]/sqrt(2), and m is the largest so far; f = e^(2.121 - m); "
        "rescale the old l = 1.979 by f, then add e^(2.828 - m) and e^(4.243 - m)": [()]
    },
    decimals=3,
)


def _parts(scores, values, chunk):
    """The outs and lses of blocks of so many keys."""
    pairs = zip(scores.split(chunk), values.split(chunk), strict=True)
    return torch.stack([torch.softmax(s, 0) @ v for s, v in pairs]), torch.stack(
        [s.logsumexp(0) for s in scores.split(chunk)]
    )


def _drawn(r):
    chunk = r.randint(1, 4)
    x = torch.randn(chunk * r.randint(1, 9), 5, dtype=torch.float64, generator=torch_generator(r))
    return _parts(3 * x[:, 0], x[:, 1:], chunk)


X = torch.randn(9, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
SHARE = "the share of a block is e^lse over the sum of all e^lse, not lse itself"
check_mended_sum = Exercise(  # outs (P, D) and lses (P,) of the blocks of one query -> its attention (D,)
    right=lambda outs, lses: torch.softmax(lses, 0) @ outs,
    wrong={
        "that is the published sum of averages; each block counts by its share e^lse of the whole": (
            lambda outs, lses: outs.sum(0)
        ),
        "that is the average of averages; each block counts by its share e^lse of the whole": (
            lambda outs, lses: outs.mean(0)
        ),
        SHARE: lambda outs, lses: lses @ outs,
        f"{SHARE}; divided by their sum neither": lambda outs, lses: lses / lses.sum() @ outs,
        "divide by the sum of all e^lse: the shares must add up to 1": lambda outs, lses: lses.exp() @ outs,
    },
    cases={
        "the shares are softmax(lses)": [
            _parts(TOKENS[0] @ TOKENS.T / 2**0.5, TOKENS, 2),
            _parts(X[:, 0], X[:, 1:], 3),
        ],
        "right for small lses, but e^1000 overflows: torch.softmax(lses, 0) does not": [
            _parts(1000 + X[:, 0], X[:, 1:], 3)
        ],
    },
    draw=_drawn,
)
