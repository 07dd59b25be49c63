"""Where a result is wrong: on which ranks, in which sequences of the batch, heads, rows of a chunk, documents.

    for pattern in PLACES: pattern.common(answers, "out")    ->    what is true of out in each of these wrong answers

A row is wrong if one of its numbers is off by more than rounding. A pattern speaks of an answer only if the answer can
show the opposite: a batch of 1 says nothing about the second sequence.

Shapes: those of wrong_answer.py.

Before: contents.py. After: inference.py, all that is told.
Source: none.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ring_doctor.patterns import Found, Pattern
from ring_doctor.wrong_answer import WrongAnswer


def _ranks(wrong: WrongAnswer, name: str) -> Iterator[Found] | None:
    P = wrong.case.world_size
    if P == 1:
        return None
    bad, every = set(wrong.answer.ranks[name]), set(range(P))
    causes = {
        "on rank 0 only": ({0}, "what rank 0 does otherwise than the other ranks"),
        "on the last rank only": ({P - 1}, "what the last rank does otherwise, and the step from rank P - 1 to rank 0"),
        "on every rank but rank 0": (every - {0}, "the blocks that arrive, and what rank 0 does otherwise"),
        "on every rank but the last": (every - {P - 1}, "what the last rank does otherwise"),
        "on even ranks only": ({r for r in every if r % 2 == 0}, "the branch for even ranks"),
        "on odd ranks only": ({r for r in every if r % 2}, "the branch for odd ranks"),
    }
    return iter([Found(words, look) for words, (ranks, look) in causes.items() if bad == ranks])


def _sequences(wrong: WrongAnswer, name: str) -> Iterator[Found] | None:
    B = wrong.case.batch
    if B == 1:
        return None
    causes = {
        "in the first sequence of a batch only": [True] + [False] * (B - 1),
        "in every sequence of a batch but the first": [False] + [True] * (B - 1),
    }
    bad = wrong.bad(name).flatten(1).any(dim=1).tolist()
    look = "views and reshapes that mix B with another dimension, and an index [0]"
    return iter([Found(words, look) for words, sick in causes.items() if bad == sick])


def _heads(wrong: WrongAnswer, name: str) -> Iterator[Found] | None:
    bad = wrong.bad(name).transpose(0, 1).flatten(1).any(dim=1).tolist()
    H, G = len(bad), wrong.case.kv_heads
    n = H // G
    if H == 1:
        return None
    causes = {
        "in the first head only": ([h == 0 for h in range(H)], "an index of a head"),
        "in every head but the first": ([h > 0 for h in range(H)], "an index of a head, and what is broadcast over H"),
        "in the last head only": ([h == H - 1 for h in range(H)], "an index of a head"),
        "in even heads only": ([h % 2 == 0 for h in range(H)], "how heads are split"),
        "in odd heads only": ([h % 2 == 1 for h in range(H)], "how heads are split"),
    }
    if n > 1 and G > 1:
        look = "the K/V head of query head h: it is h // (H/G)"
        causes["in the query heads that are not the first of their group"] = ([h % n > 0 for h in range(H)], look)
        words = "in the query heads h for which h mod G is not h // (H/G)"
        causes[words] = ([h % G != h // n for h in range(H)], look)
    return iter([Found(words, look) for words, (sick, look) in causes.items() if bad == sick])


def _rows(wrong: WrongAnswer, name: str) -> Iterator[Found] | None:
    """Rows of the chunks, on the ranks that are wrong."""
    case = wrong.case
    bad = wrong.bad(name).flatten(0, 1).any(dim=0)
    chunks = [bad[case.positions(rank)] for rank in wrong.answer.ranks[name]]
    lengths = {len(chunk) for chunk in chunks}
    if len(lengths) != 1 or lengths == {1}:
        return None
    row, C = torch.arange(len(chunks[0])), len(chunks[0])
    shapes: dict[str, tuple[Tensor, str]] = {
        "in the first row of a chunk only": (
            row == 0,
            "the border between two chunks: < or <=, and where a slice starts",
        ),
        "in the last row of a chunk only": (
            row == C - 1,
            "the border between two chunks: < or <=, and where a slice ends",
        ),
        "in every row of a chunk but the first": (row > 0, "where a slice starts"),
        "in every row of a chunk but the last": (row < C - 1, "where a slice ends"),
        "in the first half of a chunk only": (row < C // 2, "the two halves of a chunk"),
        "in the second half of a chunk only": (row >= C // 2, "the two halves of a chunk"),
    }
    for tile in (32, 64, 128, 256):
        if tile < C:
            shapes[f"from row {tile} of a chunk on"] = (
                row >= tile,
                f"tiles of {tile} rows: a sum or a mask of the first tile",
            )
            shapes[f"in the first {tile} rows of a chunk only"] = (row < tile, f"tiles of {tile} rows")
    if C % 2 and C > 1:
        look = "a chunk of odd length: its last row is left over when it is halved"
        shapes["in the middle row of a chunk of odd length only"] = (row == C // 2, look)
    found = [
        Found(words, look) for words, (rows, look) in shapes.items() if all(torch.equal(bad, rows) for bad in chunks)
    ]
    return iter(found)


def _documents(wrong: WrongAnswer, name: str) -> Iterator[Found] | None:
    if wrong.case.documents is None:
        return None
    bad = wrong.bad(name).flatten(0, 1).any(dim=0)
    first, *others = (bool(part.any()) for part in bad.split(list(wrong.case.documents)))
    look = "how the borders of documents are cut for a rank and a block"
    if not first:
        return iter([Found("in documents after the first only", look)])
    return iter([] if any(others) else [Found("in the first document only", look)])


def _numbers(wrong: WrongAnswer, name: str) -> Iterator[Found] | None:
    """The numbers of a head."""
    if name == "lse" or not wrong.clear(name):
        return None
    right = wrong.right[name]
    error = right.error(wrong.answer.results[name].to(right.dtype)).nan_to_num(nan=torch.inf)
    bad, D = (error > right.allowed).flatten(0, 2).any(dim=0), wrong.case.head_dim
    d = torch.arange(D)
    shapes = {
        "in the first half of D only": d < D // 2,
        "in the second half of D only": d >= D // 2,
        "in the first number of D only": d == 0,
        "in the last number of D only": d == D - 1,
    }
    look = "slices of the last dimension"
    return iter([Found(words, look) for words, sick in shapes.items() if torch.equal(bad, sick)])


_FINDS: tuple[Callable[[WrongAnswer, str], Iterator[Found] | None], ...] = (
    _ranks,
    _sequences,
    _heads,
    _rows,
    _documents,
    _numbers,
)
PLACES = [Pattern("{x}: wrong {words}", find) for find in _FINDS]
