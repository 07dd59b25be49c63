"""One colour for each K/V block, in every picture, notebook and table. A reader of the ring may skip this file."""

import os
import sys

# Block j of the keys and values has colour j wherever it is shown; block 8 has colour 0 again. The first six are from
# Okabe and Ito, and colour-blind readers can tell them apart. All are legible on a light and on a dark page.
BLOCK_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#B8A800", "#808080")


def _parts(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


def ink_on(background: str) -> str:
    """White or dark ink, whichever stands out more from a background "#RRGGBB" (contrast as in WCAG 2)."""

    def luminance(colour: str) -> float:
        shares = (part / 255 for part in _parts(colour))
        linear = [share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2] + 0.05

    white, dark = "#FFFFFF", "#1B1F24"
    return white if luminance(white) / luminance(background) > luminance(background) / luminance(dark) else dark


def paint(block: int, text: str) -> str:
    """`text` in the colour of a K/V block on a terminal; plain text anywhere else, and where NO_COLOR is set."""
    if not sys.stdout.isatty() or "NO_COLOR" in os.environ:
        return text
    red, green, blue = _parts(BLOCK_COLOURS[block % len(BLOCK_COLOURS)])
    return f"\033[1;38;2;{red};{green};{blue}m{text}\033[0m"
