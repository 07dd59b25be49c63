"""One run in a folder: a second one is refused, on every rank, before it computes.

A reader of the ring may skip this file.
Source: the manual page flock(2).
"""

import fcntl
import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch.distributed as dist

from ringlab.support.agreement import agree


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
                    print(me, end="", file=file, flush=True)
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
                raise ValueError(f"--out {folder} is not the folder of rank 0; expected one that all ranks see")

        agree(look)
        yield
