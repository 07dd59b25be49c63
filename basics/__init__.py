"""What the ring is made of: attention in blocks, messages that do not deadlock, processes, a record of what they do."""

import os
import sys

# Block j of the keys and values has colour j wherever it is shown (after the last one they begin again). The first six
# are Okabe and Ito's, made to stay apart for colour-blind readers; all read on light and on dark.
BLOCK_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#B8A800", "#808080")


def paint(block: int, text: str) -> str:
    """`text` in the colour of a K/V block on a terminal, plain anywhere else (and where NO_COLOR is set)."""
    if not sys.stdout.isatty() or "NO_COLOR" in os.environ:
        return text
    red, green, blue = (int(BLOCK_COLOURS[block % len(BLOCK_COLOURS)][i : i + 2], 16) for i in (1, 3, 5))
    return f"\033[1;38;2;{red};{green};{blue}m{text}\033[0m"
