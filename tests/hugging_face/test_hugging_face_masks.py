"""Windows and packed documents of Hugging Face models in the ring, against sdpa on one process, value by value."""

import re

import pytest
import torch

from ringlab.ring.masks import Mask
from tests.attention import dense
from tests.concepts import MISSING

transformers = pytest.importorskip("transformers", reason=MISSING["transformers"])
from transformers import masking_utils  # noqa: E402

from ringlab.hugging_face.batch import shard_batch  # noqa: E402
from ringlab.hugging_face.masks import BothWays, ChunkedAttention, asked_mask, rule_in_words, window_of  # noqa: E402
from tests.hugging_face import hugging_face_models as hf  # noqa: E402

# Documents ----------------------------------------------------------------------------------------------------------

WINDOWED = {"sliding_window": 4}
BOUNDARIES = (
    {name: x for name, x in hf.boundaries(hf.packed_batch()).items() if name != "attention_mask"},
    {**hf.boundaries(hf.packed_batch()), "position_ids": hf.packed_batch()["position_ids"]},
)


def test_documents_are_told_by_cumulative_lengths_too_and_rows_are_packed_alike(ranks):
    for batch in BOUNDARIES:
        for results in ranks(3, hf.in_the_ring, "Llama", {}, "zigzag", batch):
            assert max(hf.errors(results, hf.documents_alone("Llama", {}))) <= 1e-10
    for results in ranks(3, hf.in_the_ring, "Mistral", WINDOWED, "zigzag", hf.packed_batch(rows=2)):
        assert max(hf.errors(results, hf.documents_alone("Mistral", WINDOWED, rows=2))) <= 1e-10


# Rules --------------------------------------------------------------------------------------------------------------

CAUSAL = masking_utils.causal_mask_function
WINDOW = masking_utils.sliding_window_causal_mask_function(3)
CHUNKS = masking_utils.chunked_causal_mask_function(3, torch.zeros(1))


def causal_mask_function(batch_idx, head_idx, q_idx, kv_idx):
    """Its name is known, its rule is not."""
    return kv_idx < q_idx


def test_the_rules_that_a_ring_knows():
    """The pairs that each shows: below."""
    assert asked_mask(mask_function=WINDOW, local_size=3, attention_mask=torch.ones(2, 8)) == 3
    assert asked_mask(mask_function=CAUSAL, attention_mask=torch.ones(2, 8).tril(5)) == "a mask of padding"
    assert asked_mask(mask_function=CHUNKS, local_size=3) == ChunkedAttention(3)
    assert asked_mask(mask_function=WINDOW, local_size=3)[:, :, slice(-0, None), :] == 3  # all rows of it
    with pytest.raises(TypeError, match="no rows"):
        asked_mask(mask_function=WINDOW, local_size=3)[:, :, -1:, :]


@pytest.mark.parametrize("rule", [CAUSAL, WINDOW, CHUNKS, masking_utils.bidirectional_mask_function])
def test_a_rule_shows_the_pairs_that_the_ring_computes(rule):
    """8 tokens; the CHUNKS of 3 count their padding in a tensor of whole numbers."""
    at, counted = torch.arange(8), masking_utils.chunked_causal_mask_function(3, torch.zeros(1, dtype=torch.int64))
    function, whole = counted if rule is CHUNKS else rule, {"local_size": 3, "allow_is_causal_skip": False}
    shown = masking_utils.sdpa_mask(1, 8, 8, mask_function=function, **whole)[0, 0]
    asked = asked_mask(mask_function=rule, local_size=3)
    documents = asked.documents((8,)) if isinstance(asked, ChunkedAttention) else None
    window = int(asked) if isinstance(asked, int) else None
    assert torch.equal(shown, dense(Mask(not isinstance(asked, BothWays), documents, window), at, at))


PACKED = masking_utils.packed_sequence_mask_function(torch.zeros(1, 8))
PREFIX = masking_utils.or_masks(CAUSAL, lambda batch_idx, head_idx, q_idx, kv_idx: kv_idx < 2)
OTHER_RULES = {
    "and_masks(chunked_overlay(3, a tensor), causal_mask_function)": CHUNKS,  # with another local_size
    "and_masks(sliding_window_overlay(3), causal_mask_function)": WINDOW,  # with another local_size
    "and_masks(sliding_window_bidirectional_overlay(3), bidirectional_mask_function)": (
        masking_utils.sliding_window_bidirectional_mask_function(3)
    ),
    "and_masks(packed_sequence_mask_function(a tensor), causal_mask_function)": masking_utils.and_masks(PACKED, CAUSAL),
    f"or_masks(causal_mask_function, {__name__}.<lambda>)": PREFIX,
    f"{__name__}.causal_mask_function": causal_mask_function,
    "None": None,
}


@pytest.mark.parametrize("text", OTHER_RULES)
@pytest.mark.parametrize("local_size", [None, 4])
def test_other_rules_are_told_in_words(text, local_size):
    assert (
        rule_in_words(OTHER_RULES[text]) == asked_mask(mask_function=OTHER_RULES[text], local_size=local_size) == text
    )


def test_the_window_of_a_layer_is_that_of_its_mask():
    assert window_of("Layer", None, None) is None
    assert window_of("Layer", 4, 4) == 4
    own = asked_mask(mask_function=WINDOW, local_size=3)  # of a layer that passes no window itself
    assert type(window_of("Layer", own, own)) is int
    assert window_of("Layer", ChunkedAttention(4), None) is window_of("Layer", BothWays(), None) is None
    for mask, said, words in (
        (None, 4, "plain causal"),
        (ChunkedAttention(4), 4, re.escape("ChunkedAttention(size=4)")),
        (4, None, "a window of 4"),
        (4, 5, "a window of 4"),
    ):
        with pytest.raises(ValueError, match=f"Layer passes sliding_window={said}, and its mask is {words}; expected"):
            window_of("Layer", mask, said)
    for mask, words in (("or_masks(a, b)", "or_masks"), (torch.ones(1, 1, 2, 2), "a tensor")):
        with pytest.raises(ValueError, match=f"attention_mask is {words}"):
            window_of("Layer", mask, None)


# Refusals -----------------------------------------------------------------------------------------------------------


def boundaries_of_one_document(context):
    tokens = hf.packed_batch()["input_ids"]
    return [
        shard_batch({"input_ids": tokens, name: torch.tensor([0, 10])}, causal=causal).get("documents")
        for name, causal in (("cu_seq_lens_q", False), ("cu_seq_lens_k", False), ("cu_seq_lens_q", True))
    ]


def test_a_document_ends_where_its_boundary_says(ranks):
    """For an encoder; under a causal mask no token of it sees what follows."""
    assert ranks(3, boundaries_of_one_document) == [[(10, 14), (10, 14), None]] * 3
