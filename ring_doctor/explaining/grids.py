"""An X-ray in words: for each matrix a grid of tiles, what the wrong ones hold, and in which round they begin.

    rank 0   ok       missing  ok        a row for each rank's queries, a column for each block's keys
    rank 1   ok       ok       missing

Rank r computes the tile of block j in round t = (r - j) mod P, so the first wrong round says where a ring goes wrong.

Before: tiles.py. After: xray.py.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from torch import Tensor, cat

from ring_doctor.asking.case import SIZES, Case
from ring_doctor.asking.job import ranks_in_words
from ring_doctor.explaining.facts import Finding
from ring_doctor.explaining.tiles import LOOK, Sheet, Tile
from ringlab.support.colours import paint

OF_STATES = ("what each row reads of earlier tokens", "out")
TITLES = {  # the four matrices: what a reader sees of them, and the result that shows it
    "W forward": ("weights of the forward pass", "out"),
    "W backward": ("weights of the backward pass", "dV"),
    "dS in dQ": ("gradients of the scores", "dQ"),
    "dS in dK": ("gradients of the scores", "dK"),
}
LOOKS = {  # by matrix and kind of a tile
    ("W backward", "scaled"): "the lse that the backward pass gets: p = e^(s - lse), with the lse of the whole row",
    ("W backward", "missing"): "the rounds of the backward pass, the way home of dv, V received outside autograd",
    ("W forward", "scaled"): "the scale, the factors with which blocks are merged, the lse that these are made of",
    ("W backward", "keys"): "the way home of dk and dv of these keys, at a second sum over ranks",
}
OF_VALUES = "v of these keys, whose weights are right: at a sum over ranks in the place of a broadcast"
OF_SIZES = "what a block is divided by before it is sent, and multiplied by when it has come: the numbers of two ranks"
OF_BORDERS = "where documents and windows begin and end: in tokens of the whole sequence, whatever the chunk"
HIDES = ("missing", "mask", "foreign")
FOLLOWS = "wrong as a whole, as follows from these weights or this out"


@dataclass(frozen=True)
class Matrix:
    """One matrix of a patient, examined."""

    name: str  # of TITLES
    sheet: Sheet  # the matrix beside the right matrix
    tiles: list[Tile]  # rank by rank, block by block

    @property
    def sums(self) -> Tensor | None:
        """The sums of the wrong rows of weights. A right row sums to 1, or to 0 where the query sees nothing."""
        sums, right, allowed = (x.sum(dim=1) for x in (self.sheet.seen, self.sheet.right, self.sheet.allowed))
        wrong = ~((sums - right).abs() <= allowed)
        return sums[wrong] if wrong.any() and self.name.startswith("W") else None

    @property
    def ok(self) -> bool:
        """Whether all numbers are right."""
        return bool(((self.sheet.seen - self.sheet.right).abs() <= self.sheet.allowed).all())

    @property
    def shows(self) -> tuple[str, str]:
        """What a reader sees of it, and the result that shows it."""
        return TITLES.get(self.name, OF_STATES)

    @property
    def title(self) -> str:
        return "{}, {} ({})".format(self.name, *self.shows)

    @property
    def wrong(self) -> list[Tile]:
        return [tile for tile in self.tiles if tile.kind != "ok"]

    @property
    def of_tiles(self) -> list[str]:
        """What the wrong tiles hold, and in which rounds: a line for each kind of content."""
        P, lines = len(self.sheet.lengths), []
        for words in dict.fromkeys(tile.words for tile in self.wrong):
            tiles = [tile for tile in self.wrong if tile.words == words]
            rounds: dict[int, list[int]] = {}  # the ranks that compute these tiles in each
            for tile in tiles:
                rounds.setdefault((tile.rank - tile.block) % P, []).append(tile.rank)
            who = {t: "every rank" if len(ranks) == P else ranks_in_words(ranks) for t, ranks in sorted(rounds.items())}
            where = "; ".join(f"round {t} on {ranks}" for t, ranks in who.items())
            blocks = {tile.block for tile in tiles}
            if len(tiles) == P * P:
                where = "all tiles"
            elif len(tiles) == P * (P - 1) / 2 > 1 and all(tile.block > tile.rank for tile in tiles):
                where = "the keys of all later ranks"
            elif len(tiles) == P > 1 == len(blocks):
                where = f"KV{min(blocks)} on every rank"
            elif len(tiles) == P * len(rounds) and len(rounds) > 1:
                where = f"rounds {', '.join(map(str, who))} on every rank"
            elif len(rounds) > 2:
                where = f"{len(tiles)} tiles"
            amounts = [amount for tile in tiles for amount in tile.amount or ()]
            how = f": by {_between(amounts)}" if amounts else ""
            where = "" if tiles[0].kind == "scores" else f"{where}: "
            lines.append(f"{where}{words}" + (f", off by up to {max(amounts):.2g}" if words == "wrong" else how))
        return lines

    @property
    def of_rows(self) -> str:
        """What the weights of a query sum to; or that a matrix without a wrong tile is wrong. "": nothing of both."""
        if self.sums is None:
            return "" if self.ok or self.wrong else FOLLOWS
        sums = _between(self.sums.tolist())
        return f"the weights of {len(self.sums)} of {len(self.sheet.seen)} queries sum to {sums}, not to 1"

    @property
    def relative(self) -> str:
        """Where a tile is scaled: that those which are right are so up to a factor of each query only."""
        seen, right, allowed = self.sheet.seen, self.sheet.right, self.sheet.allowed
        ratio = seen / right * ((seen - right).abs() > allowed) * ("scaled" in {tile.kind for tile in self.tiles})
        cuts = [self.sheet.cut(ratio, tile.rank, tile.block) for tile in self.tiles if tile.kind == "ok"]
        factors = [x for cut in cuts for x in cut[(cut > 0) & cut.isfinite()].tolist()] if self.name[0] == "W" else []
        return f"ok means right up to one factor of each query: {_between(factors)}" if factors else ""

    @property
    def shown(self) -> list[str]:
        """All that is wrong, in lines."""
        return [line for line in (*self.of_tiles, self.of_rows, self.relative) if line]


@dataclass(frozen=True)
class XRay:
    """All that the two runs of a patient show."""

    matrices: list[Matrix]
    case: Case  # the question without its two inputs

    @property
    def right(self) -> bool:
        return all(matrix.ok for matrix in self.matrices)

    def grids(self) -> list[dict[str, Any]]:
        """Of each matrix its title, with whether it is right; the labels of its tiles, rank by rank; what they hold.

        A row of tiles is a rank's queries, a column a block's keys. "-": the mask hides the tile, which is empty. A
        matrix that is right, or wrong as another is, has no tiles.
        """
        first: dict[tuple[str, ...], str] = {}
        grids: list[dict[str, Any]] = []
        for matrix in self.matrices:
            P, name = len(matrix.sheet.lengths), first.setdefault(tuple(matrix.of_tiles), matrix.name)
            if not matrix.wrong or name != matrix.name:
                same = f"wrong in the same tiles in the same way as {name}" if matrix.wrong else matrix.of_rows
                grids.append({"title": f"{matrix.title}: {same or 'right'}.", "tiles": [], "holds": []})
                continue
            title = f"{matrix.title}: {len(matrix.wrong)} of {P * P} tiles are wrong."
            tiles = [[tile.label for tile in matrix.tiles[rank * P : (rank + 1) * P]] for rank in range(P)]
            grids.append({"title": title, "tiles": tiles, "holds": matrix.shown})
        return grids

    def text(self) -> str:
        """The grids, in words."""
        lines = []
        for grid in self.grids():
            lines.append(grid["title"])
            width = 2 + max([3, *(len(label) for row in grid["tiles"] for label in row)])
            if grid["tiles"]:
                blocks = range(len(grid["tiles"]))
                lines.append(" " * 13 + "".join(paint(j, f"KV{j}".ljust(width)) for j in blocks).rstrip())
            for rank, row in enumerate(grid["tiles"]):
                lines.append("    " + f"rank {rank}".ljust(9) + "".join(label.ljust(width) for label in row).rstrip())
            lines += [f"    {line}" for line in grid["holds"]]
        return "\n".join(lines)

    def facts(self, known: Collection[str] = ()) -> list[Finding]:
        """What each wrong matrix shows, and where to look; the weights of the forward pass alone if they are wrong.

        `known`: results of which is known what they hold. Of these no place to look at is told.
        """
        said: dict[str, Finding] = {}  # by what is shown
        wrong = [matrix for matrix in self.matrices if not matrix.ok]
        right = {matrix.name for matrix in self.matrices if matrix.ok}
        at = cat([self.case.positions(rank) for rank in range(self.case.world_size)])
        for matrix in wrong[:1] if wrong and wrong[0].name == "W forward" else wrong:
            # where a block is taken for another, the mask tells more than what is missing
            kinds = sorted((tile.kind for tile in matrix.wrong), key=lambda kind: kind not in ("mask", "foreign"))
            held = matrix.shows[1].lower() in known
            if (said and not kinds) or (held and set(kinds) <= {"wrong"}):
                continue  # it follows from another matrix, or says less than is known
            kind = next((kind for kind in kinds if LOOK.get(kind) and not held), "")
            look = LOOKS.get((matrix.name, kind), LOOK.get(kind, ""))
            look = OF_VALUES if (matrix.name, kind) == ("W forward", "keys") and matrix.sums is not None else look
            look = OF_SIZES if kind == "scaled" and self.case.inputs == SIZES else look
            later = self.case.causal and (matrix.sheet.present & ~matrix.sheet.visible & (at > at[:, None])).any()
            look = OF_BORDERS if kind in HIDES and (self.case.documents or self.case.window) and not later else look
            shown = "; ".join(matrix.of_tiles) or matrix.of_rows
            tiles = "; ".join(filter(None, (shown, matrix.relative)))
            alone = matrix.name != "W forward" and "dS in dQ" in right  # then p and dS are right, and their sums wrong
            title, named = 2 * matrix.shows[1:] if alone else (matrix.shows[0], matrix.title)
            full = f"X-ray ({self.case.words()}): {named}: {tiles}"
            nothing = {"wrong"} == {tile.kind for tile in matrix.tiles}  # that a headline could tell
            said.setdefault(shown, Finding(full, look, f"wrong {title}" if nothing else f"{title}: {shown}"))
        return list(said.values())


def _between(amounts: list[float]) -> str:
    low, high = (f"{round(x, 4) + 0.0:.3g}" for x in (min(amounts), max(amounts)))
    if low == high == "1":  # not quite
        return f"1 {amounts[0] - 1:+.1g}"
    return low if low == high else f"{low} to {high}"
