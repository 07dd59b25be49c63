"""Each example on 3 and on 4 ranks, against the same training on one process with sdpa: python examples/compare.py

The one process computes where the ranks do: the cosines of rotary are float32, and a GPU rounds them otherwise.
Errors are relative, in norm. The error of the weights is relative to how far they moved.
"""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import tiny
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

HERE = Path(__file__).parent
Result = tuple[list[float], list[Tensor]]  # the loss of each step, and the weights after the last


def weights_of(model: nn.Module) -> list[Tensor]:
    return [weight.detach().cpu().clone() for weight in model.state_dict().values()]


def summed(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy with the token that follows. transformers' own computes in float32."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(wide[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")


def loop(micro_batches: int = 1, sgd: bool = False) -> Result:
    """One process, with sdpa."""
    model = tiny.model().to(tiny.DEVICE)
    weights, losses = model.parameters(), []
    optimizer = torch.optim.SGD(weights, lr=0.1) if sgd else torch.optim.AdamW(weights, lr=1e-3)
    batches = ({name: x.to(tiny.DEVICE) for name, x in batch.items()} for batch in tiny.batches())
    for step in zip(*[batches] * micro_batches, strict=True):
        count = sum((batch["labels"][:, 1:] != -100).sum() for batch in step)
        asked = [{"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]} for batch in step]
        logits = [model(**each).logits for each in asked]
        parts = [summed(x, batch["labels"]) / count for x, batch in zip(logits, step, strict=True)]
        sum(parts).backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum(parts).item())
    return losses, weights_of(model)


def with_trainer(name: str) -> Result:
    """The script itself on one process, with the Trainer of the library in the place of that of the ring."""
    from transformers import Trainer
    from trl import SFTTrainer

    ring, plain = {"trainer": ("RingTrainer", Trainer), "sft": ("RingSFTTrainer", SFTTrainer)}[name]
    text = "\n".join(line for line in (HERE / f"{name}.py").read_text().splitlines() if "ringlab" not in line)
    kept: list[Result] = []

    def model() -> nn.Module:
        def mean(logits: Tensor, labels: Tensor, num_items_in_batch: Tensor, **_: Any) -> Tensor:
            return summed(logits, labels) / num_items_in_batch

        made = tiny_model()
        made.loss_function = mean
        return made

    tiny_model, tiny_keep = tiny.model, tiny.keep
    tiny.model, tiny.keep = model, lambda losses, trained: kept.append((losses, weights_of(trained)))
    one_gpu = mock.patch.object(torch.cuda, "device_count", return_value=min(1, torch.cuda.device_count()))
    with one_gpu, redirect_stdout(StringIO()):  # Trainer shares out to all GPUs, and prints
        exec(compile(text, name, "exec"), {ring: plain})
    tiny.model, tiny.keep = tiny_model, tiny_keep
    return kept[0]


ALONE: dict[str, Any] = {  # the function, its arguments, and what rounding allows: losses, weights
    "plain_loop": (loop, {}, (1e-12, 1e-9)),
    "fsdp2": (loop, {}, (1e-12, 1e-9)),
    "plain_loop, compiled": (loop, {"sgd": True}, (1e-6, 1e-6)),  # rotary's cosines are float32, and round otherwise
    "accelerate_loop": (loop, {"micro_batches": 2}, (1e-12, 1e-9)),
    "trainer": (with_trainer, {"name": "trainer"}, (1e-6, 1e-9)),  # Trainer adds up losses in float32
    "sft": (with_trainer, {"name": "sft"}, (1e-6, 1e-6)),  # TRL's head computes in float32
}


COMPILED = {"DistributedDataParallel(model)": "torch.compile(DistributedDataParallel(model))"}
COMPILED |= {"AdamW(model.parameters(), lr=1e-3)": "SGD(model.parameters(), lr=0.1)"}  # Adam would enlarge roundings


def script(name: str) -> str:
    """The text of an example, as it is or compiled."""
    name, _, compiled = name.partition(", ")
    text = (HERE / f"{name}.py").read_text()
    for old, new in COMPILED.items() if compiled else ():
        text = text.replace(old, new)
    return text


def on_ranks(name: str, world_size: int) -> Result:
    """Run an example with torchrun. Raises CalledProcessError when it fails."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]  # which takes a free port
    with TemporaryDirectory() as folder:
        file, kept, run = (Path(folder, part) for part in ("example.py", "kept.pt", "run"))
        file.write_text(script(name))
        shutil.copy(HERE / "tiny.py", folder)
        command = [*torchrun, f"--nproc_per_node={world_size}", file, kept, run]
        subprocess.run([*map(str, command)], check=True, capture_output=True, text=True, timeout=300)
        return torch.load(kept)


def errors(result: Result, exact: Result, start: list[Tensor]) -> tuple[float, float]:
    """(of the losses, of the weights)"""
    losses, right_losses = torch.tensor(result[0], dtype=torch.float64), torch.tensor(exact[0], dtype=torch.float64)
    wrong, right, begin = (torch.cat([w.flatten() for w in each]) for each in (result[1], exact[1], start))
    of_weights = (wrong - right).norm() / (right - begin).norm()
    return ((losses - right_losses).norm() / right_losses.norm()).item(), of_weights.item()


def table(names: list[str]) -> Iterator[tuple[str, bool]]:
    """Lines, and whether each is within what rounding allows."""
    yield "| example | ranks | error of the losses | error of the weights | allowed |", True
    yield "| --- | --- | --- | --- | --- |", True
    for name in names:
        function, arguments, allowed = ALONE[name]
        exact, start = function(**arguments), weights_of(tiny.model())
        for world_size in (3, 4):
            seen = errors(on_ranks(name, world_size), exact, start)
            ok = all(a <= b for a, b in zip(seen, allowed, strict=True))
            allows = f"{allowed[0]:.0e}, {allowed[1]:.0e}" + ("" if ok else " **WRONG**")
            shown = name if "," in name else f"[{name}.py]({name}.py)"
            yield f"| {shown} | {world_size} | {seen[0]:.0e} | {seen[1]:.0e} | {allows} |", ok


if __name__ == "__main__":
    fine = True
    for line, ok in table(sys.argv[1:] or list(ALONE)):
        print(line, flush=True)
        fine &= ok
    sys.exit(0 if fine else 1)
