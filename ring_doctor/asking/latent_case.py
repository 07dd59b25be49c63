"""A case for a ring of latents; and such a ring on paper, rank by rank.

    f(q, latents, rope_keys, w_k, w_v, ...)          K_h = [w_k[h] c, rope], V_h = w_v[h] c: a w_k marks it

A ring with `chosen` is asked for chosen keys too. Nothing but q has heads, so a ring gets the rest without them.

Shapes: q and out (B, H, S, D + R), rope_keys (B, 1, S, R), latents (B, 1, S, L), chosen (B, 1, S, COUNT), w_k
(H, D, L), w_v (H, L, L), with L = D + R.

Before: state_case.py. After: questions.py, which asks; mistakes/latents.py, the steps that go wrong.
Source: DeepSeek-AI 2024 (V2), equations 9 to 19; DeepSeek-AI 2025 (V3.2), for the chosen keys.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ring_doctor.asking.case import Case
from ring_doctor.asking.state_case import leaves, right_of, with_gradients
from ringlab.support.rounding import Right

LATENTS = "latents"
R, COUNT = 2, 3  # numbers of a key that are rotated; chosen keys
HIDDEN = -1e4  # a score whose weight is 0


@dataclass(frozen=True)
class OneHead:
    """A ring of latents as f(q, k, v, ...), so that it is asked like a ring."""

    function: Callable[..., Any]

    @property
    def __wrapped__(self) -> Callable[..., Any]:  # where inspect.signature looks
        return self.function

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        options |= {"chosen": options["chosen"][:, 0].long()} if "chosen" in options else {}
        return self.function(q, v[:, 0], k[:, 0], **options)


@dataclass(frozen=True)
class LatentCase(Case):
    """A case for a ring of latents."""

    choose: bool = False  # attention to chosen keys

    @property
    def names(self) -> tuple[str, ...]:
        return ("q", "rope_keys", "latents", *["chosen"] * self.choose)

    def whole(self) -> tuple[Tensor, ...]:
        """The inputs, and d_out."""
        q, k, v, d_out = Case.whole(replace(self, kv_heads=1))
        generator = torch.Generator().manual_seed(self.seed + 1)
        some = torch.rand(self.batch, 1, self.seq_len, self.seq_len, generator=generator) * self.visible()
        best, at = some.topk(min(COUNT, self.seq_len))
        chosen = [at.masked_fill(best == 0, -1).to(q.dtype)] if self.choose else []
        return (q, k[..., :R], v, *chosen, d_out)

    @property
    def learned(self) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(self.seed + 2)
        H, D, L = self.heads, self.head_dim - R, self.head_dim
        shapes = {"w_k": (H, D, L), "w_v": (H, L, L)}
        return {n: torch.randn(x, generator=generator, dtype=torch.float64).to(self.dtype) for n, x in shapes.items()}

    def features(self) -> list[str]:
        return [*["chosen keys"] * self.choose, *super().features()]

    def mask(self) -> str:
        return f"{LATENTS}, {super().mask()}"

    def right(self) -> dict[str, Right]:
        """The right results, and how far rounding may move them."""
        return right_of(self, compute_latents)


# On paper -------------------------------------------------------------------------------------------------------------

Block = Callable[[LatentCase, int, Tensor], Tensor]  # rank: the latents, or rope keys, of all tokens that it uses


@dataclass(frozen=True)
class LatentSteps:
    """What a rank does with its queries and the blocks of all ranks."""

    latents: Block = lambda case, rank, x: x
    rope: Block = lambda case, rank, x: x
    scale: Callable[[LatentCase], float] = lambda case: case.head_dim**-0.5 if case.scale is None else case.scale
    named: Callable[[LatentCase], Tensor] = lambda case: torch.arange(case.seq_len)  # (S,): what a choice calls a token
    at_the_end: Callable[[LatentCase, dict[str, Tensor]], dict[str, Tensor]] = lambda case, results: results


def compute_latents(case: LatentCase, steps: LatentSteps = LatentSteps()) -> dict[str, Tensor]:
    """Every result of a ring with these steps: {name: whole}, float64."""
    inputs, d_out = leaves(case)
    x = dict(zip((*case.names, *case.learned), inputs, strict=True))
    named = steps.named(case)
    outs = [_attention(case, steps, rank, named, x) for rank in range(case.world_size)]
    return steps.at_the_end(case, with_gradients(case, case.join(outs), inputs, d_out))


def _attention(case: LatentCase, steps: LatentSteps, rank: int, named: Tensor, x: dict[str, Tensor]) -> Tensor:
    """(B, H, C, L): out of a rank."""
    at = case.positions(rank)
    c, rope, seen = steps.latents(case, rank, x["latents"]), steps.rope(case, rank, x["rope_keys"]), case.visible()[at]
    if case.choose:
        seen = seen & (x["chosen"][:, :, at, :, None] == named).any(dim=-2)
    k = torch.cat([c @ x["w_k"].mT, rope.expand(-1, case.heads, -1, -1)], dim=-1)
    scores = x["q"][:, :, at] @ k.mT * steps.scale(case)
    return (scores.masked_fill(~seen, HIDDEN).softmax(dim=-1) * seen) @ (c @ x["w_v"].mT)
