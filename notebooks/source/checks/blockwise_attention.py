"""Checks of chapter 2: attention in blocks, tiles under a causal mask, the largest tensor."""

import tracemalloc
from random import Random

import torch

from notebooks.source.checks.answers import Exercise, NotYet, difference, torch_generator
from notebooks.source.trial import LiveTensors
from ringlab.basics.naive_attention import naive_attention

PRODUCTS = ("mm", "mv", "dot", "_attention", "_for_cpu")  # so end the names of torch's products, and of its attention


class PeakMemory(LiveTensors):
    """Notes the most bytes at once, and the most rows of `keys` (S, D), or of `values`, in one product of matrices."""

    rows = 0

    def __init__(self, keys, values):
        super().__init__((keys, values))
        self.known = torch.cat((keys, values))

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        D = self.known.shape[1]
        for x in args if function.__name__.partition(".")[0].endswith(PRODUCTS) else ():
            for way in (x, x.mT) if isinstance(x, torch.Tensor) and x.ndim > 1 else ():
                if way.shape[-1] == D and x.numel() > self.rows * D:
                    self.rows = max(self.rows, int((way.reshape(-1, 1, D) == self.known).all(-1).any(-1).sum()))
        result = super().__torch_dispatch__(function, types, args, kwargs)
        self.look()
        return result


def _exact(q, k, v, block_size):
    return naive_attention(q[None, None], k[None, None], v[None, None])[0, 0]


def _one_block_at_a_time(answer):
    """Raise NotYet when it computes all scores, or takes more keys at once. (How many numpy takes is not seen.)"""
    S, D, block_size = 256, 4, Random().randint(5, 16)
    q, k, v = torch.randn(3, S, D)
    with PeakMemory(k, v) as seen:
        first = answer(q, k, v, block_size)
    tracemalloc.start()  # the memory of numpy and of lists
    try:
        second = answer(q, k, v, block_size)
        largest = max(seen.most, tracemalloc.get_traced_memory()[1])
    finally:
        tracemalloc.stop()
    exact = _exact(q, k, v, block_size)
    if problem := difference(first, exact) or difference(second, exact):
        raise NotYet(f"{problem}, with {S} keys in blocks of {block_size}, D = {D}")
    if largest > S * S * 4:
        raise NotYet(
            f"right result, but with {S} tokens and blocks of {block_size} you held {largest:,} bytes at once. All "
            f"scores have {S * S * 4:,} bytes, one block of them {S * block_size * 4:,}: compute "
            "the scores of one block of keys at a time, and keep none of them"
        )
    if seen.rows > block_size:
        raise NotYet(
            f"right result, but with blocks of {block_size} you took {seen.rows} keys at once into a product: compute "
            "the scores of one block of keys at a time, for all queries or for some of them"
        )


def _tokens(S, D, block_size, generator):
    return *torch.randn(3, S, D, generator=generator), block_size


GENERATOR = torch.Generator().manual_seed(0)
LARGE = 20 * torch.tensor([[1.0, 2, 0, 3], [3, 1, 2, 0], [0, 2, 1, 1], [2, 0, 3, 1], [1, 1, 2, 3]], dtype=torch.float64)
check_blockwise = Exercise(  # q, k, v (S, D) -> (S, D)
    right=_exact,
    wrong={"the scores are not divided by sqrt(D)": lambda q, k, v, block_size: torch.softmax(q @ k.T, dim=1) @ v},
    cases={
        "full attention, a block of keys at a time": [
            _tokens(*sizes, GENERATOR) for sizes in ((7, 4, 7), (7, 4, 1), (7, 4, 3), (12, 2, 4))
        ],
        "scores of 400 to 2800: keep a running max m and subtract it before exp": [(LARGE, LARGE, LARGE, 2)],
    },
    draw=lambda r: _tokens(r.randint(1, 20), r.randint(1, 6), r.randint(1, 6), torch_generator(r)),
    then=_one_block_at_a_time,
)

check_visible_tiles = Exercise(  # how many of n x n square tiles have a pair that a causal mask leaves visible
    right=lambda n: n * (n + 1) // 2,
    wrong={
        "that is all of them": lambda n: n * n,
        "the n tiles on the diagonal count too": lambda n: n * (n - 1) // 2,
        "half of all tiles, and half of the diagonal more": lambda n: n * n / 2,
        "half of all tiles, rounded; half of the diagonal is more": lambda n: n * n // 2,
        "those are the tiles on the diagonal; row i sees those before it too": lambda n: n,
    },
    cases={"row i sees tiles 0 to i": [(1,), (2,), (3,), (4,), (5,), (32,)]},
    draw=lambda random: (random.randint(6, 500),),
)

WHOLE = 8 * 1_000_000 * 64 * 4
check_largest_tensor = Exercise(  # bytes, of blockwise attention with S = 1,000,000, H = 8, D = 64, block 256, float32
    right=WHOLE,
    wrong={
        "that is the tile of scores, 2 MiB; one of q, k, v and out is larger": 8 * 256 * 256 * 4,
        "that is the square of scores, which is never made": 8 * 1_000_000 * 1_000_000 * 4,
        "that is how many numbers it has; each is 4 bytes": WHOLE // 4,
        "that is one head of 8": WHOLE // 8,
        "that is q, k, v and out together; the largest single one": 4 * WHOLE,
    },
    cases={"out is (B, H, S, D) of 4 bytes each": [()]},
    remark="q, k, v and out are the large tensors now; one tile of scores has only 2 MiB",
)
