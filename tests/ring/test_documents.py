"""Packed documents: what a pack holds, and the hops of windows."""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from ringlab.ring.documents import IGNORED, document_lengths, document_positions, pack, window_hops
from ringlab.ring.layouts import LAYOUTS
from ringlab.ring.masks import Mask
from ringlab.ring.partition import Partition


def test_positions_restart_with_each_document():
    assert document_positions([3, 1, 2]).tolist() == [0, 1, 2, 0, 0, 1]


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


@pytest.mark.parametrize(
    ("cu_seqlens", "message"),
    [
        ([0], r"cu_seqlens is \(0,\); expected a list or tensor \(documents \+ 1,\)"),
        ([0, 4.0], r"cu_seqlens is \(0, 4.0\); expected .* whole numbers"),
        (torch.tensor([0.0, 4.0]), r"cu_seqlens is \(0.0, 4.0\); expected .* whole numbers"),
        (torch.tensor([[0, 4]]), r"cu_seqlens is tensor\(\[\[0, 4\]\]\); expected"),
        ([5, 17, 24], "cu_seqlens begins with 5, .*; expected 0"),
        ([0, 5, 5, 24], "document 1 goes from 5 to 5; expected .* a token or more"),
    ],
)
def test_cu_seqlens_that_are_none_are_refused(cu_seqlens, message):
    with pytest.raises(ValueError, match=message):
        document_lengths(cu_seqlens)


@pytest.mark.parametrize("texts", [[], [torch.arange(3), torch.arange(0)]])
def test_an_empty_document_is_refused(texts):
    with pytest.raises(ValueError, match="expected one or more, none empty"):
        pack(texts)


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
