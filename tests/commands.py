"""Commands as a reader types them, and waiting for what other processes do.

The limit only tells a job that hangs from one that ends: a lost message is waited for 300 s, and a busy machine may be
ten times slower than a quiet one.
"""

import os
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parent.parent
LIMIT = 120  # seconds
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


def run(*command, **environment):
    """Run a command (words, or one line of a shell) in the root of the project. Returns it with status and output."""
    words = [str(word) for word in command]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return subprocess.run(
        words if len(words) > 1 else words[0],
        shell=len(words) == 1,
        cwd=ROOT,
        env={**os.environ, "PATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )


@contextmanager
def ends_soon():
    """The body must end within the limit: nobody waits for a message that never comes."""
    begin = time.monotonic()
    yield
    assert time.monotonic() - begin < LIMIT


def wait_for(values, count):
    """The values, once there are as many; an error after the limit."""
    deadline = time.monotonic() + LIMIT
    while len(found := values()) < count:
        assert time.monotonic() < deadline, f"{len(found)} of {count} after {LIMIT} s"
        time.sleep(0.05)
    return found
