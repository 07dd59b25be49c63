"""Checks of chapter 8: the share of a merge, attention on a kernel, a kernel's lse made natural."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from notebooks.source.checks.answers import (
    NotYet,
    as_tensor,
    difference,
    draws,
    exercise,
    in_order,
    several,
    torch_generator,
)


def plain_kernel(q: Tensor, k: Tensor, v: Tensor, scale: float = 1.0, causal: bool = False) -> tuple[Tensor, Tensor]:
    """Attention of q (Sq, D) over k and v (Sk, D): out (Sq, D) and the natural lse (Sq,)."""
    q, k, v = (as_tensor(x) for x in (q, k, v))  # of numpy, too
    scores = scale * (q @ k.T) / q.shape[1] ** 0.5
    if causal:  # the last query sees all keys
        scores = scores.masked_fill(torch.ones_like(scores).tril(max(0, len(k) - len(q))) == 0, -math.inf)
    return torch.softmax(scores, dim=1) @ v, scores.logsumexp(dim=1)


@exercise
def check_merging_share(answer: Callable[[Tensor, Tensor], Tensor]) -> str | None:
    """(lse, lse_j), both (Sq,) -> the share that the second has of the merged result."""
    lse, lse_j = torch.tensor([0.0, 1.0, -2.0]), torch.tensor([0.0, 3.0, -2.5])
    given, expected = answer(lse, lse_j), torch.sigmoid(lse_j - lse)
    hints = [
        (1 - expected, "that is the share of what was merged before; lerp wants that of the new block"),
        (lse_j.exp(), "divide by the sum of both, e^lse + e^lse_j"),
        ((lse_j - lse).exp(), "that is e^lse_j / e^lse; divide by the sum of both, e^lse + e^lse_j"),
    ]
    for wrong, hint in hints:
        if difference(given, wrong) is None:
            raise NotYet(hint)
    if problem := difference(given, expected):
        raise NotYet(f"{problem}: it is e^lse_j / (e^lse + e^lse_j)")
    for shift in (1000, -1000):
        if difference(answer(lse.double() + shift, lse_j.double() + shift), expected):
            what = "overflows" if shift > 0 else "is 0"
            raise NotYet(f"lse near {shift}: e^{shift} {what}; the share depends on the difference of the two only")
    many = torch.linspace(-5, 5, 7)
    if problem := difference(answer(many, -many), torch.sigmoid(-2 * many)):
        raise NotYet(f"{problem}, with 7 queries")
    for random in draws():
        sizes = 2, random.randint(1, 9)
        many = 3 * torch.randn(*sizes, dtype=torch.float64, generator=torch_generator(random)) + random.uniform(
            -2e3, 2e3
        )
        if problem := difference(answer(*many), torch.sigmoid(many[1] - many[0])):
            raise NotYet(f"{problem}, with {many.shape[1]} queries: it is e^lse_j / (e^lse + e^lse_j)")


@exercise
def check_attention_on_a_kernel(answer: Callable[..., Tensor]) -> str | None:
    """(kernel, q, k, v, blocks) -> attention of q, k, v (S, D), with a kernel that returns (out, lse)."""
    generator = torch.Generator().manual_seed(0)
    drawn = [(r.randint(2, 7), r.randint(1, 6), r.randint(1, 4), r.uniform(0.3, 3)) for r in draws()]
    cases = [(12, 4, 3, 1.0, 1.0), (10, 2, 4, 1.0, 1.0), (7, 3, 1, 1.0, 1.0), (20, 4, 5, 1000.0, 1.0)]
    cases += [(blocks * keys, D, blocks, 1.0, scale) for blocks, D, keys, scale in drawn]
    for S, D, blocks, size, scale in cases:
        q, k, v = torch.randn(3, S, D, generator=generator).unbind()
        q = q * size  # 1000: scores in the thousands
        seen = []

        def kernel(q: Tensor, k: Tensor, v: Tensor, seen: list[int] = seen, scale: float = scale) -> Any:
            seen.append(len(k))
            return plain_kernel(q, k, v, scale)

        given, (exact, _) = answer(kernel, q, k, v, blocks), plain_kernel(q, k, v, scale)
        parts = [plain_kernel(q, *pair, scale)[0] for pair in zip(k.chunk(blocks), v.chunk(blocks), strict=True)]
        where = f"S = {S}, {blocks} block(s)" + (", large scores" if size > 1 else "")
        if scale != 1 and difference(given, plain_kernel(q, k, v)[0]) is None:
            raise NotYet(
                f"{where}: this is not the attention of the kernel, whose scale is its own; merge what it returns"
            )
        if problem := difference(given, exact):
            hint = "; after each merge lse becomes log(e^lse + e^lse_j), without e^lse itself, which overflows"
            if blocks > 1:
                for wrong, name in ((sum(parts), "the sum"), (sum(parts) / blocks, "the average")):
                    if difference(given, wrong) is None:
                        raise NotYet(f"{where}: that is {name} of the blocks; each has the share e^lse_j of the whole")
            raise NotYet(f"{where}: {problem}{hint if as_tensor(given).shape == exact.shape else ''}")
        if len(seen) != blocks or sum(seen) != S or max(seen) > math.ceil(S / blocks):
            raise NotYet(f"{where}: right numbers, but the kernel saw {seen} keys; expected {blocks} block(s) of {S}")


@exercise
def check_natural_lse(answer: Callable[..., tuple[Tensor, Tensor]]) -> str | None:
    """(kernel, q, k, v) -> out and the natural lse, for a kernel whose lse is natural or in base 2."""
    generator = torch.Generator().manual_seed(0)

    both = ["natural", "in base 2"]
    tried = [(*sizes, both, False) for sizes in ((6, 4), (3, 2), (5, 9))]
    tried += [(r.randint(1, 9), r.randint(1, 12), r.sample(both, 2), r.choice((True, False))) for r in draws()]
    tried.append((4, 3, both[::-1], True))  # the other order, and a mask, at least once
    for S, D, names, causal in tried:
        q, k, v = torch.randn(3, S, D, generator=generator).unbind()
        out, lse = plain_kernel(q, k, v, causal=causal)
        for name in names:

            def kernel(q: Tensor, k: Tensor, v: Tensor, name: str = name, causal: bool = causal) -> Any:
                out, lse = plain_kernel(q, k, v, causal=causal)
                return out, lse / math.log(2) if name == "in base 2" else lse

            where = f"S = {S}, D = {D}, a kernel whose lse is {name}: "
            given_out, given_lse = several(answer(kernel, q, k, v), ("out", "lse"))
            in_order((given_out, given_lse), {"out": out, "lse": lse})
            if causal and S > 1 and difference(given_out, plain_kernel(q, k, v)[0]) is None:
                raise NotYet(f"{where}this is not what the kernel returns, whose causal mask is its own")
            if problem := difference(given_lse, lse):
                hints = [
                    (lse * math.log(2), "it was natural already; ask the kernel before you change its lse"),
                    (lse / math.log(2), "it was natural already; ask the kernel before you change its lse"),
                ]
                if name == "in base 2":
                    hints = [
                        (lse / math.log(2), "you return it as it came; ask the kernel, with one key of score 1"),
                        (lse / math.log(2) ** 2, "multiply by log 2, do not divide: log2(a) = log(a) / log(2)"),
                    ]
                raise NotYet(where + next((hint for x, hint in hints if difference(given_lse, x) is None), problem))
            if problem := difference(given_out, out):
                raise NotYet(f"{where}{problem} in out: the base is a matter of lse only, out is right as it is")
