"""Models of transformers with linear layers, unchanged, in a ring of states: loss and gradients of one process."""

from functools import cache
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.extras import MISSING

transformers = pytest.importorskip("transformers", reason=MISSING["transformers"])

from ringlab import shard_batch, stop_ring, use_ring  # noqa: E402
from ringlab.models import hugging_face_states as states  # noqa: E402
from ringlab.models.hugging_face_states import CONVOLUTION, KDA, RULE, SCAN  # noqa: E402
from tests.models import every_model  # noqa: E402

KINDS = {  # of models, and what their config does not have by itself
    "qwen3_next": {},
    "qwen3_5_text": {},
    "olmo_hybrid": {},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "kimi_linear": {},
    "bamba": {"time_step_limit": (0.1, 1.5)},
}
IDS = torch.randint(every_model.FIRST, every_model.VOCABULARY, (2, 24), generator=torch.Generator().manual_seed(1))
DOCUMENTS = [5, 1, 18]


def model(kind):
    with mock.patch.dict(every_model.VARIANTS, {kind: (kind, KINDS[kind])}):
        each = every_model.small_model(kind)
    for name, weight in each.named_parameters():
        if name.endswith("A_log"):
            weight.data.fill_(-3)  # states that are kept for many tokens: else nothing would cross a border
    return each


def results(each, loss):
    loss.backward()
    return loss.detach().clone(), every_model.gradient_of(each)


@cache
def alone(kind):
    """On one process, each document alone."""
    with every_model.Exactly():
        each = model(kind)
        parts = IDS.split(DOCUMENTS, dim=1)
        labels = [2 * (part.shape[1] - 1) for part in parts]
        losses = [each(input_ids=x, labels=x).loss * n for x, n in zip(parts, labels, strict=True) if n]
        return results(each, sum(losses) / sum(labels))


def in_ring(context, kind, layout, mistake=None):
    batch = {"input_ids": IDS, "labels": IDS}
    batch["position_ids"] = torch.cat([torch.arange(n) for n in DOCUMENTS]).expand(2, -1)
    with every_model.Exactly():
        each = model(kind)
        use_ring(each, layout=layout)
        if mistake:
            states.spread(each, MISTAKES[mistake](each))
        found = results(each, each(**shard_batch(batch, layout=layout)).loss)
    for x in found:
        dist.all_reduce(x)
    stop_ring(each)
    assert not any("forward" in vars(part) for part in each.modules())
    return found


def off(found, right):
    return max(float((x - y).norm() / y.norm()) for x, y in zip(found, right, strict=True))


@pytest.mark.parametrize(
    ("kind", "P", "layout"), [(k, 3, "zigzag") for k in KINDS] + [("qwen3_5_text", 4, "contiguous")]
)
def test_a_hybrid_model_in_the_ring_is_that_of_one_process(ranks, kind, P, layout):
    """Packed documents; one text: tests/models/every_model.py."""
    for found in ranks(P, in_ring, kind, layout):
        assert off(found, alone(kind)) <= every_model.TOLERANCE


MISTAKES = {
    "its own convolution": lambda each: states.in_ring(each.ring[0]) | {CONVOLUTION: states.ALONE[CONVOLUTION]},
    "its own rule": lambda each: states.in_ring(each.ring[0]) | {x: states.ALONE[x] for x in (RULE, KDA, SCAN)},
}
SICK = [
    ("its own convolution", "qwen3_5_text"),
    *(("its own rule", k) for k in ("qwen3_5_text", "kimi_linear", "bamba")),
]


@pytest.mark.parametrize(("mistake", "kind"), SICK)
def test_a_layer_that_stays_in_its_shard_is_seen(ranks, mistake, kind):
    for found in ranks(3, in_ring, kind, "zigzag", mistake):
        assert off(found, alone(kind)) > 1e-4
