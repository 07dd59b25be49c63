"""What is wrong with a tile of a matrix: the pairs of one rank's queries and one block's keys.

The right content of a tile is known for every pair, also for those that the mask hides. So a tile that is not right can
be compared with what it should not hold: nothing, twice its content, that of another block, pairs behind the mask.

Tokens are in the order of the ranks here, so a tile is rows[a:b], columns[c:d] of an (S, S) matrix.
A reader of the ring may skip this file; xray.py calls it.
"""

from dataclasses import dataclass
from itertools import combinations

import torch
from torch import Tensor

KINDS = {  # and how a sentence goes on after "3 of 16 tiles are not right: 2 ..."
    "ok": "right",
    "missing": "missing",
    "twice": "counted twice",
    "scaled": "scaled",
    "shifted": "from elsewhere",
    "sum": "sums of several blocks",
    "mask": "under another mask",
    "foreign": "with pairs behind the mask",
    "wrong": "wrong in another way",
    "NaN": "NaN or infinite",
}


@dataclass(frozen=True)
class Tile:
    """What one tile holds."""

    rank: int  # of the queries
    block: int  # of the keys
    kind: str  # of KINDS
    label: str  # at most some ten letters, for a grid
    words: str  # the same for a sentence
    hidden: bool  # the mask hides all of its pairs


@dataclass(frozen=True)
class Sheet:
    """A matrix of a patient beside what it should be. All (S, S), float64, tokens in the order of the ranks."""

    seen: Tensor
    full: Tensor  # the right content of every pair, as if it were visible
    visible: Tensor  # bool
    allowed: Tensor  # how far rounding may move a number
    lengths: tuple[int, ...]  # tokens on each rank

    def cut(self, x: Tensor, rank: int, block: int) -> Tensor:
        """The tile of an (S, S) matrix: (tokens of `rank`, tokens of `block`)."""
        return x.split(self.lengths)[rank].split(self.lengths, dim=1)[block]

    @property
    def right(self) -> Tensor:
        """What the matrix should be."""
        return self.full * self.visible


def factor(seen: Tensor, right: Tensor, allowed: Tensor) -> tuple[float, float] | None:
    """(x, how far rounding may move x) where seen is x times right, else None. Tensors of one shape, float64.

    x is the one of least squares: Σ seen right / Σ right².
    """
    norm = right.square().sum().item()
    if norm == 0:
        return None
    x = (seen * right).sum().item() / norm
    allowed = max(1.0, abs(x)) * allowed
    off = (right.abs() * allowed).sum().item() / norm
    same = (seen - x * right).abs() <= allowed + off * right.abs()
    return (x, off) if same.all() else None


def examine(sheet: Sheet) -> list[Tile]:
    """Every tile of the matrix, rank by rank and block by block."""
    P = len(sheet.lengths)
    return [_tile(sheet, rank, block) for rank in range(P) for block in range(P)]


def _tile(sheet: Sheet, rank: int, block: int) -> Tile:
    tensors = (sheet.seen, sheet.full, sheet.visible, sheet.allowed)
    seen, full, visible, allowed = (sheet.cut(x, rank, block) for x in tensors)
    kind, label, words = _name(sheet, rank, block, seen, full, visible, allowed)
    return Tile(rank, block, kind, label, words, hidden=not visible.any())


def _name(
    sheet: Sheet, rank: int, block: int, seen: Tensor, full: Tensor, visible: Tensor, allowed: Tensor
) -> tuple[str, str, str]:
    """(kind, label, words) of a tile. The most telling answer comes first."""
    if not seen.isfinite().all():
        return "NaN", "NaN", f"{int((~seen.isfinite()).sum())} numbers are NaN or infinite"
    right = full * visible
    error = (seen - right).abs()
    if (error <= allowed).all():
        return "ok", "ok", "right"

    present = torch.where(full.abs() > 2 * allowed, seen.abs() > allowed, visible)  # a number near 0 says nothing
    extra, lost = int((present & ~visible).sum()), int((visible & ~present).sum())
    if not present.any():
        return "missing", "missing", "missing"
    if ((seen - full).abs() <= allowed)[present].all():  # the right numbers, for other pairs
        return _of_mask(present, visible, extra, lost)

    # A query that sees no other tile has the same weights whatever the tile's factor.
    alone = visible.any(dim=1) & (visible.sum(dim=1) == sheet.visible.split(sheet.lengths)[rank].sum(dim=1))
    heard = ~(alone & (error <= allowed).all(dim=1))
    found = factor(seen[heard], right[heard], allowed[heard])
    if found and abs(found[0] - 2) <= found[1]:
        return "twice", "twice", "counted twice"
    if held := _held(sheet, rank, block, seen):
        return held
    if found:
        return "scaled", f"x {found[0]:.3g}", f"{found[0]:.3g} times what it should be"
    if rows := _row_by_row(seen[heard], right[heard], allowed[heard]):
        return rows
    if not visible.any():
        return "foreign", f"leak {extra}", f"{_pairs(extra)} behind the mask"
    return "wrong", "wrong", f"off by up to {error.max():.2g}"


def _held(sheet: Sheet, rank: int, block: int, seen: Tensor) -> tuple[str, str, str] | None:
    """What the tile holds that belongs elsewhere: to some blocks in these rows, or to one tile of another rank."""
    P, length = len(sheet.lengths), sheet.lengths[block]
    blocks = [b for b in range(P) if sheet.lengths[b] == length and sheet.cut(sheet.visible, rank, b).any()]
    for count in range(1, len(blocks) + 1):
        for some in combinations(blocks, count):
            right, allowed = (sum(sheet.cut(x, rank, b) for b in some) for x in (sheet.right, sheet.allowed))
            if ((seen - right).abs() <= allowed).all():
                names = [f"KV{b}" for b in some]
                if count == 1:
                    return "shifted", f"is {names[0]}", f"what belongs to {names[0]}"
                return "sum", "+".join(map(str, some)), f"the sum of {', '.join(names[:-1])} and {names[-1]}"
    for other in range(P):
        for b in range(P):
            same_shape = (sheet.lengths[other], sheet.lengths[b]) == tuple(seen.shape)
            if other != rank and same_shape and sheet.cut(sheet.visible, other, b).any():
                right, allowed = (sheet.cut(x, other, b) for x in (sheet.right, sheet.allowed))
                if ((seen - right).abs() <= allowed).all():
                    return "shifted", f"r{other} KV{b}", f"what rank {other} should have for KV{b}"
    return None


def _row_by_row(seen: Tensor, right: Tensor, allowed: Tensor) -> tuple[str, str, str] | None:
    """Whether each query has a factor of its own. One visible pair fits any factor, so some query must have two."""
    found = [factor(*row) for row in zip(seen, right, allowed, strict=True) if row[1].any() or (row[0] != 0).any()]
    if not found or None in found or (right != 0).sum(dim=1).max() < 2:
        return None
    low, high = min(x for x, _ in found), max(x for x, _ in found)
    return "scaled", f"x {low:.2g}-{high:.2g}", f"{low:.3g} to {high:.3g} times what it should be, row by row"


def _of_mask(present: Tensor, visible: Tensor, extra: int, lost: int) -> tuple[str, str, str]:
    is_, should = pattern(present), pattern(visible)
    if not visible.any():
        return "foreign", f"leak {extra}", f"{_pairs(extra)} behind the mask" + (f": {is_}" if is_ else "")
    if is_ and should:
        return "mask", "mask", f"{is_} instead of {should}"
    parts = [f"{_pairs(n)} too {few}" for n, few in ((extra, "many"), (lost, "few")) if n]
    return ("mask", "mask", " and ".join(parts)) if lost else ("foreign", f"leak {extra}", f"{_pairs(extra)} leak")


def pattern(seen: Tensor) -> str | None:
    """The name of the pairs (queries, keys) bool that are seen in a tile, or None if they have none."""
    query, key = (torch.arange(n) for n in seen.shape)
    query = query[:, None]
    shapes = {
        "all pairs": key >= 0,
        "nothing": key < 0,
        "a triangle": key <= query,
        "a triangle without its diagonal": key < query,
        "a triangle and the next key": key <= query + 1,
        "a triangle of later keys": key >= query,
        "a triangle of later keys without its diagonal": key > query,
        "the first half of the keys": key < seen.shape[1] // 2,
        "the last half of the keys": key >= seen.shape[1] // 2,
        "the first half of the queries": query < seen.shape[0] // 2,
        "the last half of the queries": query >= seen.shape[0] // 2,
    }
    return next((name for name, shape in shapes.items() if torch.equal(seen, shape.expand(seen.shape))), None)


def _pairs(n: int) -> str:
    return f"{n} pair{'s' * (n != 1)}"
