"""The doctor names the mistake of every real sick ring, no other, and finds nothing in right ones."""

import pytest
import torch

from bench.against_peers import torch_backward, torch_forward
from ring_attn import ring_attention
from ring_doctor.diagnosis import diagnose
from ringlab.support.agreement import agree
from ringlab.training import backward, grouped_query, overlap
from ringlab.training.flash_ring import ring_flash_attention
from tests import mesh_patients
from tests.attention import SEED
from tests.examined import examined, examined_sick
from tests.sick_rings import BY_HAND, UNKNOWN
from tests.ways import WAYS

NAMED = [name for name in BY_HAND if name != "float32_inside"]
IN_CI = {"base_2_as_natural", "positions_of_the_inner_layout"}  # the first: gradients that float32 cannot hold


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in IN_CI else pytest.mark.exhaustive) for n in NAMED])
def test_a_mistake_is_named(ranks, name):
    """From all questions to four ranks. From some questions each entry is named in tests/doctor/test_sick_rings.py."""
    found = diagnose(examined_sick(ranks, name, worlds=(4,)))
    assert found, "healthy?"
    assert found.names == {name.split("/")[0], *BY_HAND[name].equals}
    assert not found.part


def test_float32_inside_is_a_remark_and_no_mistake(ranks):
    found = examined_sick(ranks, "float32_inside", worlds=(1, 3))
    assert diagnose(found) is None
    assert any("computes in float32" in remark for remark in found.remarks)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", UNKNOWN)
def test_a_mistake_that_is_not_in_the_catalogue_gets_no_name_of_it(ranks, name):
    found = diagnose(examined_sick(ranks, name, worlds=(2, 3)))
    assert found
    assert found.names == set(UNKNOWN[name].equals)


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
    "all_gather": (WAYS["all-gather"], {}),
    "all_to_all": (WAYS["all-to-all"], {}),
    "hybrid": (mesh_patients.hybrid, {"setup": mesh_patients.setup}),
    "double_ring": (mesh_patients.double_ring, {"setup": mesh_patients.setup}),
    "torch": (torch_loop, {**TORCH, "causal": (False,), "layouts": ("contiguous",)}),
    "torch, causal": (torch_loop, {**TORCH, "causal": (True,), "layouts": ("zigzag",)}),
}


IN_CI = ("flash_ring", "hybrid", "torch, causal")  # the others, and other seeds, by hand


@pytest.mark.parametrize(
    ("name", "seed"),
    [
        pytest.param(name, seed, marks=() if name in IN_CI and not seed else pytest.mark.exhaustive)
        for name in HEALTHY
        for seed in range(3)
    ],
)
def test_a_right_ring_is_healthy(ranks, name, seed):
    function, claims = HEALTHY[name]
    worlds = {"worlds": (1, 4) if seed == 0 else (3,)}
    found = examined(ranks, function, seed + 1000 * SEED, **claims, **worlds)
    sick = [answer for answer in found.answers if answer.state not in ("ok", "refused")]
    assert found.healthy, "\n".join(f"{answer.question.words()}: {answer.says or answer.wrong}" for answer in sick)
    assert diagnose(found) is None
