"""How fast is a run? Its own FLOPs a second, as a share of what the machine can do: MFU, model FLOP utilisation.

    MFU              = FLOPs of a step / seconds / peak FLOP/s
    FLOPs of a step  = 6 · tokens · (weights + layers · hidden · S)

A weight is multiplied and added once for each token in the forward pass, and twice in the backward pass: 6 FLOPs. The
embedding is looked up, so it has none. Attention: QKᵀ and PV are 4 · S · hidden FLOPs a token, half of the scores are
masked, and the backward pass has twice as many. What is computed again does not count, nor do masked scores.

Shapes: a step has B sequences of S tokens, on all ranks together. The peak is measured: plain matrix products.

    $ python -m ringlab.models.report
    2 sequences of 24 tokens, 2 layers, hidden 16: 2,285,568 FLOPs by the equation
    ok    torch counts 2,506,752: masked scores are the other 221,184

Before: checkpoint.py. After: train.py, which prints all this as it runs.
Source: Chowdhery et al. 2022 (PaLM), appendix B.
"""

import json
import os
import resource
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode

from ringlab.basics.naive_attention import naive_attention
from ringlab.models.transformer import Config, Transformer, summed_loss
from ringlab.support.processes import RankContext

LOG = "loss.jsonl"


def flops_of_a_step(model: Transformer, batch: int, seq_len: int) -> float:
    """Multiplications and additions of a step on `batch` sequences of S tokens, by the equation above."""
    weights = sum(w.numel() for w in model.parameters() if w.dim() == 2) - model.embedding.weight.numel()
    return 6.0 * batch * seq_len * (weights + len(model.layers) * model.norm.weight.numel() * seq_len)


def measured_peak(context: RankContext, dtype: torch.dtype) -> float:
    """FLOP/s of all ranks together, when each multiplies matrices of 512 x 512 eight times: the best of 3 rounds."""
    a, best = torch.ones(512, 512, dtype=dtype, device=context.device), 0.0
    for _ in range(3):
        dist.barrier()
        start = time.perf_counter()
        for _ in range(8):
            product = a @ a
        product.sum().item()  # waits for a GPU
        seconds = torch.tensor(time.perf_counter() - start, device=context.device)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)  # of the last rank: ranks may take turns on the same cores
        best = max(best, context.world_size * 8 * 2 * 512**3 / seconds.item())
    return best


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
        memory = torch.tensor(float(peak_memory(device)), device=device)
        dist.all_reduce(memory, dist.ReduceOp.MAX)
        rate = (step - self.shown) / (time.perf_counter() - self.since)  # steps a second
        self.shown, self.since = step, time.perf_counter()
        speed = f"{rate * self.tokens:,.0f} tokens/s, MFU {100 * rate * self.flops / self.peak:.0f}%"
        bar = f"{step:>6}/{self.steps} [{'#' * (20 * step // self.steps):<20}]"
        return f"{bar} loss {loss:.4f}, {speed}, {memory.item() / 1e6:,.0f} MB a rank"


def write_losses(folder: Path, losses: list[float]) -> str | None:
    """Write the losses of steps 1, 2, ...: as lines of JSON, and drawn if matplotlib is there.

    Returns why it could not, in words, or None: a run does not end for that, because its checkpoints hold the losses.
    """
    log = folder / LOG
    try:
        new = log.with_suffix(".unfinished")  # a run that is killed now leaves the old file whole
        new.write_text(as_lines(losses))
        os.replace(new, log)
        if find_spec("matplotlib"):
            draw_losses(folder / "loss.svg", losses)
    except OSError as error:
        return f"the losses could not be written: {error}; the checkpoints hold them"
    return None


def restore_losses(folder: Path, losses: list[float]) -> str | None:
    """Write the losses of a checkpoint where the log has others or cannot be read. Returns what was done, or None."""
    log = folder / LOG
    try:
        kept = log.read_text(errors="replace") if log.is_file() else ""
    except OSError:
        kept = ""
    if kept.startswith(as_lines(losses)):
        return None
    return write_losses(folder, losses) or f"{log} was missing or damaged; it is written anew from the checkpoint"


def as_lines(losses: list[float]) -> str:
    """A line of JSON for each step."""
    return "".join(json.dumps({"step": step, "loss": loss}) + "\n" for step, loss in enumerate(losses, 1))


def draw_losses(path: Path, losses: list[float]) -> None:
    """Draw the losses of steps 1, 2, ... into a picture file. Raises OSError when it cannot be written."""
    from matplotlib.figure import Figure  # after the ranks have started: it takes a second

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    ax = figure.add_subplot(xlabel="step", ylabel="loss, nats a byte", title="Training loss")
    ax.plot(range(1, len(losses) + 1), losses, color="#1B1F24")
    ax.grid(color="#D5D9DE")
    figure.savefig(path)


def main() -> int:
    B, S = 2, 24
    config = Config(vocab=32, layers=2, hidden=16, heads=2, kv_heads=2, feedforward=48)
    model = Transformer(config, lambda q, k, v, **_: naive_attention(q, k, v))  # every score is computed
    tokens = torch.zeros(B, S, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        summed_loss(model(tokens, torch.arange(S)), tokens).backward()
    flops, counted = flops_of_a_step(model, B, S), counter.get_total_flops()
    masked = 3 * 2 * B * S * config.layers * config.hidden * S  # half of 4 · S · hidden a token and layer, three times
    print(f"{B} sequences of {S} tokens, 2 layers, hidden 16: {flops:,.0f} FLOPs by the equation")
    right = counted == flops + masked
    print(f"{'ok   ' if right else 'WRONG'} torch counts {counted:,}: masked scores are the other {masked:,}")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
