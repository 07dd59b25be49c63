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
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ring_doctor.asking.case import LAYOUTS, positions
from ring_doctor.jobs.job import Job
from ringlab.models.transformer import IGNORED


@dataclass(frozen=True)
class Row:
    """A sequence of the trusted job, or what a rank of the other job has of one: (S,) or (C,) each, or None."""

    tokens: Tensor
    positions: Tensor | None
    labels: Tensor | None


@dataclass(frozen=True)
class Whole:
    """The whole numbers of a step of both jobs."""

    text: list[Row]  # the trusted job's
    ranks: list[list[Row]]  # the other one's
    layout: str  # in which every rank's rows are parts of the text, or ""
    cp: int  # ranks that share a sequence
    at: list[list[tuple[int, Tensor]]]  # for each rank's rows the sequence and the places (C,), if there is a layout


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def passes(seen: dict[str, Any], step: int) -> list[dict[str, Any]]:
    """What a rank saw of the passes of a step."""
    return list(seen["steps"][step]["passes"])


def _as_rows(x: Tensor | None, tokens: Tensor) -> list[Tensor] | list[None]:
    """x as a row for each row of `tokens`, whose last number may be missing: a label. None where it does not fit."""
    n, C = tokens.shape
    if x is not None and x.numel() == n * (C - 1):
        x = torch.nn.functional.pad(x.reshape(n, C - 1), (0, 1), value=IGNORED)
    if x is not None and x.numel() == C:
        x = x.reshape(1, C).expand(n, C)
    return list(x.reshape(n, C)) if x is not None and x.numel() == n * C else [None] * n


def _counts(x: Tensor) -> bool:
    """Whether each row counts 0, 1, 2, ..., and may begin again at 0: positions, of documents too."""
    steps = x.diff(dim=-1)
    return bool(x.shape[-1] > 1 and (x[..., 0] == 0).all() and ((steps == 1) | (x[..., 1:] == 0)).all() and x.max() > 0)


def _rows(seen: dict[str, Any], step: int, tokens: str, at: str) -> list[Row]:
    """The rows of a rank; `tokens` and `at` are the arguments that are tokens and positions."""
    rows: list[Row] = []
    for one in passes(seen, step):
        calls, places = (one["whole_numbers"].get(key, []) for key in (tokens, at))
        labels = torch.cat([torch.empty(0), *one["labels"]]).long().tensor_split(len(calls) or 1)
        for n, x in enumerate(calls):
            x = torch.atleast_2d(x.long()).flatten(0, -2)
            of_x = places[n] if len(places) == len(calls) else None
            rows += map(Row, x, _as_rows(of_x, x), _as_rows(labels[n], x))
    return rows


def whole_numbers(one: Job, many: Job, step: int, layout: str = "") -> Whole:
    """What went into both models at a step. `layout` is one of the user's own."""
    first = {key: x[0] for seen in passes(one.ranks[0], step)[:1] for key, x in seen["whole_numbers"].items()}
    counted = [key for key, x in first.items() if _counts(x)]
    tokens = ([key for key in first if key.startswith("embedding") and key not in counted] or [""])[0]
    at = [key for key in counted if tokens and first[key].shape[-1] == first[tokens].shape[-1]]
    rows, ranks = ([_rows(seen, step, tokens, (at or [""])[-1]) for seen in job.ranks] for job in (one, many))
    alike = len({str([row.tokens.tolist() for row in of]) for of in rows}) == 1  # each rank has all of the batch
    text = [row for of in (rows[:1] if alike else rows) for row in of]
    for cp in divisors(len(ranks)):
        for tried in dict.fromkeys((*LAYOUTS, *filter(None, [layout]))) if cp > 1 else ("contiguous",):
            found = [[_find(row.tokens, text, tried, cp) for row in of] for of in ranks]
            if ranks[0] and all(place is not None for places in found for place in places):
                return Whole(text, ranks, tried, cp, [[x for x in places if x is not None] for places in found])
    return Whole(text, ranks, "", 1, [])


def _find(tokens: Tensor, text: list[Row], layout: str, cp: int) -> tuple[int, Tensor] | None:
    """The sequence, and the places in it, that are these tokens (C,). Places after its end are padding."""
    C = len(tokens)
    for rank in range(cp if layout != "zigzag" or C % 2 == 0 else 0):
        at = positions(layout, C * cp, rank, cp)
        for n, row in enumerate(text):
            real = at < len(row.tokens)
            fits = len(row.tokens) <= C * cp and torch.equal(row.tokens[at[real]], tokens[real])
            if fits and bool(real.any() or (tokens == tokens[0]).all()):
                return n, at
    return None


def _counters(whole: Whole) -> tuple[Counter[int], Counter[int]]:
    """How often each token stands in the trusted rows, and on all ranks of the other job."""
    of_ranks = [row for rows in whole.ranks for row in rows]
    wanted, asked = (Counter(t for row in rows for t in row.tokens.tolist()) for rows in (whole.text, of_ranks))
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
    wanted, asked = _counters(whole)
    if asked and len(lost := wanted - asked) > 1:  # one may be padding
        return [("tokens_missing", f"{lost.total()} of {wanted.total()} tokens are on no rank")]
    named: dict[str, list[list[str]]] = {"label": [], "position": []}  # the names that fit each wrong row
    said: dict[str, str] = {}
    labels = [Counter[int](), Counter[int]()]
    for rank, (rows, at) in enumerate(zip(whole.ranks, whole.at, strict=False)):  # no places: no layout is known
        for row, (n, places) in zip(rows, at, strict=True):
            text, real = whole.text[n], places < len(whole.text[n].tokens)
            of_row = {"label": (row.labels, text.labels), "position": (row.positions, text.positions)}
            for what, (own, right) in of_row.items():
                if own is None or right is None:
                    continue
                right = torch.where(real, right[places.where(real, 0)], IGNORED if what == "label" else own)
                if what == "label":
                    labels = [seen + Counter(x.tolist()) for seen, x in zip(labels, (own, right), strict=True)]
                if (off := own != right).any():
                    token, given, expected = (int(x[off][0]) for x in (places, own, right))
                    said.setdefault(what, f"rank {rank}'s {what} of token {token} is {given}, expected {expected}")
                    fits = _of_labels(own, row.tokens) if what == "label" else _of_positions(own, places, whole)
                    named[what].append(fits)
    if labels[0] == labels[1] and not all(named["label"]):  # the same labels, gathered in another way
        del named["label"]
    common = {what: [name for name in of[0] if all(name in fits for fits in of)] for what, of in named.items() if of}
    return [((names or [f"other_{what}s"])[0], said[what]) for what, names in common.items()]


def _of_labels(own: Tensor, tokens: Tensor) -> list[str]:
    """The names that fit wrong labels (C,) of a rank: those that it took from its own tokens are of a shard."""
    return ["labels_per_shard"] * bool(((own[:-1] == tokens[1:]) | (own[:-1] == IGNORED)).all())


def _of_positions(own: Tensor, places: Tensor, whole: Whole) -> list[str]:
    """The names that fit wrong positions (C,) of a rank, whose tokens stand at `places` (C,)."""
    C = len(places)
    names = [name for name in {*LAYOUTS, whole.layout} if name != "zigzag" or C % 2 == 0]
    shards = {name: [positions(name, C * whole.cp, r, whole.cp) for r in range(whole.cp)] for name in names}
    rank = next(r for r, at in enumerate(shards[whole.layout]) if torch.equal(at, places))
    believed = {
        "positions_missing": torch.zeros_like(places),
        "rotated_twice": 2 * places,
        **{f"positions_of_{name}": shards[name][rank] for name in shards if name != whole.layout},
        "positions_per_shard": torch.arange(C),
        "documents_lost": places,  # where the right ones begin again
    }
    return [name for name, x in believed.items() if torch.equal(own.long(), x)]
