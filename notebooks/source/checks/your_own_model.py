"""Checks of chapter 12: an attention function for transformers, what must be refused."""

from functools import partial

import torch
import torch.nn.functional as F

from notebooks.source.checks.answers import Exercise, NotYet, torch_generator


def attention(q, k, v, *, scale=None, gain=1.0):
    """A ring, for a check: what it returns is so many times attention."""
    return gain * F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)


def _inputs(B, H, G, C, D, scaling, gain, generator):
    q = torch.randn(B, H, C, D, generator=generator)
    return partial(attention, gain=gain), q, *torch.randn(2, B, G, C, D, generator=generator), scaling


def _drawn(random):
    B, share, G, C, D = (random.randint(2, 6) for _ in range(5))
    rest = random.choice((None, random.uniform(0.1, 2))), random.uniform(2, 3), torch_generator(random)
    return _inputs(B, share * G, G, C, D, *rest)


def _called_once(answer):
    """Raise NotYet unless the ring is called once, with the heads as they are."""
    ring, *inputs = _inputs(2, 4, 2, 3, 8, None, 2.0, torch.Generator().manual_seed(0))
    heads = []

    def counting(q, k, v, *, scale=None):
        heads.append(k.shape[1])
        return ring(q, k, v, scale=scale)

    if problem := check_attention_function.problem(*check_attention_function.both(answer, (counting, *inputs))):
        raise NotYet(problem)
    heads.pop(0)  # of the right one
    if heads == [4]:
        raise NotYet("K and V have 2 heads, and you send 4; the ring takes them as they are")
    if len(heads) != 1:
        raise NotYet(f"the ring was called {len(heads)} times; once is enough")


def _out(change):
    return lambda ring, q, k, v, scaling: {"out": change(ring, q, k, v, scaling)}


GENERATOR = torch.Generator().manual_seed(0)
check_attention_function = Exercise(  # ring, query, key, value, scaling -> (out, weights), as transformers wants them
    right=lambda ring, q, k, v, scaling: {"out": ring(q, k, v, scale=scaling).transpose(1, 2), "weights": None},
    wrong={
        "out is (B, H, C, D), as it leaves the ring; a layer expects (B, C, H, D)": _out(
            lambda ring, q, k, v, scaling: ring(q, k, v, scale=scaling)
        ),
        "reshape mixes heads and tokens; transpose swaps the two axes": _out(
            lambda ring, q, k, v, scaling: ring(q, k, v, scale=scaling).reshape(len(q), q.shape[2], -1, q.shape[3])
        ),
        "scaling is not passed on: the ring takes 1/√D": _out(
            lambda ring, q, k, v, scaling: ring(q, k, v).transpose(1, 2)
        ),
        "scaled twice: by you, and by the ring with 1/√D": _out(
            lambda ring, q, k, v, scaling: ring(q * (scaling or q.shape[3] ** -0.5), k, v).transpose(1, 2)
        ),
        "this is not what the ring returned, or the ring was not called: a rank sees its own chunk only": _out(
            lambda ring, q, k, v, scaling: attention(q, k, v, scale=scaling).transpose(1, 2)
        ),
        "a ring never has the whole matrix of weights: return None in its place": (
            lambda ring, q, k, v, scaling: {"weights": ring(q, k, v, scale=scaling).transpose(1, 2)}
        ),
    },
    cases={
        "the ring's out, with its axes H and C exchanged": [
            _inputs(*case, GENERATOR)
            for case in ((2, 4, 2, 3, 8, None, 2.0), (1, 6, 2, 5, 4, 0.25, 0.5), (2, 3, 1, 3, 3, 1.0, 3.0))
        ]
    },
    draw=_drawn,
    then=_called_once,
)


PASSED = (  # what layers pass besides q, k and v
    {"attention_mask": None, "scaling": 0.125, "dropout": 0.0, "position_ids": torch.arange(8)[None]},
    {"scaling": 0.125, "sliding_window": 4},
    {"scaling": 0.0625, "softcap": 50.0, "sliding_window": None, "is_causal": True},
    {"dropout": 0.1},
    {"attention_mask": torch.ones(1, 1, 8, 8, dtype=torch.bool).tril()},
    {"s_aux": torch.zeros(4), "use_cache": False},
    {"cu_seq_lens_q": torch.tensor([0, 3, 8]), "max_length_q": 5},
    {"is_causal": False},
    {"is_causal": None, "scaling": None, "s_aux": None},
    {"position_bias": torch.zeros(1, 4, 8, 8), "scaling": 1.0},
)
KNOWN = ("sliding_window", "softcap", "dropout", "attention_mask", "s_aux", "cu_seq_lens_q", "max_length_q")


def _lost(name, x):
    """Whether a causal ring would drop what this asks for: a tensor always asks for something."""
    if name == "is_causal":
        return x is False
    return name not in ("scaling", "position_ids") and x is not None and (isinstance(x, torch.Tensor) or x != 0)


def _refused(of):
    return lambda passed: {name for name, x in passed.items() if of(name, x)}


def _unknown(random):
    """Names that nobody has heard of."""
    names = [f"{word}_{random.randrange(1000)}" for word in ("sink", "bias", "window", "length")]
    values = [random.choice((None, 1.5, 3, True, torch.ones(2), "soft")) for _ in names]
    return ({"scaling": 0.5, **dict(zip(names, values, strict=True)), "is_causal": random.choice((True, False))},)


check_what_is_refused = Exercise(  # what a layer passes, by name -> the names that a causal ring must refuse
    right=_refused(_lost),
    wrong={
        "you accept what the ring would drop": _refused(lambda name, x: False),
        "you refuse all of it: None asks for nothing, and the ring takes scaling": _refused(lambda name, x: True),
        "where dropout is 0.0, use_cache is False or is_causal is True nothing is lost; the ring takes scaling, and "
        "position_ids have turned q and k before": _refused(lambda name, x: x is not None),
        "a sink of 0 is a sink: it adds exp(0) to every sum of weights. Only None is no sink": (
            _refused(lambda name, x: _lost(name, x) and not (isinstance(x, torch.Tensor) and not x.any()))
        ),
        "is_causal is False asks for both directions; this ring has one": (
            _refused(lambda name, x: _lost(name, x) and name != "is_causal")
        ),
        "is_causal is None, so nothing is lost": _refused(
            lambda name, x: _lost(name, x) or (name, x) == ("is_causal", None)
        ),
        "no list of what is wrong is complete; list what the ring understands, refuse all other names": (
            _refused(lambda name, x: _lost(name, x) and name in (*KNOWN, "is_causal"))
        ),
    },
    cases={"refuse what asks for something that a causal ring does not do": [(each,) for each in PASSED]},
    draw=_unknown,
    remark=f"{len(PASSED)} models, and nothing dropped",
)
