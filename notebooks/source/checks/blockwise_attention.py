"""Checks of chapter 2: attention in blocks, tiles under a causal mask, the largest tensor."""

import tracemalloc
from collections.abc import Callable
from random import Random
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from notebooks.source.checks.answers import (
    NotYet,
    compare_formula,
    compare_number,
    difference,
    draws,
    exercise,
    torch_generator,
)
from ringlab.basics.naive_attention import naive_attention

PRODUCTS = ("mm", "mv", "dot", "_attention", "_for_cpu")  # so end the names of torch's products, and of its attention


class PeakMemory(TorchDispatchMode):
    """Notes the most bytes that tensors had at once which were made inside the `with`.

    It also notes the most rows of `keys` (S, D), or of `values`, that went into one product of matrices.
    """

    bytes = 0
    rows = 0

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self.known = torch.cat((keys, values))
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}  # two views of one storage count once

    def __torch_dispatch__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        D = self.known.shape[1]
        for x in args if function.__name__.partition(".")[0].endswith(PRODUCTS) else ():
            for way in (x, x.mT) if isinstance(x, Tensor) and x.ndim > 1 else ():
                if way.shape[-1] == D and x.numel() > self.rows * D:
                    self.rows = max(self.rows, int((way.reshape(-1, 1, D) == self.known).all(-1).any(-1).sum()))
        result = function(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else (result,):
            if isinstance(x, Tensor):
                storage = x.untyped_storage()
                self.alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.alive = {key: (ref, size) for key, (ref, size) in self.alive.items() if not ref.expired()}
        self.bytes = max(self.bytes, sum(size for _, size in self.alive.values()))
        return result


@exercise
def check_blockwise(answer: Callable[..., Tensor]) -> str | None:
    """Attention of q, k, v (S, D) with blocks of `block_size` keys. (How many keys numpy takes at once is not seen.)"""
    generator = torch.Generator().manual_seed(0)
    drawn = [(r.randint(1, 20), r.randint(1, 6), r.randint(1, 6), torch_generator(r)) for r in draws()]
    for S, D, block_size, generator in (
        *((*sizes, generator) for sizes in ((7, 4, 7), (7, 4, 1), (7, 4, 3), (12, 2, 4))),
        *drawn,
    ):
        q, k, v = torch.randn(3, S, D, generator=generator)
        exact = naive_attention(q[None, None], k[None, None], v[None, None])[0, 0]
        given = answer(q, k, v, block_size)
        if problem := difference(given, exact):
            if difference(given, torch.softmax(q @ k.T, dim=1) @ v) is None:
                problem = "the scores are not divided by sqrt(D)"
            raise NotYet(f"{problem}, with {S} keys in blocks of {block_size}, D = {D}")

    # Scores to 2800: float32 rounds each product and sum of a score, and the error of the score is that of its e^score.
    tokens, rounds = 20 * torch.tensor([[1.0, 2, 0, 3], [3, 1, 2, 0], [0, 2, 1, 1], [2, 0, 3, 1], [1, 1, 2, 3]]), 1e-3
    exact = naive_attention(tokens[None, None], tokens[None, None], tokens[None, None])[0, 0]
    if problem := difference(answer(tokens, tokens, tokens, 2), exact, rounds):
        raise NotYet(f"{problem}, for scores of 400 to 2800: keep a running max m and subtract it before exp")

    S, D, block_size = 256, 4, Random().randint(5, 16)
    q, k, v = torch.randn(3, S, D)
    exact = naive_attention(q[None, None], k[None, None], v[None, None])[0, 0]
    with PeakMemory(k, v) as seen:
        first = answer(q, k, v, block_size)
    tracemalloc.start()  # the memory of numpy and of lists
    try:
        second = answer(q, k, v, block_size)
        largest = max(seen.bytes, tracemalloc.get_traced_memory()[1])
    finally:
        tracemalloc.stop()
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


@exercise
def check_visible_tiles(answer: Callable[[int], int]) -> str | None:
    """How many of n x n square tiles have a pair that a causal mask leaves visible."""
    compare_formula(
        answer,
        lambda n: n * (n + 1) // 2,
        {
            "that is all of them": lambda n: n * n,
            "the n tiles on the diagonal count too": lambda n: n * (n - 1) // 2,
            "half of all tiles, and half of the diagonal more": lambda n: n * n / 2,
            "half of all tiles, rounded; half of the diagonal is more": lambda n: n * n // 2,
            "those are the tiles on the diagonal; row i sees those before it too": lambda n: n,
        },
        [(1,), (2,), (3,), (4,), (5,), (32,)],
        "row i sees tiles 0 to i",
        lambda random: (random.randint(6, 500),),
    )


@exercise
def check_largest_tensor(answer: Any) -> str | None:
    """Bytes of the largest tensor of blockwise attention, S = 1,000,000, H = 8, D = 64, block 256, float32."""
    whole = 8 * 1_000_000 * 64 * 4
    hints = {
        8 * 256 * 256 * 4: "that is the tile of scores, 2 MiB; one of q, k, v and out is larger",
        8 * 1_000_000 * 1_000_000 * 4: "that is the square of scores, which is never made",
        whole // 4: "that is how many numbers it has; each is 4 bytes",
        whole // 8: "that is one head of 8",
        4 * whole: "that is q, k, v and out together; the largest single one",
    }
    compare_number(answer, whole, hints, "out is (B, H, S, D) of 4 bytes each")
    return "q, k, v and out are the large tensors now; one tile of scores has only 2 MiB"
