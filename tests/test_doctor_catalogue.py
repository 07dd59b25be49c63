"""The doctor names the mistake of every real sick ring, no other, and finds nothing in right ones."""

import pytest
import torch

from bench.against_peers import torch_backward, torch_forward
from doctor.diagnosis import diagnose
from doctor.mistakes import CATALOGUE
from ring_attn import ring_attention
from support.agreement import agree
from tests.attention import SEED
from tests.examined import examined, examined_sick
from tests.sick_rings import COMPOSED, SICK, UNKNOWN
from training import backward, grouped_query, overlap
from training.flash_ring import ring_flash_attention

EQUAL = {  # a mistake: the others that give the same numbers in every question, by mathematics
    "averages_averaged/ring_attn": {"lse_of_zeros"},  # their lse differ, which this ring does not return
    "nothing_moves/overlap": {"never_called"},  # the same
    **{
        name: {"chunk_index_under_zigzag", "positions_of_contiguous"}
        for name in ("chunk_index_under_zigzag", "chunk_index_under_zigzag/plain", "positions_of_contiguous")
    },
    **{name: {"causal_per_block"} for name in ("striped_diagonal_kept", "striped_diagonal_kept/plain")},
}
NOT_YET = {  # real rings whose variant of a mistake the catalogue does not hold
    "sums_in_16_bits/always": "rounded to bfloat16 whatever the input",
    "sums_in_16_bits/ring_attn": "the output before its division is rounded to bfloat16",
    "lse_in_16_bits": "rounded to bfloat16 whatever the input",
    "gradients_in_16_bits": "rounded to bfloat16 whatever the input",
    "scale_of_padded_head": "a scale that is given is used",
    "documents_per_chunk/tail_counts": "the last tokens of a chunk are a document",
}
FAST = [  # one of each kind; the others take minutes
    "natural_as_base_2",
    "stale_first_block",
    "chunk_index_under_zigzag",
    "heads_interleaved",
    "gradients_travel_other_way",
    "lse_and_delta_of_the_block",
]


def planted(name):
    return {name.split("/")[0]} | EQUAL.get(name, set())


def assert_named(ranks, name, **claims):
    found = diagnose(examined_sick(ranks, name, **claims))
    assert found, "healthy?"
    assert found.names == planted(name)
    assert not found.forward_only


def test_every_entry_of_the_catalogue_has_a_real_ring():
    assert set(CATALOGUE) <= {name.split("/")[0] for name in SICK}


@pytest.mark.parametrize("name", FAST)
def test_the_mistake_is_named(ranks, name):
    assert_named(ranks, name, worlds=(3,))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.xfail(reason=NOT_YET[name])) if name in NOT_YET else name
        for name in SICK
        if name != "float32_inside"
    ],
)
def test_every_mistake_is_named(ranks, name):
    assert_named(ranks, name)


@pytest.mark.slow
def test_float32_inside_is_a_remark_and_no_mistake(ranks):
    found = examined_sick(ranks, "float32_inside")
    assert diagnose(found) is None
    assert any("computes in float32" in remark for remark in found.remarks)


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPOSED)
def test_two_mistakes_are_named(ranks, name):
    found = diagnose(examined_sick(ranks, name))
    assert found.names == {" and ".join(sorted(name.split(" + ")))}


@pytest.mark.slow
@pytest.mark.parametrize("name", UNKNOWN)
def test_a_mistake_that_is_not_in_the_catalogue_gets_no_name_of_it(ranks, name):
    found = diagnose(examined_sick(ranks, name))
    assert found
    assert not found.names


class TorchLoop(torch.autograd.Function):
    """PyTorch's own context-parallel loop."""

    @staticmethod
    def forward(ctx, q, k, v, options):
        out, lse = torch_forward(q, k, v, **options)
        ctx.options = options
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx, d_out):
        return *torch_backward(*ctx.saved_tensors, d_out, **ctx.options), None


def torch_loop(q, k, v, *, causal, layout):
    if len(set(agree(lambda: k.shape[2]))) > 1:
        raise ValueError("chunks of different lengths end the process in PyTorch's loop")
    return TorchLoop.apply(q, k, v, {"causal": causal, "layout": layout})


FORWARD = {"gradients": False, "grouped": False}
TORCH = {"grouped": False, "dtypes": ("float32",)}
HEALTHY = {
    "flash_ring": (ring_flash_attention, {}),
    "ring_attn": (ring_attention, FORWARD),
    "overlap": (overlap.ring_attention, FORWARD),
    "backward": (backward.ring_attention, {"grouped": False}),
    "grouped_query": (grouped_query.ring_attention, {}),
    "torch": (torch_loop, {**TORCH, "causal": (False,), "layouts": ("contiguous",)}),
    "torch, causal": (torch_loop, {**TORCH, "causal": (True,), "layouts": ("zigzag",)}),
}


def assert_healthy(ranks, name, seed):
    function, claims = HEALTHY[name]
    found = examined(ranks, function, seed, **claims)
    sick = [
        f"{it.question.words()}: {it.says or it.wrong}" for it in found.outcomes if it.state not in ("ok", "refused")
    ]
    assert found.healthy, "\n".join(sick)
    assert diagnose(found) is None


@pytest.mark.parametrize("name", HEALTHY)
@pytest.mark.parametrize("seed", [0, 1])
def test_a_right_ring_is_healthy(ranks, name, seed):
    assert_healthy(ranks, name, seed + 1000 * SEED)


@pytest.mark.slow
@pytest.mark.parametrize("name", HEALTHY)
def test_right_rings_are_healthy_for_a_hundred_seeds(ranks, name):
    for seed in range(2, 102):
        assert_healthy(ranks, name, seed + 1000 * SEED)
