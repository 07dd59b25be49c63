"""The folder of a run: one run at a time works in it, and its files are as they were written, or it is noticed.

A reader of the ring may skip this file.
Source: the manual pages flock(2) and sha256sum(1).
"""

import errno
import fcntl
import hashlib
import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO

import torch.distributed as dist

from ringlab.support.agreement import agree

SUMS = "SHA256SUMS"  # the name of a list of checksums


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
                other = lock.read_text(errors="replace")
                raise ValueError(
                    f"--out {folder} is in use by another run, {other}; wait until it ends, or name another folder"
                ) from None
            except OSError as error:
                raise ValueError(
                    f"--out {folder} cannot be written: {error}; expected a folder, or the name of a new one"
                ) from None
            return me

        owner = agree(take)[0]

        def look() -> None:
            if not lock.is_file() or lock.read_text(errors="replace") != owner:
                raise ValueError(f"--out {folder} has no lock of rank 0; expected a folder that all ranks see")

        agree(look)
        yield


def _open(path: Path) -> BinaryIO:
    if not path.is_file():  # to open a pipe would wait for ever
        raise FileNotFoundError(errno.ENOENT, "there is no such file", str(path))
    return path.open("rb")


def sha256(path: Path) -> str:
    """The checksum of a file, in hexadecimal digits. Raises OSError."""
    total = hashlib.sha256()
    with _open(path) as file:
        while piece := file.read(1 << 20):
            total.update(piece)
    return total.hexdigest()


def as_text(sums: dict[str, str]) -> str:
    """The checksums of files by name, as the command sha256sum writes them."""
    return "".join(f"{digest}  {name}\n" for name, digest in sorted(sums.items()))


def changed(folder: Path, needed: set[str], rank: int, world_size: int) -> str | None:
    """A file of `folder` that is not what its list of checksums says, and why; None if there is none.

    Each of `world_size` ranks reads a share of the files, and all read those of `needed`, which must be in the list.
    """
    name = SUMS
    try:
        with _open(folder / SUMS) as file:
            text = file.read().decode(errors="replace")
        sums = {name: digest for digest, _, name in (line.partition("  ") for line in text.splitlines())}
        if text != as_text(sums) or not sums.keys() >= needed:
            return f"{folder / SUMS} is not the list of checksums that was written"
        for name in sorted(needed | set(sorted(sums)[rank::world_size])):
            if sha256(folder / name) != sums[name]:
                return f"{folder / name} does not match its checksum in {SUMS}"
    except OSError as error:
        return f"{folder / name} cannot be read: {error.strerror}"
    return None
