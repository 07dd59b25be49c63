"""A checkpoint that any mesh can load: every rank writes its slices while it trains on, and only whole ones count.

    step-00000050.unfinished/   all ranks write their slices, in the background
    step-00000050/              renamed when the last rank is done: it is there whole, or not at all
        SHA256SUMS              a checksum of every file in it: what has changed since then is noticed, and not loaded

Shapes: a slice is what FSDP left on a rank. The file says which rows it is, so a job with another number of ranks reads
the rows that it needs. The optimizer's state is sliced in the same way. The ranks share the work of the checksums.

    $ python -m ringlab.models.checkpoint
    3 ranks save steps 10 and 20; the job is killed while it saves step 30
    a bit flips on the disk: step-00000020/__1_0.distcp does not match its checksum in SHA256SUMS
    ok    2 ranks load step 10, and the step after it is the same

Before: loader.py, which reads the same text on every mesh. After: report.py.
Source: the PyTorch manual, torch.distributed.checkpoint. `sha256sum -c SHA256SUMS` checks a checkpoint by hand.
"""

import json
import os
import shutil
import sys
import tempfile
from collections import ChainMap
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
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
from ringlab.support.run_folder import SUMS, as_text, changed, sha256

KEPT = 2  # checkpoints, so that one is whole if the last is found to be bad
RUN = "run.json"  # the step, the settings of the run, and its losses so far
PARTS = {".metadata", RUN}  # of every checkpoint; the others are slices


def finished(folder: Path) -> list[Path]:
    """The finished checkpoints of a run, newest first."""
    return sorted(folder.glob("step-" + "[0-9]" * 8), reverse=True)


def last_checkpoint(folder: Path) -> Path | None:
    """The newest finished checkpoint of a run, or None."""
    return next(iter(finished(folder)), None)


def damage(path: Path, rank: int = 0, world_size: int = 1) -> str | None:
    """A file of a checkpoint that is not as it was written, and why; None if there is none.

    Each of `world_size` ranks reads a share of the slices.
    """
    if found := changed(path, PARTS, rank, world_size):
        return found
    step = json.loads((path / RUN).read_text())["step"]
    return None if path.name == f"step-{step:08}" else f"{path / RUN} is of step {step}"


def _differences(saved: dict[str, Any], here: dict[str, Any]) -> str:
    return ", ".join(f"{name} {saved.get(name)}, here {here[name]}" for name in here if saved.get(name) != here[name])


class Checkpoints:
    """The checkpoints of one run, in a folder that every rank can reach."""

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        """`settings` must be the same on all ranks, and in a run that resumes. Every rank must call.

        Raises ValueError on every rank when the settings differ between ranks.
        """
        self.folder, self.settings = folder, settings
        self._group = dist.new_group(backend="gloo")  # its own: the background must not mix with the ring's messages
        self._writing: tuple[Future, Path] | None = None
        everyone = agree(lambda: settings, self._group)
        for rank, theirs in enumerate(everyone):
            if differ := _differences(theirs, everyone[0]):
                raise ValueError(f"rank {rank} has {differ} on rank 0; expected the same on all ranks")

    def save(self, step: int, model: nn.Module, optimizer: Optimizer, losses: list[float]) -> None:
        """Begin to write the state after `step`, from a copy; return while it is written. Errors as `finish`."""
        self.finish()
        unfinished = self.folder / f"step-{step:08}.unfinished"
        self._failure = f"{unfinished.stem} could not be written"

        def begin() -> None:
            if unfinished.exists():  # of a run that was killed
                shutil.rmtree(unfinished)
            unfinished.mkdir()
            (unfinished / RUN).write_text(json.dumps({"step": step, "settings": self.settings, "losses": losses}))

        self._on_rank_0(begin)
        weights, state = get_state_dict(model, optimizer)
        try:
            future = dcp.async_save(
                {"model": weights, "optimizer": state}, checkpoint_id=unfinished, process_group=self._group
            )
        except (CheckpointException, OSError) as error:
            raise self._failed(error) from None
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
            raise self._failed(error) from None
        names = self._on_rank_0(lambda: sorted(os.listdir(unfinished)))
        mine = names[dist.get_rank(self._group) :: dist.get_world_size(self._group)]
        shares = self._all(lambda: {name: sha256(unfinished / name) for name in mine})

        def publish() -> None:
            (unfinished / SUMS).write_text(as_text(dict(ChainMap(*shares))))
            os.replace(unfinished, unfinished.with_suffix(""))
            for needless in (*finished(self.folder)[KEPT:], *self.folder.glob("step-*.unfinished")):  # of killed runs
                shutil.rmtree(needless, ignore_errors=True)

        self._on_rank_0(publish)

    def _all(self, work: Callable[[], Any]) -> list[Any]:
        """`work` on every rank; where it fails on one, the same ValueError on all."""

        def attempt() -> Any:
            try:
                return work()
            except OSError as error:
                raise self._failed(error) from None

        return agree(attempt, self._group)

    def _on_rank_0(self, work: Callable[[], Any]) -> Any:
        return self._all(lambda: work() if dist.get_rank() == 0 else None)[0]

    def _failed(self, error: BaseException) -> ValueError:
        causes = [wrapped[0] for wrapped in getattr(error, "failures", {}).values()] or [error]
        return ValueError(f"{self._failure}: {causes[0]}; {self.kept()}")

    def kept(self) -> str:
        """Which checkpoint is left, in words."""
        last = last_checkpoint(self.folder)
        return (
            f"the last whole checkpoint is {last}, where --resume goes on" if last else "there is no earlier checkpoint"
        )

    def load(self, model: nn.Module, optimizer: Optimizer) -> tuple[int, list[float], list[str]]:
        """Load the newest whole checkpoint. Return its step, its losses, and what is wrong with newer ones, in words.

        A damaged one gets the name step-….damaged, so that the run can write that step again. Every rank must call.
        Raises ValueError on every rank when no checkpoint is whole, or when the newest whole one is of another run.
        """
        place = dist.get_rank(self._group), dist.get_world_size(self._group)
        wrong: dict[Path, str] = {}
        for path in agree(lambda: finished(self.folder), self._group)[0]:
            found = agree(partial(damage, path, *place), self._group)
            if not any(found):
                break
            wrong[path] = next(filter(None, found))
        else:
            if wrong:
                raise ValueError(f"no whole checkpoint: {'; '.join(wrong.values())}; begin again with another --out")
            raise ValueError(
                f"{self.folder} holds no checkpoint; expected one to resume from: run without --resume first"
            )
        run = json.loads((path / RUN).read_text())
        if differ := _differences(run["settings"], self.settings):
            raise ValueError(f"{path} is of another run: it has {differ}; expected the same, or another --out")
        weights, state = get_state_dict(model, optimizer)
        try:
            dcp.load({"model": weights, "optimizer": state}, checkpoint_id=path, process_group=self._group)
        except CheckpointException as error:
            raise ValueError(f"{path} cannot be read: {next(iter(error.failures.values()))[0]}") from None
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)

        def set_aside() -> None:
            for damaged in wrong if dist.get_rank() == 0 else ():
                aside = damaged.with_suffix(".damaged")
                try:
                    shutil.rmtree(aside, ignore_errors=True)
                    os.replace(damaged, aside)
                except OSError as error:
                    raise ValueError(f"{wrong[damaged]}; move it away, {aside} cannot be made: {error}") from None

        agree(set_aside, self._group)
        said = [f"{why}; {path} is whole and used, {it.name} is now {it.name}.damaged" for it, why in wrong.items()]
        return run["step"], run["losses"], said


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
    checkpoints = Checkpoints(folder, {"rows": 5})
    _step(model, optimizer)
    checkpoints.save(10, model, optimizer, [])
    after = _step(model, optimizer)  # while it is written
    checkpoints.save(20, model, optimizer, [])
    checkpoints.finish()
    if context.rank == 0:
        (folder / "step-00000030.unfinished").mkdir()  # what is left of a save when the job is killed
        slices = folder / "step-00000020" / "__1_0.distcp"
        content = slices.read_bytes()
        slices.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    return after


def _load(context: RankContext, folder: Path) -> tuple[int, list[torch.Tensor], list[str]]:
    model, optimizer = _linear(context)
    step, _, damaged = Checkpoints(folder, {"rows": 5}).load(model, optimizer)
    return step, _step(model, optimizer), damaged


def main() -> int:
    with tempfile.TemporaryDirectory() as name:
        expected = launch(_save, 3, Path(name))[0]
        print("3 ranks save steps 10 and 20; the job is killed while it saves step 30")
        step, loaded, damaged = launch(_load, 2, Path(name))[0]
        print("a bit flips on the disk:", *(each.partition(";")[0].replace(f"{name}/", "") for each in damaged))
        right = all(torch.allclose(a, b, rtol=1e-6) for a, b in zip(loaded, expected, strict=True))
        print(f"{'ok   ' if right else 'WRONG'} 2 ranks load step {step}, and the step after it is the same")
    return 0 if right and step == 10 and len(damaged) == 1 else 1


if __name__ == "__main__":
    sys.exit(main())
