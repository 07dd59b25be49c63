"""The base-2 trap: some kernels return the log-sum-exp in base 2, and a merge in the wrong base is silently wrong.

    "natural"        lse = log  Σ e^s            merge with e^lse
    "log2 of e"      lse = log2 Σ e^s            merge with 2^lse: this lse is the natural one times log2(e) = 1.4427
    "log2 of 2"      lse = log2 Σ 2^s            merge with neither, unless the softmax itself was in base 2

Here s is a score of the row, and the sum Σ goes over the keys of a block.

Shapes: out (..., Sq, D), lse (..., Sq), as in ringlab/basics/online_softmax.py, whose `merge` expects the natural lse.

    $ python -m ringlab.training.log2_lse
    largest error of two halves of 8 tokens, merged:   with e^lse   with 2^lse
        lse natural                                           0.0000       0.1540
        lse log2 of e                                         0.1472       0.0000
        lse log2 of 2                                         0.0122       0.1641
    ok    only the matching merge is right; the wrong ones give no NaN; two calls tell which one to use

Before: grouped_query.py. After: softcap.py, then fused_block.py, whose kernels return the natural lse.
Source: "about log2 lse" in TheRainstorm's Interleaved Ring Attention, on FlashInfer and FlashMLA; recomputed here. Its
merge formula has a misprint: exp(lse_i) twice, where it means exp(lse_1) + exp(lse_2).
"""

import math
import sys
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ringlab.basics.naive_attention import TOKENS
from ringlab.basics.online_softmax import merge
from ringlab.support.rounding import exact_attention

CONVENTIONS = ("natural", "log2 of e", "log2 of 2")


def to_natural(lse: Tensor) -> Tensor:
    """log2 Σ e^s -> log Σ e^s, any shape. Call it on a kernel's base-2 lse before `merge`."""
    return lse * math.log(2)


def merge_base2(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """`merge` with 2^lse in place of e^lse and log2 in place of log, like FlashInfer's merge_state. The same shapes."""
    out, lse = merge(out_a, to_natural(lse_a), out_b, to_natural(lse_b))  # 2^x = e^(x log 2)
    return out, lse / math.log(2)


def attention_with_lse(q: Tensor, k: Tensor, v: Tensor, convention: str) -> tuple[Tensor, Tensor]:
    """Attention by the usual softmax: out (..., Sq, D), and the lse (..., Sq) in one of the three conventions.

    q is (..., Sq, D), k and v are (..., Sk, D). Raises ValueError for another convention.
    """
    if convention not in CONVENTIONS:
        raise ValueError(f"convention is {convention!r}; expected one of {', '.join(CONVENTIONS)}")
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    out = torch.softmax(scores, dim=-1) @ v
    if convention == "log2 of 2":
        return out, torch.logsumexp(scores * math.log(2), dim=-1) / math.log(2)
    lse = torch.logsumexp(scores, dim=-1)
    return out, lse if convention == "natural" else lse / math.log(2)


def which_convention(attention: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]) -> str:
    """Which of the three conventions a kernel uses: attention(q, k, v) -> (out, lse), on (1, 1, S, D).

    Two small calls tell. For one key of score 1 the three lse are 1, log2(e) and 1. For two keys of score 0 they are
    log(2), 1 and 1. Raises ValueError when the kernel's answers are none of these.
    """
    one = torch.ones(1, 1, 1, 1)
    zeros = torch.zeros(1, 1, 2, 1)
    answers = (float(attention(one, one, one)[1]), float(attention(one, zeros, zeros)[1]))
    known = {"natural": (1, math.log(2)), "log2 of e": (1 / math.log(2), 1), "log2 of 2": (1, 1)}
    for convention, expected in known.items():
        if all(math.isclose(a, b, rel_tol=1e-2) for a, b in zip(answers, expected, strict=True)):
            return convention
    raise ValueError(f"lse of one key of score 1 and of two keys of score 0 is {answers}; expected one of {known}")


def main() -> int:
    x = TOKENS[None, None]  # (B, H, S, D) = (1, 1, 8, 2)
    exact = exact_attention(x, x, x)["out"]
    print("largest error of two halves of 8 tokens, merged:   with e^lse   with 2^lse")
    right, ok = [], True
    for convention in CONVENTIONS:
        halves = [attention_with_lse(x, keys, keys, convention) for keys in x.split(4, dim=2)]
        merged = [rule(*halves[0], *halves[1])[0] for rule in (merge, merge_base2)]
        errors = [exact.error(out).max().item() for out in merged]
        ok &= all(math.isfinite(error) for error in errors)
        print(f"    lse {convention:<43}" + "".join(f"{error:>13.4f}" for error in errors))
        right.append([exact.accepts(out) for out in merged])

    ok &= right == [[True, False], [False, True], [False, False]]
    for convention in CONVENTIONS:
        ok &= which_convention(partial(attention_with_lse, convention=convention)) == convention
    verdict = "ok   " if ok else "WRONG"
    print(f"{verdict} only the matching merge is right; the wrong ones give no NaN; two calls tell which one to use")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
