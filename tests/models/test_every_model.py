"""Every causal language model of transformers: in the ring it is one process's own, or a refusal says why not."""

from collections import Counter
from unittest import mock

import pytest
import torch.distributed as dist

from tests.extras import MISSING

transformers = pytest.importorskip("transformers", reason=MISSING["transformers"])

from ringlab.models import hugging_face_masks, hugging_face_pass  # noqa: E402
from tests.models import every_model  # noqa: E402

SOME = {
    "mistral": "equal",  # a window
    "gemma3_text": "equal",  # a window in some layers
    "gpt_oss": "equal",  # learned sinks, experts
    "llama4_text": "equal",  # chunks, and queries that grow with the position
    "deepseek_v3": "equal",  # v with a head dimension of its own
    "opt": "equal",  # positions that the model counts by itself
    "roberta": "equal",  # positions from 2
    "phi3 with longrope": "equal",  # frequencies by the longest position
    "doge": "attention_mask is a tensor",
    "bloom": "takes no position_ids",
    "mamba": "keeps a state over tokens",
    "bamba": "equal",  # states without the delta rule
    "jamba": "JambaMambaMixer) of JambaForCausalLM mixes tokens",
    "lfm3": "equal",  # convolutions
    "qwen3_next": "equal",  # states
    "kimi_linear": "equal",  # states with a decay for each number of a key
    "deepseek_v32": "has a DeepseekV32Indexer, which picks keys from all tokens",
    "codegen": "does not ask AttentionInterface",
}


@pytest.fixture(scope="module")
def processes():
    both = every_model.Processes()
    yield both
    both.stop()


@pytest.mark.parametrize(("name", "expected"), SOME.items(), ids=SOME)
def test_a_model_of_each_kind(processes, name, expected):
    found = every_model.outcome(name, processes, worlds=(3,))
    if expected == "equal":
        assert found.kind == "equal", found
    else:
        assert (found.kind, expected in found.sentence) == ("refused", True), found
    assert every_model.committed()[name] == found.kind


# The comparison itself can fail ------------------------------------------------------------------------------------


def no_window(name):
    def dropped(*args, **passed):
        return ring(*args, **{**passed, "window": None})

    ring = hugging_face_masks.ring_flash_attention
    with mock.patch.object(hugging_face_masks, "ring_flash_attention", dropped):
        return every_model.in_the_ring(name)


def no_stretch(name):
    """The frequencies by the longest position of a shard."""
    with mock.patch.multiple(hugging_face_pass.ModelInRing, stretch=lambda *x: x[2:], shrink=lambda *x: x[3]):
        return every_model.in_the_ring(name)


def an_error_of_transformers(name):
    return every_model.small_model(name).set_attn_implementation("an attention that nobody has registered")


def another_error_on_a_rank(name):
    raise ValueError(f"rank {dist.get_rank()} refuses")


WRONG = [
    ("mistral", no_window, "wrong"),
    ("gemma3_text with dynamic frequencies", no_stretch, "wrong"),
    ("llama", an_error_of_transformers, "crashed"),
    ("llama", another_error_on_a_rank, "crashed"),
]


@pytest.mark.parametrize(("name", "step", "expected"), WRONG, ids=lambda x: getattr(x, "__name__", x))
def test_a_mistake_is_not_equal(processes, name, step, expected):
    right = every_model.answer(processes.alone, 1, every_model.exact, name)
    assert every_model.compared(name, 3, right, processes, step).kind == expected


def test_equal_without_the_ring_proves_nothing(processes):
    right = every_model.answer(processes.alone, 1, every_model.exact, "llama")
    with mock.patch.object(every_model, "TOLD_APART", 10.0):
        assert every_model.compared("llama", 2, right, processes).kind == "unproven"


# All of them ---------------------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
def test_every_model():
    found = dict(every_model.sweep([*every_model.NAMES, *every_model.VARIANTS]))
    assert {name: each.kind for name, each in found.items()} == every_model.committed(), "stale: EVERY_MODEL.md"
    counts = Counter(found[name].kind for name in every_model.NAMES)
    assert counts["equal"] >= 110
    assert not {"wrong", "crashed", "unproven"} & {each.kind for each in found.values()}


def test_the_page_says_what_the_sweep_found():
    found = {name: every_model.Outcome(kind, sentence="a | b") for name, kind in every_model.committed().items()}
    with mock.patch.object(every_model, "TABLE", mock.Mock(read_text=lambda: every_model.page(found))):
        assert every_model.committed() == {name: each.kind for name, each in found.items()}
