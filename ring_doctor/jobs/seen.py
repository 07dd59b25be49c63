"""Which whole numbers went into model and loss: tokens, positions, labels. They tell mistakes without arithmetic.

    whole_numbers(one, many, step)    the rows of both jobs; of which sequence, and at which places, is a rank's row
    other_data(whole)                 why the data of the two jobs cannot be compared
    told(whole)                       the names that wrong labels, positions and tokens have

A trusted row has S tokens. A rank of the other job has rows of C tokens. They are looked for in all layouts; a row that
was padded to a multiple of the ranks fits too.

Before: job.py. After: verdict.py.
Source: ringlab/ring/layouts.py for the layouts.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ring_doctor.asking.case import LAYOUTS, positions
from ring_doctor.jobs.job import Job
from ringlab.models.transformer import IGNORED

ANY = -1  # the token of a place that a row does not have, and of padding


@dataclass(frozen=True)
class Row:
    """A sequence of the trusted job, or what a rank of the other job has of one: (S,) or (C,) each, or None."""

    tokens: Tensor
    positions: Tensor | None
    labels: Tensor | None


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def passes(seen: dict[str, Any], step: int) -> list[dict[str, Any]]:
    """What a rank saw of the passes of a step."""
    return list(seen["steps"][step]["passes"])


def _as_rows(x: Tensor | None, tokens: Tensor, fill: int | None = None) -> list[Tensor] | list[None]:
    """x as a row for each row of `tokens`; `fill` is a last number that rows may lack. None where it does not fit.

    The labels of a model of several losses do not fit.
    """
    n, C = tokens.shape
    if x is not None and fill is not None and x.numel() == n * (C - 1):
        x = torch.nn.functional.pad(x.reshape(n, C - 1), (0, 1), value=fill)
    if x is not None and x.numel() == C:
        x = x.reshape(1, C).expand(n, C)
    return list(x.reshape(n, C)) if x is not None and x.numel() == n * C else [None] * n


def labels_of(one: dict[str, Any], trusted: list[dict[str, Any]]) -> list[Tensor]:
    """The labels of a pass: those of torch's losses, or, where a fused loss calls none, those that the model got.

    Such a loss shifts them, if in the trusted job's passes they are the tokens.
    """
    numbers, found = one["whole_numbers"], [pair for of in trusted for pair in of["whole_numbers"].items()]
    tokens, labels = ([x for key, x in found if word in key] for word in ("embedding", ".labels"))
    shifts = any(x.shape == y.shape and ((x == y) | (x == IGNORED)).all() for x in labels for y in tokens)
    for shift, end in ((0, ".shift_labels"), (int(shifts), ".labels")):
        first = [key for key in numbers if key.endswith(end) and not one["labels"]][:1]
        if given := [x for key, x in numbers.items() if key.rstrip("'") in first and x.dim() == 2]:
            return [torch.nn.functional.pad(x[:, shift:], (0, shift), value=IGNORED).flatten() for x in given]
    return list(one["labels"])


def _counts(x: Tensor) -> bool:
    """Whether each row counts 0, 1, 2, ..., and may begin again at 0: positions, of documents too."""
    steps = x.diff(dim=-1)
    return bool(x.shape[-1] > 1 and (x[..., 0] == 0).all() and ((steps == 1) | (x[..., 1:] == 0)).all() and x.max() > 0)


def _keys(found: dict[str, Any]) -> tuple[str, str]:
    """The arguments, by name, that are the tokens and the positions; "" for none."""
    embedded = [key for key, x in found.items() if key.startswith("embedding") and not _counts(x)]
    length = found[embedded[0]].shape[-1] if embedded else 0
    counted = [key for key, x in found.items() if x.shape[-1] == length and x.dim() <= 2 and _counts(x)]
    return (embedded or [""])[0], (counted or [""])[-1]


def _rows(seen: dict[str, Any], step: int, keys: tuple[str, str], trusted: list[dict[str, Any]]) -> list[Row]:
    rows: list[Row] = []
    for one in passes(seen, step):
        numbers, labels = one["whole_numbers"], torch.cat([torch.empty(0), *labels_of(one, trusted)]).long()
        again = [prime for n in range(len(numbers)) if keys[0] + (prime := "'" * n) in numbers]  # forward passes
        for prime, of_pass in zip(again, labels.chunk(len(again) or 1), strict=False):
            tokens = torch.atleast_2d(numbers[keys[0] + prime].long()).flatten(0, -2)
            at = _as_rows(numbers.get(keys[1] + prime), tokens)
            rows += map(Row, tokens, at, _as_rows(of_pass, tokens, IGNORED))
    return rows


def _marked(row: Row) -> Row:
    """The row with ANY for its padding: at its end one token again and again, and no label, nor before it."""
    S = len(row.tokens)
    labels = row.labels if row.labels is not None else torch.zeros(S)
    kept = ((row.tokens != row.tokens[-1]) | (labels != IGNORED)).nonzero()
    end = int(kept[-1]) + 1 if len(kept) else S
    is_padded = end < S and bool(labels[end - 1] == IGNORED)
    return replace(row, tokens=torch.where(torch.arange(S) < end, row.tokens, ANY)) if is_padded else row


@dataclass(frozen=True)
class Whole:
    """The whole numbers of a step of both jobs."""

    text: list[Row]  # the trusted job's
    ranks: list[list[Row]]  # the other one's
    layout: str  # in which every rank's rows are parts of the text, or ""
    cp: int  # ranks that share a sequence
    at: list[list[tuple[int, Tensor]]]  # for each rank's rows the sequence and the places (C,), if there is a layout


def whole_numbers(one: Job, many: Job, step: int, layout: str = "") -> Whole:
    """What went into both models at a step. `layout` is one of the user's own."""
    seen = passes(one.ranks[0], step)
    keys = _keys(seen[0]["whole_numbers"] if seen else {})
    of_one = [_rows(of, step, keys, seen) for of in one.ranks]
    alike = len({str([row.tokens.tolist() for row in rows]) for rows in of_one}) == 1  # each rank has all of the batch
    text = [_marked(row) for rows in (of_one[:1] if alike else of_one) for row in rows]
    ranks = [_rows(of, step, keys, seen) for of in many.ranks]
    for cp in divisors(len(many.ranks)):
        for tried in dict.fromkeys((*LAYOUTS, *filter(None, [layout]))) if cp > 1 else ("contiguous",):
            at = [[_find(row.tokens, text, tried, cp) for row in rows] for rows in ranks]
            if ranks[0] and all(place is not None for places in at for place in places):
                return Whole(text, ranks, tried, cp, [[x for x in places if x is not None] for places in at])
    return Whole(text, ranks, "", 1, [])


def _find(tokens: Tensor, text: list[Row], layout: str, cp: int) -> tuple[int, Tensor] | None:
    C = len(tokens)
    for rank in range(cp):
        if layout == "zigzag" and C % 2:
            return None
        at = positions(layout, C * cp, rank, cp)
        for n, row in enumerate(text):
            if bool((row.tokens[C * cp :] != ANY).any()):
                continue
            padded = torch.nn.functional.pad(row.tokens[: C * cp], (0, max(0, C * cp - len(row.tokens))), value=ANY)[at]
            fits = bool(((padded == tokens) | (padded == ANY)).all())
            if fits and bool((padded != ANY).any() or (tokens == tokens[0]).all()):
                return n, at
    return None


def _counters(whole: Whole) -> tuple[Counter[int], Counter[int]]:
    """How often each token stands in the trusted rows, and on all ranks of the other job."""
    of_ranks = (row for rows in whole.ranks for row in rows)
    wanted, asked = (Counter(t for row in rows for t in row.tokens.tolist()) for rows in (whole.text, of_ranks))
    del wanted[ANY]
    return wanted, asked


def other_data(whole: Whole) -> str:
    """Why the data of the two jobs cannot be compared, or ""."""
    wanted, asked = _counters(whole)
    found = {n for places in whole.at for n, _ in places}
    rows, lengths = ({len(x.tokens) for x in of} for of in (whole.text, [x for of in whole.ranks for x in of]))
    fewer = len(found) < len(whole.text) if whole.layout else lengths <= rows
    if asked and asked.total() < wanted.total() and fewer:
        return f"the step of the first job has {wanted.total()} tokens, that of the second {asked.total()}"
    copies = max(1, asked.total() // max(wanted.total(), 1))
    extra = asked - Counter({token: copies * count for token, count in wanted.items()})
    if not whole.layout and wanted and (len(extra) > 1 or (extra and copies == 1)):  # more of one token is padding
        said = f"{extra.total()} of the {asked.total()} tokens of the second job are none of the first job's step"
        return f"{said}: other data, or another order of it; expected the same {wanted.total()} tokens, unshuffled"
    return ""


def told(whole: Whole) -> list[tuple[str, str]]:
    """(name, what was seen) of each mistake that the whole numbers show."""
    found: list[tuple[str, str]] = []
    wanted, asked = _counters(whole)
    if asked and len(lost := wanted - asked) > 1:  # one may be padding
        return [("tokens_missing", f"{lost.total()} of {wanted.total()} tokens are on no rank")]
    if not whole.layout:
        return []
    wrong_labels: list[tuple[int, Tensor, Tensor, bool]] = []  # rank, labels, places of the wrong, those of the shard?
    wrong_positions: list[tuple[Tensor, Tensor]] = []  # positions, places
    for rank, (rows, at) in enumerate(zip(whole.ranks, whole.at, strict=True)):
        for row, (n, places) in zip(rows, at, strict=True):
            text = whole.text[n]
            S = len(text.tokens)
            real = (places < S) & (text.tokens[places.clamp(max=S - 1)] != ANY)
            if row.labels is not None and text.labels is not None:
                own, right = row.labels, torch.where(real, text.labels[places.clamp(max=S - 1)], IGNORED)
                if bool((wrong := own != right).any()):
                    inside = (own[:-1] == row.tokens[1:]) | (own[:-1] == IGNORED)
                    wrong_labels.append((rank, own[wrong], places[wrong], bool(inside.all())))
            if row.positions is not None and text.positions is not None:
                right = torch.where(real, text.positions[places.clamp(max=S - 1)], row.positions)
                if bool((wrong := row.positions != right).any()):
                    wrong_positions.append((row.positions, places))
                    token, given, of_text = (int(x[wrong][0]) for x in (places, row.positions, right))
                    of_rank = f"rank {rank}'s position of token {token} is {given}, expected {of_text}"
    of_rows = (whole.text, [row for rows in whole.ranks for row in rows])
    counts = [Counter(t for x in rows if x.labels is not None for t in x.labels.flatten().tolist()) for rows in of_rows]
    of_shard = all(inside for *_, inside in wrong_labels)
    if wrong_labels and (of_shard or counts[0] != counts[1]):  # else the same labels, gathered in another way
        rank, labels, places, _ = wrong_labels[0]
        said = f"rank {rank}'s label of token {int(places[0])} is {int(labels[0])}"
        found.append(("labels_per_shard" if of_shard else "other_labels", said))
    if wrong_positions:
        found.append((_name_of(wrong_positions, whole), of_rank))
    return found


def _name_of(wrong: list[tuple[Tensor, Tensor]], whole: Whole) -> str:
    """The name of positions that fits all wrong rows: (positions, places), (C,) each."""
    C = len(wrong[0][1])
    names = [name for name in LAYOUTS if name != "zigzag" or C % 2 == 0]
    shards = {name: [positions(name, C * whole.cp, r, whole.cp) for r in range(whole.cp)] for name in names}

    def fits(believed: Callable[[Tensor], Tensor]) -> bool:
        return all(torch.equal(own.long(), believed(places)) for own, places in wrong)

    def in_layout(name: str, places: Tensor) -> Tensor:
        right = (positions(whole.layout, C * whole.cp, rank, whole.cp) for rank in range(whole.cp))
        return shards[name][next(rank for rank, at in enumerate(right) if torch.equal(at, places))]

    believed: dict[str, Callable[[Tensor], Tensor]] = {
        "positions_missing": torch.zeros_like,
        "rotated_twice": lambda places: 2 * places,
        **{f"positions_of_{name}": partial(in_layout, name) for name in shards if name != whole.layout},
        "positions_per_shard": lambda places: torch.arange(len(places)),
        "documents_lost": lambda places: places,  # where the right ones begin again
    }
    return next((name for name, of in believed.items() if fits(of)), "other_positions")
