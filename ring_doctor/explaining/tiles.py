"""What is wrong with a tile of a matrix: the pairs of one rank's queries and one block's keys.

The right number of every pair is known, also of a pair that the mask hides. So a wrong tile can be compared with wrong
contents: nothing, twice the right numbers, the numbers of another block, pairs behind the mask.

Shapes: matrices (S, S) with the tokens in the order of the ranks; a tile is [a:b, c:d] of a matrix.

Before: asking/case.py. After: grids.py, which puts them into words.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor

MASK = "the mask of these tiles: the positions of queries and keys, < and <="
LOOK = {  # for a tile of this kind
    "missing": "the number of rounds, and at what a round leaves out",
    "twice": "the number of rounds, and at the start of the sums",
    "scaled": "the scale, and the factors with which blocks are merged",
    "shifted": "the hops: who sends to whom, and which block a rank takes it for",
    "mask": MASK,
    "foreign": MASK,
    "unasked": "what hides keys though no mask was asked: a mask that is always on, slices, padding, the dimensions",
    "scores": "the scale: 1/√D with another D, a scale that is given and one that is not; a softcap",
    "keys": "tokens that join K and V in more than one round, as a text that every rank has, and chunks that overlap",
    "NaN": "queries that see no key of a block",
}


@dataclass(frozen=True)
class Tile:
    """The numbers of one tile, described."""

    rank: int  # of the queries
    block: int  # of the keys
    kind: str  # in LOOK, or "ok", or "wrong" in another way
    label: str  # at most some ten letters, for a grid; "-": right, and the mask hides all of its pairs
    words: str  # the same for a sentence
    holds: int | None = None  # "shifted": the block to which its numbers belong
    amount: tuple[float, float] | None = None  # "scaled": the least and the largest factor; "wrong": 0 and the error


@dataclass(frozen=True)
class Sheet:
    """A matrix of a patient beside the right matrix. All (S, S), float64, tokens in the order of the ranks."""

    lengths: tuple[int, ...]  # tokens on each rank
    seen: Tensor
    full: Tensor  # the right number of every pair, as if the pair were visible
    visible: Tensor  # bool
    allowed: Tensor  # how far rounding may move a number

    def cut(self, x: Tensor, rank: int, block: int) -> Tensor:
        """The tile of an (S, S) matrix: (tokens of `rank`, tokens of `block`)."""
        return x.split(self.lengths)[rank].split(self.lengths, dim=1)[block]

    @cached_property
    def right(self) -> Tensor:
        """The right matrix."""
        return self.full * self.visible

    @cached_property
    def present(self) -> Tensor:
        """(S, S) bool: the pairs that are seen. A right number near 0 says nothing of its pair, and counts as right."""
        return torch.where(self.full.abs() > 2 * self.allowed, self.seen.abs() > self.allowed, self.visible)


def factor(seen: Tensor, right: Tensor, allowed: Tensor) -> tuple[float, float] | None:
    """(x, how far rounding may move x) where seen is x times right, else None. Tensors of one shape, float64.

    x minimises the squares of the errors: x = Σ seen right / Σ right².
    """
    norm = right.square().sum().item()
    if norm == 0:
        return None
    x = (seen * right).sum().item() / norm
    allowed = max(1.0, abs(x)) * allowed
    off = (right.abs() * allowed).sum().item() / norm
    same = (seen - x * right).abs() <= allowed + off * right.abs()
    return (x, off) if same.all() else None


def likeliest(sheets: Iterable[Sheet]) -> list[Tile]:
    """Every tile of the matrix, rank by rank and block by block.

    The sheets differ in the right matrix: the rows of a rank use the sheet that explains most. It has the fewest tiles
    "wrong" or "scaled", and of several such sheets the most right tiles.
    """

    def unexplained(row: list[Tile]) -> tuple[int, int]:
        kinds = [tile.kind for tile in row]
        return kinds.count("wrong") + kinds.count("scaled"), len(kinds) - kinds.count("ok")

    best: list[list[Tile]] = []
    for sheet in sheets:
        P = range(len(sheet.lengths))
        rows = [[_tile(sheet, rank, block) for block in P] for rank in P]
        best = [min(both, key=unexplained) for both in zip(best or rows, rows, strict=True)]
        if all(tile.kind == "ok" for row in best for tile in row):
            break
    return [tile for row in best for tile in row]


def _tile(sheet: Sheet, rank: int, block: int) -> Tile:
    tensors = (sheet.seen, sheet.full, sheet.visible, sheet.allowed, sheet.present)
    seen, full, visible, allowed, present = (sheet.cut(x, rank, block) for x in tensors)
    right, hidden = full * visible, not visible.any()
    error = (seen - right).abs()
    tile = partial(Tile, rank, block)
    if not seen.isfinite().all():
        return tile("NaN", "NaN", "NaN or infinite")
    if (error <= allowed).all():
        return tile("ok", "-" if hidden else "ok", "right")
    if (seen.abs() <= allowed).all():
        return tile("missing", "missing", "missing")
    if ((seen - full).abs() <= allowed)[present].all():  # the right numbers, for other pairs
        kind, label, words = _of_mask(present, visible)
        return tile("unasked" if sheet.visible.all() else kind, label, words)

    # The weights of a query that sees this tile only do not depend on the tile's factor.
    alone = visible.any(dim=1) & (visible.sum(dim=1) == sheet.visible.split(sheet.lengths)[rank].sum(dim=1))
    heard = ~(alone & (error <= allowed).all(dim=1))
    rows = [x[heard] for x in (seen, right, allowed)]
    found = factor(*rows)
    if found and abs(found[0] - 2) <= found[1]:
        return tile("twice", "twice", "counted twice")
    if (held := _elsewhere(sheet, rank, seen)) is not None:
        return tile("shifted", f"is KV{held}", f"what belongs to KV(j + {(held - block) % len(sheet.lengths)})", held)
    if found:
        return tile("scaled", f"x {found[0]:.3g}", "scaled", amount=(found[0], found[0]))
    if counts := _of_keys(*rows):
        return tile("keys", "keys", counts)
    of_queries = [factor(*row) for row in zip(*rows, strict=True) if row[1].any() or row[0].any()]
    factors = [of_query[0] for of_query in of_queries if of_query]
    if factors and len(factors) == len(of_queries) and (right != 0).sum(dim=1).max() > 1:  # one pair fits any factor
        low, high = min(factors), max(factors)
        return tile("scaled", f"x {low:.2g}-{high:.2g}", "scaled, each query by its own factor", amount=(low, high))
    if hidden:
        return tile("foreign", f"leak {int(present.sum())}", f"{_pairs(present)} behind the mask")
    return tile("wrong", "wrong", "wrong", amount=(0.0, error.max().item()))


def _of_keys(seen: Tensor, right: Tensor, allowed: Tensor) -> str:
    """How often some keys count, in words, where every query has each key as often; "" where that is otherwise."""
    keys, times = right.any(dim=0).nonzero().flatten().tolist(), dict[str, list[str]]()
    for n in keys:
        found = factor(seen[:, n], right[:, n], allowed[:, n])
        times.setdefault(f"{found[0]:.3g}" if found else "", []).append(str(n))
    if "" in times or not times.keys() > {"1"}:
        return ""
    many = {x: f"keys {', '.join(of)} count" if len(of) > 1 else f"key {of[0]} counts" for x, of in times.items()}
    return " and ".join(f"{keys} {x} times" for x, keys in many.items() if x != "1")


def _elsewhere(sheet: Sheet, rank: int, seen: Tensor) -> int | None:
    """The block whose numbers in these rows the tile holds. A block that the mask hides has none."""
    for block in range(len(sheet.lengths)):
        right, allowed, visible = (sheet.cut(x, rank, block) for x in (sheet.right, sheet.allowed, sheet.visible))
        if visible.any() and right.shape == seen.shape and ((seen - right).abs() <= allowed).all():
            return block
    return None


def _of_mask(present: Tensor, visible: Tensor) -> tuple[str, str, str]:
    """The kind, label and words of a tile with the right numbers for other pairs than the visible ones."""
    extra, lost = present & ~visible, visible & ~present
    is_, should = pattern(present), pattern(visible)
    if not visible.any() or (not lost.any() and not (is_ and should)):
        shape = f", {is_}" if is_ and not visible.any() else ""
        return "foreign", f"leak {int(extra.sum())}", f"{_pairs(extra)} behind the mask{shape}"
    too_many = f", {_pairs(extra)} too many" if extra.any() else ""
    return "mask", "mask", f"{is_} instead of {should}" if is_ and should else f"{_pairs(lost)} too few{too_many}"


def pattern(seen: Tensor) -> str | None:
    """The name of the pairs (queries, keys) bool that are seen in a tile, or None if they have none."""
    query, key = torch.arange(seen.shape[0])[:, None], torch.arange(seen.shape[1])
    named = {
        "all pairs": key >= 0,
        "nothing": key < 0,
        "a triangle": key <= query,
        "a triangle without its diagonal": key < query,
        "a triangle and the next key": key <= query + 1,
        "a triangle of later keys": key >= query,
        "a triangle of later keys without its diagonal": key > query,
    }
    for of, i in (("queries", query), ("keys", key)):
        named |= {f"the first half of the {of}": i < len(i) // 2, f"the last half of the {of}": i >= len(i) // 2}
    return next((name for name, shape in named.items() if torch.equal(seen, shape.expand(seen.shape))), None)


def _pairs(pairs: Tensor) -> str:
    n = int(pairs.sum())
    return "1 pair" if n == 1 else f"{n} pairs"
