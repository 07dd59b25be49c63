"""The merge of GPUs, one pass by a Triton kernel, on a CPU: its numbers, by an interpreter, and whether it compiles."""

import importlib
import re

import pytest
import torch

from ringlab.basics.online_softmax import merge
from tests.attention import at_element_3, grouped_inputs, heads_last, tokens_first
from tests.concepts import MISSING

triton = pytest.importorskip("triton", reason=MISSING["triton"])
from ringlab.ring import fused_merge  # noqa: E402

B, H, INF = 2, 3, float("inf")


@pytest.fixture
def merge_rows(monkeypatch):
    """The kernel as Triton's interpreter runs it."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    yield importlib.reload(fused_merge).merge_rows
    monkeypatch.undo()
    importlib.reload(fused_merge)


def halves(Sq, D, dtype):
    """out and lse of queries (B, H, Sq, D), float32, and those of other keys, out_j in `dtype`.

    Every fifth row saw no key in the first, every seventh none in the second, and some none at all. In the others the
    one counts as much as the other, or far more.
    """
    _, _, out, out_j = grouped_inputs(B, H, H, Sq, D)
    spread = torch.tensor([0.0, 1e-3, 1.0, -30.0, 200.0, 1e4]).repeat(B * H * Sq)[: B * H * Sq].view(B, H, Sq)
    lse = torch.linspace(-50, 50, B * H * Sq).view(B, H, Sq)
    lse_j = lse + spread
    row = torch.arange(B * H * Sq).view(B, H, Sq)
    for each, its_lse, period in ((out, lse, 5), (out_j, lse_j, 7)):
        each[row % period == 0] = 0
        its_lse[row % period == 0] = -INF
    return out * 10.0 ** (row % 4)[..., None], lse, out_j.to(dtype), lse_j


@pytest.mark.parametrize("view", [None, tokens_first, heads_last, at_element_3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("Sq", "D"), [(1, 1), (16, 8), (17, 136), (40, 5)])
def test_one_pass_merges_as_float64_does(merge_rows, Sq, D, dtype, view):
    given = halves(Sq, D, dtype)
    out, lse, out_j, lse_j = (view(x.clone()) if view and x.dim() == 4 else x.clone() for x in given)
    merge_rows(out, lse, out_j, lse_j)
    wide = [x.double() for x in given]
    exact, exact_lse = merge(*wide)
    sizes, _ = merge(wide[0].abs(), wide[1], wide[2].abs(), wide[3])  # of the terms
    # Each step rounds once: the difference, e^x, 1 + it, 1 / it, a product, the sum.
    allowed = 6 * torch.finfo(torch.float32).eps * sizes
    assert ((out - exact).abs() <= allowed).all()
    assert torch.equal(lse == -INF, exact_lse == -INF)
    seen = exact_lse > -INF
    assert not seen.all()
    assert (
        (lse - exact_lse)[seen].abs() <= 4 * torch.finfo(torch.float32).eps * exact_lse[seen].abs().clamp(min=1)
    ).all()


def test_a_part_is_merged_and_the_rest_left(merge_rows):
    """As of a piece with some heads and some queries."""
    out, lse, out_j, lse_j = halves(40, 8, torch.bfloat16)
    right, right_lse = out.clone(), lse.clone()
    part = slice(None), slice(1, 2), slice(3, 30)
    right[part], right_lse[part] = merge(*(x[part] for x in (right, right_lse, out_j, lse_j)))
    merge_rows(out[part], lse[part], out_j[part].transpose(2, 3).contiguous().transpose(2, 3), lse_j[part].clone())
    torch.testing.assert_close((out, lse), (right, right_lse), rtol=1e-6, atol=1e-6)
    outside = torch.ones_like(lse, dtype=torch.bool)
    outside[part] = False
    assert torch.equal(out[outside], right[outside])
    assert torch.equal(lse[outside], right_lse[outside])


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("generation", [80, 90, 100])
def test_the_kernel_compiles_for_gpus(generation, dtype, tmp_path, monkeypatch):
    """Down to the code of the GPU: for that Triton needs none. What its types forbid, the interpreter lets pass."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    (kernel,) = (x for x in vars(fused_merge).values() if isinstance(x, triton.JITFunction))
    types = dict.fromkeys(kernel.arg_names, "i32") | dict.fromkeys(("out", "lse", "lse_j"), "*fp32")
    sizes = {"ROWS": fused_merge.ROWS, "COLUMNS": 128}
    source = ASTSource(kernel, types | {"out_j": f"*{dtype}"} | dict.fromkeys(sizes, "constexpr"), sizes)
    made = triton.compile(source, target=GPUTarget("cuda", generation, 32)).asm
    assert made["cubin"]
    assert not re.findall(r"muli .* : (?:i32|tensor<16x\S*i32>)", made["ttir"]), "an offset in 32 bits"
