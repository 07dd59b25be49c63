"""The reward of models that see n and 4n trajectories, on tasks they never saw, beside the learner that they imitate.

Drawn from bench/results/in_context_rl.json.

    $ python -m bench.in_context_rl        # trains again
    $ python -m figures.in_context_rl
"""

from pathlib import Path

from bench import record
from bench.in_context_rl import ARMS, BEST, CLONING, LEARNER, RUNS, TRAJECTORY, rewards
from figures import FOLDER
from ringlab.support import drawing

ALT = (
    "A chart of the mean reward of a pull in each of 16 trajectories on new tasks. Behaviour cloning stays at 0.5. The "
    "other three begin at about 0.55. The models with a context of n = 4 and of 16 trajectories are level up to "
    "trajectory 4. Then the shorter context falls behind: it ends at 0.79. The longer one, from a ring of 4, ends "
    "at 0.84, and Thompson sampling, from which both learned, at 0.86. The best arm gives 0.91."
)
LOOK = {  # colour (not that of a block: these are players), line style, marker
    BEST: (drawing.MUTED, (0, (1, 1.6)), ""),
    LEARNER: (drawing.INK, (0, (5, 2)), ""),
    "4n, ring of 4": ("#8C1D40", "-", "o"),
    "n, one process": ("#D79BBB", "-", "s"),
    CLONING: (drawing.MUTED, "-", "^"),
}


def draw() -> drawing.Picture:
    """The mean reward by trajectory; bars: the standard deviation over the seeds."""
    results = record.load("in_context_rl")
    n, seeds = results["trajectories"], len(results["seeds"])
    figure, page = drawing.canvas(1000, 620, ALT)
    drawing.write(
        page, 20, 34, "In-context reinforcement learning: n and 4n trajectories", size=drawing.TITLE, weight="bold"
    )
    on, what = results["machine"], f"{ARMS}-armed bandits, {TRAJECTORY} pulls in a trajectory, n = {n}"
    said = f"{what}, {results['tasks']} new tasks, {seeds} seeds   {on['cores']} cores, {on['date'][:10]}"
    drawing.write(page, 20, 65, said, color=drawing.MUTED)
    ax = figure.add_axes((0.075, 0.235, 0.905, 0.62), facecolor=drawing.PAGE)
    for i, (player, (colour, dashes, marker)) in enumerate(LOOK.items()):
        seen = rewards(results, player)  # (seeds, trajectories)
        at = range(1, seen.shape[1] + 1)
        bars = {"capsize": 3, "elinewidth": 1.2} if player in RUNS else {"elinewidth": 0}
        spread = seen.std(dim=0, correction=0)
        ax.errorbar(at, seen.mean(dim=0), spread, color=colour, ls=dashes, marker=marker, lw=2.2, ms=6, **bars)
        x, y = 75 + 320 * (i % 3), 556 + 30 * (i // 3)
        page.plot([x, x + 50], [y, y], color=colour, ls=dashes, marker=marker, lw=2.2, ms=6)
        drawing.write(page, x + 60, y, player)
    ax.axvline(n + 0.5, color=drawing.MUTED, lw=1.2)
    ax.text(n + 0.65, 0.47, "from here on the shorter context loses the first pulls", fontsize=0.72 * drawing.TEXT)
    drawing.plain(ax)
    ax.set_ylim(0.44, 0.95)
    ax.set_xticks(range(1, 4 * n + 1))
    ax.set_xlabel("trajectory", fontsize=0.72 * drawing.TEXT, color=drawing.INK)
    ax.set_ylabel("mean reward of a pull", fontsize=0.72 * drawing.TEXT, color=drawing.INK)
    return figure


def save(folder: Path = FOLDER) -> None:
    """Write in_context_rl.svg."""
    drawing.save(draw(), "in_context_rl", folder)


if __name__ == "__main__":
    save()
