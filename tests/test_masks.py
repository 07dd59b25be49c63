"""A mask, cut into pieces: every visible pair is in exactly one piece, and no other pair is in any."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from training.causal import LAYOUTS, positions, visible_slice
from training.masks import Mask, cut


def covered(pieces, queries, keys):
    """How many pieces each (query, key) pair is in: (queries, keys)."""
    times = torch.zeros(queries, keys, dtype=torch.int64)
    for piece in pieces:
        square = torch.ones_like(times[piece.queries, piece.keys])
        assert square.numel() > 0
        if piece.triangle:
            assert square.shape[0] == square.shape[1]  # the kernels align other shapes in different corners
            square = square.triu() if piece.mirrored else square.tril()
        times[piece.queries, piece.keys] += square
    return times


def dense(mask, q_at, k_at):
    """The mask by its words: bool (queries, keys)."""
    q_at, k_at = q_at[:, None], k_at[None]
    seen = torch.ones(len(q_at), k_at.shape[1], dtype=torch.bool)
    if mask.documents is not None:
        numbers = torch.arange(len(mask.documents)).repeat_interleave(torch.tensor(mask.documents))
        seen &= numbers[q_at] == numbers[k_at]
    if mask.causal:
        seen &= k_at <= q_at
    if mask.window is not None:
        seen &= q_at - k_at < mask.window
    return seen


@st.composite
def masks(draw):
    layout, P = draw(st.sampled_from(LAYOUTS)), draw(st.integers(1, 8))
    if layout == "contiguous":
        lengths = draw(st.lists(st.integers(1, 12), min_size=P, max_size=P))
    else:
        lengths = [draw(st.integers(1, 6)) * 2] * P
    S, causal = sum(lengths), draw(st.booleans())
    ends = draw(st.none() | st.sets(st.integers(1, max(1, S - 1)), min_size=1, max_size=8)) if S > 1 else None
    documents = ends and tuple(b - a for a, b in pairwise([0, *sorted(ends), S]))
    return Mask(layout, tuple(lengths), causal, documents, draw(st.none() | st.integers(1, S + 2)) if causal else None)


@given(masks())
def test_the_pieces_are_the_mask_no_more_and_no_less(mask):
    P, needed = len(mask.lengths), set()
    at = [mask.place(rank) for rank in range(P)]
    for block in range(P):
        for distance in range(P):
            rank = (block + distance) % P
            right = dense(mask, at[rank], at[block])
            assert torch.equal(covered(mask.pieces(rank, block), *right.shape), right.long())
            needed |= {distance} if right.any() else set()
    assert mask.hops == max(needed)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=20), st.integers(-3, 6))
def test_any_staircase_is_cut(steps, width):
    first = torch.tensor([a for a, _ in steps]).cumsum(0)
    end = torch.tensor([b for _, b in steps]).cumsum(0) + width
    end = end.clamp(min=0)
    key = torch.arange(int(end.max()) + 1)
    right = (first[:, None] <= key) & (key < end[:, None])
    assert torch.equal(covered(cut(first, end), *right.shape), right.long())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("P", [1, 2, 3, 4])
def test_without_documents_and_window_they_are_the_slices_of_chapter_7(layout, causal, P):
    lengths = (4,) * P
    mask = Mask(layout, lengths, causal)
    for rank in range(P):
        assert torch.equal(mask.place(rank), positions(layout, 4 * P, rank, P))
        for block in range(P):
            slices = visible_slice(layout, rank, block, lengths, causal=causal)
            right = [] if slices is None else [(range(4)[slices.queries], range(4)[slices.keys], slices.triangle)]
            pieces = mask.pieces(rank, block)
            assert [(range(4)[it.queries], range(4)[it.keys], it.triangle) for it in pieces] == right
            assert not any(it.mirrored for it in pieces)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"documents": (3, 4)}, "documents of 3, 4 tokens, 7 in all, for a sequence of 8; expected .* 8 in all"),
        ({"documents": (8, 0)}, "documents of 8, 0 tokens.* expected 1 token or more in each"),
        ({"causal": True, "window": 0}, "window is 0 with causal=True; expected 1 token or more"),
        ({"window": 4}, "window is 4 with causal=False; expected .* causal=True"),
        ({"layout": "spiral"}, "layout is 'spiral'"),
        ({"lengths": (3, 5), "layout": "zigzag"}, "expected as many on each"),
    ],
)
def test_a_mask_that_makes_no_sense_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Mask(**{"layout": "contiguous", "lengths": (4, 4), **options})


def test_a_window_costs_a_few_pieces_and_its_visible_pairs():
    mask = Mask("contiguous", (64, 64), causal=True, window=16)
    sizes = [len(mask.pieces(*it)) for it in ((0, 0), (1, 1), (1, 0))]
    assert sizes == [7, 7, 1]  # own block: a triangle, then three tiles of an upper and a lower one; the other: upper
