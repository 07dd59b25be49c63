"""Checks of chapter 10: what a rank gets of a text, the loss of the batch."""

import torch
import torch.nn.functional as F

from notebooks.source.checks.answers import Exercise, torch_generator
from ringlab.ring.layouts import positions

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


def _drawn_text(random):
    P = random.randint(1, 9)
    return _text(2 * P * random.randint(1, 4), torch_generator(random)), random.randrange(P), P


check_rank_input = Exercise(  # text (S + 1,), rank, P -> this rank's (S / P,) in the zigzag layout
    right=_input,
    wrong={
        "these are the tokens of the contiguous layout": _tokens("contiguous"),
        "these are the tokens of the striped layout": _tokens("striped"),
        "the tokens are text[:-1]; yours begin with text[1]": _tokens("zigzag", shift=1),
        f"you shifted inside the shard, so the end of a piece got a token of another piece; {FIRST}": _labels(
            lambda text, at: text[at].roll(-1)
        ),
        f"you shifted inside the shard, and its last token lost its label; {FIRST}": _labels(
            lambda text, at: F.pad(text[at][1:], (0, 1), value=IGNORED)
        ),
        "the label of a token is the token after it; yours are the tokens themselves": _labels(
            lambda text, at: text[at]
        ),
        "you shifted twice: the label is the next token, not the one after": _labels(
            lambda text, at: text[(at + 2).clamp(max=len(text) - 1)]
        ),
        BEFORE: _labels(lambda text, at: text[(at - 1).clamp(min=0)]),
        f"{BEFORE}; and {FIRST}": _labels(lambda text, at: text[at].roll(1)),
        "you counted from 0 on this rank; positions are places in the whole sequence": _places(
            lambda at, rank: torch.arange(len(at))
        ),
        "you counted on from r · C, as for contiguous chunks; the tokens are dealt out in zigzag": _places(
            lambda at, rank: torch.arange(len(at)) + rank * len(at)
        ),
        "off by one: these are the places of the labels; the first token stands at 0": _places(lambda at, rank: at + 1),
    },
    cases={
        "the label of text[i] is text[i + 1], and its position is i": [
            (_text(S, torch.Generator().manual_seed(S)), rank, P)
            for S, P in ((16, 4), (30, 5), (12, 2), (18, 3), (6, 1))
            for rank in reversed(range(P))
        ]
    },
    draw=_drawn_text,
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
        "that is the mean of the ranks' means; a rank with few labels weighs too much": (
            lambda logits, labels: _losses(logits, labels, "mean").mean()
        ),
        "that is the sum of the ranks' means; divide by the number of labels of all ranks, once": (
            lambda logits, labels: _losses(logits, labels, "mean").sum()
        ),
        "that is the sum; divide it by the number of labels of all ranks": (
            lambda logits, labels: _losses(logits, labels).sum()
        ),
        "you divided by all tokens; some of them have no label": (
            lambda logits, labels: _losses(logits, labels).sum() / torch.cat(labels).numel()
        ),
        "you divided by the labels of rank 0; divide by those of all ranks": (
            lambda logits, labels: _losses(logits, labels).sum() / _real(labels[:1])
        ),
        AS_0: lambda logits, labels: _losses(logits, labels, zero=True).sum() / torch.cat(labels).numel(),
        f"{AS_0}, in the sum": lambda logits, labels: _losses(logits, labels, zero=True).sum() / _real(labels),
    },
    cases={
        "the sum of all losses, over the number of labels of all ranks": [
            _labelled(*case, GENERATOR) for case in (((4, 2, 1), 4), ((3, 5), 6), ((5,), 7))
        ],
        "a rank without labels has no mean: 0/0; sum the losses first": [_labelled((2, 0, 3, 3), 3, GENERATOR)],
    },
    draw=lambda r: _labelled([1, *(r.randint(0, 6) for _ in range(r.randint(1, 6)))], 8, torch_generator(r)),
)
