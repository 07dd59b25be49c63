"""The speed of the flash ring and of other rings, as a share of what one process reaches with fused attention.

Drawn from bench/results/against_peers.json, float32.

    $ python -m bench.against_peers        # measures again
    $ python -m figures.speed
"""

from pathlib import Path

from bench import against_peers, record
from bench.against_peers import CONTIGUOUS, FULL, MEMORY, OWN, PIP, STRIPED_MEMORY, TORCH, ZIGZAG, ZIGZAG_MEMORY
from figures import FOLDER
from ringlab.support import drawing

ALT = (
    "Bars in two rows, for 2 and for 4 ranks on 2 cores, and three columns: forward, causal forward, causal forward "
    "and backward, each for five sequence lengths. A line at 1 is fused attention in one process with both cores. The "
    "flash ring and torch's context-parallel loop come near the line as the sequence grows, the ring in shared memory "
    "first; ring_attn.py stays at half of it or somewhat more, and ring-attention-pytorch at a quarter to a third."
)
COLOURS = {  # not those of blocks: these are methods. What is not here is in the table only
    MEMORY: drawing.INK,
    ZIGZAG_MEMORY: drawing.INK,
    STRIPED_MEMORY: "#4D5D6E",
    FULL: "#7A8998",
    ZIGZAG: "#7A8998",
    CONTIGUOUS: "#A5B1BD",
    TORCH: "#B0568A",
    OWN: "#CBD2D9",
    PIP: "#DDC3D2",
}
NAMES = {
    MEMORY: "flash ring in shared memory (causal: zigzag)",
    STRIPED_MEMORY: "in shared memory, striped",
    FULL: "flash ring, messages (causal: zigzag)",
    CONTIGUOUS: "messages, contiguous",
    **{name: name for name in (TORCH, OWN, PIP)},
}


def draw() -> drawing.Picture:
    """A panel for each number of ranks and case; a group of bars for each S."""
    results = record.load("against_peers")
    speed = results["speed"]
    figure, page = drawing.canvas(1000, 820, ALT)
    drawing.write(page, 20, 34, "Speed as a share of the limit", size=drawing.TITLE, weight="bold")
    machine = f"{results['machine']['cores']} cores, float32, B = 1, H = {speed['heads']}, D = {speed['head_dim']}"
    line = f"limit: fused attention in one process with all cores, measured in turn; {machine}"
    drawing.write(page, 20, 66, line, color=drawing.MUTED)

    for row, P in enumerate(speed["worlds"]):
        for column, (case, rings) in enumerate(against_peers.CASES.items()):
            ax = figure.add_axes((0.06 + 0.315 * column, 0.57 - 0.345 * row, 0.295, 0.28), facecolor=drawing.PAGE)
            drawn = [name for name in rings if name in COLOURS]
            width = 0.84 / len(drawn)
            for i, name in enumerate(drawn):
                seen = against_peers.speeds(results, dtype="float32", world_size=P, case=case, method=name)
                left = [group + (i - len(drawn) / 2) * width for group in range(len(seen))]
                ax.bar(left, seen, width * 0.92, align="edge", color=COLOURS[name])
            ax.axhline(1, color=drawing.INK, lw=1.2)
            drawing.plain(ax)
            ax.grid(axis="x", visible=False)
            ax.set_xticks(range(len(speed["lengths"])), [f"{S:,}" for S in speed["lengths"]])
            ax.set_xlim(-0.5, len(speed["lengths"]) - 0.5)
            ax.set_ylim(0, 1.25)
            ax.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0", "", "½", "", "1"] if column == 0 else [""] * 5)
            ax.set_title(f"{case}, P = {P}", fontsize=0.72 * drawing.TEXT, color=drawing.INK, loc="left", weight="bold")
            if row == 1:
                ax.set_xlabel("S, tokens", fontsize=0.72 * drawing.TEXT, color=drawing.INK)

    for i, (name, label) in enumerate(NAMES.items()):
        x, y = 60 + 430 * (i % 2), 700 + 28 * (i // 2)
        drawing.box(page, x, y - 8, 22, 16, fc=COLOURS[name])
        drawing.write(page, x + 32, y, label)
    return figure


def save(folder: Path = FOLDER) -> None:
    """Write speed.svg."""
    drawing.save(draw(), "speed", folder)


if __name__ == "__main__":
    save()
