"""Commands as a reader types them, what pages show of them, and waiting for what other processes do.

The limit only tells a job that hangs from one that ends: a lost message is waited for 300 s, and a busy machine may be
ten times slower than a quiet one.
"""

import itertools
import os
import re
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


# Is what a document shows still what its command prints? Equal text, but for what differs between two right runs.
# A time ("0.123 s"), an error ("3.1e-07"), the machine: they are measured anew each time.
_MEASURED = [
    (r"\d+\.\d+ (s|ms)\b", r"<time> \1"),
    (r"\b\d(\.\d+)?e-\d+\b", "<error>"),
    (r"\b0(\.0+)?e\+00\b", "<error>"),
    (r"-?\d+% of the messages' time", "<share> of the messages' time"),
    (r"(?m)^machine .*$", "<machine>"),
    (r"\b\d+ GPU\(s\)", "<n> GPU(s)"),
]


def masked(text: str) -> list[str]:
    """The lines of the text without what is measured, and without white space at the end of lines and of the text."""
    for pattern, replacement in _MEASURED:
        text = re.sub(pattern, replacement, text)
    return [line.rstrip() for line in text.strip().splitlines()]


def check_shown(shown: str, printed: str) -> None:
    """Assert that `shown` is `printed`, where a line `...` of `shown` stands for any number of lines."""
    lines, rest, skipping = masked(shown), masked(printed), False
    for line in lines:
        if line.strip() == "...":
            skipping = True
            continue
        if skipping:
            assert line in rest, f"shown, but not printed (any more):\n{line}"
            rest = rest[rest.index(line) :]
        assert rest, f"shown, but not printed (any more):\n{line}"
        assert line == rest[0], f"shown:   {line}\nprinted: {rest[0]}"
        rest, skipping = rest[1:], False
    assert skipping or not rest, f"printed, but not shown:\n{rest[0]}"


def assert_legible(figure, labels):
    """No label of a drawn figure is small on a page 900 pixels wide, cut, or under another."""
    width, height = figure.bbox.size
    boxes = []
    for label in labels:
        pixels = label.get_fontsize() / 72 * figure.dpi
        assert pixels * 900 / width >= 11, f"{label.get_text()!r} is too small on a page 900 pixels wide"
        boxes.append(label.get_window_extent())
        box = boxes[-1]
        inside = box.x0 >= 5 and box.y0 >= 5 and box.x1 <= width - 5 and box.y1 <= height - 5
        assert inside, f"{label.get_text()!r} is cut"
    for (a, one), (b, other) in itertools.combinations(zip(labels, boxes, strict=True), 2):
        apart = one.x1 <= other.x0 or other.x1 <= one.x0 or one.y1 <= other.y0 or other.y1 <= one.y0
        assert apart, f"{a.get_text()!r} and {b.get_text()!r} overlap"
