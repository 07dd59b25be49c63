"""A run: the same losses on every mesh and after every resume, checkpoints that are whole, one line for bad input."""

import contextlib
import errno
import fcntl
import hashlib
import io
import json
import math
import os
import signal
import threading
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.flop_counter import FlopCounterMode

from ringlab.basics.naive_attention import naive_attention
from ringlab.models import checkpoint, train
from ringlab.models.checkpoint import last_checkpoint
from ringlab.models.loader import open_text, read_batch, starts
from ringlab.models.mesh import batch_loss, shard_weights
from ringlab.models.transformer import Config, Linear, Transformer, flops_of_a_step, summed_loss
from ringlab.ring.flash_ring import scaled_dot_product_attention
from ringlab.states.linear_attention import recurrence
from ringlab.states.short_convolution import short_convolution
from ringlab.support.extras import install
from ringlab.support.processes import launch
from tests.mistakes import assert_refused

SMALL = ["--seq-len=24", "--layers=2", "--linear=1", "--hidden=16", "--heads=4", "--kv-heads=2"]
SMALL += ["--batch=4", "--save-every=2"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_bytes(b"the keys and values go round the ring, " * 30)
    return path


def run(context, options, before_step=None, picture=False):
    """One rank of a run on this process group; before_step(context, step) is called before each step reads.

    What takes a while is left out: the speed of the machine is not measured, and a picture is drawn where it is asked.
    Returns what it says.
    """

    def read(text, step, *args):
        if before_step:
            before_step(context, step)
        return read_batch(text, step, *args)

    quick = {"measured_peak": lambda *_: 1e9} | ({} if picture else {"find_spec": lambda name: None})
    with mock.patch.multiple(train, read_batch=read, **quick), contextlib.redirect_stdout(io.StringIO()) as said:
        train.train(context, train.parse([*SMALL, *map(str, options)]))
    return said.getvalue()


def losses(folder):
    lines = [json.loads(line) for line in (folder / "loss.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    return torch.tensor([line["loss"] for line in lines])


def names(folder):
    return sorted(path.name for path in folder.glob("step-*"))


@pytest.fixture(scope="module")
def unbroken(ranks, tmp_path_factory, data):
    """The losses of 9 steps on one process."""
    out = tmp_path_factory.mktemp("one")
    ranks(1, run, ["--out", out, "--data", data, "--steps", 9])
    return losses(out)


def test_losses_are_those_of_one_process_on_any_mesh_and_after_any_resume(ranks, tmp_path, data, unbroken):
    out = tmp_path / "many"
    (out / "step-00000001.unfinished").mkdir(parents=True)  # of a run that was killed
    common = ["--out", out, "--data", data]
    ranks(4, run, [*common, "--steps", 4, "--dp", 2])  # 2 x 2
    assert names(out) == ["step-00000002", "step-00000004"]
    more = ["--resume", "--activation-checkpointing", "--layout", "contiguous"]
    ranks(3, run, [*common, "--steps", 7, *more])  # 1 x 3
    ranks(1, run, [*common, "--steps", 9, "--resume"], None, True)
    torch.testing.assert_close(losses(out), unbroken, rtol=1e-5, atol=0)
    assert unbroken[-1] < unbroken[0] - 0.05
    assert names(out) == ["step-00000008", "step-00000009"]  # the last two
    settings = json.loads((out / names(out)[-1] / "run.json").read_text())["settings"]
    assert settings.keys() == {*train.SIZES, "batch", "seq_len", "bytes of data", "sha256 of the data"}
    assert (out / "loss.svg").read_text().startswith("<?xml")


SMALLER = 0.85  # times the loss: its gradient has a norm above 1 in some steps, and below 1 in others


def with_a_smaller_loss(context, options):
    with mock.patch.object(train, "batch_loss", lambda *args: SMALLER * batch_loss(*args)):
        return run(context, options)


def adamw_by_hand(text, steps):
    """The losses of one process without optimizer, slices or ring: the rule of AdamW as its paper writes it."""
    torch.manual_seed(0)
    sizes = {"layers": 2, "linear": 1, "hidden": 16, "heads": 4, "kv_heads": 2, "feedforward": 48}
    model = Transformer(Config(**sizes), linear=Linear(short_convolution, recurrence))
    weights, found = list(model.parameters()), []
    moments = [(torch.zeros_like(w), torch.zeros_like(w)) for w in weights]
    for step in range(1, steps + 1):
        at = torch.arange(24)
        places = starts(len(text), step, 4, 24)[:, None] + at
        loss = SMALLER * summed_loss(model(text[places], at), text[places + 1]) / (4 * 24)
        gradients = torch.autograd.grad(loss, weights)
        clip = min(1.0, 1.0 / (sum((g**2).sum() for g in gradients) ** 0.5 + 1e-6))
        rate = 0.002 * min(1.0, step / 20)
        with torch.no_grad():
            for w, g, (mean, square) in zip(weights, gradients, moments, strict=True):
                mean.lerp_(clip * g, 0.1)
                square.lerp_((clip * g) ** 2, 0.05)
                w.mul_(1 - 0.1 * rate)
                w.sub_(rate * (mean / (1 - 0.9**step)) / ((square / (1 - 0.95**step)) ** 0.5 + 1e-8))
        found.append(loss.item())
    return torch.tensor(found)


def test_the_losses_are_those_of_the_papers_rule(ranks, tmp_path, data):
    """Over 22 steps: the learning rate grows in the first 20. A line says each tenth, and the last."""
    options = ["--out", tmp_path, "--data", data, "--steps", 22, "--save-every", 22]
    (said,) = ranks(1, with_a_smaller_loss, options)
    assert [step for step in range(23) if f" {step}/22 [" in said] == [10, 20, 22]
    text = torch.tensor(list(data.read_bytes()))
    torch.testing.assert_close(losses(tmp_path), adamw_by_hand(text, 22), rtol=2e-6, atol=0)


def told(context, options):
    """What a run gives to what is only printed or only faster, and what it says."""
    seen, precisions = {}, []

    def attention(q, *args, **options):
        seen.update(dtype=q.dtype, layout=options["layout"])
        return scaled_dot_product_attention(q, *args, **options)

    def slices(model, line, precision):
        precisions.append((precision.param_dtype, precision.reduce_dtype))
        seen["checkpointing"] = model.config.checkpointing
        shard_weights(model, line, precision)

    peak = mock.Mock(return_value=1e9)
    with (
        contextlib.redirect_stdout(io.StringIO()) as said,
        mock.patch.multiple(train, scaled_dot_product_attention=attention, shard_weights=slices),
        mock.patch.multiple(train, measured_peak=peak, find_spec=lambda name: None),
        mock.patch.object(train, "Progress", side_effect=train.Progress) as progress,
    ):
        train.train(context, train.parse([*SMALL, *map(str, options)]))
    return seen, precisions, peak.call_args.args[1], progress.call_args.args, said.getvalue()


def test_every_option_arrives(ranks, tmp_path, data, unbroken):
    """Of each: what is left out changes no loss by much, or none. bf16 learns as float32 does."""
    common = ["--out", tmp_path, "--data", data, "--dp", 2, "--layout", "contiguous", "--dtype", "bf16"]
    common += ["--activation-checkpointing"]
    weights = 256 * 16 + (16 * 16 * 2 + 2 * 16 * 8 + 3 * 16 * 48) * 2 + 16 * 16 + 16 * 8 + 32 * 4  # q, o, k, v, F; z
    flops = 6 * 4 * 24 * (weights + 16 * (24 + 3 * 4))  # a layer of attention, and a linear one
    for steps, before, more in ((2, 0, []), (4, 2, ["--resume"])):
        for rank, found in enumerate(ranks(6, told, [*common, "--steps", steps, *more])):
            seen, precisions, peak, progress, said = found
            assert seen == {"dtype": torch.bfloat16, "layout": "contiguous", "checkpointing": True}
            assert (precisions, peak) == ([(torch.bfloat16, torch.float32)], torch.bfloat16)
            assert progress == (before, steps, 4 * 24, flops, 1e9)
            assert ("; matrix products reach 1 GFLOP/s, all ranks together\n" in said) == (rank == 0)
            assert ("dp 2 x cp 3, contiguous layout\nstep      4 x 24 tokens, 2 x 8 on a rank\n" in said) == (rank == 0)
            curve = f"the curve needs matplotlib: {install('plots')}; its numbers are {tmp_path}/loss.jsonl\n"
            assert said.endswith(f"done      {steps} steps; {curve}") == (rank == 0)
    torch.testing.assert_close(losses(tmp_path), unbroken[:4], rtol=0.02, atol=0)
    assert not torch.equal(losses(tmp_path), unbroken[:4])


def test_what_is_not_given_is_as_help_says(capsys):
    sizes = {"batch": 4, "seq_len": 512, "layers": 2, "linear": 0, "hidden": 128, "heads": 4, "kv_heads": 2}
    run = {"dp": 1, "cp": None, "layout": "zigzag", "dtype": "fp32", "steps": 100, "save_every": 50}
    where = {"data": None, "out": Path("run"), "resume": False, "activation_checkpointing": False}
    assert vars(train.parse([])) == sizes | run | where
    two = "model     2 layers, hidden 128, 4 heads on 2, 8 parameters, fp32\nmesh      dp 3 x cp 1, zigzag layout"
    assert train.model_and_mesh(train.parse([]), torch.nn.Linear(3, 2), 3, 1) == two
    for name in ("dp", "cp", *sizes, "steps", "save_every"):
        with pytest.raises(SystemExit, match="2"):
            train.parse([f"--{name.replace('_', '-')}={'half' if name == 'linear' else 0}"])
        assert f"--{name.replace('_', '-')}: " in capsys.readouterr().err


@pytest.mark.parametrize(("platform", "size"), [("linux", 3_072_000), ("darwin", 3000)])
def test_peak_memory_is_in_bytes(monkeypatch, platform, size):
    monkeypatch.setattr(train.sys, "platform", platform)
    monkeypatch.setattr(train.resource, "getrusage", lambda who: mock.Mock(ru_maxrss=3000))
    assert train.peak_memory(torch.device("cpu")) == size


def test_every_text_file_of_a_folder_is_read_in_the_order_of_names(tmp_path, monkeypatch):
    """But for what is hidden."""
    texts = {"e.rst": "0", "a.py": "1", "d.txt": "2", "c.md": "3", "f.bin": "5", "G.TXT": "9"}
    texts |= {".venv/lib/a.py": "6", "c/.txt.txt": "7", "run/loss.jsonl": "{}", "b.rst": "⊗", "c/d.txt": "8"}
    folder = tmp_path / ".below"  # that it is hidden itself is no reason
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    assert bytes(open_text(folder)) == "91⊗8320".encode()
    (folder / "z.txt").symlink_to("nowhere")
    with pytest.raises(ValueError, match=r"z\.txt cannot be read: No such file"):
        open_text(folder)
    monkeypatch.setattr(os, "scandir", mock.Mock(side_effect=PermissionError(13, "no", "c")))
    with pytest.raises(ValueError, match="c cannot be read: no"):
        open_text(folder)


def test_a_step_reads_what_it_read_in_every_version():
    """By torch's generator with the step as its seed: another seed would change the losses of runs that resume."""
    for step in (1, 7):
        generator = torch.Generator().manual_seed(step)
        assert starts(1000, step, 4, 8).tolist() == torch.randint(992, (4,), generator=generator).tolist()


def signals_in_step_3(context, step):
    """Ctrl-C on rank 1, and what a cluster sends on rank 2."""
    if context.rank > 0 and step == 3:
        os.kill(os.getpid(), (signal.SIGINT, signal.SIGTERM)[context.rank - 1])


def test_a_signal_to_some_ranks_saves_on_all_and_ends(ranks, tmp_path, data, unbroken):
    common = ["--out", tmp_path / "run", "--data", data, "--steps", 9]
    said, *others = ranks(3, run, common, signals_in_step_3)
    assert said.endswith("stopped   by a signal after step 3, and saved; --resume goes on from there\n")
    assert others == ["", ""]
    assert len(losses(tmp_path / "run")) == 3
    assert last_checkpoint(tmp_path / "run").name == "step-00000003"
    ranks(1, run, [*common, "--resume"])
    torch.testing.assert_close(losses(tmp_path / "run"), unbroken, rtol=1e-5, atol=0)


def full(fd, right=os.fsync):
    """No room for step 4. That of step 2 may still be under way: checkpoints are written beside the training."""
    if "step-00000004" in os.readlink(f"/proc/self/fd/{fd}"):
        raise OSError(errno.ENOSPC, "No space left on device")
    return right(fd)


def full_disk(context, step):
    if context.rank == 1 and step == 4:
        mock.patch.object(os, "fsync", full).start()


def run_on_a_full_disk(context, options):
    try:
        run(context, options, full_disk)
    finally:
        mock.patch.stopall()


def test_a_full_disk_ends_the_run_and_leaves_the_last_checkpoint(ranks, tmp_path, data, unbroken):
    common = ["--out", tmp_path / "run", "--data", data, "--steps", 9]
    goes_on = f"{tmp_path / 'run' / 'step-00000002'}, where --resume goes on"
    words = ["step-00000004 could not be written: ", "No space left on device; ", goes_on]
    assert_refused(ranks, 2, words, run_on_a_full_disk, common)
    ranks(2, run, [*common, "--resume"])  # over the remains
    torch.testing.assert_close(losses(tmp_path / "run"), unbroken, rtol=1e-5, atol=0)


def with_an_infinite_loss(context, options):
    """On rank 1, in step 3, when step 2 may still be written."""
    factors = iter([1.0, 1.0, math.inf if context.rank == 1 else 1.0])
    with mock.patch.object(train, "batch_loss", lambda *args: next(factors) * batch_loss(*args)):
        run(context, options)


def test_a_loss_that_is_infinite_ends_the_run_behind_its_last_checkpoint(ranks, tmp_path, data):
    words = ["the loss of step 3 is inf; the last whole checkpoint is ", "step-00000002, where --resume goes on"]
    assert_refused(ranks, 2, words, with_an_infinite_loss, ["--out", tmp_path, "--data", data])
    assert names(tmp_path) == ["step-00000002"]


BAD = [
    (["--seq-len", 26], "26 tokens in the zigzag layout on 2 ranks; expected a multiple of 4"),
    (["--layers", 1], "layers is 1, linear 1; expected linear to be 0 or more, and layers a multiple of linear + 1"),
    (["--layout", "striped"], "layout is striped; expected contiguous or zigzag"),
    (["--dp", 2, "--batch", 3], "a batch of 3 sequences for 2 rings; expected a multiple"),
    (["--dp", 3], "dp · cp is 3 · 1 on 2 process(es); expected as many processes"),
    (["--data", "missing.txt"], "missing.txt does not exist; expected a text file, or a folder of them"),
    (["--seq-len", 4000], "a text of 1170 bytes for sequences of 4000 tokens; expected 4001 at least"),
    (["--resume"], "holds no checkpoint; expected one to resume from: run without --resume first"),
]


def test_bad_input_is_refused_on_every_rank(ranks, tmp_path, data):
    for options, said in BAD:
        assert_refused(ranks, 2, said, run, ["--out", tmp_path / "run", "--data", data, *options])


@pytest.mark.parametrize(("rank", "said"), [("0", "ring-train: no\n"), ("1", "")])
def test_one_rank_says_what_is_refused(monkeypatch, capsys, rank, said):
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr(train, "join_ring", lambda **where: contextlib.nullcontext())
    monkeypatch.setattr(train, "train", mock.Mock(side_effect=ValueError("no")))
    monkeypatch.setattr(dist, "is_initialized", lambda: rank == "0")
    monkeypatch.setattr(dist, "destroy_process_group", destroyed := mock.Mock())
    assert train.main([]) == 2
    assert capsys.readouterr().err == said
    assert destroyed.call_count == (rank == "0")


def test_the_curve_has_the_loss_of_each_step(tmp_path):
    with mock.patch("matplotlib.axes.Axes.plot") as plot:
        assert train.write_losses(tmp_path, [3.0, 2.0]) is None
    assert list(map(list, plot.call_args.args)) == [[1, 2], [3.0, 2.0]]


def save_and_go_on(context, folder):
    """The weight when it was saved; the checkpoint was written after it had changed."""
    model, optimizer = linear(context)
    checkpoints = checkpoint.Checkpoints(folder, {})
    release, write, replace, published = threading.Event(), FileSystemWriter.write_data, os.replace, []

    def slowly(self, *args):
        release.wait(10)
        return write(self, *args)

    def named(old, new):
        published.extend(path.name for path in old.iterdir())
        replace(old, new)

    renames = mock.patch.object(checkpoint.os, "replace", named)
    with mock.patch.object(FileSystemWriter, "write_data", slowly), renames:
        saved = model.weight.full_tensor().detach().clone()
        checkpoints.save(1, model, optimizer, [0.5])
        with torch.no_grad():
            model.weight.add_(1.0)
        optimizer.state[model.weight]["exp_avg"].add_(1.0)
        listed = names(folder)
        dist.barrier()
        release.set()
        checkpoints.finish()
    assert checkpoint.SUMS in published or context.rank > 0, "it has its name before its sums"
    return saved, listed


def linear(context):
    torch.manual_seed(context.world_size)
    model = torch.nn.Linear(4, 5, bias=False)  # 5 rows do not divide evenly
    fully_shard(model, mesh=init_device_mesh("cpu", (context.world_size,)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


def load(context, folder):
    model, optimizer = linear(context)
    with pytest.raises(ValueError, match="it has batch None, here 7"):
        checkpoint.Checkpoints(folder, {"batch": 7}).load(model, optimizer)
    step, losses, damaged = checkpoint.Checkpoints(folder, {}).load(model, optimizer)
    assert (losses, damaged) == ([0.5], [])
    return step, model.weight.full_tensor().detach(), optimizer.state[model.weight]["exp_avg"].full_tensor()


def test_a_checkpoint_holds_the_moment_of_its_save_and_is_whole_or_absent(ranks, tmp_path):
    saved, listed = ranks(3, save_and_go_on, tmp_path)[0]
    assert listed in ([], ["step-00000001.unfinished"])  # nothing is called finished while it is written
    assert names(tmp_path) == ["step-00000001"]
    (tmp_path / "step-00000009.unfinished").mkdir()  # of a run that was killed
    step, weight, mean = ranks(2, load, tmp_path)[0]
    assert step == 1
    assert torch.equal(weight, saved)
    assert mean.abs().max() < 1.0


def test_ranks_read_their_own_tokens_and_no_others(tmp_path):
    (tmp_path / "a.txt").write_bytes(bytes(range(100)))
    (tmp_path / "empty.txt").touch()
    (tmp_path / "sub.txt").mkdir()
    for nothing in ("empty.txt", "sub.txt"):
        with pytest.raises(ValueError, match=rf"{nothing} holds no text; expected a file with bytes in it, or \.txt, "):
            open_text(tmp_path / nothing)
    (tmp_path / "sub.txt" / "b.md").write_bytes(bytes(range(100, 150)))
    text = open_text(tmp_path)
    assert len(text) == 150
    first = starts(150, 7, 4, 24)
    seen = torch.zeros(4, 24)
    for d in range(2):
        for c in range(3):
            tokens, labels, at = read_batch(text, 7, 4, 24, "zigzag", (d, 2), (c, 3))
            assert torch.equal(tokens, first[2 * d : 2 * d + 2, None] + at)  # byte i of the text is i
            assert torch.equal(labels, tokens + 1)
            seen[2 * d : 2 * d + 2, at] += 1
    assert (seen == 1).all()


def test_the_default_text_is_that_of_every_version():
    text = open_text(None)
    assert hashlib.sha256(text).hexdigest()[:16] == "e4635b34ae9a35ad"  # another text would end runs that resume
    assert b"\n4 ranks, round 1: rank 2 has block 1 and sends it to rank 3.\n" in bytes(text)


@pytest.mark.parametrize("linear", [0, 1])
def test_flops_are_those_counted(linear):
    config = Config(vocab=32, layers=2, linear=linear, hidden=16, heads=2, kv_heads=2, feedforward=48)
    linear_layers = Linear(lambda x, weight: x, recurrence)  # torch counts a convolution as if it had no groups
    model = Transformer(config, lambda q, k, v, **_: naive_attention(q, k, v), linear_layers)
    tokens = torch.zeros(2, 24, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        summed_loss(model(tokens, torch.arange(24)), tokens).backward()
    masked = 6 * 2 * 24 * (config.layers - linear) * config.hidden * 24  # a causal mask spares half of attention
    convolution = linear * 6 * 2 * 24 * (6 * 8) * 4  # 4 taps for each channel of q, k and v
    assert flops_of_a_step(model, 2, 24) + masked == counter.get_total_flops() + convolution


def test_a_second_run_is_kept_out(ranks, tmp_path, data):
    with (tmp_path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)  # a run that would share its lock would come in
        print("process 7", file=lock, end="", flush=True)
        said = f"--out {tmp_path} is in use by another run, process 7; wait until it ends, or name another"
        assert_refused(ranks, 2, said, run, ["--data", data, "--out", tmp_path, "--steps", 1])


def test_a_run_that_another_rank_has_left_names_its_last_checkpoint(monkeypatch, tmp_path):
    monkeypatch.setattr(train, "join_ring", lambda **where: contextlib.nullcontext())
    monkeypatch.setattr(train, "train", mock.Mock(side_effect=RuntimeError("Connection closed by peer")))
    with pytest.raises(RuntimeError, match=r"another rank has ended\. there is no checkpoint yet"):
        train.main(["--out", str(tmp_path)])
    for step in (2, 4):
        (tmp_path / f"step-{step:08}").mkdir()
    with pytest.raises(RuntimeError, match="step-00000004 is whole: --resume goes on from there"):
        train.main(["--out", str(tmp_path)])


def run_until_killed(context, options):
    """One rank of a run; rank 0 is killed when it is about to publish the checkpoint of step 4."""
    replace, reached = os.replace, []

    def killed(*args):
        if context.rank == 0 and reached:
            os.kill(os.getpid(), signal.SIGKILL)
        return replace(*args)

    def before_step(context, step):
        while step == 3 and not checkpoints.written():  # step 3 finishes that of step 2
            time.sleep(0.01)
        if step == 4:
            reached.append(step)

    class Kept(checkpoint.Checkpoints):
        def __init__(self, *args):
            nonlocal checkpoints
            super().__init__(*args)
            checkpoints = self

    checkpoints = None
    with mock.patch.object(checkpoint.os, "replace", killed), mock.patch.object(train, "Checkpoints", Kept):
        run(context, options, before_step)


def test_a_rank_killed_while_it_publishes_leaves_a_checkpoint_that_loads(ranks, tmp_path, data, unbroken):
    out = tmp_path / "run"
    common = ["--out", out, "--data", data, "--steps", 9]
    with pytest.raises(RuntimeError, match=r"rank 0 .*SIGKILL"):
        launch(run_until_killed, 2, common)
    assert last_checkpoint(out).name == "step-00000002"
    ranks(1, run, [*common, "--resume"])
    torch.testing.assert_close(losses(out), unbroken, rtol=1e-5, atol=0)
    assert names(out) == ["step-00000008", "step-00000009"]


def numbers_of_progress(context):
    """The peak where rank r takes r + 1 s in a round; from step 2 on 4 steps in 2 s, 4 in 4 s, 2 in 0.4 s; r + 1 MB."""
    rank, of_round = context.rank, iter([2, 1, 3])

    def of_ranks(work, device, calls):
        slower, product = next(of_round), work()
        assert (product.shape, product.dtype) == ((512, 512), torch.bfloat16)
        return [slower * (rank + 1) / calls for rank in range(context.world_size)]

    with mock.patch.object(train, "laps", side_effect=of_ranks):
        peak = train.measured_peak(context, torch.bfloat16)
    clock = iter([0.0, 2.0, 2.0, 6.0, 6.0])
    with (
        mock.patch.object(train, "time", mock.Mock(perf_counter=lambda: next(clock, 6.4))),
        mock.patch.object(train, "peak_memory", return_value=1_000_000 * (rank + 1)),
    ):
        progress = train.Progress(2, steps=12, tokens=100, flops=50.0, peak=200.0)
        return peak, [progress.line(step, 1.5, context.device) for step in (6, 10, 12)]


def test_progress_by_hand(ranks):
    """FLOP/s are those of all ranks together, in the time of the slowest; memory is that of the rank with most."""
    for peak, lines in ranks(3, numbers_of_progress):
        assert peak == pytest.approx(3 * 8 * 2 * 512**3 / 3.0)
        assert lines == [
            "     6/12 [##########          ] loss 1.5000, 200 tokens/s, MFU 50%, 3 MB a rank",
            "    10/12 [################    ] loss 1.5000, 100 tokens/s, MFU 25%, 3 MB a rank",
            "    12/12 [####################] loss 1.5000, 500 tokens/s, MFU unknown (the machine was busy when "
            "its peak was measured), 3 MB a rank",
        ]
