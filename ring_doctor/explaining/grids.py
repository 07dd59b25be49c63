"""An X-ray in words: for each matrix a grid of tiles, what the wrong ones hold, and in which round they begin.

    rank 0   ok       missing  ok        a row for each rank's queries, a column for each block's keys
    rank 1   ok       ok       missing

Rank r computes the tile of block j in round t = (r - j) mod P, so the first wrong round says where a ring goes wrong.

Before: tiles.py. After: xray.py.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from torch import Tensor

from ring_doctor.asking.case import Case
from ring_doctor.explaining.tiles import KINDS, Sheet, Tile
from ringlab.support.colours import paint

TITLES = {  # the four matrices: what a reader sees of them, and the result that shows it
    "W forward": ("weights of the forward pass", "out"),
    "W backward": ("weights of the backward pass", "dV"),
    "dS in dQ": ("gradients of the scores", "dQ"),
    "dS in dK": ("gradients of the scores", "dK"),
}
OF_LSE = "the lse that the backward pass gets: p = e^(s - lse), with the lse of the whole row"


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
        return sums[wrong] if wrong.any() and not self.name.startswith("dS") else None

    @property
    def ok(self) -> bool:
        """Whether all numbers are right."""
        return bool(((self.sheet.seen - self.sheet.right).abs() <= self.sheet.allowed).all())

    @property
    def title(self) -> str:
        return "{}, {} ({})".format(self.name, *TITLES[self.name])

    @property
    def wrong(self) -> list[Tile]:
        return [tile for tile in self.tiles if tile.kind != "ok"]

    def _round(self, tile: Tile) -> int:
        return (tile.rank - tile.block) % len(self.sheet.lengths)

    def _by_round(self, tiles: Iterable[Tile]) -> dict[int, list[int]]:
        """{round: the ranks that compute these tiles in it}."""
        rounds: dict[int, list[int]] = {}
        for tile in tiles:
            rounds.setdefault(self._round(tile), []).append(tile.rank)
        return dict(sorted(rounds.items()))

    def details(self) -> list[str]:
        """What the wrong tiles hold, a line for each kind of content."""
        P, lines = len(self.sheet.lengths), []
        for words in dict.fromkeys(tile.words for tile in self.wrong):
            tiles = [tile for tile in self.wrong if tile.words == words]
            rounds = self._by_round(tiles)
            where = _in_rounds(rounds, P, "; ")
            if len(tiles) == P * P:
                where = "all tiles"
            elif all(len(ranks) == P for ranks in rounds.values()) and len(rounds) > 1:
                where = f"rounds {', '.join(map(str, rounds))} on every rank"
            elif len(rounds) > 2:
                where = f"{len(tiles)} tiles"
            amounts = [amount for tile in tiles for amount in tile.amount or ()]
            how = f": by {_between(amounts)}" if amounts else ""
            lines.append(f"{where}: {words}" + (f", off by up to {max(amounts):.2g}" if words == "wrong" else how))
        return lines

    def sentences(self) -> list[str]:
        """How many tiles are wrong, how, from which round on, and what the weights of a query sum to."""
        if self.ok:
            return ["right."]
        P, said = len(self.sheet.lengths), []
        if self.wrong:
            kinds = [tile.kind for tile in self.wrong]
            counts = ", ".join(f"{kinds.count(kind)} {words}" for kind, (words, _) in KINDS.items() if kind in kinds)
            first = {tile.rank: tile for tile in sorted(self.wrong, key=self._round, reverse=True)}
            starts = _in_rounds(self._by_round(first[rank] for rank in sorted(first)), P, ", ")
            said = [f"{len(kinds)} of {P * P} tiles are wrong: {counts}.", f"First in {starts}."]
        elif self.sums is None:
            said = ["wrong as a whole, as follows from these weights or this out."]
        if self.sums is not None:
            sums = _between(self.sums.tolist())
            said.append(f"The weights of {len(self.sums)} of {len(self.sheet.seen)} queries sum to {sums}, not to 1.")
        return said


@dataclass(frozen=True)
class XRay:
    """All that the two runs of a patient show."""

    matrices: list[Matrix]
    case: Case  # the question without its two inputs

    @property
    def right(self) -> bool:
        return all(matrix.ok for matrix in self.matrices)

    def summary(self) -> str:
        """The summary of each wrong matrix, or one sentence if all are right."""
        wrong = [f"{matrix.title}: {' '.join(matrix.sentences())}" for matrix in self.matrices if not matrix.ok]
        return "\n".join(wrong) or f"X-ray: all {len(self.matrices)} matrices are right."

    def text(self) -> str:
        """The summary of each matrix. Below a wrong matrix stand a grid and what each of its wrong tiles holds.

        A row of the grid is a rank's queries, a column a block's keys. "-": the mask hides the tile, which is empty.
        """
        first: dict[tuple[str, ...], str] = {}
        texts = []
        for matrix in self.matrices:
            name = first.setdefault(tuple(matrix.details()), matrix.name)
            same = f"{matrix.title}: wrong in the same tiles in the same way as {name}."
            texts.append(same if matrix.wrong and name != matrix.name else _text(matrix))
        return "\n".join(texts)

    def facts(self, known: Collection[str] = ()) -> list[str]:
        """What each wrong matrix shows, and where to look; the weights of the forward pass alone if they are wrong.

        `known`: results of which is known what they hold. Of these no place to look at is told.
        """
        said: dict[str, str] = {}  # by what is shown
        wrong = [matrix for matrix in self.matrices if not matrix.ok]
        for matrix in wrong[:1] if wrong and wrong[0].name == "W forward" else wrong:
            kinds = [tile.kind for tile in matrix.wrong]
            held = TITLES[matrix.name][1].lower() in known
            if (said and not kinds) or (held and set(kinds) <= {"wrong"}):
                continue  # it follows from another matrix, or says less than is known
            shown = "; ".join(matrix.details()) + "." if kinds else " ".join(matrix.sentences())
            kind = next((kind for kind in kinds if KINDS[kind][1] and not held), "ok")
            look = OF_LSE if (matrix.name, kind) == ("W backward", "scaled") else KINDS[kind][1]
            if shown not in said:
                said[shown] = f"{matrix.title}: {shown}" + (f" Look at {look}." if look else "")
        return [f"X-ray ({self.case.words()}): {words}" for words in said.values()]


def _text(matrix: Matrix) -> str:
    first, *others = matrix.sentences()
    lines = [f"{matrix.title}: {first}", *(f"    {sentence}" for sentence in others)]
    if matrix.wrong:
        P = len(matrix.sheet.lengths)
        labels = ["-" if tile.kind == "ok" and tile.hidden else tile.label for tile in matrix.tiles]
        width = 2 + max(3, *(len(label) for label in labels))
        lines.append(" " * 13 + "".join(paint(j, f"KV{j}".ljust(width)) for j in range(P)).rstrip())
        for rank in range(P):
            row = "".join(label.ljust(width) for label in labels[rank * P : (rank + 1) * P])
            lines.append("    " + f"rank {rank}".ljust(9) + row.rstrip())
        lines += [f"    {detail}" for detail in matrix.details()]
    return "\n".join(lines)


def _between(amounts: list[float]) -> str:
    low, high = (f"{round(x, 4) + 0.0:.3g}" for x in (min(amounts), max(amounts)))
    return low if low == high else f"{low} to {high}"


def _in_rounds(rounds: dict[int, list[int]], world_size: int, between: str) -> str:
    """ "round 1 on rank 2, round 2 on every rank"."""
    return between.join(f"round {t} on {_ranks(ranks, world_size)}" for t, ranks in rounds.items())


def _ranks(ranks: list[int], world_size: int) -> str:
    if len(ranks) == world_size:
        return "every rank"
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
