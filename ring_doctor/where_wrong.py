"""Where a result is wrong: on which ranks, in which sequences of the batch, heads, rows of a chunk, documents.

    for pattern in WHERE: pattern.common(answers, "out")    ->    what is true of out in each of these wrong answers

A row is wrong if one of its numbers is off by more than rounding. A pattern speaks of an answer only if the answer can
show the opposite: a batch of 1 says nothing about the second sequence.

Before: facts.py. After: inference.py, all that is told.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from ring_doctor.case import Case
from ring_doctor.facts import Fact, Pattern
from ring_doctor.wrong_answer import WrongAnswer

TILES = (32, 64, 128, 256)  # rows of a tile of usual kernels
BATCH = "views and reshapes that mix B with another dimension, and an index [0]"
HEAD, SPLIT, OF_GROUP = "an index of a head", "how heads are split", "the K/V head of query head h: it is h // (H/G)"
BORDER, HALVES = "the border between two chunks: < or <=, and where a slice", "the two halves of a chunk"
DOCUMENTS, SLICES = "how the borders of documents are cut for a rank and a block", "slices of the last dimension"
RANK_0, LAST_RANK = "what rank 0 does otherwise", "what the last rank does otherwise"

# fmt: off
ROWS = (  # along which axis, which of the n things are wrong, in words, and where to look
    ("rank", "first", "on rank 0 only", f"{RANK_0} than the other ranks"),
    ("rank", "last", "on the last rank only", f"{LAST_RANK}, and the step from rank P - 1 to rank 0"),
    ("rank", "not first", "on every rank but rank 0", f"the blocks that arrive, and {RANK_0}"),
    ("rank", "not last", "on every rank but the last", LAST_RANK),
    ("rank", "second", "on rank 1 only", "what rank 1 does otherwise than the other ranks"),
    ("rank", "even", "on even ranks only", "the branch for even ranks"),
    ("rank", "odd", "on odd ranks only", "the branch for odd ranks"),
    ("sequence", "first", "in the first sequence of a batch only", BATCH),
    ("sequence", "not first", "in every sequence of a batch but the first", BATCH),
    ("head", "first", "in the first head only", HEAD),
    ("head", "not first", "in every head but the first", f"{HEAD}, and what is broadcast over H"),
    ("head", "last", "in the last head only", HEAD),
    ("head", "even", "in even heads only", SPLIT),
    ("head", "odd", "in odd heads only", SPLIT),
    ("head", "not first of group", "in the query heads that are not the first of their group", OF_GROUP),
    ("head", "another group", "in the query heads h for which h mod G is not h // (H/G)", OF_GROUP),
    ("row", "first", "in the first row of a chunk only", f"{BORDER} starts"),
    ("row", "last", "in the last row of a chunk only", f"{BORDER} ends"),
    ("row", "not first", "in every row of a chunk but the first", "where a slice starts"),
    ("row", "not last", "in every row of a chunk but the last", "where a slice ends"),
    ("row", "first half", "in the first half of a chunk only", HALVES),
    ("row", "second half", "in the second half of a chunk only", HALVES),
    *(("row", f"from {n}", f"from row {n} of a chunk on", f"tiles of {n} rows: a sum or a mask of the first tile")
      for n in TILES),
    ("document", "first", "in the first document only", DOCUMENTS),
    ("document", "not first", "in documents after the first only", DOCUMENTS),
    ("number", "first half", "in the first half of D only", SLICES),
    ("number", "second half", "in the second half of D only", SLICES),
    ("number", "first", "in the first number of D only", SLICES),
    ("number", "last", "in the last number of D only", SLICES),
)
# fmt: on


def shapes(n: int) -> dict[str, Tensor]:
    """Some of n things in a row, (n,) bool, by name."""
    i = torch.arange(n)
    found = {"first": i == 0, "second": i == 1, "last": i == n - 1, "even": i % 2 == 0, "first half": i < n // 2}
    found |= {"not first": i > 0, "not last": i < n - 1, "odd": i % 2 == 1, "second half": i >= n // 2}
    return found | {f"from {tile}": i >= tile for tile in TILES if tile < n}


def _chunks(case: Case, bad: Tensor) -> list[Tensor]:
    """Of each rank which rows of its chunk are wrong: (C,)."""
    rows = bad.any(dim=3).flatten(0, 1).any(dim=0)
    return [rows[case.positions(rank)] for rank in range(case.world_size)]


def _documents(case: Case, bad: Tensor) -> list[Tensor]:
    """All documents but the first are one."""
    parts = bad.any(dim=3).flatten(0, 1).any(dim=0).split(list(case.documents or (case.seq_len,)))
    return [torch.tensor([bool(part.any()) for part in (parts[0], torch.cat(parts[1:]))])] if len(parts) > 1 else []


AXES: dict[str, Callable[[Case, Tensor], list[Tensor]]] = {  # which things along an axis are wrong, of (B, H, S, D)
    "rank": lambda case, bad: [torch.stack([chunk.any() for chunk in _chunks(case, bad)])],
    "sequence": lambda case, bad: [bad.flatten(1).any(dim=1)],
    "head": lambda case, bad: [bad.transpose(0, 1).flatten(1).any(dim=1)],
    "row": lambda case, bad: [chunk for chunk in _chunks(case, bad) if chunk.any()],  # each must be so
    "document": _documents,
    "number": lambda case, bad: [bad.flatten(0, 2).any(dim=0)],
}


def _find(axis: str, wrong: WrongAnswer, name: str) -> Iterator[Fact] | None:
    """What the wrong ones along an axis are. None where there is one thing only."""
    case, bad = wrong.case, wrong.bad_numbers(name)
    of = AXES[axis](case, bad if bad.dim() == 4 else bad[..., None])
    if len({len(each) for each in of}) != 1 or len(of[0]) == 1 or (axis == "number" and not wrong.clear(name)):
        return None
    known, h, n = shapes(len(of[0])), torch.arange(len(of[0])), len(of[0]) // case.kv_heads
    if axis == "head" and n > 1 and case.kv_heads > 1:
        known |= {"not first of group": h % n > 0, "another group": h % case.kv_heads != h // n}
    told = ((shape, words, look) for its, shape, words, look in ROWS if its == axis and shape in known)
    return (Fact(words, look) for shape, words, look in told if all(torch.equal(each, known[shape]) for each in of))


WHERE = [Pattern("{x}: wrong {words}", partial(_find, axis), clear=False) for axis in AXES]
