"""A job that runs already: a line of a right training script is spoiled, and the doctor names what it has seen."""

import gc
import os
import re
import runpy
import shutil
import subprocess
import sys
import textwrap
import time
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from ring_doctor.asking.answers import RIGHT, WRONG_RING
from ring_doctor.asking.job import CannotExamine
from ring_doctor.jobs.gradients import gradients_of
from ring_doctor.jobs.job import GUARD, Job, run_job
from ring_doctor.jobs.seen import Row, Whole, told, whole_numbers
from ring_doctor.jobs.verdict import compare
from ringlab.models.transformer import IGNORED
from tests.commands import ROOT

WARM = ROOT / "tests/wrong/warm.py"
SCRIPT = (ROOT / "tests/wrong/job.py").read_text()
P = 3
SUM = "    for weight in model.parameters():\n        dist.all_reduce(weight.grad)\n"
AT = "    at = positions(LAYOUT, S, rank, P)\n"
SHARDS = "labels[:, at]\n"
COUNT = "    dist.all_reduce(count)\n"
CALL = "wrapped(tokens, at)"
RING = "scaled_dot_product_attention(q, k, v, layout=LAYOUT, **options)"
CLIP = "model.parameters(), 0.5"
GRADS, BY = "[x.grad for x in model.parameters()]", f"torch.nn.utils.clip_grads_with_norm_({CLIP}, norm)"
WRAPPED = "wrapped = model\n"
DDP = "wrapped = torch.nn.parallel.DistributedDataParallel(model)\n"
TWICE = ("loss.backward()", "(loss / 2).backward(retain_graph=True)\n    (loss / 2).backward()")
ZERO = """\
    own = list(model.parameters())[rank::P]
    for n, weight in enumerate(model.parameters()):
        dist.reduce(weight.grad, n % P)
    norm = sum(weight.grad.square().sum() for weight in own)
    dist.all_reduce(norm)
    torch.nn.utils.clip_grads_with_norm_(own, 0.5, norm**0.5)
    optimizer.step()
    for n, weight in enumerate(model.parameters()):
        dist.broadcast(weight.data, n % P)
"""
SUMMING = """\
class Summing(torch.optim.AdamW):
    def step(self):
        for weight in (weights := self.param_groups[0]["params"]):
            dist.all_reduce(weight.grad)
        torch.nn.utils.clip_grad_norm_(weights, 0.5)
        super().step()


def train("""
OWN = """\
class Own(torch.optim.Optimizer):
    def step(self):
        weights = self.param_groups[0]["params"]
        sums = [weight.grad{} for weight in weights]
        for x in sums:
            dist.all_reduce(x)
        norm = torch.stack([x.square().sum() for x in sums]).sum() ** 0.5 + 1e-6
        for weight, x in zip(weights, sums):
            weight.data -= x.mul_(0.5 / norm{})


def train("""


def summed_by_own_class(copied="", divided=""):
    """An optimizer that is not torch's sums gradients, or copies of them, in its step, and clips them."""
    edits = [(f"{SUM}    torch.nn.utils.clip_grad_norm_({CLIP})\n", ""), ("torch.optim.AdamW(", "Own(")]
    return [*edits, ("lr=1e-2", "{}"), ("def train(", OWN.format(copied, divided))]


MISTAKES = {  # what stands in the place of which lines, and the names; other words are in the first line of the report
    "the labels of a shard": ([(SHARDS, "tokens.roll(-1, dims=1)\n")], "labels_per_shard"),
    "its last label ignored": ([(SHARDS, "F.pad(tokens[:, 1:], (0, 1), value=IGNORED)\n")], "labels_per_shard"),
    "the positions of a shard": ([(CALL, "wrapped(tokens, torch.arange(len(at)))")], "positions_per_shard"),
    "plain attention": ([(RING, "F.scaled_dot_product_attention(q, k, v, **options)")], "ring_not_called"),
    "sharded twice": ([(AT, f"{AT}    at = at[rank * len(at) // P :][: len(at) // P]\n")], "tokens_missing"),
    "means of means": ([(COUNT, "    count = count * P\n")], "mean_of_means"),
    "means of means, in two passes, where 32 is ignored": (
        [(COUNT, "    count = count * P\n"), TWICE, ("-100", "32")],
        "mean_of_means",
    ),
    "no sum": ([(SUM, "")], "gradients_not_reduced"),
    "two sums": ([(SUM, f"{SUM}{SUM}")], "gradients_times_p"),
    "DDP's mean": ([(SUM, ""), (WRAPPED, DDP)], "gradients_over_p"),
    "one weight is not summed": (
        [(SUM, SUM.replace("        dist", "        if weight.dim() == 2:\n            dist"))],
        "gradients_not_reduced; 3 of 12 weights",
    ),
    "one weight is summed twice": (
        [(SUM, f"{SUM}    dist.all_reduce(model.head.weight.grad)\n")],
        "gradients_times_p; 1 of 12 weights, head.weight, × 3",
    ),
    "an own class divides": (summed_by_own_class(divided=" / P"), "gradients_over_p; all weights"),
    "only a rank clips": (
        [("    torch.nn.utils.clip", "    if rank == 0:\n        torch.nn.utils.clip")],
        "12 of 12 gradients are wrong on rank 1, 2 only",
    ),
    "the norm of a rank's weights": (
        [(CLIP, "list(model.parameters())[rank::P], 0.5")],
        "clipped_per_rank; the norm for clipping is",
    ),
    "the norm of copies": (
        [
            (
                f"torch.nn.utils.clip_grad_norm_({CLIP})",
                f"norm = torch.nn.utils.get_total_norm({GRADS}) * P**0.5\n    {BY}",
            )
        ],
        "gradients_over_root_p; the norm for clipping is",
    ),
    "keys in 16 bits": (
        [(RING, RING.replace(" k,", " k.bfloat16().to(k.dtype),"))],
        "; rounding to bfloat16 moves them as far",
    ),
    "the gradient of keys": (
        [(RING, f"(k.register_hook(lambda x: -x), {RING})[1]")],
        "; a backward pass meets layers.0.wk.weight first",
    ),
    "rotated once more": (
        [(RING, RING.replace("(q, k", "(rotary(q, AT), rotary(k, AT)")), (AT, f"{AT}    global AT\n    AT = at\n")],
        "with another output is layers.0",
    ),
}
HEALTHY = {
    "as it is": [],
    "DDP, with the factor": [(SUM, ""), (WRAPPED, DDP), (" / count", " / count * P")],
    "another layout": [('"zigzag"', '"striped"')],
    "contiguous": [('"zigzag"', '"contiguous"')],
    "summed in a step of the user's, at another rate": [
        (f"{SUM}    torch.nn.utils.clip_grad_norm_({CLIP})\n", ""),
        ("torch.optim.AdamW(model.parameters(), lr=1e-2", "Summing(model.parameters(), lr=1e-3"),
        ("def train(", SUMMING),
    ],
    "summed by an optimizer of an own class": summed_by_own_class(),
    "two backward passes": [TWICE],
    "nothing is shared out": [
        (AT, "    at = torch.arange(S)\n"),
        (RING, "F.scaled_dot_product_attention(q, k, v, **options)"),
    ],
}
ROWS = """\
    for row, of_row in zip(tokens, labels):
        logits = wrapped(row[None], at)
        loss = P * F.cross_entropy(logits[0], of_row, ignore_index=IGNORED, reduction="sum") / count
        loss.backward()
"""
LONGER = {
    "fully_shard, two passes": [
        (SCRIPT[SCRIPT.index("    logits =") : SCRIPT.index(SUM)], ROWS),
        (SUM, ""),
        (WRAPPED, "wrapped = torch.distributed.fsdp.fully_shard(model)\n"),
    ],
    "a step that is compiled whole": [("def take_step", "@torch.compile(backend='eager')\ndef take_step")],
}
CANNOT = {
    "other weights": ([("manual_seed(3)", "manual_seed(4)")], "the jobs begin with other weights (embedding.weight)"),
    "other weights on a rank": (
        [("    model = build()\n", "    model = build()\n    model.head.weight.data *= 1 + rank\n")],
        "rank 1 of the second job begins with other weights than rank 0 (head.weight); seed them",
    ),
    "other data": ([("manual_seed(5)", "manual_seed(6)")], "tokens of the second job are none of the first job's"),
    "half the batch": ([("B, S = 2, 24", "B, S = 1, 24")], "first job has 48 tokens, that of the second 24"),
    "dropout": ([(CALL, f"F.dropout({CALL}, 0.1)")], "the second job draws random numbers"),
    "an own class sums copies": (summed_by_own_class(".clone()"), "wrong when Own.step begins, and it sends messages"),
    "a rank that fails": ([(SUM, f"    assert rank < 2, 'no' * 200\n{SUM}")], f"AssertionError: {'no' * 200}"),
    "steps in backward": (
        [("    loss.back", "    model.head.weight.register_hook(lambda _: optimizer.step())\n    loss.back")],
        "RuntimeError: an optimizer steps during backward; ring-doctor sees only steps after backward",
    ),
    "no optimizer": ([("optimizer.step()", "pass")], "no process had made step 1 of an optimizer of torch.optim"),
}  # fmt: skip


@pytest.fixture(scope="module")
def warm(tmp_path_factory):
    """The socket of a process that has imported torch already."""
    at = tmp_path_factory.mktemp("warm") / "socket"
    with subprocess.Popen([sys.executable, WARM, at], env={**os.environ, "OMP_NUM_THREADS": "1"}) as server:
        while not at.exists():
            assert server.poll() is None
            time.sleep(0.05)
        yield at
        server.kill()


@pytest.fixture(scope="module")
def ask(warm, tmp_path_factory):
    """Run the script, spoiled, on some ranks, in a folder of its own."""

    def run(edits, ranks, start=f"-S {WARM} {warm}", **options):
        text, home = SCRIPT, tmp_path_factory.mktemp("job")
        for old, new in edits:
            assert text.count(old) >= 1, old
            text = text.replace(old, new, 1)
        (home / "train.py").write_text(text)
        command = f"cd {home} && PYTHONPATH=$PYTHONPATH:{ROOT} {sys.executable} {start} train.py {ranks}"
        found = run_job(command, home / "seen", seconds=100, **options)
        assert not (home / "trained").exists()
        return found

    return run


@pytest.fixture(scope="module")
def trusted(ask):
    return ask([], 1, start="", steps=2), ask([], 1, steps=2, move="float64")


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named(ask, trusted, mistake):
    edits, says = MISTAKES[mistake]
    found = compare(trusted[0], ask(edits, P), trusted[1], 1)
    assert found.level == WRONG_RING
    assert says in found.line


@pytest.mark.parametrize("change", [*HEALTHY, *(pytest.param(job, marks=pytest.mark.exhaustive) for job in LONGER)])
def test_a_right_job_is_healthy(ask, trusted, change):
    found = compare(trusted[0], ask((HEALTHY | LONGER)[change], P), trusted[1], 1)
    assert (found.level, found.names) == (RIGHT, [])
    assert ("Every rank has all tokens" in str(found)) == (change == "nothing is shared out")


@pytest.mark.parametrize("change", CANNOT)
def test_what_cannot_be_compared_is_said_by_name(ask, trusted, change):
    edits, says = CANNOT[change]
    with pytest.raises(CannotExamine) as error:
        compare(trusted[0], ask(edits, P), trusted[1], 1)
    assert says in str(error.value)


def test_state_that_outlives_a_step_is_seen_at_step_2(ask, trusted):
    found = compare(trusted[0], ask([("optimizer.zero_grad()", "pass")], P, steps=2), trusted[1], 2)
    assert found.level == WRONG_RING
    assert found.lines[0].startswith("Step 1 was right and step 2 is wrong")


def test_weights_that_are_dealt_out_to_optimizers_are_compared_where_they_are(ask, trusted):
    """ZeRO-1, by hand: a rank has the sums of its own weights only, steps, and sends them to the others."""
    edits = [(SCRIPT[SCRIPT.index(SUM) : SCRIPT.index("    optimizer.zero")], ZERO), ("optimizer.zero", "model.zero")]
    edits += [("AdamW(model.parameters()", "AdamW(list(model.parameters())[rank::P]")]
    assert compare(trusted[0], ask(edits, P, steps=2), trusted[1], 2).level == RIGHT


def seen_by(*ranks):
    """A job of which the whole numbers and the labels of each rank were seen."""
    return Job("", Path(), [{"steps": [{"passes": [{"whole_numbers": x, "labels": y}]}]} for x, y in ranks])


def test_rows_without_the_padding_of_others_are_found():
    """One process pads two rows to 6 tokens; a rank of two has the short row alone, without padding."""
    long, short = torch.tensor([[1, 2, 3, 4, 5, 6]]), torch.tensor([[6, 5, 7]])
    labels = torch.tensor([2, 3, 4, 5, 6, IGNORED, 5, 7, *[IGNORED] * 4])
    both = torch.cat([long, F.pad(short, (0, 3))])
    ranks = [({"embedding 0": x}, [y]) for x, y in ((long, labels[:6]), (short, labels[6:9]))]
    whole = whole_numbers(seen_by(({"embedding 0": both}, [labels])), seen_by(*ranks), 0)
    assert (whole.layout, whole.cp, told(whole)) == ("contiguous", 1, [])
    fewer = replace(whole, ranks=[whole.ranks[0], []], layout="")
    assert told(fewer) == [("tokens_missing", "3 of 9 tokens are on no rank")]


@pytest.mark.parametrize("by", [0, 1], ids=["the loss", "the caller"])
def test_labels_of_a_fused_loss_are_shifted_once(by):
    """The model gets them, in two shards. Where it shifts them itself, each shard loses its last label."""
    text, parts = torch.arange(1, 10)[None], (slice(8), slice(4), slice(4, 8))
    one, *ranks = (({"embedding 0": text[:, at], "M.labels": text[:, by:][:, at]}, []) for at in parts)
    found = told(whole_numbers(seen_by(one), seen_by(*ranks), 0))
    assert [name for name, _ in found] == ["labels_per_shard"] * (1 - by)


TEXT = torch.arange(8).flip(0)[None]


def small_job(folder, size, names=("weight",), numbers=(), dtypes=("torch.float64",)):
    """What is seen of a job of one rank: the gradient of its last weight is `size`, 3."""
    folder.mkdir()
    torch.save(torch.tensor([size, 3.0]), folder / f"before-0-{names[-1]}-0.pt")
    seen = {"whole_numbers": {"embedding 0": TEXT, **dict(numbers)}, "labels": [], "loss": size, "draws": False}
    seen |= {"messages": [], "dtypes": set(dtypes)}
    step = {"passes": [seen], "norm": None, "modules": [("layer", size)], "dtypes": set(), "reported": None}
    step |= {"left": [], "later": [], "owned": [], "compiles": False, "sizes": {}, "own_steps": {}}
    return Job("", folder, [{"rank": 0, "weights": dict.fromkeys(names), "steps": [step]}])


@pytest.mark.parametrize("lost", ["attention_mask", "weights"])
def test_an_argument_that_separates_documents_is_missed(lost, tmp_path):
    """The model of the second job, on one rank, does not get it, and its output and its gradient are others."""
    one = small_job(tmp_path / "one", 1.0, numbers={f"Model.{lost}": TEXT > 2})
    found = compare(one, small_job(tmp_path / "many", 2.0), None, 1)
    assert found.names == (["documents_lost"] if lost == "attention_mask" else [])
    assert f"the model gets no Model.{lost}, as that of the first job does" in found.says


def test_outputs_with_other_padding_are_not_compared(tmp_path):
    many = small_job(tmp_path / "many", 2.0, numbers={"embedding 0": F.pad(TEXT, (0, 2))})
    found = compare(small_job(tmp_path / "one", 1.0), many, None, 1)
    assert found.says.startswith("the jobs pad to other lengths (8 and 10 tokens), so outputs of modules were not comp")


def test_a_narrower_dtype_in_the_second_job_is_told(tmp_path):
    many = small_job(tmp_path / "many", 1.01, dtypes=["torch.float64", "torch.bfloat16"])
    with pytest.raises(CannotExamine, match=r"only the second job computes in .*bfloat16"):
        compare(small_job(tmp_path / "one", 1.0), many, None, 1)


@pytest.mark.parametrize("names", [["weight", "adapter"], ["weight"]])
def test_a_weight_that_only_the_second_job_trains_is_told(names, tmp_path):
    one = small_job(tmp_path / "one", 1.0, names=["weight", "frozen", "head"])
    many = small_job(tmp_path / "many", 1.0, names=["head", "frozen", *names])
    torch.save(torch.tensor([1.0, 3.0]), many.folder / "before-0-head-0.pt")
    with pytest.raises(CannotExamine, match=f"{names[-1]} has a gradient in the second job only"):
        compare(one, many, None, 1)


CAUGHT = "import sys, traceback\ntry:\n    1 / 0\nexcept Exception:\n    traceback.print_exc()\n"
MANY = "class Many(Exception):\n    exceptions = ['a reason']\n"
FAILING = {  # scripts that fail, one after another, as ranks 0 and 1, and the end of what is shown
    "after an error that was caught": ([f"{CAUGHT}raise ValueError('a reason')"], "')\n  | ValueError: a reason"),
    "sys.exit after one": ([f"{CAUGHT}sys.exit('no config.yaml')"], "\n  | no config.yaml"),
    "no Python": (["x = = 1"], "\n  | SyntaxError: invalid syntax"),
    "a group": (
        [f"{MANY}class BaseExceptionGroup(Exception):\n    exceptions = [Many(1)]\nraise BaseExceptionGroup"],
        "Many: 1",
    ),
    "many lines": ([r"raise ValueError('\n'.join('ab' * 20))"], "\n  | b" + "\n  | a\n  | b" * 3),
    "a launcher": (
        ["print('no config.yaml')\nexec(compile('1/0', 'torch/distributed/launcher/api.py', 'exec'))"],
        "\n  | no config.yaml",
    ),
    "a rank that lost the other": (
        ["raise OSError('Broken pipe')", "raise ValueError(1)"],
        '\n  | rank 1\n  |   File "{}", line 1, in <module>\n  |     raise ValueError(1)\n  | ValueError: 1',
    ),
    "a helper without torch": (
        ["raise ValueError(1)", "import ring_doctor_recorder\nring_doctor_recorder.seen = 0\nraise KeyError(2)"],
        "\n  | KeyError: 2",
    ),
    "a PYTHONPATH of the user's": (["import os\nraise ValueError(os.environ['PYTHONPATH'])"], f"{os.pathsep}mine"),
}


@pytest.mark.parametrize("failing", FAILING)
def test_the_reason_of_a_job_that_failed_is_shown(failing, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "mine")
    scripts, shown = FAILING[failing]
    files = [tmp_path / f"{rank}" / "train.py" for rank in range(len(scripts))]
    for file, script in zip(files, scripts, strict=True):
        file.parent.mkdir()
        file.write_text(script)
    command = "; ".join(f"RANK={rank} {sys.executable} {file}" for rank, file in enumerate(files))
    with pytest.raises(CannotExamine) as error:
        run_job(command, tmp_path / "seen", seconds=100)
    assert str(error.value).endswith(shown.format(files[-1]))


def test_gradients_of_zero_only_are_told(tmp_path):
    jobs = [small_job(tmp_path / name, 0.0) for name in ("one", "many")]
    for job in jobs:
        torch.save(torch.zeros(2), job.folder / "before-0-weight-0.pt")
    with pytest.raises(CannotExamine, match=r"all gradients of step 1 of the first job are 0 .* a closure"):
        compare(*jobs, None, 1)


def test_a_weight_that_a_rank_lacks_is_told(tmp_path):
    one, many = (small_job(tmp_path / name, 1.0) for name in ("one", "many"))
    many.ranks.append(many.ranks[0] | {"rank": 1, "weights": {}})
    with pytest.raises(CannotExamine, match="rank 1 of the second job has no weight weight, as rank 0 has"):
        compare(one, many, None, 1)


SENT = {  # the numbers of steps, what the weight adds up to on both ranks at step 2, and the first line
    "one step": (1, (2.0, 2.0), "CANNOT TELL: .*only some ranks' optimizers have a gradient of weight, .* --steps 2"),
    "both": (2, (2.0, 2.0), "HEALTHY"),
    "one": (2, (2.0, 1.0), "SICK: rank 1 has another weight than rank 0 after step 1"),
    "none": (2, (1.0, 1.0), "CANNOT TELL: .*no change reached the others; expected --steps 3"),
}


@pytest.mark.parametrize("sent", SENT)
def test_the_gradient_of_a_weight_may_be_on_one_rank_only_if_both_get_the_new_weight(sent, tmp_path):
    """At each step, as in ZeRO-2. While its learning rate is 0, as in a warm-up, nothing shows it."""
    steps, sizes, says = SENT[sent]
    one, many = (small_job(tmp_path / name, 1.0) for name in ("one", "many"))
    for job, ranks in ((one, 1), (many, 2)):
        shutil.copy(job.folder / "before-0-weight-0.pt", job.folder / "before-1-weight-0.pt")
        [step], of = job.ranks[0]["steps"], job.ranks[0]
        at = [[step | {"sizes": {"weight": torch.tensor(x)}} for x in (1.0, sizes[rank])] for rank in range(ranks)]
        job.ranks[:] = [of | {"rank": rank, "steps": at[rank]} for rank in range(ranks)]
    try:
        said = compare(one, many, None, steps).line
    except CannotExamine as error:
        said = f"CANNOT TELL: {error}"
    assert re.match(says, said), said


def test_a_gradient_is_wrong_on_the_rank_whose_optimizer_has_its_weight(tmp_path):
    one, many = (small_job(tmp_path / name, 1.0) for name in ("one", "many"))
    torch.save(torch.tensor([2.0, 3.0]), many.folder / "before-0-weight-1.pt")
    of_rank_1 = many.ranks[0]["steps"][0] | {"owned": ["weight"]}
    many.ranks.append(many.ranks[0] | {"rank": 1, "steps": [of_rank_1]})
    assert gradients_of(one, many, None, 0, "before").wrong_ranks == {1}


def test_ranks_are_in_their_order_and_not_in_that_of_their_files(tmp_path):
    for rank in range(11):
        torch.save({"rank": rank}, tmp_path / f"seen-{rank}-of-11.pt")
    job = run_job(f"cp {tmp_path}/*.pt $RING_DOCTOR_FOLDER", tmp_path / "seen", seconds=100)
    assert [seen["rank"] for seen in job.ranks] == [*range(11)]


@pytest.mark.parametrize(("norms", "names"), [((5.0, 5.0), []), ((5.0, 4.0), ["clipped_per_rank"])])
def test_a_norm_of_another_rank_is_told_though_it_clips_nothing(norms, names, tmp_path):
    one, many = (small_job(tmp_path / name, 1.0) for name in ("one", "many"))
    torch.save(torch.tensor([1.0, 3.0]), many.folder / "before-0-weight-1.pt")
    [step] = many.ranks[0]["steps"]
    one.ranks[0]["steps"] = [step | {"norm": 5.0}]
    many.ranks[:] = [many.ranks[0] | {"rank": rank, "steps": [step | {"norm": x}]} for rank, x in enumerate(norms)]
    assert compare(one, many, None, 1).names == names


def test_weights_of_an_optimizer_that_made_no_step_are_told(tmp_path):
    one, many = (small_job(tmp_path / name, 1.0, names=["other", "weight"]) for name in ("one", "many"))
    one.ranks[0]["steps"][0]["later"] = ["other"]
    with pytest.raises(CannotExamine, match=r"but the optimizer of other made no step until then; expected --steps 2"):
        compare(one, many, None, 1)


@pytest.mark.parametrize("doctor", [b"", b"\n"], ids=["was killed", "ends the job"])
@pytest.mark.parametrize("name", ["ring-doctor-abc_1234", "mine"])
def test_the_guard_removes_the_temporary_folder_of_a_killed_doctor(doctor, name, tmp_path):
    (folder := tmp_path / name / "one").mkdir(parents=True)
    nobody = str(10**9)
    subprocess.run(["sh", "-c", GUARD, "sh", nobody, str(folder)], input=doctor, stderr=subprocess.DEVNULL)
    assert folder.exists() == (name == "mine" or doctor == b"\n")


def test_the_recorder_reads_the_gradients_of_each_optimizer_at_its_own_step(tmp_path, monkeypatch):
    """Those of the other, whose module is another, may change until then. None steps during backward."""
    monkeypatch.setenv("RING_DOCTOR_FOLDER", str(tmp_path))
    monkeypatch.setenv("RING_DOCTOR_STEPS", "3")
    recorder = SimpleNamespace(**runpy.run_path(str(ROOT / "ring_doctor/jobs/recorder.py")))
    assert recorder.plain("0._checkpoint_wrapped_module.wq.weight") == "0.wq.weight"
    seen, body, head = recorder.Recorder(torch), torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    monkeypatch.setattr(gc, "get_objects", lambda: [body, head])  # among a million others it takes seconds
    seen.call(body, lambda *_: torch.ones(1), (), {})
    assert not seen.parts[-1]["sums"]  # of a loss, which is a shard's
    head(body(torch.ones(2))).sum().backward()
    seen.passes, seen.backwards = [recorder.fresh()], 1
    optimizers = [torch.optim.SGD(x.parameters()) for x in (body, head)]
    seen.optimizers = [*map(weakref.ref, optimizers), lambda: None]  # one was replaced
    with pytest.raises(RuntimeError, match="an optimizer steps during backward"):
        seen.step(optimizers[0])
    seen.backwards = 0
    for module, optimizer in zip((body, head), optimizers, strict=True):
        assert not seen.steps
        for weight in module.parameters():
            weight.grad *= 3  # as ranks' gradients are summed
        seen.step(optimizer)
    assert len(seen.steps) == 1
    for name, weight in torch.nn.ModuleList([body, head]).named_parameters():
        assert torch.equal(weight.grad, torch.load(tmp_path / f"before-0-{name}-0.pt"))
    seen.passes, optimizers[0].grad_scale = [recorder.fresh()], torch.tensor(4.0)  # as GradScaler leaves it to the step
    right = body.weight.grad / 4
    optimizers[1].zero_grad()
    seen.step(optimizers[0])
    assert torch.equal(torch.load(tmp_path / "before-1-0.weight-0.pt"), right)
    assert seen.steps[1]["later"] == ["1.weight", "1.bias"]
    seen.passes = [recorder.fresh()]
    seen.clip(lambda *_: torch.ones(()), body.parameters(), (1.0,), {})
    optimizers[0].zero_grad()  # after clipping
    monkeypatch.setattr(seen, "end", lambda: None)
    seen.step(optimizers[0])
    assert not torch.load(tmp_path / "gradient-2-0.weight-0.pt").any()


LOSS = SCRIPT[SCRIPT.index("    logits =") : SCRIPT.index(SUM)]
GAN = f"""\
    for one in optimizer:
        one.zero_grad()
{textwrap.indent(LOSS, "    ")}\
        for weight in one.param_groups[0]["params"]:
            dist.all_reduce(weight.grad)
        one.step()
"""


@pytest.mark.exhaustive
def test_gradients_that_no_optimizer_uses_are_not_judged(ask):
    """Two optimizers, none of the embedding; the pass for the first leaves gradients to the second."""
    edits = [(SCRIPT[SCRIPT.index(LOSS) : SCRIPT.index("\n\ndef train")], GAN)]
    edits += [("torch.optim.AdamW(model.parameters()", "[torch.optim.AdamW(x.parameters()")]
    edits += [("lr=1e-2)\n", "lr=1e-2) for x in (model.layers, model.head)]\n")]
    wrong = [("dist.all_reduce(weight.grad)", "weight is model.head.weight or dist.all_reduce(weight.grad)")]
    one, *of_three = (ask([*edits, *more], ranks, steps=2) for ranks, more in ((1, []), (P, []), (P, wrong)))
    found, wrong = (compare(one, many, None, 2) for many in of_three)
    assert (found.level, len(found.numbers["errors"])) == (RIGHT, 1)
    assert "No optimizer used the gradients of embedding.weight, norm.weight until then" in str(found)
    assert wrong.names == ["gradients_not_reduced"]


PLACES = torch.arange(8)
POSITIONS = {  # the right ones of 8 tokens, and those of the ranks that have the first half and the second
    "documents_lost": (PLACES % 5, PLACES),
    "positions_missing": (PLACES, 0 * PLACES),
    "rotated_twice": (PLACES, 2 * PLACES),
    "positions_of_striped": (PLACES, PLACES.view(4, 2).T.flatten()),
    "other_positions": (PLACES, PLACES + 1),
}


@pytest.mark.parametrize("name", POSITIONS)
def test_wrong_positions_are_named(name):
    right, of_ranks = POSITIONS[name]
    ranks = [[Row(*of, None)] for of in zip(PLACES.chunk(2), of_ranks.chunk(2), strict=True)]
    whole = Whole([Row(PLACES, right, None)], ranks, "contiguous", 2, [[(0, at)] for at in PLACES.chunk(2)])
    assert [named for named, _ in told(whole)] == [name]
