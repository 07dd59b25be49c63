"""Which whole numbers went into model and loss: tokens, positions, labels. They tell mistakes without arithmetic.

    whole_numbers(one, many)          the rows of both jobs, and which shard of which sequence each row is
    check_data(whole)                 raises CannotExamine where the two jobs have other data
    told(whole)                       the names that wrong labels, positions and tokens have

A trusted row is a text of S tokens. A rank of the other job has rows of C tokens. Each is looked for in the texts, by
all layouts. Then its labels and positions must be those of its places. What lies after the end of a text is padding.

Before: job.py. After: verdict.py.
Source: ringlab/ring/layouts.py for the layouts.
"""

from collections import ChainMap, Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ring_doctor.asking.case import positions
from ring_doctor.asking.job import CannotExamine
from ringlab.models.transformer import IGNORED
from ringlab.ring.layouts import LAYOUTS

Ranks = Sequence[dict[str, Any]]  # what each rank saw of a step: recorder.py
Clue = tuple[str, str]  # the name of a mistake, or "", and what was seen
UNKNOWN = -(2**62)  # a number that was not seen, or that is not asked for: it agrees with each


@dataclass(frozen=True)
class Row:
    """A text of the trusted job, or what a rank of the other job has of one: (S,) or (C,) each."""

    rank: int
    tokens: Tensor
    position: Tensor
    label: Tensor


@dataclass(frozen=True)
class Whole:
    """The whole numbers of a step of both jobs."""

    texts: list[Row]  # the trusted job's
    rows: list[Row]  # the other one's
    layout: str  # in which every row is a shard of a text, or ""
    cp: int  # ranks that share a text
    shards: list[tuple[Row, Row, int]]  # each row, its text, and which shard of it. Empty where there is no layout


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _as_rows(x: Tensor, tokens: Tensor) -> Tensor:
    """x like `tokens` (n, C): its last number may be missing, a label, or all rows but one, as of positions."""
    n, C = tokens.shape
    if x.numel() == n * (C - 1):
        x = pad(x.reshape(n, C - 1), (0, 1), value=IGNORED)
    if x.numel() == C:
        x = x.reshape(1, C).expand(n, C)
    return x.reshape(n, C).long() if x.numel() == n * C else torch.full_like(tokens, UNKNOWN)


def _counts(x: Tensor) -> bool:
    """Whether each row counts 0, 1, 2, ..., and may begin again at 0: positions, of documents too."""
    steps = x.diff(dim=-1)
    return bool(x.shape[-1] > 1 and (x[..., 0] == 0).all() and ((steps == 1) | (x[..., 1:] == 0)).all() and x.max() > 0)


def _rows(ranks: Ranks, tokens: str, at: str) -> list[Row]:
    """The rows of all ranks; `tokens` and `at` are the arguments that are tokens and positions."""
    rows: list[Row] = []
    for rank, one in ((rank, one) for rank, seen in enumerate(ranks) for one in seen["passes"]):
        calls = [call for call in one["calls"] if tokens in call]
        labels = torch.cat([torch.empty(0), *one["labels"]]).tensor_split(len(calls) or 1)
        for call, label in zip(calls, labels, strict=False):
            x = torch.atleast_2d(call[tokens].long()).flatten(0, -2)
            others = (_as_rows(of, x) for of in (call.get(at, torch.empty(0)), label))
            rows += map(Row, [rank] * len(x), x, *others)
    return rows


def whole_numbers(one: Ranks, many: Ranks, layout: str = "") -> Whole:
    """What went into both models at a step. `layout` is one of the user's own."""
    first = ChainMap(*(call for seen in one[0]["passes"][:1] for call in seen["calls"]))
    counted = [key for key, x in first.items() if _counts(x)]
    tokens = next((key for key in first if key.startswith("embedding") and key not in counted), "")
    at = [key for key in counted if tokens and first[key].shape[-1] == first[tokens].shape[-1]]
    texts, rows = (_rows(ranks, tokens, (at or [""])[-1]) for ranks in (one, many))
    texts = list({str(row.tokens.tolist()): row for row in texts}.values())  # each rank may have all of them
    for cp, tried in product(divisors(len(many)), (*LAYOUTS, layout or "contiguous")):
        shards = [shard for row in rows if (shard := _find(row, texts, tried, cp))]
        if rows and len(shards) == len(rows):
            return Whole(texts, rows, tried, cp, shards)
    return Whole(texts, rows, "", 1, [])


def _find(row: Row, texts: list[Row], layout: str, cp: int) -> tuple[Row, Row, int] | None:
    """A row, its text, and which shard of it the row is. A shard of padding is one token."""
    tokens, C = row.tokens, len(row.tokens)
    for shard, text in product(range(cp if layout != "zigzag" or C % 2 == 0 else 0), texts):
        right = _at(text.tokens, positions(layout, C * cp, shard, cp), UNKNOWN)
        if _agree(right, tokens).all() and bool((right != UNKNOWN).any() or (tokens == tokens[0]).all()):
            return row, text, shard
    return None


def _at(x: Tensor, places: Tensor, padding: int) -> Tensor:
    """The numbers of a text (S,) at these places (C,)."""
    return torch.where(places < len(x), x[places.clamp(max=len(x) - 1)], padding)


def _agree(x: Tensor, y: Tensor) -> Tensor:
    return (x == y) | (x == UNKNOWN) | (y == UNKNOWN)


def _tokens(rows: list[Row]) -> Counter[int]:
    return Counter(token for row in rows for token in row.tokens.tolist())


def check_data(whole: Whole) -> None:
    """Raise CannotExamine where the two jobs have other data."""
    wanted, asked = _tokens(whole.texts), _tokens(whole.rows)
    fewer = asked.total() < wanted.total() and len({id(text) for _, text, _ in whole.shards}) < len(whole.texts)
    copies = max(1, asked.total() // max(wanted.total(), 1))
    extra = asked - Counter({token: copies * count for token, count in wanted.items()})
    if wanted and (fewer if whole.layout else extra):
        said = f"the first job's step has {wanted.total()} tokens, that of the second job {asked.total()}"
        raise CannotExamine(f"{said}, {extra.total()} of them others; expected the same data in the same order")


def told(whole: Whole) -> list[Clue]:
    """The mistakes that the whole numbers show. Without a name, the numbers may be right."""
    wanted, asked, found = _tokens(whole.texts), _tokens(whole.rows), []
    if asked and len(lost := wanted - asked) > 1:  # one may be padding
        return [("tokens_missing", f"{lost.total()} of {wanted.total()} tokens are on no rank")]
    for what, padding in (("label", IGNORED), ("position", UNKNOWN)):
        said, names = "", list[str]()  # of the first row that is wrong, and the names that fit all that are
        for row, text, shard in whole.shards:
            places, own = positions(whole.layout, len(row.tokens) * whole.cp, shard, whole.cp), getattr(row, what)
            right = _at(getattr(text, what), places, padding)
            if (off := ~_agree(own, right)).any():
                fits = [name for name, x in _believed(what, row, places, shard, whole).items() if _agree(own, x).all()]
                names = [name for name in names if name in fits] if said else fits
                token, number, other = (int(x[off][0]) for x in (places, own, right))
                said = said or f"rank {row.rank}'s {what} of token {token} is {number}, expected {other}"
        found += [((names or [""])[0], said)] if said else []
    return found


def _believed(what: str, row: Row, places: Tensor, shard: int, whole: Whole) -> dict[str, Tensor]:
    """The labels or positions (C,) that a rank has by each mistake, in the place of those of its `places` (C,)."""
    C = len(places)
    if what == "label":
        return {"labels_per_shard": pad(row.tokens[1:], (0, 1), value=UNKNOWN).where(row.label != IGNORED, UNKNOWN)}
    others = [name for name in LAYOUTS if name != "zigzag" or C % 2 == 0]
    return {
        "positions_missing": 0 * places,
        "rotated_twice": 2 * places,
        "documents_lost": places,  # where the right ones begin again
        **{f"positions_of_{name}": positions(name, C * whole.cp, shard, whole.cp) for name in others},
        "positions_per_shard": torch.arange(C),
    }
