"""Checks of chapter 10: what a rank gets of a text, the loss of the batch."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from notebooks.source.checks.answers import NotYet, as_tensor, difference, draws, exercise, in_order, several
from ringlab.ring.layouts import positions

IGNORED = -100


def _wrong_labels(text: Tensor, at: Tensor) -> list[tuple[Tensor, str]]:
    """Labels of the wild for the tokens at positions `at`, and what went wrong with each."""
    inside = text[at].roll(-1)
    without_last = torch.cat([text[at][1:], torch.tensor([IGNORED])])
    first = "shift the whole text by one first, then take this rank's part"
    before = "you shifted the wrong way: the label is the token after, not the one before"
    return [
        (inside, f"you shifted inside the shard, so the end of a piece got a token of another piece; {first}"),
        (without_last, f"you shifted inside the shard, and its last token lost its label; {first}"),
        (text[at], "the label of a token is the token after it; yours are the tokens themselves"),
        (text[(at + 2).clamp(max=len(text) - 1)], "you shifted twice: the label is the next token, not the one after"),
        *((wrong, before) for wrong in (text[(at - 1).clamp(min=0)], text.roll(1)[at], text[:-1].roll(1)[at])),
        (text[at].roll(1), f"{before}; and {first}"),
        (torch.cat([torch.tensor([IGNORED]), text])[at], before),
    ]


@exercise
def check_rank_input(answer: Callable[[Tensor, int, int], Any]) -> str | None:
    """(text (S + 1,), rank, P) -> this rank's tokens, labels and positions, (S / P,) each, in the zigzag layout."""
    drawn = [(2 * P * random.randint(1, 4), P) for random in draws() for P in (random.randint(1, 9),)]
    for S, P in ((16, 4), (30, 5), (12, 2), (18, 3), (6, 1), *drawn):
        text = torch.randperm(1000)[: S + 1]  # no token comes twice
        for rank in reversed(range(P)):  # on rank 0, counting from 0 and from r · C are the same
            at = positions("zigzag", S, rank, P)
            tokens, labels, given_at = several(answer(text, rank, P), ("tokens", "labels", "positions"))
            where = f"S = {S}, P = {P}, rank {rank}: "
            in_order((tokens, labels, given_at), {"tokens": text[at], "labels": text[at + 1], "positions": at})
            if problem := difference(tokens, text[at]):
                hint = f"{problem} in the tokens; expected those at places {at.tolist()}"
                for layout in ("contiguous", "striped"):
                    other = text[positions(layout, S, rank, P)]
                    if P > 1 and difference(tokens, other) is None:
                        hint = f"these are the tokens of the {layout} layout"
                if difference(tokens, text[at + 1]) is None:
                    hint = "the tokens are text[:-1]; yours begin with text[1]"
                raise NotYet(where + hint)
            if problem := difference(labels, text[at + 1]):
                hints, otherwise = _wrong_labels(text, at), f"{problem}; the label of text[i] is text[i + 1]"
                hint = next((hint for wrong, hint in hints if difference(labels, wrong) is None), otherwise)
                raise NotYet(f"{where}labels: {hint}")
            if problem := difference(given_at, at):
                hint = f"{problem}; expected {at.tolist()}"
                if difference(given_at, torch.arange(len(at))) is None:
                    hint = "you counted from 0 on this rank; positions are places in the whole sequence"
                elif difference(given_at, torch.arange(len(at)) + rank * len(at)) is None:
                    hint = "you counted on from r · C, as for contiguous chunks; the tokens are dealt out in zigzag"
                elif difference(given_at, at + 1) is None:
                    hint = "off by one: these are the places of the labels; the first token stands at 0"
                raise NotYet(f"{where}positions: {hint}")


def _losses(logits: list[Tensor], labels: list[Tensor], reduction: str) -> list[Tensor]:
    return [F.cross_entropy(*pair, reduction=reduction) for pair in zip(logits, labels, strict=True)]


@exercise
def check_batch_loss(answer: Callable[[list[Tensor], list[Tensor]], Any]) -> str | None:
    """(logits [(C, vocab)], labels [(C,)]), an item for each rank -> the loss of the batch."""
    generator = torch.Generator().manual_seed(0)
    # for each case the number of labels of each rank, and C
    drawn = [([r.randint(0, 6) for _ in range(r.randint(1, 6))], r.randint(7, 9)) for r in draws()]
    for counts, C in (((4, 2, 1), 4), ((3, 5), 6), ((2, 0, 3, 3), 3), ((5,), 7), *(((1, *n), C) for n, C in drawn)):
        P, vocab = len(counts), 6
        logits = [3 * torch.randn(C, vocab, generator=generator) for _ in counts]
        labels = [torch.randint(vocab, (C,), generator=generator) for _ in counts]
        for wanted, count in zip(labels, counts, strict=True):
            wanted[count:] = IGNORED
        right = F.cross_entropy(torch.cat(logits), torch.cat(labels))
        given = as_tensor(answer(logits, labels), "a number")
        given = given.reshape(()) if given.numel() == 1 else given
        where = f"{P} rank(s) with {', '.join(map(str, counts))} labels: "
        problem = difference(given, right)
        if problem is None:
            continue
        total, means = sum(_losses(logits, labels, "sum")), _losses(logits, labels, "mean")
        as_zero = sum(_losses(logits, [wanted.clamp(min=0) for wanted in labels], "sum"))
        mean_of_means = "that is the mean of the ranks' means; a rank with few labels weighs too much"
        hints = [
            (sum(means) / P, mean_of_means),
            (sum(means), "that is the sum of the ranks' means; divide by the number of labels of all ranks, once"),
            (total, "that is the sum; divide it by the number of labels of all ranks"),
            (total / (P * C), f"you divided by all {P * C} tokens; {P * C - sum(counts)} of them have no label"),
            (total / counts[0], "you divided by the labels of rank 0; divide by those of all ranks"),
            (as_zero / (P * C), "a label of -100 has no loss; you counted it as label 0"),
            (as_zero / sum(counts), "a label of -100 has no loss; you counted it as label 0"),
            (sum(mean for mean in means if not mean.isnan()) / P, mean_of_means),
        ]
        if given.isnan().any() and 0 in counts:
            raise NotYet(f"{where}a rank without labels has no mean: 0/0; sum the losses first")
        raise NotYet(where + next((hint for wrong, hint in hints if difference(given, wrong) is None), problem))
