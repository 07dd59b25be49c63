"""A few new tokens over a long cache: what a GPU sends if K and V travel or if Q does, and which is faster, measured.

The bytes are counted by ringlab/planning/pass_q_or_kv.py. The times are those of Yang et al. 2025 (arXiv 2411.01783v3),
table 4: Llama 3 405B on 4 hosts of 8 H100.

    $ python -m figures.pass_q
"""

from pathlib import Path

from figures import FOLDER
from ringlab.planning.pass_q_or_kv import HOSTS, MEASURED, ON_A_GPU, TOKENS, reached, sent_bytes, share_for_keys
from ringlab.support import drawing

ALT = (
    "Two panels against the share of new tokens among 128,000, on logarithmic axes from 1 % to 100 %. Left, the bytes "
    "that a GPU sends in a layer: a level line for K and V at 49 megabytes, and rising lines for the queries alone, "
    "which meet it at 12.5 %, and for queries and partial results, which meet it at 6.2 % with partial results in 16 "
    "bits and at 4.1 % in float32. Right, the measured time with pass-KV over the time with pass-Q: 1.14 at 1 %, 1 "
    "near 5 %, below 1 for all larger shares. The model's share is 2.9 %."
)
KEYS, QUERIES, HOME = "#8C1D40", "#B0568A", drawing.INK  # not those of blocks: these are ways
SHARES = [1.1**i / 100 for i in range(49)] + [1.0]
TEXT = 0.72 * drawing.TEXT
DASHED = (0, (4, 2.5))
TICKS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1)


def sent(share: float, partial: int = 2) -> tuple[float, float, float]:
    """Megabytes that a GPU sends in a layer: K and V; the queries; the queries and the partial results."""
    keys, queries, home = sent_bytes(ON_A_GPU, share * TOKENS, (1 - share) * TOKENS, HOSTS, partial)
    return keys / 1e6, queries / 1e6, (queries + home) / 1e6


def draw() -> drawing.Picture:
    """A panel for the bytes of both ways, and one for the ratio of their times."""
    figure, page = drawing.canvas(1000, 600, ALT)
    title = "Few new tokens over a long cache: the queries are less to send than K and V"
    drawing.write(page, 20, 34, title, size=drawing.TITLE, weight="bold")
    what = f"Llama 3 405B, {TOKENS:,} tokens in all, {HOSTS} hosts of 8 H100, bf16"
    by = "left: counted   right: measured by Yang et al. 2025, table 4"
    drawing.write(page, 20, 65, f"{what}   {by}", color=drawing.MUTED)

    left, right = (figure.add_axes((x, 0.285, 0.405, 0.5), facecolor=drawing.PAGE) for x in (0.075, 0.575))
    keys = sent(0.01)[0]
    left.plot([0.01, 1], [keys] * 2, color=KEYS, lw=2.2)
    lines = {
        "queries": (QUERIES, "-", 1, 2, 2 * ON_A_GPU.kv_heads / ON_A_GPU.heads),
        "queries, and partial results in 16 bits": (
            HOME,
            "-",
            2,
            2,
            share_for_keys(ON_A_GPU, TOKENS, HOSTS, partial=2),
        ),
        "the same in float32": (HOME, DASHED, 2, 4, share_for_keys(ON_A_GPU, TOKENS, HOSTS)),
    }
    for i, (name, (colour, style, which, partial, meets)) in enumerate(lines.items()):
        left.plot(SHARES, [sent(share, partial)[which] for share in SHARES], color=colour, lw=1.8, ls=style)
        left.plot([meets], [keys], "o", color=colour, ms=9, mec=drawing.PAGE, mew=1.2)
        page.plot([75, 111], [514 + 26 * i] * 2, color=colour, lw=1.8, ls=style)
        drawing.write(page, 123, 514 + 26 * i, f"{name}: as many bytes at {meets:.1%}")
    page.plot([75, 111], [488] * 2, color=KEYS, lw=2.2)
    drawing.write(page, 123, 488, "K and V")

    for share, ratio in ((new / TOKENS, by_keys / by_queries) for new, by_keys, by_queries in MEASURED):
        right.plot([share], [ratio], "o", color=KEYS if ratio < 1 else HOME, ms=9, mec=drawing.PAGE, mew=1.2)
    right.axhline(1, color=drawing.MUTED, lw=1.2)
    as_long = share_for_keys(ON_A_GPU, TOKENS, HOSTS, *reached(), partial=2)
    right.axvline(as_long, color=drawing.MUTED, lw=1.2, ls=DASHED)
    for x, y, colour, words in (
        (0.1, 1.015, HOME, "above: pass-Q is faster"),
        (0.1, 0.975, KEYS, "below: pass-KV is faster"),
    ):
        right.text(x, y, words, fontsize=TEXT, color=colour, weight="bold")
    page.plot([575, 611], [488] * 2, color=drawing.MUTED, lw=1.2, ls=DASHED)
    drawing.write(page, 623, 488, f"the model, with table 5: as long at {as_long:.1%}")

    for ax, name in ((left, "MB that a GPU sends in a layer"), (right, "time with pass-KV / time with pass-Q")):
        drawing.plain(ax)
        ax.set(xscale="log", xlim=(0.0092, 1.09))
        ax.set_xticks(TICKS, [f"{share:.0%}" for share in TICKS])
        ax.minorticks_off()
        ax.set_title(name, fontsize=TEXT, color=drawing.INK, loc="left", weight="bold")
        ax.set_xlabel("share of new tokens", fontsize=TEXT, color=drawing.INK)
    left.set(yscale="log")
    left.set_yticks([3, 10, 30, 100, 300, 1000], ["3", "10", "30", "100", "300", "1,000"])
    left.minorticks_off()
    right.set(ylim=(0.87, 1.17))
    return figure


def save(folder: Path = FOLDER) -> None:
    """Write pass_q.svg."""
    drawing.save(draw(), "pass_q", folder)


if __name__ == "__main__":
    save()
