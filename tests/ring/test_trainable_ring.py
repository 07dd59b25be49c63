"""trainable_ring.py, copied alone into an empty folder: its numbers, its messages, what it refuses, and its own run."""

import ast
import io
import re
import runpy
import shutil
from contextlib import ExitStack, redirect_stdout
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.attention import assert_four, expected_of_inputs, gradients, grouped_inputs
from tests.commands import ROOT, TORCHRUN, run
from tests.rings import messages_of_ring

FILE = ROOT / "trainable_ring.py"
SIZES = 2, 4, 2, 60, 6  # B, H, G, S and D: 60 tokens are equal chunks of an even length on 1, 2, 3, 5 ranks
OPTIONS = [(causal, layout) for causal in (False, True) for layout in ("contiguous", "zigzag")]


@pytest.fixture(scope="module")
def copied(tmp_path_factory):
    return str(shutil.copy(FILE, tmp_path_factory.mktemp("alone")))


def test_it_is_short_and_needs_torch_alone():
    text = FILE.read_text()
    assert len(text.splitlines()) <= 150
    imports = [it for it in ast.walk(ast.parse(text)) if isinstance(it, ast.Import | ast.ImportFrom)]
    assert [ast.unparse(it) for it in imports] == ["import torch", "import torch.distributed as dist"]


def on_rank(context, path, sizes, dtype, group_of=None):
    """Of each option this rank's positions and out, dq, dk, dv. Ranks outside the group of a larger job: nothing."""
    group = dist.new_group(group_of) if group_of else None
    if group_of and context.rank not in group_of:
        return None
    ring, whole, found = runpy.run_path(path), grouped_inputs(*sizes, dtype), {}
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    for causal, layout in OPTIONS:
        at = ring["positions"](layout, whole[0].shape[2], rank, world_size)
        moved = {name: x for name, x in (("causal", causal), ("layout", layout)) if x not in (False, "contiguous")}
        attention = partial(ring["ring_attention"], group=group, **moved)
        with torch.autocast(
            context.device.type, torch.bfloat16
        ):  # it rounds no product of this ring, also in a backward pass
            mine = gradients(attention, *(x[:, :, at].to(context.device) for x in whole))
            found[causal, layout] = at, [x.cpu() for x in mine]
    return found


def assert_whole(of_ranks, sizes, dtype, fused_blocks=0):
    for causal, layout in OPTIONS:
        at, mine = zip(*(of_rank[causal, layout] for of_rank in of_ranks), strict=True)
        order = torch.cat(at).argsort()
        assert torch.equal(torch.cat(at)[order], torch.arange(sizes[3]))
        results = [torch.cat(parts, dim=2)[:, :, order] for parts in zip(*mine, strict=True)]
        assert {x.dtype for x in results} == {dtype}
        assert_four(results, expected_of_inputs(*sizes, dtype, causal=causal, fused_blocks=fused_blocks))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5])
def test_out_and_gradients(ranks, copied, world_size, dtype):
    sizes = SIZES if world_size != 4 else (2, 4, 1, 16, 6)  # MQA, and two tokens a rank: one in each half
    assert_whole(ranks(world_size, on_rank, copied, sizes, dtype), sizes, dtype)


def test_three_ranks_of_a_larger_job(ranks, copied):
    of_ranks = ranks(5, on_rank, copied, SIZES, torch.float64, [1, 2, 4])
    assert_whole([it for it in of_ranks if it], SIZES, torch.float64)


def with_gpu_blocks(folder, aten):
    """A copy with the blocks of examples/gpu_blocks.py, and with this for torch's kernels."""
    own, blocks = FILE.read_text(), (ROOT / "examples/gpu_blocks.py").read_text().partition("import torch\n")[2]
    rest = own[: own.index("def block_forward")], own[own.index("def hop(") :]
    (folder / FILE.name).write_text(rest[0] + blocks.replace("torch.ops.aten", aten) + rest[1])
    return str(folder / FILE.name)


EMULATED = "__import__('tests.fake_gpu').fake_gpu.Kernels()"


def test_blocks_for_gpus(ranks, tmp_path):
    sizes, dtype = (*SIZES[:3], 36, 16), torch.bfloat16
    assert_whole(ranks(3, on_rank, with_gpu_blocks(tmp_path, EMULATED), sizes, dtype), sizes, dtype, fused_blocks=2 * 3)


def messages(context, path, whole):
    return messages_of_ring(context, runpy.run_path(path)["ring_attention"], [4] * context.world_size, *whole)


def test_p_minus_1_messages_a_way(ranks, copied):
    B, H, G, D, P = 1, 4, 2, 6, 3
    block = 2 * B * G * 4 * D  # the numbers of K and V, or of dK and dV, of 4 tokens
    whole = grouped_inputs(B, H, G, 4 * P, D, torch.bfloat16)
    for rank, (forward, backward) in enumerate(ranks(P, messages, copied, whole)):
        sent = [[it for it in way if it.kind != "recv"] for way in (forward, backward)]
        assert {it.peer for it in (*sent[0], *sent[1])} == {(rank + 1) % P}
        assert [it.bytes for it in sent[0]] == [2 * block] * (P - 1)
        assert sorted(it.bytes for it in sent[1]) == [2 * block] * (P - 1) + [4 * block] * (P - 1)  # sums: float32


def bad(context, path, case):
    q, k, v = torch.zeros(3, 1, 2, 6, 4)
    changed = {
        "the last rank has fewer tokens": [x[:, :, : 6 - context.rank // 2] for x in (q, k, v)],
        "only one rank is wrong": [q, k, v[:, :, 1:] if context.rank == 1 else v],
        "dimensions": [x.flatten(0, context.rank // 2) for x in (q, k, v)],
        "heads": [torch.zeros(1, 3, 6, 4), k, v],
        "odd zigzag": [q[:, :, 1:], k[:, :, 1:], v[:, :, 1:]],
        "as many bytes": [x.view(1, 2, 4, 6) if context.rank else x for x in (q, k, v)],
        "dtypes": [x.to(torch.float16 if context.rank else torch.bfloat16) for x in (q, k, v)],
        "integers on one rank": [x.long() if context.rank == 1 else x for x in (q, k, v)],
        "integers": [x.long() for x in (q, k, v)],
        "k and v in float64": [q, k.double(), v.double()],
        "no numbers": [x[..., :0] for x in (q, k, v)],
        "gradients": [q, k.clone().requires_grad_(context.rank == 1), v],
        "mode of gradients": [q.clone().requires_grad_(), k, v],
        "v in float64 on one rank": [q, k, v.double() if context.rank == 1 else v],
        "no head of K and V on one rank": [q, *(x[:, : context.rank != 1] for x in (k, v))],
    }
    layout = {"odd zigzag": "zigzag", "layout": "zig-zag"}.get(case, "contiguous")
    layout = {"layouts": "zigzag", "a list": ["contiguous"]}.get(case, layout) if context.rank else layout
    causal = case != "masks" or context.rank == 1
    with torch.set_grad_enabled(case != "mode of gradients" or context.rank == 1):
        runpy.run_path(path)["ring_attention"](*changed.get(case, (q, k, v)), causal=causal, layout=layout)


ON_ALL = "heads", "odd zigzag", "layout", "integers", "k and v in float64", "no numbers"
ON_ONE = "only one rank is wrong", "integers on one rank", "v in float64 on one rank", "no head of K and V on one rank"
BAD = {case: range(3) for case in ON_ALL} | {case: [1] for case in ON_ONE} | {"dimensions": [2], "a list": [1, 2]}
ALIKE = ["the last rank has fewer tokens", "as many bytes", "dtypes", "masks", "layouts", "gradients"]


@pytest.mark.parametrize("case", [*BAD, *ALIKE, "mode of gradients"])
def test_what_would_be_silently_wrong_is_refused_on_every_rank(ranks, copied, case):
    """A rank whose own call is right is told that the ranks' calls differ."""
    for rank, outcome in enumerate(ranks.outcomes(3, bad, copied, case)):
        says = "q (B, H, C, D), k" if rank in BAD.get(case, ()) else "the same call on all ranks, and on no others;"
        assert (outcome.kind, f"expected {says}" in outcome.message) == ("ValueError", True), rank


@pytest.mark.parametrize("wrong", [("zig-zag", 8, 0), ("zigzag", 6, 1), ("contiguous", 8, -1), ("contiguous", 8, 2)])
def test_positions_that_no_rank_has_are_refused(copied, wrong):
    with pytest.raises(ValueError, match="; expected contiguous or zigzag, "):
        runpy.run_path(copied)["positions"](*wrong, 2)


def twice(context, path, power):
    q = torch.ones(1, 1, 2, 2, requires_grad=True)
    out = runpy.run_path(path)["ring_attention"](q, q, q)
    (dq,) = torch.autograd.grad((out**power).sum(), q, create_graph=True)
    dq.sum().backward()


@pytest.mark.parametrize("power", [1, 2])
def test_second_derivatives_are_refused(ranks, copied, power):
    """With a loss that is linear in out, d_out needs no gradient, and torch itself would not refuse."""
    for outcome in ranks.outcomes(2, twice, copied, power):
        assert "asks for a second derivative" in outcome.message


def outside(context, path):
    group, q = dist.new_group([0, 1]), torch.ones(1, 1, 2, 2)
    return runpy.run_path(path)["ring_attention"](q, q, q, group=group).sum().item()


def test_a_rank_outside_the_group_is_refused(ranks, copied):
    *inside, refusal = ranks.outcomes(3, outside, copied)
    assert (inside, refusal.kind) == ([4.0, 4.0], "ValueError")


def without_graph(context, path):
    q = torch.ones(1, 1, 2, 2, requires_grad=context.rank == 0)
    with torch.no_grad():
        return runpy.run_path(path)["ring_attention"](q, q, q).sum().item()


def test_a_pass_without_gradients_takes_any_leaves(ranks, copied):
    assert ranks(2, without_graph, copied) == [4.0, 4.0]


STEPS = ["step  0", "step 10", "step 20", "step 30"]


def own_run(context, path, gpus):
    """Of a rank that has joined already, on a host with so many GPUs: the exit status of the file's own run, what it
    prints, and what it asks of torch."""
    answers = [(torch.cuda, "is_available", gpus > 0), (torch.cuda, "device_count", gpus)]
    answers += [(dist, "get_node_local_rank", context.rank), (dist, "destroy_process_group", None)]
    asked = (dist, "init_process_group"), (torch.cuda, "set_device"), (torch, "set_default_device")
    with ExitStack() as stack:
        for home, name, answer in answers:
            stack.enter_context(mock.patch.object(home, name, return_value=answer))
        calls = [stack.enter_context(mock.patch.object(*of)) for of in asked]
        printed = stack.enter_context(redirect_stdout(io.StringIO()))
        with pytest.raises(SystemExit) as end:
            runpy.run_path(path, run_name="__main__")
    return end.value.code, printed.getvalue(), [call.call_args.args[0] for call in calls]


@pytest.mark.slow
@pytest.mark.parametrize(("gpus", "share", "last"), [(1, "0.5", "WRONG, on CPUs"), (2, "weight", "ok, on GPUs")])
def test_its_own_run(ranks, tmp_path, gpus, share, last):
    """A run can fail. Two ranks compute on GPUs where there are two, each on its own; messages are then NCCL's."""
    (tmp_path / FILE.name).write_text(FILE.read_text().replace("out_j, weight)", f"out_j, {share})"))
    for rank, (status, printed, asked) in enumerate(ranks(2, own_run, str(tmp_path / FILE.name), gpus)):
        lines = [line.split(":")[0] for line in printed.splitlines()]
        assert (status, lines) == (int(gpus == 1), [*STEPS, last] if rank == 0 else [])
        if rank == 0:  # the losses of the ring and of one process
            assert len({*re.findall(r"\d\.\d{9}", printed)}) == (8 if gpus == 1 else 4)
        assert asked == ["cpu:gloo,cuda:nccl", *((rank, "cuda") if gpus == 2 else (-1, "cpu"))]


@pytest.mark.slow
def test_torchrun_starts_it(copied, tmp_path):
    """Where torch finds an accelerator, it would make a group for that one only; Apple's is no GPU of CUDA."""
    (tmp_path / "start.py").write_text(f"""\
import runpy, torch
torch._C._get_accelerator = lambda *_: torch.device("mps")
runpy.run_path({copied!r}, run_name="__main__")""")
    done = run(*TORCHRUN, "--nproc_per_node=2", str(tmp_path / "start.py"))
    lines = [line.split(":")[0] for line in done.stdout.splitlines()]
    assert (done.returncode, lines) == (0, [*STEPS, "ok, on CPUs"]), done.stderr


def test_without_torchrun_it_says_what_starts_it():
    with pytest.raises(SystemExit, match=r"^start it with torchrun --nproc_per_node=4 trainable_ring.py$"):
        runpy.run_path(str(FILE), run_name="__main__")
