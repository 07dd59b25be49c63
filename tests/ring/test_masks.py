"""A mask, cut into pieces: every visible pair is in exactly one piece, no other is in any. And packed documents."""

from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from ringlab.ring import partition as partition_module
from ringlab.ring.documents import IGNORED, document_lengths, pack, window_hops
from ringlab.ring.layouts import LAYOUTS
from ringlab.ring.masks import Mask
from ringlab.ring.partition import LARGEST_UPPER, Partition, cut
from tests.attention import dense, masks


def covered(pieces, queries, keys):
    """How many pieces each (query, key) pair is in: (queries, keys)."""
    times = torch.zeros(queries, keys, dtype=torch.int64)
    for piece in pieces:
        square = torch.ones_like(times[piece.queries, piece.keys])
        assert square.numel() > 0
        if piece.triangle:
            assert square.shape[0] == square.shape[1]  # the kernels align other shapes in different corners
            square = square.triu() if piece.upper else square.tril()
        times[piece.queries, piece.keys] += square
    return times


@given(masks())
def test_the_pieces_are_the_mask_no_more_and_no_less(partition):
    P, needed, mask = len(partition.lengths), set(), partition.mask
    at = [partition.positions(rank) for rank in range(P)]
    for block in range(P):
        for distance in range(P):
            rank = (block + distance) % P
            right = dense(mask, at[rank], at[block])
            assert torch.equal(covered(partition.pieces(rank, block), *right.shape), right.long())
            needed |= {distance} if right.any() else set()
    assert partition.hops == max(needed)
    everywhere = torch.arange(partition.seq_len)
    assert [partition.pairs(rank) for rank in range(P)] == [dense(mask, it, everywhere).sum() for it in at]


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=20),
    st.integers(-3, 6),
    st.sampled_from([1, 3, LARGEST_UPPER]),
)
def test_any_staircase_is_cut(steps, width, largest):
    first = torch.tensor([a for a, _ in steps]).cumsum(0)
    end = torch.tensor([b for _, b in steps]).cumsum(0) + width
    end = end.clamp(min=0)
    key = torch.arange(int(end.max()) + 1)
    right = (first[:, None] <= key) & (key < end[:, None])
    with mock.patch.object(partition_module, "LARGEST_UPPER", largest):
        pieces = list(cut(first, end))
    assert torch.equal(covered(pieces, *right.shape), right.long())
    assert all(it.queries.stop - it.queries.start <= largest for it in pieces if it.upper)


@pytest.mark.parametrize("kind", [list, tuple, torch.tensor, np.array])
def test_documents_and_windows_may_be_of_any_kind_and_size(kind):
    mask = Mask(True, kind([3, 5]), np.int64(2**62), np.int32(2**30))
    assert (mask.documents, type(mask.documents[0]), mask.window) == ((3, 5), int, 2**62)
    (first, end), (no_key, begin) = Mask(True, kind([3, 5]), 2**70, 2**70).visible_keys(torch.arange(8), 8)
    assert (first.tolist(), end.tolist()) == ([0, 0, 0, 3, 3, 3, 3, 3], list(range(1, 9)))
    assert torch.equal(no_key, begin)


def test_a_mask_costs_a_few_pieces():
    for layout in LAYOUTS:
        causal = Partition(Mask(causal=True), layout, (4,) * 3)
        sizes = [[len(causal.pieces(rank, block)) for block in range(3)] for rank in range(3)]
        assert sizes == [[1, *[int(layout != "contiguous")] * 2], [1, 1, int(layout != "contiguous")], [1, 1, 1]]
    partition = Partition(Mask(causal=True, window=16), "contiguous", (64, 64))
    sizes = [len(partition.pieces(*it)) for it in ((0, 0), (1, 1), (1, 0))]
    assert sizes == [7, 7, 1]  # own block: a triangle, then three tiles of an upper and a lower one; the other: upper


# Packed documents ----------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 16))
def test_a_pack_is_its_documents_and_padding_that_counts_in_no_loss(sizes, multiple):
    texts = [100 * i + torch.arange(n) for i, n in enumerate(sizes)]
    tokens, labels, places, lengths = pack(texts, multiple)
    assert len(tokens) == len(labels) == len(places) == sum(lengths)
    assert len(tokens) % multiple == 0
    assert len(tokens) - sum(sizes) < multiple
    assert lengths[: len(sizes)] == sizes
    assert len(lengths) - len(sizes) == (sum(sizes) % multiple > 0)
    for i, (text, mine, at) in enumerate(
        zip(texts, labels.split(lengths), places.split(lengths), strict=False)  # without the padding
    ):
        assert torch.equal(tokens.split(lengths)[i], text)
        assert mine.tolist() == [*text[1:].tolist(), IGNORED]
        assert torch.equal(at, torch.arange(len(text)))
    assert (labels[sum(sizes) :] == IGNORED).all()
    assert (tokens[sum(sizes) :] == 0).all()


@pytest.mark.parametrize("kind", [list, tuple, torch.tensor, lambda ends: torch.tensor(ends, dtype=torch.int32)])
def test_lengths_of_cu_seqlens(kind):
    assert document_lengths(kind([0, 5, 17, 24])) == [5, 12, 7]
    assert document_lengths(kind([0, 3])) == [3]


# Windows --------------------------------------------------------------------------------------------------------------


@given(st.integers(1, 60), st.integers(1, 12), st.integers(1, 8), st.booleans())
@example(1, 2, 4, False)  # where the window ends with a chunk, and one token further
@example(5, 2, 4, False)
@example(6, 2, 4, False)
def test_hops_of_a_window(window, chunk, P, global_token):
    """In the contiguous layout by the formula; in the others, as ringlab/ring/documents.py says."""
    mask = Mask(True, None, window, int(global_token))
    hops = {layout: Partition(mask, layout, (2 * chunk,) * P).hops for layout in LAYOUTS}
    assert window_hops(window, 2 * chunk, P) == min(-((1 - window) // (2 * chunk)), P - 1)
    if global_token:  # all ranks see the first block
        assert hops == dict.fromkeys(LAYOUTS, P - 1)
    else:
        assert hops["contiguous"] == window_hops(window, 2 * chunk, P)
        assert hops["striped"] == min(window - 1, P - 1)
        assert hops["zigzag"] == (P - 1 if window > 1 else 0)
