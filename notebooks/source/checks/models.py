"""Checks of chapters 10, 11, 12 and 14."""

from functools import partial
from itertools import product

import torch
import torch.nn.functional as F

from notebooks.source.checks.answers import Exercise, NotYet
from ringlab.ring.layouts import positions

# Chapter 10: what a rank gets of a text, the loss of the batch -------------------------------------------------------

IGNORED = -100


def _input(text, rank, P):
    at = positions("zigzag", len(text) - 1, rank, P)
    return {"tokens": text[at], "labels": text[at + 1], "positions": at}


def _tokens(layout, shift=0):
    """Wrong tokens: those of a layout, so many places later."""
    return lambda text, rank, P: {"tokens": text[positions(layout, len(text) - 1, rank, P) + shift]}


def _labels(of):
    """Wrong labels: those that `of` gives for the text, and the places of the rank's tokens."""
    return lambda text, rank, P: {"labels": of(text, positions("zigzag", len(text) - 1, rank, P))}


def _places(of):
    return lambda text, rank, P: {"positions": of(positions("zigzag", len(text) - 1, rank, P), rank)}


FIRST = "shift the whole text by one first, then take this rank's part"
BEFORE = "you shifted the wrong way: the label is the token after, not the one before"


def _text(S, generator):
    return torch.randperm(1000, generator=generator)[: S + 1]  # no token comes twice


check_rank_input = Exercise(  # text (S + 1,), rank, P -> this rank's (S / P,) in the zigzag layout
    right=_input,
    wrong={
        "these are the tokens of the contiguous layout": _tokens("contiguous"),
        "these are the tokens of the striped layout": _tokens("striped"),
        "the tokens are text[:-1]; yours begin with text[1]": _tokens("zigzag", shift=1),
        f"the end of a piece has another's token; {FIRST}": _labels(lambda text, at: text[at].roll(-1)),
        f"the last token lost its label; {FIRST}": _labels(lambda text, at: F.pad(text[at][1:], (0, 1), value=IGNORED)),
        "yours are the tokens themselves; the label is the token after": _labels(lambda text, at: text[at]),
        "you shifted twice: the label is the next": _labels(lambda text, at: text[(at + 2).clamp(max=len(text) - 1)]),
        BEFORE: _labels(lambda text, at: text[(at - 1).clamp(min=0)]),
        f"{BEFORE}; and {FIRST}": _labels(lambda text, at: text[at].roll(1)),
        "you counted from 0 here; places are of the whole sequence": _places(lambda at, rank: torch.arange(len(at))),
        "you counted from r · C, as if contiguous": _places(lambda at, rank: torch.arange(len(at)) + rank * len(at)),
        "off by one: these are the places of the labels; the first token stands at 0": _places(lambda at, rank: at + 1),
    },
    said="the label of text[i] is text[i + 1], and its position is i",
    cases=[
        (_text(S, torch.Generator().manual_seed(S)), rank, P)
        for S, P in ((16, 4), (30, 5), (12, 2), (18, 3), (6, 1))
        for rank in reversed(range(P))
    ],
)


def _labelled(counts, C, generator):
    """Logits (C, 6) and labels (C,) of each rank, of which so many are real."""
    logits = [3 * torch.randn(C, 6, generator=generator) for _ in counts]
    labels = [torch.randint(6, (C,), generator=generator) for _ in counts]
    for of_rank, count in zip(labels, counts, strict=True):
        of_rank[count:] = IGNORED
    return logits, labels


def _losses(logits, labels, reduction="sum", zero=False):
    """The loss of each rank; `zero`: a label that is ignored counts as label 0."""
    labels = [x.clamp(min=0) if zero else x for x in labels]
    return torch.stack([F.cross_entropy(*pair, reduction=reduction) for pair in zip(logits, labels, strict=True)])


def _real(labels):
    return sum((x != IGNORED).sum() for x in labels)


AS_0 = "a label of -100 has no loss; you counted it as label 0"
GENERATOR = torch.Generator().manual_seed(0)
check_batch_loss = Exercise(  # logits [(C, vocab)] and labels [(C,)] of each rank -> the loss of the batch
    right=lambda logits, labels: F.cross_entropy(torch.cat(logits), torch.cat(labels)).item(),
    wrong={
        "that is the mean of means: a rank with few labels weighs too much": "_losses(logits, labels, 'mean').mean()",
        "that is the sum of means; divide once, by the labels of all ranks": "_losses(logits, labels, 'mean').sum()",
        "that is the sum; divide it by the number of labels of all ranks": "_losses(logits, labels).sum()",
        "you divided by all tokens; some have no label": "_losses(logits, labels).sum() / torch.cat(labels).numel()",
        "you divided by the labels of rank 0, not of all ranks": "_losses(logits, labels).sum() / _real(labels[:1])",
        AS_0: "_losses(logits, labels, zero=True).sum() / torch.cat(labels).numel()",
        f"{AS_0}, in the sum": "_losses(logits, labels, zero=True).sum() / _real(labels)",
    },
    cases={
        "the sum of all losses, over the number of labels of all ranks": [
            _labelled(*case, GENERATOR) for case in (((4, 2, 1), 4), ((3, 5), 6), ((5,), 7))
        ],
        "a rank without labels has no mean: 0/0; sum the losses first": [_labelled((2, 0, 3, 3), 3, GENERATOR)],
    },
)


# Chapter 11: the loss of a rank, the norm of a gradient in slices ----------------------------------------------------


def _times(factor):
    return lambda total, here, batch, dp, cp, tp: total / batch * factor(dp, cp, tp)


check_rank_loss = Exercise(  # whose gradients fully_shard averages over dp · cp ranks
    right=lambda total, labels_here, labels_of_batch, dp, cp, tp: total / labels_of_batch * dp * cp,
    wrong={
        "fully_shard averages: every gradient is at 1 / (dp · cp) of the right one": _times(lambda dp, cp, tp: 1),
        "fully_shard divides already: undo that, do not do it twice": _times(lambda dp, cp, tp: 1 / (dp * cp)),
        "fully_shard averages over the rings too: cp alone is too little": _times(lambda dp, cp, tp: cp),
        "fully_shard averages over the ranks of a ring too: dp alone is too little": _times(lambda dp, cp, tp: dp),
        "tp ranks have the same tokens: no average over them": _times(lambda dp, cp, tp: dp * cp * tp),
        "in a mean over the rank's own labels, labels weigh more on a rank that has few": lambda s, n, *_: s / n,
        "a mean over its own labels is wrong, and no factor cures it": lambda s, n, N, dp, cp, tp: s / n * dp * cp,
        "labels are not counted: a larger batch would take larger steps": lambda s, n, N, dp, cp, tp: s * dp * cp,
        "a sum alone: a larger batch would take larger steps": lambda s, *_: s,
    },
    cases={
        "every label of the batch has the same weight, and fully_shard divides by dp · cp": [
            (12.0, 6, 50, 2, 3, 5),
            (7.5, 4, 9, 1, 2, 2),
            (30.0, 11, 70, 3, 1, 2),
            (1.0, 2, 64, 4, 5, 1),
        ],
        "a rank may hold only padding; its loss is 0": [(0.0, 0, 9, 2, 2, 1)],
    },
    remark="tp does not appear, and labels_here is needed only for the count of the batch",
)


def _slices(P, rows, generator):
    """The weights' rows of each rank, as fully_shard cuts them: the last rank may get no row of a weight."""
    weights = [(i + 1) * torch.randn(n, 3, generator=generator, dtype=torch.float64) for i, n in enumerate(rows)]
    chunks = [weight.chunk(P) for weight in weights]
    return ([[of[rank] if rank < len(of) else of[0][:0] for of in chunks] for rank in range(P)],)


def _norms(slices):
    """The norm of each rank's part, (P,)."""
    return torch.stack([torch.cat(mine).norm() for mine in slices])


check_gradient_norm = Exercise(  # the slices of all gradients, rank by rank -> the norm of the whole gradient
    right=lambda slices: torch.cat([part for mine in slices for part in mine]).norm().item(),
    wrong={
        "that is the norm of the slices of rank 0": "_norms(slices)[0]",
        "that is the norm of the slices of the last rank": "_norms(slices)[-1]",
        "that is the largest norm of a rank": "_norms(slices).max()",
        "norms do not add up; their squares do": "_norms(slices).sum()",
        "norms of slices do not add up; their squares do": "sum(part.norm() for mine in slices for part in mine)",
        "that is the mean of the ranks' norms; each has its own part of the squares": "_norms(slices).mean()",
        "the square root is missing": "_norms(slices).square().sum()",
        "the squares of the ranks are added up, not averaged": "_norms(slices).square().mean().sqrt()",
        "norms are squared before they are added": "_norms(slices).sum().sqrt()",
    },
    said="take every number of every slice of every rank once: the root of the sum of their squares",
    cases=[_slices(P, rows, GENERATOR) for P, rows in product((4, 3, 1), ([8, 7, 6], [12, 3, 5]))],
    remark="this is one all_reduce of one number: the sum of squares of each rank",
)


# Chapter 12: an attention function for transformers, what must be refused --------------------------------------------


def attention(q, k, v, *, scale=None, gain=1.0):
    """A ring, for a check: what it returns is so many times attention."""
    return gain * F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)


def _inputs(B, H, G, C, D, scaling, gain, generator):
    q = torch.randn(B, H, C, D, generator=generator)
    return partial(attention, gain=gain), q, *torch.randn(2, B, G, C, D, generator=generator), scaling


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


check_attention_function = Exercise(  # ring, query, key, value, scaling -> (out, weights), as transformers wants them
    right=lambda ring, q, k, v, scaling: {"out": ring(q, k, v, scale=scaling).transpose(1, 2), "weights": None},
    wrong={
        "out is (B, H, C, D) still; a layer expects (B, C, H, D)": "{'out': ring(q, k, v, scale=scaling)}",
        "reshape mixes heads and tokens; transpose swaps the two axes": (
            "{'out': ring(q, k, v, scale=scaling).reshape(len(q), q.shape[2], -1, q.shape[3])}"
        ),
        "scaling is not passed on: the ring takes 1/√D": "{'out': ring(q, k, v).transpose(1, 2)}",
        "scaled twice: by you, and by the ring with 1/√D": (
            "{'out': ring(q * (scaling or q.shape[3] ** (-0.5)), k, v).transpose(1, 2)}"
        ),
        "a rank sees its own chunk: call the ring": "{'out': attention(q, k, v, scale=scaling).transpose(1, 2)}",
        "a ring has no matrix of weights: return None": "{'weights': ring(q, k, v, scale=scaling).transpose(1, 2)}",
    },
    said="the ring's out, with its axes H and C exchanged",
    cases=[
        _inputs(*case, GENERATOR)
        for case in ((2, 4, 2, 3, 8, None, 2.0), (1, 6, 2, 5, 4, 0.25, 0.5), (2, 3, 1, 3, 3, 1.0, 3.0))
    ],
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
    {"position_bias": torch.zeros(1, 4, 8, 8), "scaling": 1.0, "soft_1": None, "length_9": 3},
)
KNOWN = ("sliding_window", "softcap", "dropout", "attention_mask", "s_aux", "cu_seq_lens_q", "max_length_q")


def _lost(name, x):
    """Whether a causal ring would drop what this asks for: a tensor always asks for something."""
    if name == "is_causal":
        return x is False
    return name not in ("scaling", "position_ids") and x is not None and (isinstance(x, torch.Tensor) or x != 0)


def _refused(of):
    return lambda passed: {name for name, x in passed.items() if of(name, x)}


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
        "is_causal=False asks for both directions": _refused(lambda name, x: _lost(name, x) and name != "is_causal"),
        "is_causal=None loses nothing": _refused(lambda name, x: _lost(name, x) or (name, x) == ("is_causal", None)),
        "no list of what is wrong is complete; list what the ring understands, refuse all other names": (
            _refused(lambda name, x: _lost(name, x) and name in (*KNOWN, "is_causal"))
        ),
    },
    said="refuse what asks for something that a causal ring does not do",
    cases=[(each,) for each in PASSED],
    remark=f"{len(PASSED)} models, and nothing dropped",
)


# Chapter 14: who stores a new token, the bytes of a token ------------------------------------------------------------


def _in_turn(C, N, P):
    return [C + len(range(rank, N - 1, P)) for rank in range(P)]


check_caches = Exercise(  # how many tokens each rank holds after N new tokens
    right=_in_turn,
    wrong={
        "the last new token is returned and never computed: it has no K and V": "_in_turn(C, N + 1, P)",
        "rank 0 stores the first new token, so the first ranks have one more": "_in_turn(C, N, P)[::-1]",
        "rank 0 stores new token number 0": "_in_turn(C, N, P)[-1:] + _in_turn(C, N, P)[:-1]",
        "then rank 0 fills up alone; they store in turn": "[C + N - 1] + [C] * (P - 1)",
        "then the last rank fills up alone; they store in turn": "[C] * (P - 1) + [C + N - 1]",
        "if all ranks store a token, it counts P times": "[C + N - 1] * P",
        "if all ranks store a token, it counts P times; and the last one is not stored": "[C + N] * P",
        "new tokens are stored, too": "[C] * P",
        "that is the number of slots; count the tokens in them": "[C - (-(N - 1) // P)] * P",
        "N - 1 is not always a multiple of P: some ranks have one more": "[C + (N - 1) // P] * P",
    },
    said="rank n mod P stores new token number n, for n = 0 ... N - 2",
    cases=[(4, 12, 4), (4, 8, 3), (10, 7, 5), (3, 1, 2), (2, 5, 1)],
    remark="no rank has more than one token more than another",
)


check_bytes_of_a_token = Exercise(  # one new token of each prompt, float32
    right=lambda layers, B, H, G, D, C, P: layers * B * H * (D + 2) * 4,
    wrong={
        "o alone is not enough: m and l of each head travel too": "4 * layers * B * H * D",
        "one of m and l is missing": "4 * layers * B * H * (D + 1)",
        "m, l and o belong to a query head: there are H of them, not G": "4 * layers * B * G * (D + 2)",
        "that is a ring, which moves K and V; here they stay": "4 * layers * (P - 1) * 2 * B * G * C * D",
        "the number of keys does not matter: o is a sum over them": "4 * layers * B * H * (D + 2) * C",
        "a rank gives its own part once, for any P": "4 * layers * B * H * (D + 2) * P",
        "a rank gives its own part once, not P - 1 times": "4 * layers * B * H * (D + 2) * (P - 1)",
        "one sequence has that; there are B of them": "4 * layers * H * (D + 2)",
        "one layer has that": "B * H * (D + 2) * 4",
        "these are numbers; a float32 has 4 bytes": "layers * B * H * (D + 2)",
        "m, l and o are float32, 4 bytes each, not 2": "layers * B * H * (D + 2) * 2",
    },
    said="for each head of each prompt: m, l, and the D numbers of o",
    cases=[(32, 1, 32, 8, 128, 16_384, 8), (2, 3, 6, 2, 16, 10, 5), (4, 2, 8, 4, 64, 1000, 3)],
    remark="C, G and P do not appear",
)
