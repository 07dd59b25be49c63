"""Checkpoints that any mesh can load: every rank writes its slices while it trains on, and only whole ones count.

    lock                        one run at a time works in the folder
    step-00000050.unfinished/   all ranks write their slices, in the background
    step-00000050/              renamed when the last rank is done: it is there whole, or not at all
        SHA256SUMS              a checksum of every file in it: what has changed since then is noticed, and not loaded

Shapes: a slice is what FSDP left on a rank. The file says which rows it is, so a job with another number of ranks reads
the rows that it needs. The optimizer's state is sliced in the same way. The ranks share the work of the checksums.

train.py runs it: a first reader may skip this file.
Before: loader.py, which reads the same text on every mesh. After: train.py, a run.
Source: the PyTorch manual, torch.distributed.checkpoint; flock(2). `sha256sum -c SHA256SUMS` checks one by hand.
"""

import fcntl
import hashlib
import json
import os
import shutil
import socket
import tempfile
from collections import ChainMap
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import Optimizer

from ringlab.support.agreement import agree, agree_same

KEPT = 2  # checkpoints, so that one is whole if the last is found to be bad
RUN, SUMS = "run.json", "SHA256SUMS"  # RUN: the step, the settings of the run, and its losses so far
PARTS = {".metadata", RUN}  # of every checkpoint; the others are slices


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Make the folder of a run, and keep other runs out of it. Every rank must call.

    Raises ValueError on every rank when one cannot write the folder or sees another, or when another run is in it. The
    system ends the lock with the process, even with one that is killed: none is left behind.
    """
    lock, me = folder / "lock", f"process {os.getpid()} on {socket.gethostname()}"
    with ExitStack() as stack:

        def take() -> str:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                tempfile.TemporaryFile(dir=folder).close()  # every rank writes here
                if dist.get_rank() == 0:
                    file = stack.enter_context(lock.open("a+"))
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    file.truncate(0)
                    os.write(file.fileno(), me.encode())  # unbuffered: on a full disk only this line fails
            except BlockingIOError:
                wait = f"{lock.read_text(errors='replace')}; wait until it ends, or name another folder"
                raise ValueError(f"--out {folder} is in use by another run, {wait}") from None
            except OSError as error:
                reason = f"{error}; expected a folder, or the name of a new one"
                raise ValueError(f"--out {folder} cannot be written: {reason}") from None
            return me

        owner = agree(take)[0]

        def look() -> None:
            if not lock.is_file() or lock.read_text(errors="replace") != owner:
                raise ValueError(f"--out {folder} has no lock of rank 0; expected a folder that all ranks see")

        agree(look)
        yield


def sha256(path: Path) -> str:
    """The checksum of a file, in hexadecimal digits. Raises OSError."""
    total = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            total.update(piece)
    return total.hexdigest()


def as_text(sums: dict[str, str]) -> str:
    """The checksums of files by name, as the command sha256sum writes them."""
    return "".join(f"{digest}  {name}\n" for name, digest in sorted(sums.items()))


def damage(path: Path, rank: int = 0, world_size: int = 1) -> str | None:
    """A file of a checkpoint that is not as it was written, and why; None if there is none.

    Each of `world_size` ranks reads a share of the slices, and all read PARTS.
    """
    name = SUMS
    try:
        text = (path / SUMS).read_bytes().decode(errors="replace")
        sums = {name: digest for digest, _, name in (line.partition("  ") for line in text.splitlines())}
        if text != as_text(sums) or not sums.keys() >= PARTS:
            return f"{path / SUMS} is not the list of checksums that was written"
        for name in sorted(PARTS | set(sorted(sums)[rank::world_size])):
            if sha256(path / name) != sums[name]:
                return f"{path / name} does not match its checksum in {SUMS}"
    except OSError as error:
        return f"{path / name} cannot be read: {error.strerror}"
    step = json.loads((path / RUN).read_text())["step"]
    named = f"step-{step:08}"
    return None if path.name == named else f"{path} is whole, and {RUN} is of step {step}: it is to be named {named}"


def finished(folder: Path) -> list[Path]:
    """The finished checkpoints of a run, newest first."""
    return sorted(folder.glob("step-" + "[0-9]" * 8), reverse=True)


def last_checkpoint(folder: Path) -> Path | None:
    """The newest finished checkpoint of a run, or None."""
    return next(iter(finished(folder)), None)


def _differences(saved: dict[str, Any], here: dict[str, Any]) -> str:
    return ", ".join(f"{name} {saved.get(name)}, here {here[name]}" for name in here if saved.get(name) != here[name])


class Checkpoints:
    """The checkpoints of one run, in a folder that every rank can reach. Every rank must make each call."""

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        """`settings` must be the same on all ranks, else ValueError on every rank; and in a run that resumes."""
        self.folder, self.settings = folder, settings
        self._group = dist.new_group(backend="gloo")  # its own: the background must not mix with the ring's messages
        self._writing: tuple[Future, Path] | None = None
        agree_same(lambda: (None, settings), self._group)

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
        whole = {"model": weights, "optimizer": state}
        with self._told():
            future = dcp.async_save(whole, checkpoint_id=unfinished, process_group=self._group)
        assert isinstance(future, Future)  # the other kind is of an async_stager
        self._writing = future, unfinished

    def written(self) -> bool:
        """Whether this rank has written its slices of a `save` that is not finished yet."""
        return self._writing is not None and self._writing[0].done()

    def finish(self) -> None:
        """Wait until the last `save` is on disk, and remove those that are no longer kept.

        Raises ValueError on every rank when a rank could not write; the finished checkpoints stay as they are.
        """
        if self._writing is None:
            return
        (future, unfinished), self._writing = self._writing, None
        with self._told():
            future.result()
        names = self._on_rank_0(lambda: sorted(os.listdir(unfinished)))
        mine = names[dist.get_rank(self._group) :: dist.get_world_size(self._group)]
        shares = self._all(lambda: {name: sha256(unfinished / name) for name in mine})

        def publish() -> None:
            (unfinished / SUMS).write_text(as_text(dict(ChainMap(*shares))))
            os.replace(unfinished, unfinished.with_suffix(""))
            for needless in (*finished(self.folder)[KEPT:], *self.folder.glob("step-*.unfinished")):  # of killed runs
                shutil.rmtree(needless, ignore_errors=True)

        self._on_rank_0(publish)

    @contextmanager
    def _told(self) -> Iterator[None]:
        """An error of the disk says which checkpoint could not be written, and which is left."""
        try:
            yield
        except (CheckpointException, OSError) as error:
            causes = [wrapped[0] for wrapped in getattr(error, "failures", {}).values()] or [error]
            raise ValueError(f"{self._failure}: {causes[0]}; {self.kept()}") from None

    def _all(self, work: Callable[[], Any]) -> list[Any]:
        """`work` on every rank; where it fails on one, the same ValueError on all."""
        return agree(self._told()(work), self._group)

    def _on_rank_0(self, work: Callable[[], Any]) -> Any:
        return self._all(lambda: work() if dist.get_rank() == 0 else None)[0]

    def kept(self) -> str:
        """Which checkpoints are left, in words: the weights of the last may be the cause of what has ended the run."""
        last, before, *_ = *finished(self.folder), None, None
        whole = f"the last whole checkpoint is {last}, where --resume goes on"
        whole += f" (delete it to go on from {before})" if before else ""
        return whole if last else "there is no earlier checkpoint"

    def load(self, model: nn.Module, optimizer: Optimizer) -> tuple[int, list[float], list[str]]:
        """Load the newest whole checkpoint. Return its step, its losses, and what is wrong with newer ones, in words.

        A damaged one gets the name step-….damaged, so that the run can write that step again. Raises ValueError on
        every rank when no checkpoint is whole, or when the newest whole one is of another run.
        """
        place = dist.get_rank(self._group), dist.get_world_size(self._group)
        wrong: dict[Path, str] = {}
        for path in agree(lambda: finished(self.folder), self._group)[0]:
            damages = agree(partial(damage, path, *place), self._group)
            if not any(damages):
                break
            wrong[path] = next(filter(None, damages))
        else:
            if wrong:
                kept = "; ".join(wrong.values())
                raise ValueError(f"no whole checkpoint in its place: {kept}; or begin with another --out")
            expected = "expected one to resume from: run without --resume first"
            raise ValueError(f"{self.folder} holds no checkpoint; {expected}")
        run = json.loads((path / RUN).read_text())
        if differ := _differences(run["settings"], self.settings):
            raise ValueError(f"{path} is of another run: it has {differ}; expected the same, or another --out")
        weights, state = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optimizer": state}, checkpoint_id=path, process_group=self._group)
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
        words = [f"{why}; {path} is whole and used, {it.name} is now {it.name}.damaged" for it, why in wrong.items()]
        return run["step"], run["losses"], words
