"""docs/: what the pages say is there is there, and a mistake that a page names has the symptom that the page gives it.

The step of docs/your_model.md is run as it stands, and with a line spoiled.
"""

import inspect
import math
import re
import shlex
import subprocess
import sys
from contextlib import nullcontext
from functools import cache, partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import ringlab
from bench import gpu
from ring_doctor import __main__ as doctor
from ring_doctor.catalogue import CATALOGUE
from ring_doctor.jobs.verdict import MISTAKES
from ring_doctor.whole_models.whole_model import examine_model
from ring_planner import command as planner
from ringlab.basics import ring_attn_command as command
from ringlab.basics.naive_attention import naive_attention
from ringlab.models import train
from ringlab.ring.layouts import rotary
from ringlab.support import processes
from ringlab.support.rounding import exact_attention
from tests.attention import assert_right
from tests.commands import LIMIT, ROOT

# The code of docs/use.md, as it stands, on real processes ------------------------------------------------------------

PAGES = {path.stem: path.read_text() for path in sorted(ROOT.glob("docs/*.md"))}
MODEL, SYMPTOMS = PAGES["your_model"], PAGES["symptoms"]
FORWARD = re.findall(r"^```python\n(.*?)^```", PAGES["use"], re.M | re.S)[0]


def snippet_on_rank(context):
    """What the snippet had on this rank, which has joined already."""
    with mock.patch.object(processes, "join_ring", return_value=nullcontext(context)):
        exec(FORWARD, names := {})
    return [names[name] for name in ("q", "k", "v", "out")]


def test_the_forward_snippet_is_full_attention(ranks):
    P = 3
    q, k, v, out = (torch.cat(chunks, dim=2) for chunks in zip(*ranks(P, snippet_on_rank), strict=True))
    assert q.shape == (1, 8, 512 * P, 64)  # as its comment says
    two = slice(0, None, 4)  # of the 8 heads: the float64 of all takes seconds
    q, k, v = (x[:, two] for x in (q, k, v))
    assert_right(out[:, two], exact_attention(q, k, v, causal=True, fused_blocks=P)["out"])


# Names and commands --------------------------------------------------------------------------------------------------

NEW = ("your_model", "symptoms", "cluster", "use")
KNOWN = CATALOGUE | MISTAKES


def cells(page):
    """The cells of every row of every table, without anchors, and without the links of names."""
    page = re.sub(r"<a id=[^>]*></a>|\[(?=`\w+`\])|(?<=`)\]\([^)]*mistakes\.md[^)]*\)", "", page)
    return [re.split(r"(?<!\\) *\| *", line.strip("| ")) for line in re.findall(r"^\|(?! ?-).*\|$", page, re.M)]


@pytest.mark.parametrize("name", ["your_model", "symptoms"])
def test_the_names_of_mistakes_are_the_doctors_and_their_chapters_too(name):
    for row in cells(PAGES[name]):
        for mistake in re.findall(r"`([a-z]+_[a-z_0-9]+)`", " ".join(row[3:4])):
            assert mistake in KNOWN, mistake
        for mistake in KNOWN.keys() & set(re.findall(r"`(\w+)`", " ".join(row))):
            chapters = re.findall(r"notebooks/(\d+)_", row[-1])
            assert not chapters or KNOWN[mistake].chapter == int(chapters[0]), mistake


def commands():
    """Every line of the pages that a reader may type."""
    blocks = [block for name in NEW for block in re.findall(r"^```bash\n(.*?)^```", PAGES[name], re.M | re.S)]
    return dict.fromkeys(line for block in blocks for line in block.splitlines())


PROGRAMS = {  # what reads the options of a command
    "ring-doctor": doctor.parse,
    "ring-plan": planner.main,
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

STEP = re.findall(r"^```python\n(.*?)^```", MODEL, re.M | re.S)[0]
SPOILED = {  # the number of the line of the checklist: what is in the step, and what is there when it is forgotten
    1: (
        "labels = labels[:, at]",
        "labels = text[:, at].roll(-1, dims=1) if P > 1 and targets is None else labels[:, at]",
    ),
    2: ("text[:, at], at)", "text[:, at], torch.arange(len(at)))"),
    4: ("q, k = rotary(q, at), rotary(k, at)", "q, k = (rotary(rotary(x, at), at) for x in (q, k))"),
    10: ("dist.all_reduce(count)", "pass"),
    11: ("dist.all_reduce(weight.grad)", "dist.all_reduce(weight.grad.div_(P))"),
    12: ("dist.all_reduce(weight.grad)", "dist.all_reduce(weight.grad.mul_(P))"),
    13: ("dist.all_reduce(weight.grad)", "pass"),
    14: ("return loss, {", "return loss * P, {"),
    15: ("return loss, {", "return loss / P, {"),
    16: ("dist.all_reduce(loss := loss.detach())", "loss = loss.detach()"),
}
FACTORS = {"P": lambda P: P, "1/P": lambda P: 1 / P}
LINES = {int(row[0]): row for row in cells(MODEL) if row[0].isdecimal()}
WORDS, TEXT = 11, (2, 49)  # the size of the vocabulary; B and S + 1: 48 tokens on 1, 2, 3 or 4 ranks


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


@cache
def text_of_the_page():
    return torch.randint(WORDS, TEXT, generator=torch.Generator().manual_seed(2))


@cache
def exact():
    """The loss and the gradients of all weights, on one device, without the page's code."""
    model, text = Model(full_attention), text_of_the_page()
    logits = model(text[:, :-1], torch.arange(TEXT[1] - 1))
    loss = F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
    loss.backward()
    return loss.detach(), torch.cat([weight.grad.flatten() for weight in model.parameters()])


def wrapped(model, wrap):
    if wrap == "DDP":
        return nn.parallel.DistributedDataParallel(model)
    if wrap == "fully_shard":
        from torch.distributed import fsdp  # a second's import, for this alone

        fsdp.fully_shard(model, mesh=dist.init_device_mesh("cpu", (dist.get_world_size(),)))
    return model


def the_step(text, *, targets=None, code=STEP, wrap=None):
    """The step of the page, or another; the vocabulary is small."""
    names = {"build_model": lambda: wrapped(Model(names["attention"]), wrap)}
    exec(compile(code, "your_model.md", "exec"), names)
    if targets is not None:
        targets = torch.where(targets < 0, targets, targets % WORDS)
    return names["step"](text, targets=targets)


def spoiled(line):
    old, new = SPOILED[line]
    assert old in STEP
    return STEP.replace(old, new)


def on_rank(context, code, wrap=None):
    loss, gradients = the_step(text_of_the_page(), code=code, wrap=wrap)
    whole = [gradient.full_tensor() if wrap == "fully_shard" else gradient for gradient in gradients.values()]
    return loss, torch.cat([gradient.flatten() for gradient in whole])


@pytest.mark.parametrize("world_size", [1, 3])
def test_the_step_of_the_page_is_that_of_full_attention_on_one_device(ranks, world_size):
    for found in ranks(world_size, on_rank, STEP):
        torch.testing.assert_close(found, exact())


def blocks_of(page, words):
    """The blocks of Python of a page that have these words."""
    return [block for block in re.findall(r"```python\n(.*?)```", page, re.S) if words in block]


def joint_on_rank(context, code, parts, right):
    names = dict(zip(("q_text", "q_image", "k_text", "k_image", "v_text", "v_image"), parts, strict=True))
    names |= {"rank": context.rank, "P": context.world_size}
    exec(code, names)
    mine = ringlab.shard(right, "contiguous", context.rank, context.world_size)
    torch.testing.assert_close(names["out"], mine)
    torch.testing.assert_close(torch.cat((names["out_text"], names["out_image"]), dim=2), mine)
    return names["out_text"].shape[2]


def test_text_that_every_rank_has_counts_once(ranks):
    (code,) = blocks_of((ROOT / "docs/use.md").read_text(), "q_text")
    parts = [torch.randn(2, 3, n, 4, dtype=torch.float64) for n in (5, 8) * 3]
    q, k, v = (torch.cat(parts[i : i + 2], dim=2) for i in (0, 2, 4))
    rows = ranks(3, joint_on_rank, code, parts, naive_attention(q, k, v))
    assert rows == [5, 0, 0]  # the text, on the first rank


def mesh_on_rank(context, code, shape, whole, right):
    assert all(words in code for words in ("(2, 4, 4)", '"cuda"'))
    chunk, tp = divmod(context.rank, shape[2])
    *mine, out = (
        ringlab.shard(x.chunk(shape[2], dim=1)[tp], "contiguous", chunk, shape[0] * shape[1]) for x in (*whole, right)
    )
    names = dict(zip("qkv", mine, strict=True))
    exec(code.replace("(2, 4, 4)", str(shape)).replace('"cuda"', '"cpu"'), names)
    torch.testing.assert_close(names["out"], out)


@pytest.mark.parametrize("shape", [(2, 1, 2), (1, 2, 2)])
def test_a_mesh_of_three_dimensions_has_all_three(ranks, shape):
    (code,) = blocks_of((ROOT / "docs/use.md").read_text(), "Hybrid")
    whole = torch.randn(3, 1, 4, 8, 6, dtype=torch.float64).unbind()
    ranks(4, mesh_on_rank, code, shape, whole, naive_attention(*whole, causal=True))


def preference(chosen):
    """A loss of whole sequences: the first of two should be likelier."""
    return -F.logsigmoid(chosen[0] - chosen[1])


def sequences_on_rank(context, code, x, weights, labels, right):
    names = {}
    exec(code, names)
    weights = [weight.clone().requires_grad_() for weight in weights]
    where = "contiguous", context.rank, context.world_size
    x, labels = (ringlab.shard(each[:, None], *where)[:, 0] for each in (x, labels[..., None]))
    logits = layer(x, *weights, partial(ringlab.ring_flash_attention, causal=True))
    loss = preference(names["sequence_log_probs"](logits, labels[..., 0]))
    loss.backward()
    for weight in weights:
        dist.all_reduce(weight.grad)
    torch.testing.assert_close([loss.detach(), *(weight.grad for weight in weights)], right)


def layer(x, of_keys, of_logits, attention):
    """Logits of one head of attention, whose keys are made by a weight."""
    return attention(x[:, None], (x @ of_keys)[:, None], x[:, None])[:, 0] @ of_logits


@pytest.mark.parametrize("P", [2, 3, 4])
def test_a_loss_of_whole_sequences_is_that_of_one_process(ranks, P):
    (code,) = blocks_of(MODEL, "def sequence_log_probs")
    x, *weights = (torch.randn(shape, dtype=torch.float64) for shape in ((2, 12, 4), (4, 4), (4, 5)))
    labels = torch.arange(24).view(2, 12) % 6 - 1  # some are -1: no label
    leaves = [weight.clone().requires_grad_() for weight in weights]
    logits = layer(x, *leaves, partial(naive_attention, causal=True))
    of_tokens = -F.cross_entropy(logits.mT, labels.clamp(min=0), reduction="none")
    loss = preference((of_tokens * (labels >= 0)).sum(dim=1))
    right = [loss.detach(), *torch.autograd.grad(loss, leaves)]
    ranks(P, sequences_on_rank, code, x, weights, labels, right)


@pytest.mark.slow
@pytest.mark.parametrize("wrap", ["DDP", "fully_shard"])
def test_ddp_and_fully_shard_average_so_the_loss_is_multiplied_by_p(ranks, wrap):
    """As the page says: without the loop over the weights, and with the loss times P; else all gradients are 1/P."""
    P = 4
    assert "leave out the loop over `model.parameters()` and call `(P * loss).backward()`" in " ".join(MODEL.split())
    without_sum = re.sub(r" +for weight in model.parameters\(\):\n.*\n", "", STEP)
    multiplied = without_sum.replace("loss.backward()", "(P * loss).backward()")
    assert len({STEP, without_sum, multiplied}) == 3
    for right in ranks(P, on_rank, multiplied, wrap):
        torch.testing.assert_close(right, exact())
    for _, divided in ranks(P, on_rank, without_sum, wrap):
        torch.testing.assert_close(divided, exact()[1] / P)
    assert f"× 1/P ({1 / P:.4f} on {P} ranks)" in SYMPTOMS


@pytest.mark.parametrize("line", SPOILED)
def test_a_line_that_is_forgotten_has_the_symptom_of_the_page(ranks, line):
    P, said, (loss, gradients) = 3, LINES[line][2], exact()
    for mine, of_weights in ranks(P, on_rank, spoiled(line)):
        factors = {what: FACTORS[factor](P) for what, factor in re.findall(r"(loss|gradients) × (1/P|P)", said)}
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
@pytest.mark.xdist_group("jobs")  # with the other tests that start their jobs so
def test_the_doctor_finds_the_step_of_the_page_healthy(tmp_path, warm, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(warm))
    file = tmp_path / "step_of_the_page.py"
    own = f"import torch\nfrom torch import nn\n\nWORDS = {WORDS}\n\n\n{inspect.getsource(Model)}\n\n"
    file.write_text(f"{own}{STEP}\ndef build_model():\n    return Model(attention)\n")
    found = examine_model(f"{file}:step", layout="zigzag", vocab=WORDS, progress=(ran := []).append)
    assert str(found).startswith("HEALTHY")
    assert ran == [f"the {P}-process{moved} job" for P, moved in ((1, ""), (1, "-moved"), (3, ""), (2, ""), (4, ""))]
    assert found.names == []


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
