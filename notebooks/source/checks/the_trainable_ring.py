"""Checks of chapter 8: attention on a kernel, the gradient of a shared head."""

from functools import partial

import torch

from notebooks.source.checks.answers import Exercise, NotYet, difference, torch_generator
from notebooks.source.checks.fused_kernels import plain_kernel


def _outs(kernel, q, k, v, blocks):
    return [kernel(q, *pair)[0] for pair in zip(k.chunk(blocks), v.chunk(blocks), strict=True)]


def _blocks(S, D, blocks, generator, size=1.0, scale=1.0):
    """A kernel and its inputs; `size` 1000: scores in the thousands."""
    q, k, v = torch.randn(3, S, D, generator=generator).unbind()
    return partial(plain_kernel, scale=scale), q * size, k, v, blocks


def _drawn_blocks(r):
    D, blocks = r.randint(1, 6), r.randint(2, 7)
    return _blocks(blocks * r.randint(1, 4), D, blocks, torch_generator(r), scale=r.uniform(0.3, 3))


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


GENERATOR = torch.Generator().manual_seed(0)
check_attention_on_a_kernel = Exercise(  # kernel, q, k, v (S, D), blocks -> attention, of a kernel's (out, lse)
    right=lambda kernel, q, k, v, blocks: kernel(q, k, v)[0],
    wrong={
        "that is the sum of the blocks; each has the share e^lse_j of the whole": lambda *case: sum(_outs(*case)),
        "that is the average of the blocks; each has the share e^lse_j of the whole": (
            lambda *case: torch.stack(_outs(*case)).mean(dim=0)
        ),
        "this is not the attention of the kernel, whose scale is its own; merge what it returns": (
            lambda kernel, q, k, v, blocks: plain_kernel(q, k, v)[0]
        ),
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
    draw=_drawn_blocks,
    then=_each_block_once,
)


def _heads(B, G, N, S, D, generator):
    return torch.randn(B, G * N, S, D, generator=generator), G


check_group_gradient = Exercise(  # dk (B, H, S, D) of repeated heads, G -> dk (B, G, S, D)
    right=lambda dk, G: dk.unflatten(1, (G, -1)).sum(dim=2),
    wrong={
        "query head h used head h // (H/G), so neighbours share a head": lambda dk, G: dk.unflatten(1, (-1, G)).sum(
            dim=1
        ),
        "each query head adds its part: a sum, not the mean": lambda dk, G: dk.unflatten(1, (G, -1)).mean(dim=2),
        "that is the part of the first query head of each group": lambda dk, G: dk.unflatten(1, (G, -1))[:, :, 0],
    },
    cases={
        "the sum over the query heads that share a head": [
            _heads(1, 2, 2, 3, 4, GENERATOR),
            _heads(2, 2, 3, 5, 1, GENERATOR),
        ],
        "with one head": [_heads(1, 1, 4, 2, 3, GENERATOR)],
        "without groups it stays as it is": [_heads(1, 3, 1, 2, 3, GENERATOR)],
    },
    draw=lambda r: _heads(*(r.randint(1, 4) for _ in range(5)), torch_generator(r)),
)
