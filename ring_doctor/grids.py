"""An X-ray in words: for each matrix a grid of tiles, what the wrong ones hold, and in which round they begin.

    rank 0   ok       missing  ok        a row for each rank's queries, a column for each block's keys
    rank 1   ok       ok       missing

Rank r computes the tile of block j in round t = (r - j) mod P, so the first wrong round says where a ring goes wrong.

Before: tiles.py. After: xray.py.
Source: none.
"""

from dataclasses import dataclass

from torch import Tensor

from ring_doctor.case import Case
from ring_doctor.tiles import KINDS, Sheet, Tile
from ringlab.support.colours import paint

TITLES = {  # the four matrices: what a reader sees of them
    "W forward": "weights of the forward pass (out)",
    "W backward": "weights of the backward pass (dV)",
    "dS in dQ": "gradients of the scores (dQ)",
    "dS in dK": "gradients of the scores (dK)",
}


@dataclass(frozen=True)
class Matrix:
    """One matrix of a patient, examined."""

    name: str  # of TITLES
    sheet: Sheet  # the matrix beside the right matrix
    tiles: list[Tile]  # rank by rank, block by block

    @property
    def sums(self) -> Tensor | None:
        """The sums of the wrong rows of weights. A right row sums to 1, or to 0 where the query sees nothing."""
        if self.name.startswith("dS"):
            return None
        sums = self.sheet.seen.sum(dim=1)
        wrong = ~((sums - self.sheet.right.sum(dim=1)).abs() <= self.sheet.allowed.sum(dim=1))
        return sums[wrong] if wrong.any() else None

    @property
    def ok(self) -> bool:
        """Whether all numbers are right."""
        return bool(((self.sheet.seen - self.sheet.right).abs() <= self.sheet.allowed).all())

    @property
    def title(self) -> str:
        return f"{self.name}, {TITLES[self.name]}"

    @property
    def wrong(self) -> list[Tile]:
        return [tile for tile in self.tiles if tile.kind != "ok"]

    def first_wrong_round(self, rank: int) -> int | None:
        """The round in which the rank's first wrong tile is computed."""
        P = len(self.sheet.lengths)
        return min(((rank - tile.block) % P for tile in self.wrong if tile.rank == rank), default=None)

    def details(self) -> list[str]:
        """What the wrong tiles hold, a line for each kind of content."""
        P = len(self.sheet.lengths)
        groups: dict[str, list[Tile]] = {}
        for tile in self.wrong:
            groups.setdefault(tile.words, []).append(tile)
        lines = []
        for words, tiles in groups.items():
            rounds: dict[int, list[int]] = {}
            for tile in tiles:
                rounds.setdefault((tile.rank - tile.block) % P, []).append(tile.rank)
            where = "; ".join(f"round {t} on {_ranks(ranks, P)}" for t, ranks in sorted(rounds.items()))
            if len(tiles) == P * P:
                where = "all tiles"
            elif all(len(ranks) == P for ranks in rounds.values()) and len(rounds) > 1:
                where = f"rounds {', '.join(map(str, sorted(rounds)))} on every rank"
            elif len(rounds) > 2:
                where = f"{len(tiles)} tiles"
            amounts = [tile.amount for tile in tiles if tile.amount]
            how = ""
            if amounts:
                low, high = min(low for low, _ in amounts), max(high for _, high in amounts)
                how = f", off by up to {high:.2g}" if words == "wrong" else f": by {_between(low, high)}"
            lines.append(f"{where}: {words}{how}")
        return lines

    def sentences(self) -> list[str]:
        """How many tiles are wrong, how, from which round on, and what the weights of a query sum to."""
        if self.ok:
            return ["right."]
        P, said = len(self.sheet.lengths), []
        if self.wrong:
            kinds = [tile.kind for tile in self.wrong]
            counts = ", ".join(f"{kinds.count(kind)} {words}" for kind, words in KINDS.items() if kind in kinds)
            rounds = [self.first_wrong_round(rank) for rank in range(P)]
            starts = [
                f"round {t} on {_ranks([rank for rank in range(P) if rounds[rank] == t], P)}"
                for t in sorted({t for t in rounds if t is not None})
            ]
            said = [f"{len(kinds)} of {P * P} tiles are wrong: {counts}.", f"First in {', '.join(starts)}."]
        elif self.sums is None:
            said = ["wrong as a whole, as follows from these weights or this out."]
        if self.sums is not None:
            sums = _between(self.sums.min().item(), self.sums.max().item())
            said.append(f"The weights of {len(self.sums)} of {len(self.sheet.seen)} queries sum to {sums}, not to 1.")
        return said

    def summary(self) -> str:
        """The title and the sentences in one line."""
        return f"{self.title}: {' '.join(self.sentences())}"


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
        if self.right:
            return f"X-ray: all {len(self.matrices)} matrices are right."
        return "\n".join(matrix.summary() for matrix in self.matrices if not matrix.ok)

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


def _text(matrix: Matrix) -> str:
    lines = [f"{matrix.title}: {matrix.sentences()[0]}", *(f"    {sentence}" for sentence in matrix.sentences()[1:])]
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


def _between(low: float, high: float) -> str:
    low_text, high_text = (f"{round(x, 4) + 0.0:.3g}" for x in (low, high))
    return low_text if low_text == high_text else f"{low_text} to {high_text}"


def _ranks(ranks: list[int], world_size: int) -> str:
    if len(ranks) == world_size:
        return "every rank"
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
