"""Train the transformer on a mesh of FSDP × ring: one command, on one process or on many.

    step:  read own tokens → logits → batch_loss → backward → clip by the norm over all shares → AdamW
    MFU  =  FLOPs of a step / seconds / peak FLOP/s        model FLOP utilisation; the peak is of plain matrix products

Shapes: a step has `--batch` sequences of `--seq-len` bytes; a rank has (B / dp, C) of them, C = S / cp. Weights and the
optimizer's state are float32 and sliced over all ranks; `--dtype bf16` computes layers in bfloat16.

    $ torchrun --nproc_per_node=4 -m ringlab.models.train --dp 2 --cp 2
    model     2 layers, hidden 128, 4 heads on 2, 459,392 parameters, fp32
    mesh      dp 2 x cp 2, zigzag layout
    step      4 x 512 tokens, 2 x 256 on a rank
    data      the moves of rings, 93,610 bytes
    ...
       100/100 [####################] loss 0.2316, 5,146 tokens/s, MFU 7%, 412 MB a rank
    done      100 steps; the curve is run/loss.svg; its numbers are run/loss.jsonl

After Ctrl-C or SIGTERM the run saves, says so and ends. `--resume` goes on from the last whole checkpoint with the same
losses, on any number of ranks, in any mesh and layout. It says so when a newer one is damaged, and refuses other data.
On several machines --out must be a folder that all of them see.

Before: checkpoint.py. After: your own data with --data.
Source: Liu et al. 2024, section 4; Chowdhery et al. 2022 (PaLM), appendix B, for MFU.
"""

import argparse
import hashlib
import json
import math
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.utils import clip_grad_norm_

from ringlab.models.checkpoint import Checkpoints, last_checkpoint, locked
from ringlab.models.loader import open_text, read_batch, text_files
from ringlab.models.mesh import batch_loss, build_mesh, shard_weights
from ringlab.models.transformer import ALONE, Config, Linear, Transformer, flops_of_a_step, ring_of_states
from ringlab.options import Parser, positive
from ringlab.ring.flash_ring import scaled_dot_product_attention
from ringlab.ring.layouts import LAYOUTS
from ringlab.states.state_ring import check_layout_of_states
from ringlab.support.agreement import agree
from ringlab.support.expect import expect
from ringlab.support.extras import install
from ringlab.support.processes import RankContext, join_ring
from ringlab.support.timeline import laps

RATE, WARM_UP, CLIP = 2e-3, 20, 1.0  # learning rate, steps to reach it, largest gradient norm
SHOWN_EVERY = 10  # steps
LOG = "loss.jsonl"  # of a run
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SIZES = ("layers", "linear", "hidden", "heads", "kv_heads")  # of the model, that are options


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options; ends the process with status 2 and one message when one of them makes no sense by itself."""
    parser = Parser(prog="ring-train", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--dp", type=positive, default=1, help="rings, each with sequences of its own (1)")
    add("--cp", type=positive, help="ranks in a ring (all ranks / dp)")
    add("--layout", choices=LAYOUTS, default="zigzag", help="which tokens a rank of a ring has (zigzag)")
    add("--batch", type=positive, default=4, help="sequences in a step, on all ranks together (4)")
    add("--seq-len", type=positive, default=512, help="tokens in a sequence; a token is a byte (512)")
    add("--layers", type=positive, default=2, help="(2)")
    add("--linear", type=int, default=0, help="linear layers before each layer of attention (0; Qwen3-Next: 3)")
    add("--hidden", type=positive, default=128, help="width of the model (128)")
    add("--heads", type=positive, default=4, help="query heads (4)")
    add("--kv-heads", type=positive, default=2, help="key/value heads (2)")
    add("--dtype", choices=DTYPES, default="fp32", help="in which layers compute (fp32)")
    add("--activation-checkpointing", action="store_true", help="compute activations twice instead of keeping them")
    add("--steps", type=positive, default=100, help="in all, those before --resume too (100)")
    add("--save-every", type=positive, default=50, help="steps (50)")
    add("--data", type=Path, help="text file, or folder of them (the moves of rings, in words)")
    add("--out", type=Path, default=Path("run"), help="folder for checkpoints, loss.jsonl and loss.svg (run)")
    add("--resume", action="store_true", help="go on from the last checkpoint in --out")
    return parser.parse_args(arguments)


def check_options(args: argparse.Namespace, dp: int, cp: int) -> tuple[Config, np.ndarray]:
    """The size of the model, and the data. Raises ValueError when options do not fit together."""
    sizes = {name: getattr(args, name) for name in SIZES}
    config = Config(**sizes, feedforward=3 * args.hidden, checkpointing=args.activation_checkpointing)
    if args.linear:
        check_layout_of_states(args.layout)
    text = open_text(args.data)
    read_batch(text, 0, args.batch, args.seq_len, args.layout, (0, dp), (0, cp))
    return config, text


def build(
    config: Config, attention: Callable[..., Tensor], line: DeviceMesh, dtype: torch.dtype, linear: Linear = ALONE
) -> tuple[Transformer, torch.optim.Optimizer]:
    """The model and its optimizer, sliced over the ranks of `line`; layers compute in `dtype`."""
    torch.manual_seed(0)  # the same weights on every rank
    model = Transformer(config, attention, linear).to(line.device_type)
    shard_weights(model, line, MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32))
    return model, torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.1)


def train(context: RankContext, args: argparse.Namespace) -> None:
    """One rank of the run. Raises ValueError on every rank when options do not fit, or a checkpoint fails."""
    meshes = build_mesh(args.dp, args.cp or max(1, context.world_size // args.dp), context.device.type)
    checked: list[Any] = []
    agree(lambda: checked.extend(check_options(args, *meshes[0].shape)))  # wrong on one rank is wrong on all

    def check_new() -> None:
        go_on = "--resume to go on with it, or another --out"
        expect(args.resume or not last_checkpoint(args.out), f"{args.out} holds an earlier run", go_on)

    with locked(args.out):
        agree(check_new)
        _train(context, args, meshes, *checked)


def _train(
    context: RankContext, args: argparse.Namespace, meshes: tuple[DeviceMesh, ...], config: Config, text: np.ndarray
) -> None:
    signals = caught_signals()
    say: Callable[..., None] = print if context.rank == 0 else lambda *words, **options: None  # rank 0 speaks for all
    (mesh, line), (dp, cp) = meshes, meshes[0].shape
    ring = mesh["cp"].get_group()
    attention = partial(scaled_dot_product_attention, layout=args.layout, group=ring)
    linear = ring_of_states(layout=args.layout, group=ring)
    model, optimizer = build(config, attention, line, DTYPES[args.dtype], linear)
    same = {name: getattr(args, name) for name in (*SIZES, "batch", "seq_len")}
    same |= {"bytes of data": len(text), "sha256 of the data": hashlib.sha256(text.data).hexdigest()[:16]}
    checkpoints = Checkpoints(args.out, same)
    start, losses = 0, list[float]()
    if args.resume:
        start, losses, damaged = checkpoints.load(model, optimizer)
        for words in damaged:
            say(f"damaged   {words}")
        say(f"resumed   after step {start}, from {args.out}")
    peak = measured_peak(context, DTYPES[args.dtype])
    of_a_step = args.batch * args.seq_len, flops_of_a_step(model, args.batch, args.seq_len)
    progress = Progress(start, args.steps, *of_a_step, peak)
    say(model_and_mesh(args, model, dp, cp))
    say(f"step      {args.batch} x {args.seq_len} tokens, {args.batch // dp} x {args.seq_len // cp} on a rank")
    files = f", {len(text_files(args.data)):,} file(s)" if args.data and args.data.is_dir() else ""
    say(f"data      {os.path.relpath(args.data) if args.data else 'the moves of rings'}{files}, {len(text):,} bytes")
    say(f"machine   {context.why}; matrix products reach {peak / 1e9:.0f} GFLOP/s, all ranks together")

    places = [(mesh[name].get_local_rank(), mesh[name].size()) for name in ("dp", "cp")]
    stopped, step, unwritten = False, start, None
    while step < args.steps and not stopped:
        step += 1
        batch = read_batch(text, step, args.batch, args.seq_len, args.layout, *places)
        loss = take_step(model, optimizer, *(x.to(context.device) for x in batch), rate=RATE * min(1, step / WARM_UP))
        facts = torch.stack([loss, *loss.new_tensor([len(signals), checkpoints.written()])])
        dist.all_reduce(facts)
        summed, signalled, written = facts.tolist()
        losses.append(summed / context.world_size)
        stopped = signalled > 0  # a signal on any rank stops all of them, after the same step
        if written == context.world_size or not math.isfinite(losses[-1]):
            checkpoints.finish()  # at once: until then a run that is killed has the one before
        if not math.isfinite(losses[-1]):
            raise ValueError(f"the loss of step {step} is {losses[-1]}; {checkpoints.kept()}")
        if stopped or step % args.save_every == 0 or step == args.steps:
            checkpoints.save(step, model, optimizer, losses)
            unwritten = write_losses(args.out, losses) if context.rank == 0 else None
            if unwritten:
                say(f"log       {unwritten}")
        if stopped or step % SHOWN_EVERY == 0 or step == args.steps:
            end = "\r" if sys.stdout.isatty() and step < args.steps and not stopped else "\n"
            say(progress.line(step, losses[-1], context.device), end=end, flush=True)
    checkpoints.finish()
    if stopped:
        say(f"stopped   by a signal after step {step}, and saved; --resume goes on from there")
    else:
        curve = f"is {args.out / 'loss.svg'}" if find_spec("matplotlib") else f"needs matplotlib: {install('plots')}"
        written = "" if unwritten else f"; the curve {curve}; its numbers are {args.out / LOG}"
        say(f"done      {step} steps{written}")


def caught_signals() -> list[int]:
    """The signals that come from now on, which then end nothing by themselves: the step in hand is finished first."""
    came: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: came.append(number))
    return came


def model_and_mesh(args: argparse.Namespace, model: nn.Module, dp: int, cp: int) -> str:
    """Two lines: what is trained, and on which mesh."""
    layers = f"{args.layers} layers"
    if args.linear:
        layers += f", {args.linear} of {args.linear + 1} linear"
    sizes = f"{layers}, hidden {args.hidden}, {args.heads} heads on {args.kv_heads}"
    weights = sum(w.numel() for w in model.parameters())
    mesh = f"mesh      dp {dp} x cp {cp}, {args.layout} layout"
    return f"model     {sizes}, {weights:,} parameters, {args.dtype}\n{mesh}"


def take_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor, labels: Tensor, at: Tensor, *, rate: float
) -> Tensor:
    """One step of AdamW with learning rate `rate`; the loss before it, whose mean over the ranks is the batch's."""
    loss = batch_loss(model(tokens, at), labels)
    loss.backward()
    clip_grad_norm_(model.parameters(), CLIP)
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def measured_peak(context: RankContext, dtype: torch.dtype) -> float:
    """FLOP/s of all ranks together, when each multiplies matrices of 512 x 512 eight times: the best of 3 rounds."""
    a = torch.ones(512, 512, dtype=dtype, device=context.device)
    rounds = [max(laps(lambda: a @ a, context.device, 8)) for _ in range(3)]  # ranks may take turns on the same cores
    return context.world_size * 2 * 512**3 / min(rounds)


def peak_memory(device: torch.device) -> int:
    """Bytes that this process has used at most: of its GPU, or of the host's memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


class Progress:
    """The lines that a run prints: speed, MFU and peak memory since the line before."""

    def __init__(self, start: int, steps: int, tokens: int, flops: float, peak: float) -> None:
        """`tokens` and `flops` are of one step on all ranks, `peak` is their FLOP/s."""
        self.steps, self.tokens, self.flops, self.peak = steps, tokens, flops, peak
        self.shown, self.since = start, time.perf_counter()

    def line(self, step: int, loss: float, device: torch.device) -> str:
        """The line after `step`; every rank must call."""
        memory = max(agree(lambda: peak_memory(device)))
        rate = (step - self.shown) / (time.perf_counter() - self.since)  # steps a second
        self.shown, self.since = step, time.perf_counter()
        mfu = rate * self.flops / self.peak
        told = f"MFU {100 * mfu:.0f}%" if mfu <= 1 else "MFU unknown (the machine was busy when its peak was measured)"
        speed = f"{rate * self.tokens:,.0f} tokens/s, {told}"
        bar = f"{step:>6}/{self.steps} [{'#' * (20 * step // self.steps):<20}]"
        return f"{bar} loss {loss:.4f}, {speed}, {memory / 1e6:,.0f} MB a rank"


def write_losses(folder: Path, losses: list[float]) -> str | None:
    """Write the losses of steps 1, 2, ...: a line of JSON for each, and a picture if matplotlib is there.

    Returns why it could not, in words, or None: a run does not end for that, because its checkpoints hold the losses.
    """
    lines = (json.dumps({"step": step, "loss": loss}) + "\n" for step, loss in enumerate(losses, 1))
    try:
        (folder / LOG).write_text("".join(lines))
        if find_spec("matplotlib"):
            from matplotlib.figure import Figure  # after the ranks have started: it takes a second

            figure = Figure(figsize=(8, 4.5), layout="constrained")
            ax = figure.add_subplot(xlabel="step", ylabel="loss, nats a byte", title="Training loss")
            ax.plot(range(1, len(losses) + 1), losses, color="#1B1F24")
            ax.grid(color="#D5D9DE")
            figure.savefig(folder / "loss.svg")
    except OSError as error:
        return f"the losses could not be written: {error}; the checkpoints hold them"
    return None


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments)
    alone: dict[str, Any] = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    try:
        with join_ring(**({} if "WORLD_SIZE" in os.environ else alone)) as context:  # which torchrun sets
            train(context, args)
    except ValueError as error:
        if os.environ.get("RANK", "0") == "0":  # one complaint, not P of them
            print(f"ring-train: {error}", file=sys.stderr)
        if dist.is_initialized():  # every rank raised the same error, so none waits; left open, gloo may abort the end
            dist.destroy_process_group()
        return 2
    except RuntimeError as error:  # of a message to a rank that has ended, for one
        last = last_checkpoint(args.out)
        kept = f"{last} is whole: --resume goes on from there" if last else "there is no checkpoint yet"
        raise RuntimeError(f"the run ends: see above, or another rank has ended. {kept}") from error
    return 0


if __name__ == "__main__":
    sys.exit(main())
