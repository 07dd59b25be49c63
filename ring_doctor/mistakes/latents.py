"""The mistakes of a ring of latents. Only these are compared with the answers of such a ring.

Shapes: those of asking/latent_case.py.

Before: states.py. After: explaining/diagnosis.py.
Source: docs of Megatron-LM #5049 and vllm #53684, which ask for such rings; the page names who had a mistake.
"""

from functools import partial

import torch
from torch import Tensor

from ring_doctor.asking.latent_case import LatentCase, LatentSteps, R
from ring_doctor.mistakes import Change, but, in_the_end, told


def detached_after(hops: int, steps: LatentSteps, case: LatentCase, rank: int, x: Tensor) -> Tensor:
    """The blocks that made more hops to this rank bring no gradient home."""
    near = torch.cat([case.positions((rank - t) % case.world_size) for t in range(min(hops + 1, case.world_size))])
    return x.detach().index_copy(2, near, x[:, :, near])


def of_own_block(steps: LatentSteps, case: LatentCase, rank: int, x: Tensor) -> Tensor:
    """The numbers of the rank's own tokens in place of those of each block."""
    return x[:, :, case.positions(rank)[_local(case).clamp(max=len(case.positions(rank)) - 1)]]


def _local(case: LatentCase) -> Tensor:
    """(S,): where in its chunk a token stands."""
    chunks = [torch.arange(len(case.positions(rank)))[None, None, :, None] for rank in range(case.world_size)]
    return case.join(chunks)[0, 0, :, 0]


def times_ranks(*names: str) -> Change:
    return in_the_end(lambda steps, case, results: {name: case.world_size * results[name] for name in names})


CHANGES = {
    "chosen_positions_local": [but(named=lambda steps, case: _local(case))],
    "gradient_of_latents_dropped": [
        but(**dict.fromkeys(steps, partial(detached_after, hops)))
        for steps in (("latents", "rope"), ("latents",))
        for hops in (1, 0)
    ],
    "rope_of_the_own_block": [but(rope=of_own_block)],
    "scale_without_the_rope": [
        but(scale=lambda steps, case: (case.head_dim - R) ** -0.5 if case.scale is None else case.scale)
    ],
    "dw_counted_once_a_rank": [times_ranks("dw_k", "dw_v"), times_ranks("dw_k"), times_ranks("dw_v")],
}
MISTAKES = told("Latents", CHANGES)
