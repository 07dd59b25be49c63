"""Ways to damage the folder of a run, made by rule, and what the run must say to each.

The folder has two checkpoints, of steps 2 and 4 of a run on three ranks. Each way changes the folder, or the options of
the command that goes on with it, and names what must come of it: a line in which these words stand, and an outcome.

    resumed     nothing is wrong, or only the log: the run goes on after step 4
    older       the newest checkpoint is passed over: the run goes on after step 2
    refused     exit status 2, before anything is computed or changed
    ended       exit status 2, and the checkpoints are as they were
"""

import contextlib
import io
import json
import os
import resource
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from ringlab.models import train

NEWEST, OLDER = BOTH = ("step-00000004", "step-00000002")
FILES = (".metadata", "__0_0.distcp", "__1_0.distcp", "__2_0.distcp", "run.json", "SHA256SUMS")
NO_FILE = "cannot be read: there is no such file"
OTHER_SUM = "does not match its checksum in SHA256SUMS"


@dataclass
class Way:
    """A way to damage a run."""

    outcome: str
    said: tuple[str, ...] = ()  # words that stand in the one line about it; none: no such line
    damage: Callable[[Path], None] = lambda run: None  # what is done to the folder
    options: list[str] = field(default_factory=lambda: ["--resume"])
    disk: int | None = None  # the largest file that can be written, in bytes


def flip(path, at):
    content = bytearray(path.read_bytes())
    content[at] ^= 1 << at % 8
    path.write_bytes(content)


def instead(path, make):
    """Remove what is there, and make something else in its place."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    elif path.exists() or path.is_symlink():
        path.unlink()
    make(path)


def change(path, function):
    path.write_bytes(function(path.read_bytes()))


TO_A_FILE = {
    "one byte short": lambda path: change(path, lambda content: content[:-1]),
    "half of it": lambda path: change(path, lambda content: content[: len(content) // 2]),
    "empty": lambda path: path.write_bytes(b""),
    "a byte more": lambda path: change(path, lambda content: content + b"\n"),
    "first bit": lambda path: flip(path, 0),
    "a bit in the middle": lambda path: flip(path, path.stat().st_size // 2),
    "a bit near the end": lambda path: flip(path, path.stat().st_size - 2),
    "zeros": lambda path: change(path, lambda content: bytes(len(content))),
    "garbage": lambda path: path.write_bytes(bytes(range(256)) * 9),
    "deleted": lambda path: path.unlink(),
    "a folder": lambda path: instead(path, Path.mkdir),
    "a pipe": lambda path: instead(path, os.mkfifo),
    "a dead link": lambda path: instead(path, lambda path: path.symlink_to("nowhere")),
    "a link to itself": lambda path: instead(path, lambda path: path.symlink_to(path)),
    "a bad disk": lambda path: instead(path, lambda path: path.symlink_to("/proc/self/mem")),  # its first page fails
    "of another step": lambda path: shutil.copy(path.parent.parent / OLDER / path.name, path),
    "of another run": lambda path: shutil.copy(path.parent.parent.parent / "other" / NEWEST / path.name, path),
}
if os.geteuid():  # root reads everything
    TO_A_FILE["not readable"] = lambda path: path.chmod(0)


def reason(file, name):
    """What must be said of a file of a checkpoint, and which file may be named."""
    if name in ("deleted", "a folder", "a pipe", "a dead link", "a link to itself"):
        return f"{file} {NO_FILE}"
    if name == "a bad disk":
        return f"{file} cannot be read: Input/output error"
    if name == "not readable":
        return f"{file} cannot be read: Permission denied"
    if file != "SHA256SUMS":
        return f"{file} {OTHER_SUM}"
    if name in ("first bit", "a bit in the middle", "a bit near the end"):
        return "SHA256SUMS"  # of a digest or of a name: the list, or a file that is not as listed
    return OTHER_SUM if name.startswith("of another") else "SHA256SUMS is not the list of checksums"


def of(steps, file, name):
    return lambda run: [TO_A_FILE[name](run / step / file) for step in steps]


# Of each file, and each damage, tests/test_models_damage.py asks the function that looks for it; the run, of these.
WAYS: dict[str, Way] = {
    "a pipe": Way("older", (NEWEST, f".metadata {NO_FILE}", OLDER), of([NEWEST], ".metadata", "a pipe")),
    "of both, garbage": Way(
        "refused",
        ("no whole checkpoint in its place", NEWEST, OLDER, "SHA256SUMS is not the list", "another --out"),
        of(BOTH, "SHA256SUMS", "garbage"),
    ),
}


def empty(path):
    for file in path.iterdir():
        file.unlink()


def copied(path, of):
    """`path` becomes a copy of the folder `of`, a checkpoint of the same run or of another."""
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(of, path)


TO_A_CHECKPOINT = {
    "emptied": (empty, f"SHA256SUMS {NO_FILE}"),
    "a file": (lambda path: instead(path, Path.touch), f"SHA256SUMS {NO_FILE}"),
    "a dead link": (lambda path: instead(path, lambda path: path.symlink_to("nowhere")), f"SHA256SUMS {NO_FILE}"),
    "slices of the older one": (
        lambda path: [shutil.copy(file, path) for file in (path.parent / OLDER).glob("*.distcp")],
        OTHER_SUM,
    ),
    "no slices": (lambda path: [file.unlink() for file in path.glob("*.distcp")], f".distcp {NO_FILE}"),
}
WAYS["the newest, the older one"] = Way(
    "older", (NEWEST, "run.json is of step 2", OLDER), lambda run: copied(run / NEWEST, run / OLDER)
)


def with_damaged(make):
    """The newest is damaged, and there is something that has the name it will get."""

    def damage(run):
        make(run / f"{NEWEST}.damaged")
        empty(run / NEWEST)

    return damage


WAYS |= {
    "swapped": Way(
        "refused",
        (f"{NEWEST} is whole", f"to be named {OLDER}", f"{OLDER} is whole", f"to be named {NEWEST}"),
        lambda run: [(run / a).rename(run / b) for a, b in ((NEWEST, "x"), (OLDER, NEWEST), ("x", OLDER))],
    ),
    "both gone": Way(
        "refused",
        ("holds no checkpoint", "run without --resume"),
        lambda run: [shutil.rmtree(run / step) for step in (NEWEST, OLDER)],
    ),
    "a file more": Way("resumed", (), lambda run: (run / NEWEST / ".nfs01").write_text("x")),
    "an unfinished one": Way("resumed", (), lambda run: copied(run / "step-00000006.unfinished", run / OLDER)),
    "an unfinished file of the next step": Way(
        "ended",
        ("step-00000005 could not be written", "Not a directory", NEWEST, "--resume"),
        lambda run: (run / "step-00000005.unfinished").touch(),
    ),
    "damaged, and the name is taken": Way(
        "refused",
        (f"SHA256SUMS {NO_FILE}; move it away, run/{NEWEST}.damaged cannot be made"),
        with_damaged(Path.touch),
    ),
    "of another run": Way(
        "refused",
        (NEWEST, "is of another run: it has sha256 of the data ", ", here "),
        lambda run: copied(run / NEWEST, run.parent / "other" / NEWEST),
    ),
    "started again": Way("refused", ("holds an earlier run", "--resume", "--out"), options=[]),
}

REBUILT = ("loss.jsonl was missing or damaged; it is written anew from the checkpoint",)
UNWRITTEN = ("the losses could not be written", "the checkpoints hold them")
OF_THE_LOG = ("garbage", "a pipe", "a bad disk")
WAYS |= {
    f"loss.jsonl, {name}": Way("resumed", REBUILT, lambda run, name=name: TO_A_FILE[name](run / "loss.jsonl"))
    for name in OF_THE_LOG
}
WAYS |= {
    "loss.jsonl, a step twice": Way(
        "resumed", REBUILT, lambda run: change(run / "loss.jsonl", lambda text: text.splitlines(True)[0] + text)
    ),
    "loss.jsonl, of steps that were lost": Way(
        "resumed", (), lambda run: change(run / "loss.jsonl", lambda text: text + b'{"step": 5, "loss": 1.0}\n{"st')
    ),
    "loss.svg, a folder": Way("resumed", UNWRITTEN, lambda run: instead(run / "loss.svg", Path.mkdir)),
    "loss.svg, a pipe": Way("resumed", (), lambda run: instead(run / "loss.svg", os.mkfifo)),
    "lock, garbage": Way("resumed", (), lambda run: (run / "lock").write_bytes(bytes(range(256)))),
    "lock, a pipe": Way("refused", ("--out", "cannot be written"), lambda run: instead(run / "lock", os.mkfifo)),
}


def of_other_data(make):
    """The text of the run becomes another."""
    return lambda run: make(run.parent / "text.txt")


OTHER_DATA = {
    "one bit": (lambda path: flip(path, 500), "sha256 of the data"),
    "a pipe": (lambda path: instead(path, os.mkfifo), "holds no text"),
}
WAYS |= {f"data, {name}": Way("refused", (said,), of_other_data(make)) for name, (make, said) in OTHER_DATA.items()}


def as_jsonl(*lines):
    """Options that name another text: a .jsonl file with these lines."""

    def damage(run):
        (run.parent / "text.jsonl").write_bytes(b"\n".join(lines))

    return damage


GOOD = b'{"text": "' + b"the keys and values go round the ring. " * 10 + b'", "id": 7}'
BAD_LINES = {
    "no JSON": b"the keys",
    "half of a line": GOOD[:-5],
    "nothing": b"",
    "a list": b'["text"]',
    "a number": b"5",
    "no text": b'{"txt": "words"}',
    "a text that is a number": b'{"text": 5}',
    "a text that is null": b'{"text": null}',
    "half a letter": b'{"text": "\xff\xfe\xfa"}',
    "a lone surrogate": b'{"text": "\\ud800"}',
    "a deep list": b"[" * 100_000,
    "a long number": b'{"text": "x", "n": ' + b"9" * 5000 + b"}",
}
JSONL = ["--data", "text.jsonl"]
WAYS[".jsonl, a bad line"] = Way(
    "refused",
    ("text.jsonl, line 2: expected an object",),
    as_jsonl(GOOD, BAD_LINES["half of a line"], GOOD),
    options=["--resume", *JSONL],
)
WAYS[".jsonl, the same data"] = Way(
    "resumed",
    (),
    lambda run: as_jsonl(json.dumps({"text": (run.parent / "text.txt").read_text()[:-1]}).encode())(run),
    options=["--resume", *JSONL],
)

WAYS["--hidden 32"] = Way(
    "refused", (NEWEST, "is of another run: it has", ", here 32"), options=["--resume", "--hidden", "32"]
)

WAYS["--out in a file"] = Way(
    "refused", ("--out", "Not a directory", "expected a folder"), options=["--out", "text.txt/run"]
)
WAYS |= {  # the largest file that can be written: as on a full disk, some writes fail
    "disk, no byte": Way("refused", ("--out", "cannot be written", "File too large"), disk=0),
    "disk, 100 bytes": Way("ended", ("step-00000005 could not be written", NEWEST, "--resume"), disk=100),
}


def go_on(folder, options, disk):
    """The exit status, stdout and stderr of `ringlab.models.train` with these options, in this process."""
    os.chdir(folder)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as error:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard if disk is None else disk, hard))
        try:
            status = train.main(options)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    return status, out.getvalue(), error.getvalue()
