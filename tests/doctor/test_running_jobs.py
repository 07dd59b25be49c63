"""A job that runs already: a line of a right training script is spoiled, and the doctor names what it has seen."""

import json
import math
import os
import runpy
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import FunctionType, SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

import ring_doctor.__main__ as command
from ring_doctor.asking.answers import RIGHT, WRONG_RING
from ring_doctor.asking.job import CannotExamine
from ring_doctor.jobs import verdict
from ring_doctor.jobs.gradients import compared, gradients_of
from ring_doctor.jobs.job import Job, run_job
from ring_doctor.jobs.seen import UNKNOWN, Row, Whole, told
from ring_doctor.jobs.verdict import compare
from tests.commands import ROOT

SCRIPT = (ROOT / "tests/wrong/job.py").read_text()
P = 3
SUM = "    for weight in model.parameters():\n        dist.all_reduce(weight.grad)\n"
AT = "    at = positions(LAYOUT, S, rank, P)\n"
SHARDS = "labels[:, at]\n"
COUNT = "    dist.all_reduce(count)\n"
CALL = "wrapped(tokens, at)"
RING = "scaled_dot_product_attention(q, k, v, layout=LAYOUT, **options)"
PLAIN = (RING, "F.scaled_dot_product_attention(q, k, v, **options)")
CLIP = "model.parameters(), 0.5"
CLIPS = f"    torch.nn.utils.clip_grad_norm_({CLIP})\n"
WRAPPED = "wrapped = model\n"
DDP = "wrapped = torch.nn.parallel.DistributedDataParallel(model)\n"
TWICE = ("loss.backward()", "(loss / 2).backward(retain_graph=True)\n    (loss / 2).backward()")
TO_ONE = (SUM, SUM.replace("all_reduce(weight.grad)", "reduce(weight.grad, 0)"))
OF_ZERO = ("AdamW(model.parameters()", "AdamW(list(model.parameters())[rank::P]")
SUMMING = """\
class Summing(torch.optim.AdamW):
    def step(self):
        for weight in self.param_groups[0]["params"]:
            dist.all_reduce(weight.grad)
        super().step()


def train("""


MISTAKES = {  # what stands in the place of which lines, and the names; other words are in the first line of the report
    "the labels of a shard": ([(SHARDS, "tokens.roll(-1, dims=1)\n")], "labels_per_shard"),
    "its last label ignored": ([(SHARDS, "F.pad(tokens[:, 1:], (0, 1), value=IGNORED)\n")], "labels_per_shard"),
    "the positions of a shard": ([(CALL, "wrapped(tokens, torch.arange(len(at)))")], "positions_per_shard"),
    "plain attention": ([PLAIN], "ring_not_called"),
    "sharded twice": ([(AT, f"{AT}    at = at[rank * len(at) // P :][: len(at) // P]\n")], "tokens_missing"),
    "means of means": ([(COUNT, "    count = count * P\n")], "mean_of_means"),
    "two passes, 32 is ignored": ([(COUNT, "    count = count * P\n"), TWICE, ("-100", "32")], "mean_of_means"),
    "no sum": ([(SUM, "")], "gradients_not_reduced"),
    "two sums": ([(SUM, f"{SUM}{SUM}")], "gradients_times_p"),
    "one weight is summed twice": (
        [(SUM, f"{SUM}    dist.all_reduce(model.head.weight.grad)\n")],
        "gradients_times_p; 1 of 12 gradients are wrong (head.weight), × 3",
    ),
    "clipped, then summed": ([(SUM + CLIPS, CLIPS + SUM)], "clipped_before_sum; the ranks have other gradients when"),
    "the norm of a rank's weights": ([(CLIP, "list(model.parameters())[rank::P], 0.5")], "clipped_per_rank; clipping"),
    "rotated once more": (
        [(RING, RING.replace("(q, k", "(rotary(q, AT), rotary(k, AT)")), (AT, f"{AT}    global AT\n    AT = at\n")],
        "with another output is layers.0",
    ),
}
HEALTHY = {
    "as it is": [],
    "DDP, with the factor": [(SUM, ""), (WRAPPED, DDP), (" / count", " / count * P")],
    "another layout": [('"zigzag"', '"striped"')],
    "two backward passes": [TWICE],
    "nothing is shared out": [(AT, "    at = torch.arange(S)\n"), PLAIN],
}
SOME = "only some ranks have the right gradient"
CANNOT = {
    "other weights": ([("manual_seed(3)", "manual_seed(4)")], "rank 0 of the second job begins with other weights"),
    "other weights on a rank": (
        [("    model = build()\n", "    model = build()\n    model.head.weight.data *= 1 + rank\n")],
        "rank 1 of the second job begins with other weights than the first job (head.weight); expected one seed",
    ),
    "other data": ([("manual_seed(5)", "manual_seed(6)")], "of them others; expected the same data in the same order"),
    "half the batch": ([("B, S = 2, 24", "B, S = 1, 24")], "step has 48 tokens, that of the second job 24, 0 of them"),
    "dropout": ([(CALL, f"F.dropout({CALL}, 0.1)")], "a model draws random numbers"),
    "an own class sums in its step": (
        [(SUM, ""), ("torch.optim.AdamW(", "Summing("), ("def train(", SUMMING)],
        "before Summing.step, which sends messages",
    ),
    "a rank that fails": ([(SUM, f"    assert rank < 2, 'no' * 200\n{SUM}")], f"AssertionError: {'no' * 200}"),
    "steps in backward": (
        [("    loss.back", "    model.head.weight.register_hook(lambda _: optimizer.step())\n    loss.back")],
        "RuntimeError: an optimizer steps during backward; ring-doctor sees only steps after backward",
    ),
    "ZeRO-1, by hand": ([OF_ZERO], f"{SOME} of embedding.weight, layers.0."),
    "rank 0 has the sums": ([TO_ONE], f"{SOME} of embedding.weight, layers.0."),
    "only a rank clips": ([(CLIPS, f"    if rank == 0:\n    {CLIPS}")], f"{SOME} of embedding.weight"),
    "no optimizer": ([("optimizer.step()", "pass")], "an optimizer of torch.optim after a call of .backward()"),
}  # fmt: skip


@pytest.fixture(scope="module")
def ask(warm, tmp_path_factory):
    """Run the script, spoiled, on some ranks, in a folder of its own."""

    def run(edits, ranks, start=warm, **options):
        text, home = SCRIPT, tmp_path_factory.mktemp("job")
        for old, new in edits:
            assert text.count(old) >= 1, old
            text = text.replace(old, new, 1)
        (home / "train.py").write_text(text)
        command = f"cd {home} && PYTHONPATH=$PYTHONPATH:{ROOT} {start} train.py {ranks}"
        found = run_job(command, home / "seen", seconds=100, **options)
        assert [(home / name).exists() for name in ("trained", "seen/end")] == [False, True]
        return found

    return run


@pytest.fixture(scope="module")
def trusted(ask):
    one, moved = ask([], 1, start=sys.executable, steps=2), ask([], 1, steps=2, move="float64")
    change, right = (job.gradients("before", 0, "head.weight")[0] for job in (moved, one))
    assert 1e-17 < (change - right).norm() < 1e-12
    return one, moved


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named(ask, trusted, mistake):
    edits, says = MISTAKES[mistake]
    found = compare(trusted[0], ask(edits, P), trusted[1])
    assert found.level == WRONG_RING
    assert says in found.line


@pytest.mark.parametrize("change", HEALTHY)
def test_a_right_job_is_healthy(ask, trusted, change):
    found = compare(trusted[0], ask(HEALTHY[change], P), trusted[1])
    assert (found.level, found.names) == (RIGHT, [])
    assert ("Every rank has all tokens" in str(found)) == (change == "nothing is shared out")
    zigzag = change not in ("another layout", "nothing is shared out")
    assert ("\n  tokens     48, zigzag over 3 ranks\n  loss       4." in str(found)) == zigzag


@pytest.mark.parametrize("change", CANNOT)
def test_what_cannot_be_compared_is_said_by_name(ask, trusted, change):
    edits, says = CANNOT[change]
    with pytest.raises(CannotExamine) as error:
        compare(trusted[0], ask(edits, P), trusted[1])
    assert says in str(error.value)


def test_state_that_outlives_a_step_is_seen_at_step_2(ask, trusted):
    found = compare(trusted[0], ask([("optimizer.zero_grad()", "pass")], P, steps=2), trusted[1])
    assert found.level == WRONG_RING
    assert found.line.endswith("; step 1 was right: look for state that it leaves behind")


TEXT = torch.arange(8).flip(0)[None]


def small_job(folder, size, names=("weight",), numbers=(), dtypes=("float64",), steps=1):
    """What is seen of a job of one rank: the gradient of its last weight is `size`, 3, in each step."""
    folder.mkdir()
    for at in range(steps):
        save(folder, size, 3.0, name=names[-1], step=at)
    call = {"embedding 0": TEXT, **dict(numbers)}
    seen = {"calls": [call], "labels": [], "loss": size, "draws": False, "sent": 0}
    modules = {"layer": torch.tensor(size, dtype=torch.float64)}
    dtypes = {f"torch.{dtype}" for dtype in dtypes}
    step = {"passes": [seen], "norm": None, "modules": modules, "dtypes": dtypes, "later": set(), "sending": ""}
    return Job(folder, [[step | {"weights": dict.fromkeys(names, torch.ones(2))}]] * steps)


def save(folder, *gradient, name="weight", step=0, rank=0, kind="gradient"):
    torch.save(torch.tensor(gradient, dtype=torch.float64), folder / f"{kind}-{step}-{name}-{rank}.pt")


def of_ranks(job, *changes):
    """The job, with what is other on each rank."""
    return replace(job, steps=[[job.steps[0][0] | change for change in changes]])


@pytest.mark.parametrize("lost", ["attention_mask", "weights"])
def test_an_argument_that_separates_documents_is_missed(lost, tmp_path):
    """The model of the second job, on one rank, does not get it, and its output and its gradient are others."""
    one = small_job(tmp_path / "one", 1.0, numbers={f"Model.{lost}": TEXT > 2})
    found = compare(one, small_job(tmp_path / "many", 2.0), None)
    assert found.names == (["documents_lost"] if lost == "attention_mask" else [])
    assert ("gets no Model.attention_mask, as that of the first job" in found.says) == (lost == "attention_mask")


@pytest.mark.parametrize("passes", [0, 1])
def test_of_a_job_without_tokens_the_gradients_are_judged(passes, tmp_path):
    """Its model takes none, or its step calls torch.autograd.grad, which is no pass that is seen."""
    jobs = [small_job(tmp_path / f"{x}", x, numbers={"embedding 0": TEXT.flip(1)}) for x in (1.0, 2.0)]
    jobs = [of_ranks(job, {"passes": job.steps[0][0]["passes"][:passes]}) for job in jobs]
    found = compare(*jobs, None)
    assert (found.level, found.names) == (WRONG_RING, [])
    assert "tokens     0, no known layout" in str(found)


@pytest.mark.parametrize("sent", [7, 8])
def test_a_ring_sends_two_numbers_of_each_token_at_least(sent, tmp_path):
    one, many = (small_job(tmp_path / name, size) for name, size in (("one", 1.0), ("many", 2.0)))
    save(many.folder, 2.0, 3.0, rank=1)
    [seen] = many.steps[0][0]["passes"]
    passes = [seen | {"calls": [{"embedding 0": x}], "sent": sent} for x in TEXT.chunk(2, dim=1)]
    many = of_ranks(many, *({"passes": [of_rank]} for of_rank in passes))
    assert compare(one, many, None).names == ["ring_not_called"] * (sent < 8)


@pytest.mark.parametrize(("off", "level"), [(2e-15, RIGHT), (3e-15, WRONG_RING)])
def test_a_gradient_below_a_hundredth_of_an_average_one_may_be_rounding_only(off, level, tmp_path):
    """Allowed are 8 · 64 eps of a hundredth of √10 / √2."""
    one, many = (small_job(tmp_path / name, 1.0, names=["k", "weight"]) for name in ("one", "many"))
    for job, size in ((one, 1e-9), (many, 1e-9 + off)):
        save(job.folder, size, 0.0, name="k")
    assert compare(one, many, None).level == level


def test_outputs_with_other_padding_are_not_compared(tmp_path):
    many = small_job(tmp_path / "many", 2.0, numbers={"embedding 0": F.pad(TEXT, (0, 2))})
    found = compare(small_job(tmp_path / "one", 1.0), many, None)
    assert found.says.startswith("no output was compared: no module was seen in both, or the jobs pad to other lengths")


WRONG = {  # modules, all with right outputs ({}: the job); weights, and their gradients in place of (1, 3); words
    "of the model": (["the model"], "g", (3, 1), "SICK: every module that was seen has the right output: look at"),
    "of no module": (["in {}"], "ab", (3, 1), "pad to other lengths; 2 of 3 gradients are wrong (a, b)"),
    "frozen": (["the model"], "g", (0, 0), "; 1 of 2 gradients are wrong (g), × 0"),
}


@pytest.mark.parametrize("where", WRONG)
def test_wrong_gradients_without_a_name_are_told(where, tmp_path):
    modules, wrong, given, says = WRONG[where]
    one, many = (small_job(tmp_path / job, 1.0, names=[*wrong, "weight"]) for job in ("one", "many"))
    for job, gradient in ((one, (1.0, 3.0)), (many, given)):
        job.steps[0][0]["modules"] = {name.format(job.folder.name): torch.ones(()).double() for name in modules}
        for name in wrong:
            save(job.folder, *gradient, name=name)
    assert says in compare(one, many, None).line


@pytest.mark.parametrize(
    ("one", "many", "says"),
    [
        (["float64"], ["float64", "bfloat16"], "computes in float64, the second in bfloat16, float64; expected the sa"),
        (["float32", "float64"], ["float32"], "computes in float32, float64, the second in float32; expected the sam"),
    ],
)
def test_another_dtype_in_the_second_job_is_told(one, many, says, tmp_path):
    """The narrowest of its weights, or the widest."""
    jobs = [small_job(tmp_path / str(size), size, dtypes=of) for size, of in ((1.0, one), (1.01, many))]
    with pytest.raises(CannotExamine, match=says):
        compare(*jobs, None)


@pytest.mark.parametrize("names", [["weight", "adapter"], ["weight"]])
def test_a_weight_that_only_one_of_the_jobs_trains_is_told(names, tmp_path):
    """The second job. Also the first one, where the second one does not have it."""
    one = small_job(tmp_path / "one", 1.0, names=["weight", "frozen", "head"])
    many = small_job(tmp_path / "many", 1.0, names=["head", "frozen", *names])
    save(many.folder, 1.0, 3.0, name="head")
    for jobs in ((one, many), (many, one))[: len(names)]:
        with pytest.raises(CannotExamine, match=f"{names[-1]} has a gradient in one of the jobs only"):
            compare(*jobs, None)


CAUGHT = "import sys, traceback\ntry:\n    1 / 0\nexcept Exception:\n    traceback.print_exc()\n"
LAUNCHER = "class ChildFailedError(Exception): ...\nraise ChildFailedError"
FAILING = {  # scripts that fail, one after another, as ranks 0, 1, 2, and the end of what is shown
    "after an error that was caught": ([f"{CAUGHT}raise ValueError('a \\udcff')"], "')\n  | ValueError: a ?"),
    "many lines": (
        [r"raise ValueError('\n'.join('ab' * 40))"],
        "\n  | ValueError: a" + "\n  | b\n  | a" * 29 + "\n  | b",
    ),
    "no Python": (["x = = 1"], "\n  | SyntaxError: invalid syntax"),
    "a rank that lost the other": (
        ["raise OSError('Broken pipe')", LAUNCHER, "def fail():\n    raise ValueError(1)\nfail()"],
        '\n  | rank 2\n  |   File "{0}", line 3, in <module>\n  |     fail()\n  |   File "{0}", line 2, in fail\n'
        "  |     raise ValueError(1)\n  | ValueError: 1",
    ),
}


@pytest.mark.parametrize("failing", FAILING)
def test_the_reason_of_a_job_that_failed_is_shown(failing, tmp_path, warm):
    scripts, shown = FAILING[failing]
    files = [tmp_path / f"{rank}" / "train.py" for rank in range(len(scripts))]
    for file, script in zip(files, scripts, strict=True):
        file.parent.mkdir()
        file.write_text(script)
    command = "; ".join(f"RANK={rank} {warm} {file}" for rank, file in enumerate(files))
    with pytest.raises(CannotExamine) as error:
        run_job(command, tmp_path / "seen", seconds=100)
    assert str(error.value).endswith(shown.format(files[-1]))


def test_gradients_of_zero_only_are_told(tmp_path):
    jobs = [small_job(tmp_path / name, 0.0) for name in ("one", "many")]
    for job in jobs:
        save(job.folder, 0.0, 0.0)
    with pytest.raises(CannotExamine, match=r"gradients of step 1 of the first job is 0; those that a closure"):
        compare(*jobs, None)


def test_a_weight_that_a_rank_lacks_is_told(tmp_path):
    one, many = (small_job(tmp_path / name, 1.0) for name in ("one", "many"))
    with pytest.raises(CannotExamine, match=f"{SOME} of weight: the others must get the"):
        compare(one, of_ranks(many, {}, {"weights": {}}), None)


@pytest.mark.parametrize("number", [2.0, math.nan])
@pytest.mark.parametrize("owners", [[1], [0, 1]])
def test_a_gradient_may_be_wrong_on_one_rank(owners, number, tmp_path):
    """The optimizer of this rank alone has the weight, or the optimizers of both ranks."""
    one, many = (small_job(tmp_path / name, 1.0) for name in ("one", "many"))
    if 0 not in owners:
        (many.folder / "gradient-0-weight-0.pt").unlink()
    save(many.folder, number, 3.0, rank=1)
    found = gradients_of(one, of_ranks(many, {}, {}), None, 0, "before")
    assert (found["weight"].off, [*found["weight"].errors]) == ([1], owners)


@pytest.fixture
def runs(monkeypatch):
    """The commands that the doctor runs, and how. The gradient of a job is its command, a number."""
    asked = []

    def run(command, folder, *, steps, seconds=600, tell=len, move=""):
        asked.append((command, steps, seconds, move))
        tell(command)
        return small_job(folder, float(command), steps=steps)

    monkeypatch.setattr(verdict, "run_job", run)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    return asked


@pytest.mark.parametrize("options", [[], ["--steps=2", "--time-limit=7", "--exact"]])
@pytest.mark.parametrize(("many", "status", "line"), [("1", 0, "HEALTHY: "), ("2", 1, "SICK: "), ("nan", 1, "SICK: ")])
def test_the_command_runs_both_jobs_and_the_first_once_more(options, many, status, line, runs, tmp_path, capsys):
    report, how = tmp_path / "report.json", (2, 7) if options else (1, 600)
    assert command.main(["run", "1", many, f"--json={report}", *options]) == status
    assert runs == [("1", *how, ""), (many, *how, ""), ("1", *how, "float64")][: 2 if options else 3]
    said = json.loads(report.read_text())
    assert said["verdict"] == capsys.readouterr().out.splitlines()[0]
    assert said["verdict"].startswith(line)
    assert said["allowed"]["weight"] == 8 * 64 * 2**-52  # nothing was measured, or nothing moved
    assert said["errors"]["weight"] == (None if many == "nan" else pytest.approx((float(many) - 1) / 10**0.5))


def test_a_job_is_asserted(runs):
    """A job whose gradients are not finite cannot be the judge."""
    verdict.assert_job("1", "1", steps=2, exact=True, seconds=5)
    assert runs == [("1", 2, 5, "")] * 2
    for one, many, says in (("1", "2", "SICK: .*\n  gradients  1; the"), ("inf", "1", "CANNOT TELL: .* is inf; those")):
        with pytest.raises(AssertionError, match=says):
            verdict.assert_job(one, many)


def test_an_error_of_the_doctors_own_is_no_verdict(runs, monkeypatch, capsys):
    monkeypatch.setattr(verdict, "compare", lambda *_: [][0])
    assert command.main(["run", "1", "1"]) == 3
    assert capsys.readouterr().out.startswith("CANNOT TELL: the doctor itself failed")


WAITS = "touch $RING_DOCTOR_FOLDER/torch-$$; echo $$ > {0}; exec sleep 99"  # in a session of its own
FORKS = 'import os, time; os.fork() or (os.setsid(), open("{0}", "w").write(str(os.getpid())), time.sleep(99))'
TILL = "while [ ! -s {0} ]; do sleep 0.05; done;"
ENDS = {  # commands, seconds, and what is said
    "sleep 99": (0.1, "had not ended after 0.1 s: no process has imported torch and its plugins"),
    f"setsid sh -c '{WAITS}' & {TILL} printf '\\377'; exit 4": (99, "(status 4): no process had made"),
    f"{sys.executable} -c '{FORKS}'; {TILL} exit 4": (99, "(status 4): no process has"),
    "cd $RING_DOCTOR_FOLDER; touch torch-999999999 seen-00000-of-00002.pt; sleep 99": (
        0.9,
        "0.9 s: only rank 0 had made step 3",
    ),
}


@pytest.mark.parametrize("job", ENDS)
def test_a_job_that_waits_or_ends_is_told_and_leaves_no_process(job, tmp_path):
    (seconds, says), file = ENDS[job], tmp_path / "number"
    with pytest.raises(CannotExamine) as error:
        run_job(job.format(file), tmp_path / "seen", steps=3, seconds=seconds)
    assert says in str(error.value)
    for left in reversed(range(1000 if file.exists() else 0)):
        if not Path("/proc", file.read_text().strip(), "exe").exists():
            break
        assert left
        time.sleep(0.01)


def test_ranks_are_in_their_order_and_a_launcher_that_stays_is_ended(tmp_path):
    for rank in range(11):
        torch.save([rank], tmp_path / f"seen-{rank:05}-of-00011.pt")
    job = run_job(f"mv {tmp_path}/*.pt $RING_DOCTOR_FOLDER; sleep 99", tmp_path / "seen", seconds=100)
    assert job.steps == [tuple(range(11))]


@pytest.mark.parametrize(
    ("norms", "after", "says"),
    [
        ((5.0, 5.0), 1.0, "the gradients of 2 ranks are those of the first job"),
        ((3.0, 4.0), 1.0, "clipped_per_rank; clipping spoils right gradients; 1 of 2 gradients are wrong (1 / the n"),
        ((5 * 2**0.5,) * 2, 1.0, "gradients_over_root_p; 1 of 2 gradients are wrong (1 / the norm for clipping), × 0."),
        ((5 * 2**0.5,) * 2, 3.0, "gradients_over_root_p; clipping spoils right gradients; 2 of 2 gradients are wrong"),
        ((7.0, 7.0), 1.0, "SICK: clipping spoils right gradients; 1 of 2 gradients are wrong (1 / the norm for clip"),
        ((5.0, 5.0), 3.0, "SICK: clipping spoils right gradients; 1 of 2 gradients are wrong (weight)"),
    ],
)
def test_clipping_of_right_gradients_is_told(norms, after, says, tmp_path):
    """Also that of another rank than rank 0, and a norm that clips nothing."""
    one, many = (small_job(tmp_path / name, 1.0) for name in ("one", "many"))
    for rank, x in enumerate((1.0, after)):
        save(many.folder, 1.0, 3.0, rank=rank, kind="before")
        save(many.folder, x, 3.0, rank=rank)
    one, many = of_ranks(one, {"norm": 5.0}), of_ranks(many, *({"norm": x} for x in norms))
    if after != 1 and norms == (5, 5):
        with pytest.raises(CannotExamine, match=f"{SOME} of weight: the others must"):
            compare(one, many, None)
    save(many.folder, after, 3.0)
    assert says in compare(one, many, None).line


def test_weights_of_an_optimizer_that_made_no_step_are_told(tmp_path):
    """In one step of two; then in both."""
    one, many = (small_job(tmp_path / name, 1.0, names=["other", "weight"], steps=2) for name in ("one", "many"))
    [waits] = of_ranks(one, {"later": {7}}).steps
    assert compare(replace(one, steps=[waits, one.steps[1]]), many, None).level == RIGHT
    with pytest.raises(CannotExamine, match="an optimizer had made no step; expected --steps 3"):
        compare(replace(one, steps=[waits, waits]), many, None)


@pytest.mark.parametrize("change", [0.019, 0.19, 0.21])
def test_what_rounding_may_change_is_eight_times_what_a_unit_changes(change, tmp_path):
    one, many, moved = (small_job(tmp_path / f"{n}", 1.0 + change * (n == 2)) for n in range(3))
    if change > 0.2:
        with pytest.raises(CannotExamine, match=r"nothing is wrong, but in float64, rounding .* by 53%"):
            compare(one, many, moved)
        return
    found = compare(one, many, moved)
    assert found.numbers["allowed"]["weight"] == pytest.approx(8 * change / 10**0.5, rel=1e-5)


FACTORS = {1: "", 3: "times_p", 1 / 3: "over_p", 3**0.5: "times_root_p", 3**-0.5: "over_root_p", 0.7: ""}


@pytest.mark.parametrize("factor", FACTORS)
def test_a_factor_of_all_gradients_has_a_name(factor):
    right = torch.tensor([1.0, 2.0], dtype=torch.float64)
    found = compared("w", right, dict.fromkeys(range(3), factor * right), 0.0, 1e-9, 3)
    assert (found.factor, found.times) == (FACTORS[factor], pytest.approx(factor))


@pytest.fixture
def recorder(tmp_path, monkeypatch):
    """The recorder's file, in this process."""
    for name, value in (("FOLDER", str(tmp_path)), ("STEPS", "9"), ("MOVE", "bfloat16")):
        monkeypatch.setenv(f"RING_DOCTOR_{name}", value)
    return SimpleNamespace(**runpy.run_path(str(ROOT / "ring_doctor/jobs/recorder.py")))


def test_the_recorder_reads_the_gradients_of_each_optimizer_at_its_own_step(recorder, tmp_path):
    """Those of the other, whose module is another, may change until then. None steps during backward."""
    assert recorder.WRAPPERS.sub("", "_orig_mod.module.0._checkpoint_wrapped_module.submodule.wq") == "0.submodule.wq"
    seen, body, head = recorder.seen, torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    optimizers = [torch.optim.SGD(x.parameters(), lr=0.0) for x in (body, head)]
    for optimizer in optimizers:
        seen.made(lambda _: None, optimizer)
    call, backward = torch.nn.Module.__call__, torch.autograd.backward

    def one_pass():
        out = seen.call(call, head, seen.call(call, body, torch.ones(2)))
        seen.backward(backward, out.sum())

    def step(*which):
        for optimizer in which:
            seen.before_step(optimizer)
            seen.after_step(optimizer)

    step(*optimizers)  # without a backward pass: an optimizer makes its state
    one_pass()
    for module, optimizer in zip((body, head), optimizers, strict=True):
        assert not seen.steps  # the other has gradients, which may be its own
        for weight in module.parameters():
            weight.grad *= 3  # as ranks' gradients are summed
        step(optimizer)
    assert [*seen.steps[0]["modules"]] == ["0.", "1."]
    for name, weight in torch.nn.ModuleList([body, head]).named_parameters():
        assert torch.equal(weight.grad, torch.load(tmp_path / f"gradient-0-{name}-0.pt"))
    one_pass()
    optimizers[1].zero_grad()
    step(optimizers[0])
    assert seen.steps[1]["later"] == set(map(id, head.parameters()))
    one_pass()
    for norm, most in ((3.0, math.inf), (1.0, 1.0), (2.0, 1.0)):  # the first only measures
        seen.clip(lambda *_: None, body.parameters(), most, torch.tensor(norm))
        body.weight.grad *= most != 1
    step(*optimizers)
    assert torch.load(tmp_path / "before-2-0.weight-0.pt").all()
    assert not torch.load(tmp_path / "gradient-2-0.weight-0.pt").any()
    assert (seen.steps[2]["norm"], seen.steps[2]["later"]) == (1, set())
    (tmp_path / "end").touch()  # by the doctor, which reads a file as soon as it has its name
    with mock.patch.object(torch, "save", wraps=torch.save) as save, mock.patch.object(os, "_exit") as ended:
        recorder.Recorder.end(seen)
    ended.assert_called_once_with(0)
    assert (save.call_args.args[1].suffix, len(torch.load(tmp_path / "seen-00000-of-00001.pt"))) == (".tmp", 3)


@pytest.mark.parametrize("names", [["weight"], ["0.weight", "1.weight"]])
def test_weights_in_a_wrapper_have_their_own_names(names, recorder):
    layers = [torch.nn.Linear(2, 2, bias=False) for _ in names]
    model = torch.nn.Sequential(*layers) if len(names) > 1 else layers[0]
    recorder.seen.call(lambda _: None, torch.nn.ModuleDict({"a": torch.nn.ModuleDict({"model": model})}))
    assert [*recorder.seen.weights()] == names


def test_no_output_of_one_number_is_noted(recorder):
    """It is a loss, and that of a shard."""
    recorder.seen.call(lambda *_: torch.ones(1), torch.nn.Linear(2, 2), torch.ones(3).int())
    assert (recorder.seen.sums, recorder.seen.now["calls"][1:]) == ({}, [{"Linear.input": mock.ANY}])


def test_messages_of_a_forward_pass_are_seen_but_for_weights(recorder):
    seen, home = recorder.seen, {"__name__": "torch.distributed.fsdp.x", "torch": torch}
    by_fsdp = FunctionType((lambda seen: seen.sent(max, torch.ones(9))).__code__, home)
    seen.sent(lambda *_: None, torch.ones(8))  # before the first call: weights
    seen.call(lambda _: None, torch.nn.Linear(2, 2))
    by_fsdp(seen)
    seen.sent(lambda *_, **__: None, [torch.ones(5)], x=torch.ones(7).long())
    (x := torch.ones(1, requires_grad=True)).register_hook(lambda _: seen.sent(lambda *_: None, torch.ones(6)))
    x.sum().backward()
    assert seen.now["sent"] == 5
    seen.step["passes"].append(seen.now)
    seen.after_step(optimizer := torch.optim.SGD([torch.ones(1)]))  # that made its state only
    seen.before_step(optimizer)
    with mock.patch.object(seen, "end_step"):
        seen.after_step(optimizer)
        assert seen.step["sending"] == ""  # of those before
        seen.sent(max, torch.ones(9))
        seen.after_step(optimizer)
    assert seen.step["sending"] == "SGD"
    seen.call(lambda _: None, torch.compile(torch.nn.Linear(2, 2)))
    assert seen.now["sent"] == math.inf
    names = set(filter(recorder.SENDS.match, dir(torch.distributed.ProcessGroup)))
    assert {"send", "gather", "scatter", "broadcast", "alltoall_base", "_allgather_base"} <= names
    assert not names & {"rank", "size", "barrier", "recv"}


def test_weights_are_moved_once_by_a_unit(recorder):
    model = torch.nn.Linear(9, 9)
    before, model.steps = model.weight.detach().clone(), torch.nn.Parameter(torch.ones(1).long(), requires_grad=False)
    for _ in range(2):
        recorder.move(model)
    moved = model.weight / before - 1
    assert torch.allclose(moved.abs(), torch.tensor(2.0**-7))
    assert moved.min() < 0 < moved.max()


PLACES = torch.arange(8)
POSITIONS = {  # the right ones of 8 tokens, and those of the ranks that have the first half and the second
    "documents_lost": (PLACES % 5, PLACES),
    "positions_missing": (PLACES, 0 * PLACES),
    "rotated_twice": (PLACES, 2 * PLACES),
    "positions_of_striped": (PLACES, PLACES.view(4, 2).T.flatten()),
    "": (PLACES, PLACES + 1),
}


@pytest.mark.parametrize("name", POSITIONS)
def test_wrong_positions_are_named(name):
    right, of_ranks = POSITIONS[name]
    rows = [Row(r, *of, of[0]) for r, of in enumerate(zip(PLACES.chunk(2), of_ranks.chunk(2), strict=True))]
    text = Row(0, PLACES, right, PLACES)
    whole = Whole([text], rows, "contiguous", 2, [(rows[0], text, 0), (rows[1], text, 1)])
    assert [named for named, _ in told(whole)] == [name]


@pytest.mark.parametrize("by", [0, 20])
def test_other_labels_are_told_without_a_name(by):
    """They may be right: outputs of the ranks may be gathered in another way."""
    none, labels = torch.full((8,), UNKNOWN), PLACES + 10
    rows = [Row(r, at, none[:4], at + 10 + by) for r, at in enumerate(PLACES.chunk(2))]
    text = Row(0, PLACES, none, labels)
    whole = Whole([text], rows, "contiguous", 2, [(rows[0], text, 0), (rows[1], text, 1)])
    assert told(whole) == [("", "rank 0's label of token 0 is 30, expected 10")] * (by > 0)
