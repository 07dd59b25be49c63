"""The picture of a plan: seconds of a sequence, and tokens/s of a GPU, against the length S, for several GPUs P.

The P GPUs may work on several sequences at once: seconds of a sequence are those of a step, divided by the sequences.
Every point is the fastest way that fits, as answers.py finds it. A line ends where nothing fits. All is modelled.

A reader may skip this file.

Before: answers.py. After: cost_model.py, the command that writes it.
Source: drawn from the numbers of whole_step.py, as all pictures here from what the code did.
"""

from dataclasses import replace

from ringlab.planning.answers import Answer, Wish, best
from ringlab.planning.whole_step import Step
from ringlab.support.extras import extra

with extra("plots", __name__):
    from ringlab.support import drawing

SHORTEST, LONGEST, LINES = 2**12, 2**21, 4  # tokens; numbers of GPUs
COLOURS = ("#8C1D40", "#B0568A", drawing.MUTED, drawing.INK)  # not those of blocks: these are numbers of GPUs
PANELS = (("seconds for each sequence, on all GPUs", 60), ("tokens/s of a GPU", 540))


def clusters(step: Step) -> list[Step]:
    """The step on its GPUs, on half of them, and so on: at most `LINES`, the smallest first."""
    found = [step]
    while len(found) < LINES:
        last = found[-1]
        if last.hosts % 2 == 0:
            found.append(replace(last, hosts=last.hosts // 2, cp=1, tp=1))
        elif last.hosts == 1 and last.per_host % 2 == 0:
            found.append(replace(last, per_host=last.per_host // 2, cp=1, tp=1))
        else:
            break
    return found[::-1]


def line(step: Step, wish: Wish) -> list[tuple[int, Answer]]:
    """(S, the fastest way that fits) for S in powers of two."""
    found, seq_len = [], SHORTEST
    while seq_len <= LONGEST:
        gpus = step.gpus
        asked = replace(wish, cp=wish.cp and min(wish.cp, gpus), tp=wish.tp and min(wish.tp, step.per_host))
        ranked = best(replace(step, seq_len=seq_len, cp=1, tp=1), asked)
        if not ranked:
            break
        found.append((seq_len, ranked[0]))
        seq_len *= 2
    return found


def each_seconds(answer: Answer) -> float:
    """Seconds for each sequence, when all GPUs work."""
    return answer.step.seq_len / (answer.speed * answer.step.gpus)


def tokens(number: int) -> str:
    """A power of two of tokens: 4K, 1M."""
    return f"{number // 2**20}M" if number >= 2**20 else f"{number // 2**10}K"


def words(step: Step, lines: dict[int, list[tuple[int, Answer]]]) -> str:
    """The picture in words."""
    said = [f"Modelled training steps of {step.model.name} on {step.gpu.name}: the fastest way that fits."]
    for gpus, points in lines.items():
        if points:
            S, answer = points[-1]
            speed = f"{answer.speed:,.0f} tokens/s each"
            said.append(f"{gpus} GPUs reach {tokens(S)} tokens, in {each_seconds(answer):.3g} s, {speed}.")
        else:
            said.append(f"On {gpus} GPUs nothing fits.")
    return " ".join(said)


def draw(step: Step, wish: Wish) -> drawing.Picture:
    """Two panels with a line for each number of GPUs, and a legend."""
    lines = {each.gpus: line(each, wish) for each in clusters(step)}
    figure, page = drawing.canvas(1000, 520, words(step, lines))
    title = f"{step.model.name} on {step.gpu.name}, batch {step.batch}: the fastest way that fits"
    drawing.write(page, 20, 34, title, size=drawing.TITLE, weight="bold")
    drawing.write(page, 20, 62, "modelled, not measured; a line ends where nothing fits", color=drawing.MUTED)
    shown = sorted({S for points in lines.values() for S, _ in points}) or [SHORTEST]
    for i, (name, left) in enumerate(PANELS):
        ax = figure.add_axes((left / 1000, 0.19, 0.41, 0.58), facecolor=drawing.PAGE)
        for colour, points in zip(COLOURS[-len(lines) :], lines.values(), strict=True):
            values = [answer.speed if i else each_seconds(answer) for _, answer in points]
            ax.plot([S for S, _ in points], values, "o-", color=colour, lw=2, ms=6)
        drawing.plain(ax)
        ax.set_xscale("log", base=2)
        ax.set_xticks(shown[::2], [tokens(S) for S in shown[::2]])
        if i:
            ax.set_ylim(bottom=0)
            ax.yaxis.set_major_formatter("{x:,.0f}")
        else:
            ax.set_yscale("log")
            ax.yaxis.set_major_formatter("{x:g}")
        ax.minorticks_off()
        ax.set_title(name, fontsize=0.72 * drawing.TEXT, color=drawing.INK, loc="left", weight="bold")
        drawing.write(page, left + 205, 455, "S, tokens of a sequence", ha="center", color=drawing.MUTED)
    for k, (colour, gpus) in enumerate(zip(COLOURS[-len(lines) :], lines, strict=True)):
        page.plot([60 + 200 * k, 96 + 200 * k], [490, 490], "o-", color=colour, lw=2, ms=6)
        drawing.write(page, 108 + 200 * k, 490, f"P = {gpus}" + ("" if lines[gpus] else ": nothing fits"))
    return figure
