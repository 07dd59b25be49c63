"""Checks of chapter 12: an attention function for transformers, what must be refused."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from notebooks.source.checks.answers import NotYet, difference, draws, exercise, items, several


def attention(q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)


@exercise
def check_attention_function(answer: Callable[..., tuple[Tensor, None]]) -> str | None:
    """(ring, query, key, value, scaling) -> (out, weights), as transformers wants them."""
    generator = torch.Generator().manual_seed(0)
    cases: list[tuple[Any, ...]] = [(2, 4, 2, 3, 8, None, 1), (1, 6, 2, 5, 4, 0.25, 1), (2, 3, 1, 3, 3, 1.0, 1)]
    for random in draws():
        B, share, G, C, D = (random.randint(2, 6) for _ in range(5))
        cases.append((B, share * G, G, C, D, random.choice((None, random.uniform(0.1, 2))), random.uniform(2, 3)))
    for B, H, G, C, D, scaling, gain in cases:  # what the ring returns is so many times attention
        q = torch.randn(B, H, C, D, generator=generator)
        k, v = torch.randn(2, B, G, C, D, generator=generator).unbind()
        heads = []

        def ring(
            q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, heads: list[int] = heads, gain: float = gain
        ) -> Tensor:
            heads.append(k.shape[1])
            return gain * attention(q, k, v, scale=scale)

        out, weights = several(answer(ring, q, k, v, scaling), ("out", "weights"))
        right = gain * attention(q, k, v, scale=scaling)  # (B, H, C, D)
        where = f"B = {B}, H = {H}, G = {G}, C = {C}, D = {D}, scaling = {scaling}"
        if not heads:
            raise NotYet("the ring was not called: each rank sees its own chunk only, and no error says so")
        if heads == [H]:
            raise NotYet(f"{where}: K and V have {G} heads, and you send {H}; the ring takes them as they are")
        if difference(out, right) is None:
            raise NotYet(f"{where}: out is (B, H, C, D), as it leaves the ring; a layer expects (B, C, H, D)")
        if difference(out, right.reshape(B, C, H, D)) is None:
            raise NotYet(f"{where}: reshape mixes heads and tokens; transpose swaps the two axes")
        right = right.transpose(1, 2)
        wrong_scales = {
            "scaling is not passed on: the ring takes 1/√D": gain * attention(q, k, v),
            "scaled twice: by you, and by the ring with 1/√D": gain * attention(q * (scaling or D**-0.5), k, v),
            "this is not what the ring returned: computed beside it, a rank sees its own chunk only": attention(
                q, k, v, scale=scaling
            ),
        }
        if problem := difference(out, right):
            for hint, wrong in wrong_scales.items():
                if difference(out, wrong.transpose(1, 2)) is None:
                    raise NotYet(f"{where}: {hint}")
            raise NotYet(f"{where}: {problem}")
        if len(heads) != 1:
            raise NotYet(f"the ring was called {len(heads)} times; once is enough")
        if weights is not None:
            raise NotYet("a ring never has the whole matrix of weights: return None in its place")


PASSED = [  # what layers pass besides q, k and v; what a causal ring would drop
    ({"attention_mask": None, "scaling": 0.125, "dropout": 0.0, "position_ids": torch.arange(8)[None]}, []),
    ({"scaling": 0.125, "sliding_window": 4}, ["sliding_window"]),
    ({"scaling": 0.0625, "softcap": 50.0, "sliding_window": None, "is_causal": True}, ["softcap"]),
    ({"dropout": 0.1}, ["dropout"]),
    ({"attention_mask": torch.ones(1, 1, 8, 8, dtype=torch.bool).tril()}, ["attention_mask"]),
    ({"s_aux": torch.zeros(4), "use_cache": False}, ["s_aux"]),
    ({"cu_seq_lens_q": torch.tensor([0, 3, 8]), "max_length_q": 5}, ["cu_seq_lens_q", "max_length_q"]),
    ({"is_causal": False}, ["is_causal"]),
    ({"is_causal": None, "scaling": None, "s_aux": None}, []),
    ({"position_bias": torch.zeros(1, 4, 8, 8), "scaling": 1.0}, ["position_bias"]),
]
NOTHING_LOST = {
    "dropout": "dropout is 0.0, so nothing is lost",
    "use_cache": "use_cache is False, so nothing is lost",
    "scaling": "the ring takes scaling as its scale",
    "position_ids": "position_ids were used before attention, to turn q and k",
    "is_causal": "is_causal is True, and the ring is causal",
}
LOST = {
    "s_aux": "a sink of 0 is a sink: it adds exp(0) to every sum of weights. Only None is no sink",
    "is_causal": "is_causal is False asks for both directions; this ring has one",
    "position_bias": "no list of what is wrong is complete; list what the ring understands, refuse all other names",
}


@exercise
def check_what_is_refused(answer: Callable[[dict[str, Any]], list[str]]) -> str | None:
    """What a layer passes, by name -> the names that a causal ring must refuse, sorted."""
    cases = list(PASSED)
    for random in draws():  # names that nobody has heard of
        names = [f"{word}_{random.randrange(1000)}" for word in ("sink", "bias", "window", "length")]
        values = [random.choice((None, 1.5, 3, True, torch.ones(2), "soft")) for _ in names]
        passed = {"scaling": 0.5, **dict(zip(names, values, strict=True)), "is_causal": random.choice((True, False))}
        refused = [name for name, x in zip(names, values, strict=True) if x is not None]
        cases.append((passed, refused if passed["is_causal"] else [*refused, "is_causal"]))
    for passed, right in cases:
        given = items(answer(passed), "a list of names")
        if not all(isinstance(name, str) for name in given):
            raise NotYet(f"expected a list of names, got {given!r}")
        shown = {name: f"a tensor {tuple(x.shape)}" if isinstance(x, Tensor) else x for name, x in passed.items()}
        for name in given:
            if name not in right:
                lost = NOTHING_LOST.get(name, "it was not passed")
                if name in passed and passed[name] is None:
                    lost = f"{name} is None, so nothing is lost"
                raise NotYet(f"of {shown} you refuse {name}: {lost}")
        for name in right:
            if name not in given:
                raise NotYet(f"of {shown} you accept {name}: {LOST.get(name, 'the ring would drop it')}")
    return f"{len(PASSED)} models, and nothing dropped"
