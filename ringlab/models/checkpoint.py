"""A checkpoint that any mesh can load: every rank writes its slices while it trains on, and only whole ones count.

    step-00000050.unfinished/   all ranks write their slices, in the background
    step-00000050/              renamed when the last rank is done: it is there whole, or not at all

Shapes: a slice is what FSDP left on a rank. The file says which rows it is, so a job with another number of ranks reads
the rows that it needs. The optimizer's state is sliced in the same way.

    $ python -m ringlab.models.checkpoint
    3 ranks save step 10, and take another step while it is written
    the job is killed while it saves step 20
    ok    2 ranks load step 10, and the step after it is the same

Before: loader.py, which reads the same text on every mesh. After: report.py.
Source: the PyTorch manual, torch.distributed.checkpoint.
"""

import json
import os
import shutil
import sys
import tempfile
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import Optimizer

from ringlab.models.mesh import gathered
from ringlab.support.agreement import agree
from ringlab.support.processes import RankContext, launch

KEPT = 2  # checkpoints, so that one is whole if the last is found to be bad
SETTINGS = "settings.json"


def last_checkpoint(folder: Path) -> Path | None:
    """The newest finished checkpoint of a run, or None."""
    return max(folder.glob("step-" + "[0-9]" * 8), default=None)


class Checkpoints:
    """The checkpoints of one run, in a folder that every rank can reach."""

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        """`settings` must be the same in a run that resumes; every rank must call."""
        self.folder, self.settings = folder, settings
        self._group = dist.new_group(backend="gloo")  # its own: the background must not mix with the ring's messages
        self._writing: tuple[Future, Path] | None = None

    def save(self, step: int, model: nn.Module, optimizer: Optimizer) -> None:
        """Begin to write the state after `step`, from a copy; return while it is written. Errors as `finish`."""
        self.finish()
        unfinished = self.folder / f"step-{step:08}.unfinished"
        weights, state = get_state_dict(model, optimizer)
        try:
            future = dcp.async_save(
                {"model": weights, "optimizer": state}, checkpoint_id=unfinished, process_group=self._group
            )
        except (CheckpointException, OSError) as error:
            raise self._failed(unfinished, error) from None
        assert isinstance(future, Future)  # the other kind is of an async_stager
        self._writing = future, unfinished

    def finish(self) -> None:
        """Wait until the last `save` is on disk, and remove those that are no longer kept. Every rank must call.

        Raises ValueError on every rank when a rank could not write; the finished checkpoints stay as they are.
        """
        if self._writing is None:
            return
        (future, unfinished), self._writing = self._writing, None
        try:
            future.result()
        except (CheckpointException, OSError) as error:
            raise self._failed(unfinished, error) from None
        agree(lambda: self._publish(unfinished) if dist.get_rank() == 0 else None, self._group)

    def _publish(self, unfinished: Path) -> None:
        try:
            (unfinished / SETTINGS).write_text(json.dumps(self.settings))
            os.replace(unfinished, unfinished.with_suffix(""))
        except OSError as error:
            raise self._failed(unfinished, error) from None
        old = sorted(self.folder.glob("step-" + "[0-9]" * 8))[:-KEPT]
        for needless in (*old, *self.folder.glob("step-*.unfinished")):  # the latter are of runs that were killed
            shutil.rmtree(needless)

    def kept(self) -> str:
        """Which checkpoint is left, in words."""
        last = last_checkpoint(self.folder)
        return f"the last whole checkpoint is {last}" if last else "there is no earlier checkpoint"

    def _failed(self, unfinished: Path, error: BaseException) -> ValueError:
        causes = [wrapped[0] for wrapped in getattr(error, "failures", {}).values()] or [error]
        return ValueError(f"{unfinished.stem} could not be written: {causes[0]}; {self.kept()}")

    def load(self, model: nn.Module, optimizer: Optimizer) -> int:
        """Load the last checkpoint into model and optimizer, and return its step. Every rank must call.

        Raises ValueError on every rank when there is none, when it is of other settings, or when it cannot be read.
        """
        path = agree(self._check, self._group)[0]
        weights, state = get_state_dict(model, optimizer)
        try:
            dcp.load({"model": weights, "optimizer": state}, checkpoint_id=path, process_group=self._group)
        except CheckpointException as error:
            raise ValueError(f"{path} cannot be read: {next(iter(error.failures.values()))[0]}") from None
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
        return int(path.name.removeprefix("step-"))

    def _check(self) -> Path:
        path = last_checkpoint(self.folder)
        if path is None:
            raise ValueError(
                f"{self.folder} holds no checkpoint; expected one to resume from: run without --resume first"
            )
        saved = json.loads((path / SETTINGS).read_text())
        differ = [name for name in self.settings if saved.get(name) != self.settings[name]]
        if differ:
            each = ", ".join(f"{name} {saved.get(name)}, here {self.settings[name]}" for name in differ)
            raise ValueError(f"{path} is of another run: it has {each}; expected the same")
        return path


def _linear(context: RankContext) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(context.world_size)  # other weights in each world: a checkpoint must replace them
    model = nn.Linear(4, 5)  # 5 rows do not divide evenly
    fully_shard(model, mesh=init_device_mesh(context.device.type, (context.world_size,)))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def _step(model: nn.Module, optimizer: Optimizer) -> list[torch.Tensor]:
    """The weights, and the optimizer's running mean of their gradients, whole, after one more step."""
    optimizer.zero_grad()
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    return [gathered(x).detach() for w in model.parameters() for x in (w, optimizer.state[w]["exp_avg"])]


def _save(context: RankContext, folder: Path) -> list[torch.Tensor]:
    model, optimizer = _linear(context)
    _step(model, optimizer)
    checkpoints = Checkpoints(folder, {"rows": 5})
    checkpoints.save(10, model, optimizer)
    after = _step(model, optimizer)  # while it is written
    checkpoints.finish()
    return after


def _load(context: RankContext, folder: Path) -> tuple[int, list[torch.Tensor]]:
    model, optimizer = _linear(context)
    step = Checkpoints(folder, {"rows": 5}).load(model, optimizer)
    return step, _step(model, optimizer)


def main() -> int:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        print("3 ranks save step 10, and take another step while it is written")
        expected = launch(_save, 3, folder)[0]
        (folder / "step-00000020.unfinished").mkdir()  # what is left of it
        print("the job is killed while it saves step 20")
        step, loaded = launch(_load, 2, folder)[0]
        right = all(torch.allclose(a, b, rtol=1e-6) for a, b in zip(loaded, expected, strict=True))
        print(f"{'ok   ' if right else 'WRONG'} 2 ranks load step {step}, and the step after it is the same")
    return 0 if right and step == 10 else 1


if __name__ == "__main__":
    sys.exit(main())
