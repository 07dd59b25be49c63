"""The tokens of a step: each rank reads its own, at their places in the sequence, and never the whole sequence.

    token of position s  = byte (start + s)          label of position s  = byte (start + s + 1)

Shapes: a step has B sequences of S tokens. A rank reads tokens and labels (B / dp, C) at positions (C,), C = S / cp.
Labels come from the text, so the last token of a chunk has one too. The starts depend on the step only: another mesh,
or a run that was resumed, reads the same sequences. Without a text of yours it is that of `moves_of_rings`.

    a text of 64 bytes, step 0: 2 sequences of 8 tokens start at bytes 4 and 31; 2 x 2 ranks, zigzag
    dp 0, cp 0: tokens [4, 5, 10, 11], labels [5, 6, 11, 12], positions [0, 1, 6, 7]
    dp 1, cp 1: tokens [33, 34, 35, 36], labels [34, 35, 36, 37], positions [2, 3, 4, 5]

train.py runs it: a first reader may skip this file.
Before: mesh.py, which sequences and positions a rank has. After: checkpoint.py.
Source: the layouts of ringlab/ring/layouts.py; transformer.py, where labels are shifted first.
"""

import os
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ringlab.ring.layouts import positions
from ringlab.support.expect import expect

SUFFIXES = (".txt", ".md", ".py", ".rst")  # of the files that are read in a folder, in any case


def moves_of_rings() -> bytes:
    """The text to learn when no other is named, 94 KB: where the blocks of 2 to 16 ranks are in each round."""
    return "".join(
        f"{P} ranks, round {t}: rank {r} has block {(r - t) % P} and sends it to rank {(r + 1) % P}.\n"
        for P in range(2, 17)
        for t in range(P)
        for r in range(P)
    ).encode()


def text_files(folder: Path) -> list[Path]:
    """The text files of a folder and of those in it, by name: no empty ones, no hidden names.

    Raises OSError when a file or a folder cannot be read: a link that leads nowhere, no right to enter.
    """

    def refuse(error: OSError) -> None:
        raise error

    named = sorted(Path(at, name) for at, _, names in os.walk(folder, onerror=refuse) for name in names)
    shown = (p for p in named if not any(part.startswith(".") for part in p.relative_to(folder).parts))
    return [p for p in shown if p.suffix.lower() in SUFFIXES and p.stat().st_size and p.is_file()]


def open_text(path: Path | None) -> np.ndarray:
    """The bytes of a file, on disk; or of the `text_files` of a folder, joined in memory; or else `moves_of_rings`.

    Raises ValueError when there is no such file, one that cannot be read, or no byte in it.
    """
    if path is None:
        return np.frombuffer(moves_of_rings(), np.uint8)
    try:
        expect(path.exists(), f"{path} does not exist", "a text file, or a folder of them")
        files = text_files(path) if path.is_dir() else [path] if path.stat().st_size else []
        parts = [np.memmap(file, np.uint8, "r") for file in files]
    except OSError as error:
        raise ValueError(f"{error.filename or path} cannot be read: {error.strerror}") from None
    expect(parts, f"{path} holds no text", f"a file with bytes in it, or {', '.join(SUFFIXES)} files")
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def starts(length: int, step: int, batch: int, seq_len: int) -> Tensor:
    """Where the sequences of a step begin: (batch,). Raises ValueError when the text is too short for one."""
    expect(length > seq_len, f"a text of {length} bytes for sequences of {seq_len} tokens", f"{seq_len + 1} at least")
    return torch.randint(length - seq_len, (batch,), generator=torch.Generator().manual_seed(step))


def read_batch(
    text: np.ndarray, step: int, batch: int, seq_len: int, layout: str, dp: tuple[int, int], cp: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor]:
    """This rank's tokens (batch / dp, C), labels (batch / dp, C) and positions (C,); dp and cp are (index, size).

    Raises ValueError when batch is not a multiple of dp, and as `starts` and `positions` do.
    """
    expect(batch % dp[1] == 0, f"a batch of {batch} sequences for {dp[1]} rings", "a multiple")
    mine = starts(len(text), step, batch, seq_len).chunk(dp[1])[dp[0]]
    at = positions(layout, seq_len, *cp)
    places = (mine[:, None] + at).numpy()  # (batch / dp, C)
    tokens, labels = (torch.from_numpy(text[at].astype(np.int64)) for at in (places, places + 1))
    return tokens, labels, at
