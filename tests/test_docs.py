"""docs/: what the pages say is there is there, and a mistake that a page names has the symptom that the page gives it.

The step of docs/your_model.md is run as it stands, and with a line spoiled. The mistakes of docs/symptoms.md are
computed on paper: right on 2 ranks and wrong on 4, wrong under a causal mask only, in 16 bits only, NaN.
"""

import math
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from functools import cache, partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import ringlab
from bench import gpu
from ring_doctor import __main__ as doctor
from ring_doctor.case import Case
from ring_doctor.catalogue import CATALOGUE
from ring_doctor.mistakes_of_models import MISTAKES
from ring_doctor.paper_ring import RIGHT, compute
from ring_doctor.whole_model import examine_model
from ringlab.basics import command
from ringlab.basics.naive_attention import naive_attention
from ringlab.models import train
from ringlab.planning import cost_model
from ringlab.support.processes import launch
from ringlab.support.rounding import exact_attention
from ringlab.training.layouts import rotary
from tests.attention import assert_right
from tests.commands import LIMIT, ROOT, TORCHRUN, run
from tests.sick_models import step as sick_step

# The code of docs/use.md, as it stands, on real processes ------------------------------------------------------------

USE = (ROOT / "docs/use.md").read_text()
FORWARD, TRAINING = re.findall(r"^```python\n(.*?)^```", USE, re.M | re.S)
WORDS, TEXT = 11, (2, 49)  # the size of the vocabulary; B and S + 1: 48 tokens on 1, 2, 3 or 4 ranks


@pytest.mark.slow
def test_the_forward_snippet_is_full_attention_on_torchruns_processes(tmp_path):
    """As a file of its own, to which only one line is added: what every rank had is written down."""
    P, script = 3, tmp_path / "snippet.py"
    script.write_text(FORWARD + f"\ntorch.save((q, k, v, out), f'{tmp_path}/{{context.rank}}.pt')\n")
    done = run(*TORCHRUN, f"--nproc_per_node={P}", script, PYTHONPATH=str(ROOT))  # found from there, installed or not
    assert done.returncode == 0, done.stderr
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(P)]
    q, k, v, out = (torch.cat(chunks, dim=2) for chunks in zip(*ranks, strict=True))
    assert q.shape == (1, 8, 512 * P, 64)  # as its comment says
    assert_right(out, exact_attention(q, k, v, causal=True, fused_blocks=P)["out"])


class Model(nn.Module):
    """A transformer of two layers without its norms and MLPs: 4 query heads on 2 key/value heads, D = 6, float64."""

    def __init__(self, attention):
        super().__init__()
        torch.manual_seed(0)
        self.attention = attention
        self.embedding = nn.Embedding(WORDS, 24)
        self.to_qkv = nn.ModuleList(nn.Linear(24, (4 + 2 + 2) * 6) for _ in range(2))
        self.to_words = nn.Linear(24, WORDS)
        self.double()

    def forward(self, tokens, at):
        x = self.embedding(tokens)  # (B, C, 24)
        for to_qkv in self.to_qkv:
            q, k, v = to_qkv(x).unflatten(2, (8, 6)).transpose(1, 2).split([4, 2, 2], dim=1)
            x = x + self.attention(q, k, v, at).transpose(1, 2).flatten(2)
        return self.to_words(x)


def full_attention(q, k, v, at):
    q, k = rotary(q, at), rotary(k, at)
    return naive_attention(q, k.repeat_interleave(2, dim=1), v.repeat_interleave(2, dim=1), causal=True)


def text_of_the_tests():
    return torch.randint(WORDS, TEXT, generator=torch.Generator().manual_seed(1))


def exact_gradients():
    """The gradients of every weight, on one device, without the page's code."""
    model, text = Model(full_attention), text_of_the_tests()
    logits = model(text[:, :-1], torch.arange(TEXT[1] - 1))
    F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten()).backward()
    return [weight.grad for weight in model.parameters()]


def trained(context, code, wrap):
    """One rank: run the page's code on a model that is wrapped, or not. Returns the gradients."""
    names = {}
    exec(compile(code, "use.md", "exec"), names)
    model = Model(names["attention"])
    if wrap == "DDP":
        model = nn.parallel.DistributedDataParallel(model)
    elif wrap == "fully_shard":
        from torch.distributed import fsdp  # a second's import, for this alone

        fsdp.fully_shard(model, mesh=dist.init_device_mesh("cpu", (context.world_size,)))
    names["gradients"](model, text_of_the_tests(), context.rank, context.world_size)
    grads = [weight.grad for weight in model.parameters()]
    return [grad.full_tensor() if wrap == "fully_shard" else grad for grad in grads]


def both_trained(context, code, other_code, wrap):
    return trained(context, code, wrap), trained(context, other_code, wrap)


@pytest.mark.parametrize("world_size", [1, 3])
def test_the_training_snippet_gives_the_gradients_of_full_attention(ranks, world_size):
    for gradients in ranks(world_size, trained, TRAINING, None):
        torch.testing.assert_close(gradients, exact_gradients())


@pytest.mark.slow
@pytest.mark.parametrize("wrap", ["DDP", "fully_shard"])
def test_ddp_and_fully_shard_average_so_the_loss_is_multiplied_by_p(wrap):
    """As the page says: without the last two lines, and with the loss times P; else every gradient is 1/P of it."""
    P = 4
    assert "leave out the loop over `model.parameters()` and multiply the loss by P" in " ".join(USE.split())
    without_sum = TRAINING.rstrip().rsplit("\n", 2)[0] + "\n"
    assert "all_reduce" not in without_sum
    multiplied = without_sum.replace("loss.backward()", "(world_size * loss).backward()")
    for right, divided in launch(both_trained, P, multiplied, without_sum, wrap):
        torch.testing.assert_close(right, exact_gradients())
        pairs = zip(divided, exact_gradients(), strict=True)
        assert {f"{gradient.norm() / exact.norm():.4f}" for gradient, exact in pairs} == {"0.2500"}
    assert f"(measured on {P} ranks: 0.2500)" in USE


# Names, commands, the step of docs/your_model.md, and docs/symptoms.md -----------------------------------------------

PAGES = {path.stem: path.read_text() for path in sorted(ROOT.glob("docs/*.md"))}
MODEL, SYMPTOMS = PAGES["your_model"], PAGES["symptoms"]
NEW = ("your_model", "symptoms", "cluster", "use")
KNOWN = CATALOGUE | MISTAKES


def cells(page):
    """The cells of every row of every table, without anchors."""
    page = re.sub(r"<a id=[^>]*></a>", "", page)
    return [re.split(r"(?<!\\) *\| *", line.strip("| ")) for line in re.findall(r"^\|(?! ?-).*\|$", page, re.M)]


def test_every_test_that_the_checklist_names_is_in_the_file_before_it():
    """A name stands behind the link of its file; "the same" is the file of the row above."""
    file, seen = "", 0
    for row in cells(MODEL):
        for link, name in re.findall(r"\]\(\.\./(tests/[\w/]+\.py)\)|`(test_\w+)`", row[-1]):
            file = link or file
            assert not name or f"def {name}(" in (ROOT / file).read_text(), (file, name)
            seen += bool(name)
    assert seen >= 20


@pytest.mark.parametrize("name", NEW)
def test_the_names_of_mistakes_are_the_doctors_and_their_chapters_too(name):
    for row in cells(PAGES[name]):
        known = [word for word in re.findall(r"`([a-z_]+)`", row[-2]) if "_" in word] if len(row) == 5 else []
        for mistake in known:
            assert mistake in KNOWN, mistake
            chapters = re.findall(r"notebooks/(\d+)_", row[-1])
            assert not chapters or KNOWN[mistake].chapter == int(chapters[0]), mistake


def commands():
    """Every line of the pages that a reader may type."""
    blocks = [block for name in NEW for block in re.findall(r"^```bash\n(.*?)^```", PAGES[name], re.M | re.S)]
    return dict.fromkeys(line for block in blocks for line in block.splitlines())


PROGRAMS = {  # what reads the options of a command
    "ring-doctor": doctor.parse,
    "ring-plan": cost_model.main,
    "ringlab.models.train": train.parse,
    "examples/cluster/ring.sbatch": train.parse,  # it passes them on
    "ring_attn.py": lambda words: command.parse(words, world_size=2, local_world_size=2),
    "bench.gpu": gpu.main,
}


@pytest.mark.parametrize("line", commands())
def test_a_command_of_the_pages_is_one(line, monkeypatch):
    """Its program is there and takes its options; the tests of each program run it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    words = shlex.split(line, comments=True)
    [at] = [i for i, word in enumerate(words) if word in PROGRAMS]
    said = PROGRAMS[words[at]](words[at + 1 :])  # the options, or the exit status; bad options end the process
    assert not isinstance(said, int) or said == 0


# The step of docs/your_model.md -------------------------------------------------------------------------------------

[STEP] = re.findall(r"^```python\n(.*?)^```", MODEL, re.M | re.S)
SPOILED = {  # the number of the line of the checklist: what is in the step, and what is there when it is forgotten
    1: (
        "labels = labels[:, at]",
        "labels = text[:, at].roll(-1, dims=1) if P > 1 and targets is None else labels[:, at]",
    ),
    2: ("at if positions is None else", "torch.arange(len(at)) if positions is None else"),
    4: ("model = build_model()", "model = build_model(twice=True)"),
    10: ("dist.all_reduce(count)", "pass"),
    11: ("dist.all_reduce(weight.grad)", "dist.all_reduce(weight.grad.div_(P))"),
    12: ("dist.all_reduce(weight.grad)", "dist.all_reduce(weight.grad.mul_(P))"),
    13: ("dist.all_reduce(weight.grad)", "pass"),
    14: ("return loss, {", "return loss * P, {"),
    15: ("return loss, {", "return loss / P, {"),
    16: ("dist.all_reduce(loss := loss.detach())", "loss = loss.detach()"),
}
FACTORS = {"P": lambda P: P, "1/P": lambda P: 1 / P, "1/√P": lambda P: P**-0.5}
SYMPTOM = {int(row[0]): row[2] for row in cells(MODEL) if row[0].isdecimal()}
NAME = {int(row[0]): row[3].strip("`") for row in cells(MODEL) if row[0].isdecimal() and len(row) == 5}


def build_model(twice=False):
    """The model of the test of docs/use.md, with the ring as its attention."""

    def attention(q, k, v, at):
        for _ in range(1 + (twice and dist.get_world_size() > 1)):
            q, k = rotary(q, at), rotary(k, at)
        return ringlab.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True, layout="zigzag")

    return Model(attention)


def the_step(text, *, positions=None, targets=None, spoiled=0):
    """The step of the page, or with one line forgotten."""
    old, new = SPOILED.get(spoiled, ("", ""))
    assert old in STEP
    names = {"build_model": build_model}
    exec(compile(STEP.replace(old, new) if spoiled else STEP, "your_model.md", "exec"), names)
    return names["step"](text % WORDS, positions=positions, targets=None if targets is None else shortened(targets))


def shortened(targets):
    return torch.where(targets < 0, targets, targets % WORDS)


def on_rank(context, text, spoiled):
    loss, gradients = the_step(text, spoiled=spoiled)
    return loss, torch.cat([gradient.flatten() for gradient in gradients.values()])


@cache
def text_of_the_page():
    return torch.randint(WORDS, TEXT, generator=torch.Generator().manual_seed(2))


def test_the_step_of_the_page_is_that_of_one_process(ranks):
    [(loss, gradients)] = ranks(1, on_rank, text_of_the_page(), 0)
    for mine in ranks(3, on_rank, text_of_the_page(), 0):
        torch.testing.assert_close(mine, (loss, gradients))


@pytest.mark.parametrize("line", SPOILED)
def test_a_line_that_is_forgotten_has_the_symptom_of_the_page(ranks, line):
    P, said = 3, SYMPTOM[line]
    [(loss, gradients)] = ranks(1, on_rank, text_of_the_page(), 0)
    for mine, of_weights in ranks(P, on_rank, text_of_the_page(), line):
        factors = {what: FACTORS[factor](P) for what, factor in re.findall(r"(loss|gradients) × (1/√P|1/P|P)", said)}
        if factors:
            torch.testing.assert_close(mine, loss * factors.get("loss", 1))
            torch.testing.assert_close(of_weights, gradients * factors.get("gradients", 1))
        elif said.startswith("another loss"):
            assert abs(mine / loss - 1) > 1e-6  # rounding: 1e-15
        else:
            assert said.startswith("other gradients on each rank")
            assert (of_weights - gradients).norm() > 0.1 * gradients.norm()
            torch.testing.assert_close(mine, loss)


@pytest.mark.slow
@pytest.mark.parametrize("line", [0, 2, 11])
def test_the_doctor_names_the_line_that_is_forgotten(ranks, line):
    examination = examine_model(partial(the_step, spoiled=line), layout="zigzag", ranks=ranks)
    assert examination.healthy == (line == 0)
    assert [found.names for found in examination.diagnoses] == ([(NAME[line],)] if line else [])


def sick(context, mistakes, clip):
    loss, gradients = sick_step(text_of_the_page() % 32, mistakes, clip=clip)
    return loss, torch.cat([gradient.flatten() for gradient in gradients.values()])


@pytest.mark.parametrize(("line", "mistake"), [(3, "positions_of_striped"), (5, "ring_not_called"), (17, "")])
def test_the_symptom_of_a_mistake_in_a_tiny_transformer(ranks, line, mistake):
    mistake, clip = mistake or NAME[line], 0.1 if line == 17 else None
    [(loss, gradients)] = ranks(1, sick, (), clip)
    for mine, of_weights in ranks(4, sick, (mistake,), clip):
        if line == 17:
            torch.testing.assert_close(of_weights, gradients / 2, rtol=1e-5, atol=0)  # 1/√4; the norm + 1e-6 divides
        else:
            assert SYMPTOM[line].startswith("another loss")
            assert abs(mine / loss - 1) > 1e-3


# The mistakes of docs/symptoms.md, on paper -------------------------------------------------------------------------


def named(heading):
    """The names in the table under this heading."""
    [part] = re.findall(rf"^## {heading}\n(.*?)(?=^## |\Z)", SYMPTOMS, re.M | re.S)
    rows = [row for row in cells(part) if len(row) == 5]
    return [name for row in rows for name in re.findall(r"`([a-z_0-9]+)`", row[3]) if name in CATALOGUE]


def wrong(case, variant):
    """Which results differ from the right ones by more than the last digits of float64."""
    found, right = compute(case, variant(RIGHT)), compute(case, RIGHT)
    return {x for x in right if not torch.allclose(found[x].double(), right[x].double(), rtol=1e-9, atol=1e-9)}


FULL, CAUSAL = Case(4, heads=4, kv_heads=4), Case(4, causal=True, layout="zigzag", heads=4, kv_heads=4)


@pytest.mark.parametrize("name", named("Right on 2 GPUs, wrong on 4"))
def test_right_on_two_wrong_on_four(name):
    heads = 2 if name.startswith("replicated") else 4
    four = [replace(case, kv_heads=heads) for case in (FULL, CAUSAL)]
    two = [replace(case, world_size=2) for case in four]
    assert any(
        not any(wrong(case, variant) for case in two) and any(wrong(case, variant) for case in four)
        for variant in CATALOGUE[name].variants
    )


@pytest.mark.parametrize("name", named("Right without causal, wrong with it"))
def test_right_without_causal_wrong_with_it(name):
    causal = [CAUSAL, replace(CAUSAL, layout="striped"), replace(CAUSAL, layout="contiguous")]
    assert any(
        not wrong(FULL, variant) and any(wrong(case, variant) for case in causal)
        for variant in CATALOGUE[name].variants
    )


@pytest.mark.parametrize("name", named("Right in float32, wrong in bf16"))
def test_right_in_float32_wrong_in_bf16(name):
    """Rounding to 16 bits: nothing in float64, beyond float32's digits in bfloat16."""
    assert any(
        not wrong(FULL, variant) and wrong(replace(FULL, dtype=torch.bfloat16), variant)
        for variant in CATALOGUE[name].variants
    )


@pytest.mark.parametrize("name", named("NaN in some rows"))
def test_nan_in_some_rows(name):
    inputs = "large" if name == "unstabilised" else "normal"
    for variant in CATALOGUE[name].variants:
        out = compute(replace(CAUSAL, inputs=inputs), variant(RIGHT))["out"]
        rows = out.isnan().any(dim=-1).any(dim=1).any(dim=0)
        assert rows.any()
        assert name == "unstabilised" or not compute(FULL, variant(RIGHT))["out"].isnan().any()


def test_the_lines_that_find_the_rows(capsys):
    [snippet] = [it for it in re.findall(r"^```python\n(.*?)^```", SYMPTOMS, re.M | re.S) if "isnan" in it]
    out = torch.zeros(2, 3, 4, 5)
    out[1, 2, 1, 0] = out[0, 0, 3] = math.nan
    exec(snippet, {"out": out, "rank": 2, "at": torch.tensor([4, 5, 18, 19])})
    assert capsys.readouterr().out == "rank 2: NaN at positions [5, 19]\n"


def test_the_lines_that_show_where_a_rank_waits():
    [snippet] = [it for it in re.findall(r"^```python\n(.*?)^```", SYMPTOMS, re.M | re.S) if "faulthandler" in it]
    script = snippet.replace("120", "0.1") + "def waits():\n    __import__('time').sleep(60)\nwaits()\n"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 1
    assert re.search(r"line \d+ in waits\b", done.stderr)


def test_the_parts_of_the_gpu_bench_are_those_of_the_page():
    of_gpus = PAGES["cluster"].partition("## On NCCL")[2]
    listed = [row[0] for row in cells(of_gpus) if len(row) == 3 and row[0].isalpha()]
    assert [name for name in listed if name != "part"] == [word for part in gpu.PARTS for word in part.split(" and ")]
