"""One colour for each K/V block, in every picture, notebook and table."""

import os
import sys

# Block j of the keys and values has colour j wherever it is shown; block 8 has colour 0 again. The first six are from
# Okabe and Ito, and colour-blind readers can tell them apart. All are legible on a light and on a dark page.
BLOCK_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#B8A800", "#808080")


def colour(block: int) -> str:
    """The colour of K/V block `block`."""
    return BLOCK_COLOURS[block % len(BLOCK_COLOURS)]


def ink_on(background: str) -> str:
    """White or dark ink, whichever stands out more from a background "#RRGGBB" (contrast as in WCAG 2)."""
    shares = (part / 255 for part in bytes.fromhex(background[1:]))
    red, green, blue = (x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in shares)
    is_dark = 0.2126 * red + 0.7152 * green + 0.0722 * blue < 0.208  # there both inks have a contrast of 4.1
    return "#FFFFFF" if is_dark else "#1B1F24"


def paint(block: int, text: str) -> str:
    """`text` in the colour of a K/V block on a terminal; plain text anywhere else, and where NO_COLOR is set."""
    if not sys.stdout.isatty() or "NO_COLOR" in os.environ:
        return text
    return f"\033[1;38;2;{';'.join(map(str, bytes.fromhex(colour(block)[1:])))}m{text}\033[0m"
