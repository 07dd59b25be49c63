"""Checks of chapters 1 to 4."""

import math

import torch

from notebooks.source.checks.answers import Exercise, NotYet, exercise, items
from notebooks.source.live_tensors import LiveTensors
from ringlab.basics.blocking_messages import Recv, Send, simulate_messages
from ringlab.basics.naive_attention import TOKENS, naive_attention
from ringlab.basics.online_softmax import merge

# Chapter 1: a softmax that does not overflow, one running update, a merge of two results -----------------------------


def _scores(*scores):
    return [(torch.tensor(each, dtype=torch.float64),) for each in scores]  # float32 would round large ones


STILL = "the largest score still overflows; subtract the largest score, not the smallest, the mean or the"
check_safe_softmax = Exercise(  # scores (n,) of any size -> weights (n,)
    right=lambda scores: torch.softmax(scores, 0),
    cases={
        "each weight is e^score, divided by the sum of all e^score, already for the small scores": _scores(
            [0.0, 1.0, 2.0], [1.0, 0.5, 0.0, -1.0], [2.0]
        ),
        "e^1000 overflows; subtract the largest score from all scores before exp": _scores(
            [1000.0, 1001.0, 1002.0], [9001.0, 9000.0]
        ),
        "e^-1000 is 0, so the sum is 0; subtract the largest score itself, which is -1000 (its absolute value, or a "
        "fixed number, does not help here)": _scores([-1000.0, -1001.0, -1002.0]),
        f"{STILL} first": _scores([0.0, 1.0, 2.0, 1000.0]),
        f"{STILL} last": _scores([1000.0, 2.0, 1.0, 0.0]),
    },
)


def _update(sums):
    """A running update whose new l and o are sums(old, new, f)."""

    def update(m, l, o, scores, v):
        m_new = torch.maximum(m, scores.max())
        p, f = torch.exp(scores - m_new), torch.exp(m - m_new)
        return {"m": m_new, "l": sums(l, p.sum(), f), "o": sums(o, p @ v, f)}

    return update


VALUES = torch.tensor([[1.0, 0.0], [0.0, 1.0], [2.0, 5.0]])
OLD = torch.tensor(1.0), torch.tensor(2.5), torch.tensor([3.0, 4.0])
RIGHT = _update(lambda old, new, f: f * old + new)
ONLY = "only the old part is rescaled by e^(m - m_new); the new part has the new max already"
check_running_update = Exercise(  # (m, l, o), scores (n,), v (n, D) -> (m, l, o), for one query
    right=lambda m, l, o, scores, v: RIGHT(m, l, o, scores, v),
    wrong={
        "m is the largest score of all so far: compare the old m with the new scores": "{'m': scores.max()}",
        "the old part is not rescaled: multiply it by e^(m - m_new)": _update(lambda old, new, f: old + new),
        "the old part is lost: add it, rescaled by e^(m - m_new)": _update(lambda old, new, f: new),
        "rescaled the wrong way round: e^(m - m_new), not e^(m_new - m)": _update(lambda old, new, f: old / f + new),
        ONLY: _update(lambda old, new, f: f * (old + new)),
        "the new part of o is p @ v, values and weights": "{'o': RIGHT(m, l, o, scores, torch.ones_like(v))['o']}",
        "divide o by l at the end only": "{'o': RIGHT(m, l, o, scores, v)['o'] / RIGHT(m, l, o, scores, v)['l']}",
    },
    cases={
        "the max stays at 1": [(*OLD, torch.tensor([0.0, 0.5]), VALUES[:2])],
        "the max grows": [
            (*OLD, torch.tensor([3.0, 2.0]), VALUES[:2]),
            (*OLD, torch.tensor([4.0, -1.0, 2.0]), VALUES),
        ],
        "these are the first keys, so m was -inf": [
            (torch.tensor(-math.inf), torch.tensor(0.0), torch.zeros(2), torch.tensor([3.0, 2.0]), VALUES[:2])
        ],
    },
)


def _two_parts(n, keys, D, generator, shift=0.0):
    """(out, lse) of the first key, and of the others; the scores are so much larger."""
    scores, v = (torch.randn(*size, dtype=torch.float64, generator=generator) for size in ((n, keys), (keys, D)))
    parts = ((scores[:, k], v[k]) for k in (slice(0, 1), slice(1, keys)))
    return [x for s, values in parts for x in (torch.softmax(s, 1) @ values, s.logsumexp(1) + shift)]


def _merged(out_a, lse_a, out_b, lse_b):
    return dict(zip(("out", "lse"), merge(out_a, lse_a, out_b, lse_b), strict=True))


GENERATOR = torch.Generator().manual_seed(0)
PART, NOTHING = _two_parts(3, 5, 2, GENERATOR)[:2], [torch.zeros(3, 2).double(), torch.full((3,), -math.inf).double()]
STABLE = "use torch.logaddexp, or subtract the larger lse before exp"
check_merge_two = Exercise(  # (out (n, D), lse (n,)) of two sets of keys -> (out, lse) of both
    right=_merged,
    wrong={
        "out is the plain average; a part with more weight, a larger lse, counts more": "{'out': (out_a + out_b) / 2}",
        "out is the plain sum, so its weights add up to 2": "{'out': out_a + out_b}",
        "shares are swapped: out_a has e^(lse_a - lse)": "{'out': _merged(out_b, lse_a, out_a, lse_b)['out']}",
        "divide by the sum of both, e^lse": "{'out': lse_a.exp()[:, None] * out_a + lse_b.exp()[:, None] * out_b}",
    },
    cases={
        "weigh out_a by e^(lse_a - lse) and out_b by e^(lse_b - lse); lse is log(e^lse_a + e^lse_b)": [
            tuple(_two_parts(*size, GENERATOR)) for size in ((3, 5, 2), (4, 9, 3), (1, 2, 1))
        ],
        f"right for small lse, but e^1000 overflows; {STABLE}": [tuple(_two_parts(3, 5, 2, GENERATOR, 1000.0))],
        f"right for small lse, but e^-1000 is 0; {STABLE}": [tuple(_two_parts(3, 5, 2, GENERATOR, -1000.0))],
        "a part that saw no key (out = 0, lse = -inf) changes nothing": [(*PART, *NOTHING), (*NOTHING, *PART)],
        "twice no key (lse = -inf for both): -inf - (-inf) is NaN; the result is out = 0 and lse = -inf": [
            (*NOTHING, *NOTHING)
        ],
    },
)


# Chapter 2: attention in blocks, tiles under a causal mask -----------------------------------------------------------


class Peak(LiveTensors):
    """Looks after each operation."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = super().__torch_dispatch__(function, types, args, kwargs)
        self.look()
        return result


def _exact(q, k, v, block_size):
    return naive_attention(q[None, None], k[None, None], v[None, None])[0, 0]


def _one_block_at_a_time(answer):
    """Raise NotYet when it holds all scores at once. (What numpy holds is not seen.)"""
    S, D, block_size = 256, 4, 8
    q, k, v = torch.randn(3, S, D)
    with Peak((q, k, v)) as seen:
        answer(q, k, v, block_size)
    if seen.most > S * S * 4:
        raise NotYet(
            f"right result, but with {S} tokens and blocks of {block_size} you held {seen.most:,} bytes at once. All "
            f"scores have {S * S * 4:,} bytes, one block of them {S * block_size * 4:,}: compute "
            "the scores of one block of keys at a time, and keep none of them"
        )


def _tokens(S, D, block_size, generator):
    return *torch.randn(3, S, D, generator=generator), block_size


LARGE = 20 * torch.tensor([[1.0, 2, 0, 3], [3, 1, 2, 0], [0, 2, 1, 1], [2, 0, 3, 1], [1, 1, 2, 3]], dtype=torch.float64)
check_blockwise = Exercise(  # q, k, v (S, D) -> (S, D)
    right=_exact,
    wrong={"the scores are not divided by sqrt(D)": "torch.softmax(q @ k.T, dim=1) @ v"},
    cases={
        "full attention, a block of keys at a time": [
            _tokens(*sizes, GENERATOR) for sizes in ((7, 4, 7), (7, 4, 1), (7, 4, 3), (12, 2, 4))
        ],
        "scores of 400 to 2800: keep a running max m and subtract it before exp": [(LARGE, LARGE, LARGE, 2)],
    },
    then=_one_block_at_a_time,
)

check_visible_tiles = Exercise(  # how many of n x n square tiles have a pair that a causal mask leaves visible
    right=lambda n: n * (n + 1) // 2,
    wrong={
        "that is all of them": "n * n",
        "the n tiles on the diagonal count too": "n * (n - 1) // 2",
        "half of all tiles, and half of the diagonal more": "n * n / 2",
        "half of all tiles, rounded; half of the diagonal is more": "n * n // 2",
        "those are the tiles on the diagonal; row i sees those before it too": "n",
    },
    said="row i sees tiles 0 to i",
    cases=[(1,), (2,), (3,), (4,), (5,), (32,)],
)

# Chapter 3: the blocks of a GPU, one round by hand, block outputs merged rightly -------------------------------------

check_blocks_of_gpu = Exercise(  # the blocks that GPU 2 computes on in rounds 0, 1, 2, 3
    right=[2, 1, 0, 3],
    wrong={
        "that is a ring that turns the other way; GPU 2 receives from GPU 1": [2, 3, 0, 1],
        "there is no block -1: after KV0 comes KV3, which went round": [2, 1, 0, -1],
        "that is its own block in all rounds; the blocks move on": [2, 2, 2, 2],
    },
    said="GPU 2 starts with its own block and then takes what GPU 1 had",
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
    said=(
        "the scores are [1 1].[3 1]/sqrt(2) and [1 1].[3 3]/sqrt(2), and m is the largest so far; f = e^(2.121 - m); "
        "rescale the old l = 1.979 by f, then add e^(2.828 - m) and e^(4.243 - m)"
    ),
    decimals=3,
)


def _parts(scores, values, chunk):
    """The outs and lses of blocks of so many keys."""
    pairs = zip(scores.split(chunk), values.split(chunk), strict=True)
    return torch.stack([torch.softmax(s, 0) @ v for s, v in pairs]), torch.stack(
        [s.logsumexp(0) for s in scores.split(chunk)]
    )


X = torch.randn(9, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
SHARE = "the share of a block is e^lse over the sum of all e^lse, not lse itself"
check_mended_sum = Exercise(  # outs (P, D) and lses (P,) of the blocks of one query -> its attention (D,)
    right=lambda outs, lses: torch.softmax(lses, 0) @ outs,
    wrong={
        "that is the published sum of averages; each block counts by its share e^lse of the whole": "outs.sum(0)",
        "that is the average of averages; each block counts by its share e^lse of the whole": "outs.mean(0)",
        SHARE: "lses @ outs",
        f"{SHARE}; divided by their sum neither": "lses / lses.sum() @ outs",
        "divide by the sum of all e^lse: the shares must add up to 1": "lses.exp() @ outs",
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
)


# Chapter 4: the block in hand, the order of messages -----------------------------------------------------------------


check_block_in_hand = Exercise(  # that the rank computes on in a round
    right=lambda rank, t, P: (rank - t) % P,
    wrong={
        "your ring turns the other way: blocks come from rank r - 1": "(rank + t) % P",
        "blocks have the numbers 0 to P - 1: take the remainder by P": "rank - t",
    },
    said="each hop brings the block of the rank before",
    cases=[(rank, t, P) for P in (4, 5, 1, 2, 3, 7) for t in range(P) for rank in range(P)],
)


@exercise
def check_ring_order(answer):
    """(rank, P) -> the rank's [Send, Recv] of one hop, in an order that does not deadlock."""
    slow = ""
    for world_size in (2, 3, 4, 5, 6, 9, 16):
        programs = [_steps(answer(rank, world_size)) for rank in range(world_size)]
        for rank, program in enumerate(programs):
            send, receive = Send((rank + 1) % world_size), Recv((rank - 1) % world_size)
            if len(program) != 2 or set(program) != {send, receive}:
                raise NotYet(f"rank {rank} of {world_size}: expected one {send} and one {receive}, got {program}")
        outcome = simulate_messages(programs)
        if outcome.waits_for:
            raise NotYet(f"{world_size} ranks deadlock; these wait for each other in a circle: {outcome.cycle}")
        if outcome.phases > 2 + world_size % 2:
            slow = slow or f"{world_size} ranks need {outcome.phases} phases"
    few = "When even ranks send first, 2 phases are enough, 3 with an odd number of ranks"
    return f"no deadlock, but {slow}: messages wait for each other in a row. {few}" if slow else None


def _steps(given):
    steps = items(given, "a list of one Send and one Recv")
    for step in steps:
        if not isinstance(step, Send | Recv):
            raise NotYet(f"expected a list of one Send and one Recv, got a {type(step).__name__} in it")
    return [Send(int(step.to)) if isinstance(step, Send) else Recv(int(step.source)) for step in steps]
