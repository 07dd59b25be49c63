"""One sentence of an X-ray: which tiles of which matrix are wrong, how, and where to look; or why it shows nothing.

Shapes: those of grids.py.

Before: take_xray.py. After: inference.py.
Source: none.
"""

import torch
from torch import Tensor

from ring_doctor.answers import Answer
from ring_doctor.case import Case
from ring_doctor.grids import Matrix, XRay
from ring_doctor.patterns import listed

LONG = 300  # letters: details of tiles that are longer are told in sum
SHOWN_BY = {"W forward": "out", "W backward": "dv", "dS in dQ": "dq", "dS in dK": "dk"}
LOOK = {  # by kind of tile
    "missing": "the number of rounds, and at what a round leaves out",
    "twice": "the number of rounds, and at the start of the sums",
    "shifted": "the hops: who sends to whom, and which block a rank takes it for",
    "sum": "buffers that are added to and not replaced",
    "mask": "the mask of these tiles: the positions of queries and keys, < and <=",
    "foreign": "the mask of these tiles: the positions of queries and keys, < and <=",
    "scaled": "the scale, and the factors with which blocks are merged",
    "NaN": "queries that see no key of a block",
}


def of_xray(xray: XRay | str, wrong: list[Answer], known: set[str]) -> tuple[list[str], list[str]]:
    """What an X-ray shows, or why it cannot show the mistake. `known`: results of which is known what they hold."""
    if isinstance(xray, str):
        return [], []
    if xray.right:
        lacks = _lacks(xray.case, wrong)
        why = f"every wrong answer is one {listed(lacks)}" if lacks else "it has one head, small scores and few tokens"
        return [], [f"An X-ray cannot show this mistake: {why}."]
    matrix = next(matrix for matrix in xray.matrices if not matrix.ok)
    kinds = [tile.kind for tile in matrix.wrong]
    held = SHOWN_BY[matrix.name] in known
    if held and set(kinds) <= {"wrong"}:
        return [], []  # that all tiles are wrong says less
    details = "; ".join(matrix.details()) + "."
    seen = details if matrix.wrong and len(details) < LONG else " ".join(matrix.sentences())
    said = f"X-ray ({xray.case.words()}): {matrix.title}: {seen}"
    if kinds and set(kinds) <= {"mask", "foreign"}:
        said += _pairs(matrix, xray.case)
    looks = [_look(matrix, kind) for kind in dict.fromkeys(kinds) if kind in LOOK and not held]
    return [said + (f" Look at {looks[0]}." if looks else "")], []


def _look(matrix: Matrix, kind: str) -> str:
    of_backward = "the lse that the backward pass gets: p = e^(s - lse), with the lse of the whole row"
    return of_backward if kind == "scaled" and matrix.name == "W backward" else LOOK[kind]


def _lacks(case: Case, wrong: list[Answer]) -> list[str]:
    """What all wrong answers have and the X-ray has not."""
    features = {
        "with another mask": lambda x: x.case.causal != case.causal,
        "in another layout": lambda x: x.case.layout != case.layout,
        "with another number of ranks": lambda x: x.case.world_size != case.world_size,
        "with a batch": lambda x: x.case.batch > 1,
        "with grouped queries": lambda x: x.case.heads != x.case.kv_heads,
        "with large scores": lambda x: x.case.inputs == "large",
        "with a scale": lambda x: x.case.scale is not None,
        "with attention sinks": lambda x: x.case.sinks,
        "in 16 bits": lambda x: torch.finfo(x.case.dtype).bits <= 16,
        "with chunks of unequal length": lambda x: not x.case.equal_chunks and case.equal_chunks,
        "with more tokens": lambda x: x.case.seq_len > 8 * case.seq_len,
        "to views": lambda x: x.question.how == "views",
        "to a second call": lambda x: x.question.how in ("twice", "after another length"),
        "of two backward passes": lambda x: x.question.how in ("two backward passes", "interleaved"),
        "with inputs that need no gradient": lambda x: x.question.how.startswith("frozen"),
        "under autocast": lambda x: x.question.how == "autocast",
        "without gradients": lambda x: x.question.how == "without gradients",
        "in a part of a job": lambda x: x.question.members is not None,
    }
    return [words for words, has in features.items() if all(has(answer) for answer in wrong)]


def _pairs(matrix: Matrix, case: Case) -> str:
    """The pairs that are seen and must be hidden, or the reverse: by their distance, or by their place in a tile."""
    sheet = matrix.sheet
    present = torch.where(sheet.full.abs() > 2 * sheet.allowed, sheet.seen.abs() > sheet.allowed, sheet.visible)
    order = torch.cat([case.positions(rank) for rank in range(case.world_size)])
    distance, said = order[None, :] - order[:, None], ""
    for pairs, words in ((present & ~sheet.visible, "seen too"), (sheet.visible & ~present, "not seen")):
        at = distance[pairs].unique()
        tiles = [sheet.cut(pairs, tile.rank, tile.block) for tile in matrix.wrong]
        where = next((which for which, rows in LINES.items() if all(_only(tile, *rows) for tile in tiles)), "")
        if len(at) == 1:
            every = "Each" if bool((pairs == (distance == at)).all()) else "Some"
            said += f" {every} pair of query i and key i{_signed(int(at))} is {words}."
        elif where:
            said += f" In these tiles {where} is {words}."
    return said


LINES = {"the last key": (1, -1), "the first key": (1, 0), "the last query": (0, -1), "the first query": (0, 0)}


def _only(pairs: Tensor, dim: int, index: int) -> bool:
    """Whether these pairs are one whole line of their tile."""
    line = pairs.select(dim, index)
    return bool(line.all()) and int(pairs.sum()) == len(line)


def _signed(n: int) -> str:
    return f" {'+' if n > 0 else '-'} {abs(n)}" if n else ""
