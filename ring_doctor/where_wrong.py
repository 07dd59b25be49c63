"""Where a result is wrong: on which ranks, in which sequences of the batch, heads, rows of a chunk, documents.

    for pattern in WHERE: pattern.common(answers, "out")    ->    what is true of out in each of these wrong answers

A row is wrong if one of its numbers is off by more than rounding. A pattern speaks of an answer only if the answer can
show the opposite: a batch of 1 says nothing about the second sequence.

Before: facts.py. After: inference.py, all that is told.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from ring_doctor.facts import Fact, Pattern
from ring_doctor.wrong_answer import WrongAnswer

TILES = (32, 64, 128, 256)  # rows of a tile of usual kernels
BATCH = "views and reshapes that mix B with another dimension, and an index [0]"
HEAD, SPLIT, OF_GROUP = "an index of a head", "how heads are split", "the K/V head of query head h: it is h // (H/G)"
BORDER, HALVES = "the border between two chunks: < or <=, and where a slice", "the two halves of a chunk"
DOCUMENTS, SLICES = "how the borders of documents are cut for a rank and a block", "slices of the last dimension"
RANK_0, LAST_RANK = "what rank 0 does otherwise", "what the last rank does otherwise"
TOLD = {  # by axis: which of the n things along it are wrong, in words, and where to look
    "rank": {
        "first": ("on rank 0 only", f"{RANK_0} than the other ranks"),
        "last": ("on the last rank only", f"{LAST_RANK}, and the step from rank P - 1 to rank 0"),
        "not first": ("on every rank but rank 0", f"the blocks that arrive, and {RANK_0}"),
        "not last": ("on every rank but the last", LAST_RANK),
        "second": ("on rank 1 only", "what rank 1 does otherwise than the other ranks"),
        "even": ("on even ranks only", "the branch for even ranks"),
        "odd": ("on odd ranks only", "the branch for odd ranks"),
    },
    "sequence": {
        "first": ("in the first sequence of a batch only", BATCH),
        "not first": ("in every sequence of a batch but the first", BATCH),
    },
    "head": {
        "first": ("in the first head only", HEAD),
        "not first": ("in every head but the first", f"{HEAD}, and what is broadcast over H"),
        "last": ("in the last head only", HEAD),
        "even": ("in even heads only", SPLIT),
        "odd": ("in odd heads only", SPLIT),
        "not first of group": ("in the query heads that are not the first of their group", OF_GROUP),
        "another group": ("in the query heads h for which h mod G is not h // (H/G)", OF_GROUP),
    },
    "row": {
        "first": ("in the first row of a chunk only", f"{BORDER} starts"),
        "last": ("in the last row of a chunk only", f"{BORDER} ends"),
        "not first": ("in every row of a chunk but the first", "where a slice starts"),
        "not last": ("in every row of a chunk but the last", "where a slice ends"),
        "first half": ("in the first half of a chunk only", HALVES),
        "second half": ("in the second half of a chunk only", HALVES),
    }
    | {
        f"from {n}": (f"from row {n} of a chunk on", f"tiles of {n} rows: a sum or a mask of the first tile")
        for n in TILES
    },
    "document": {
        "first": ("in the first document only", DOCUMENTS),
        "not first": ("in documents after the first only", DOCUMENTS),
    },
    "number": {
        "first half": ("in the first half of D only", SLICES),
        "second half": ("in the second half of D only", SLICES),
        "first": ("in the first number of D only", SLICES),
        "last": ("in the last number of D only", SLICES),
    },
}


def shapes(n: int) -> dict[str, Tensor]:
    """Some of n things in a row, (n,) bool, by name."""
    i = torch.arange(n)
    found = {"first": i == 0, "second": i == 1, "last": i == n - 1, "even": i % 2 == 0, "first half": i < n // 2}
    found |= {"not first": i > 0, "not last": i < n - 1, "odd": i % 2 == 1, "second half": i >= n // 2}
    return found | {f"from {tile}": i >= tile for tile in TILES if tile < n}


def _find(axis: str, bad: list[Tensor], **more: Tensor) -> Iterator[Fact] | None:
    """What the wrong ones along an axis are; each of `bad` must be so. None where there is one thing only."""
    known = shapes(len(bad[0])) | {name.replace("_", " "): shape for name, shape in more.items()}
    if len({len(each) for each in bad}) > 1 or len(bad[0]) == 1:
        return None
    told = TOLD[axis].items()
    return (Fact(*said) for name, said in told if name in known and all(torch.equal(each, known[name]) for each in bad))


def _ranks(wrong: WrongAnswer, name: str) -> Iterable[Fact] | None:
    ranks = wrong.answer.ranks[name]
    return _find("rank", [torch.tensor([rank in ranks for rank in range(wrong.case.world_size)])])


def _sequences(wrong: WrongAnswer, name: str) -> Iterable[Fact] | None:
    return _find("sequence", [wrong.bad(name).flatten(1).any(dim=1)])


def _heads(wrong: WrongAnswer, name: str) -> Iterable[Fact] | None:
    bad, G = wrong.bad(name).transpose(0, 1).flatten(1).any(dim=1), wrong.case.kv_heads
    h, n = torch.arange(len(bad)), len(bad) // G
    grouped = {"not_first_of_group": h % n > 0, "another_group": h % G != h // n} if n > 1 and G > 1 else {}
    return _find("head", [bad], **grouped)


def _rows(wrong: WrongAnswer, name: str) -> Iterable[Fact] | None:
    """Rows of the chunks, on the ranks that are wrong."""
    bad = wrong.bad(name).flatten(0, 1).any(dim=0)
    return _find("row", [bad[wrong.case.positions(rank)] for rank in wrong.answer.ranks[name]])


def _documents(wrong: WrongAnswer, name: str) -> Iterable[Fact] | None:
    if wrong.case.documents is None:
        return None
    parts = wrong.bad(name).flatten(0, 1).any(dim=0).split(list(wrong.case.documents))
    first, others = bool(parts[0].any()), any(bool(part.any()) for part in parts[1:])
    return _find("document", [torch.tensor([first, others])])  # all others are one


def _numbers(wrong: WrongAnswer, name: str) -> Iterable[Fact] | None:
    """The numbers of a head."""
    if name == "lse" or not wrong.clear(name):
        return None
    return _find("number", [wrong.bad_numbers(name).flatten(0, 2).any(dim=0)])


WHERE = [Pattern("{x}: wrong {words}", find) for find in (_ranks, _sequences, _heads, _rows, _documents, _numbers)]
