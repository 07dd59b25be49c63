"""Checks of chapter 8: the share of a merge, attention on a kernel, the bytes of training."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from notebooks.checks.answers import NotYet, difference, exercise


@exercise
def check_merging_share(answer: Callable[[Tensor, Tensor], Tensor]) -> str | None:
    """(lse, lse_j), both (Sq,) -> the share that the second has of the merged result."""
    lse, lse_j = torch.tensor([0.0, 1.0, -2.0]), torch.tensor([0.0, 3.0, -2.5])
    given = answer(lse, lse_j)
    expected = torch.sigmoid(lse_j - lse)
    if difference(given, 1 - expected) is None:
        raise NotYet("that is the share of what was merged before; lerp wants that of the new block")
    if difference(given, lse_j.exp()) is None:
        raise NotYet("divide by the sum of both, e^lse + e^lse_j")
    if problem := difference(given, expected):
        raise NotYet(f"{problem}: it is e^lse_j / (e^lse + e^lse_j)")
    if difference(answer(1000 + lse, 1000 + lse_j), expected):
        raise NotYet("e^1000 overflows; only the difference of the two counts")


@exercise
def check_attention_on_a_kernel(answer: Callable[..., Tensor]) -> str | None:
    """(kernel, q, k, v, blocks) -> attention of q, k, v (S, D), with a kernel that returns (out, lse)."""
    q, k, v = torch.randn(3, 12, 4, generator=torch.Generator().manual_seed(0)).unbind()
    seen = []

    def kernel(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        seen.append(len(k))
        scores = q @ k.T / 2
        return torch.softmax(scores, dim=1) @ v, scores.logsumexp(dim=1)

    averages = torch.stack([kernel(q, k_j, v_j)[0] for k_j, v_j in zip(k.chunk(3), v.chunk(3), strict=True)])
    seen.clear()
    given = answer(kernel, q, k, v, 3)
    for wrong, name in ((averages.mean(0), "the average of the blocks"), (averages.sum(0), "the sum of the blocks")):
        if difference(given, wrong) is None:
            raise NotYet(f"that is {name}; each has the share e^lse_j of the whole")
    if problem := difference(given, kernel(q, k, v)[0]):
        raise NotYet(f"{problem}; after each merge lse becomes log(e^lse + e^lse_j)")
    if seen[:-1] != [4, 4, 4]:
        raise NotYet(f"right numbers, but the kernel saw {seen[:-1]} keys at a time; expected 3 blocks of 4")


@exercise
def check_bytes_of_training(answer: Any) -> str | None:
    """Bytes a rank sends forwards and backwards: P = 8, C = 16,384, H = 32, G = 8, D = 128, bfloat16."""
    numbers = 2 * 8 * 16_384 * 128
    right = (7 * 2 + 7 * 2 + 8 * 4) * numbers
    hints = {
        4 * right: "K and V travel with their 8 heads, not with 32",
        (7 * 2 + 7 * 2 + 8 * 2) * numbers: "the gradients travel in float32, 4 bytes",
        (7 * 2 + 7 * 2 + 7 * 4) * numbers: "the gradients need 8 hops, the last one brings them home",
        (7 * 2 + 8 * 4) * numbers: "K and V go round twice: once forwards, once backwards",
        right // 2: "both K and V travel, and both gradients",
    }
    if answer == right:
        return f"{right / 2**30:.3g} GiB, of which more than half are gradients"
    raise NotYet(hints.get(answer, "7 hops of K and V, twice, and 8 hops of their gradients"))
