"""In-context reinforcement learning with n and with 4n trajectories in the context: the return on tasks never seen.

One rank's memory allows a context of n = 4 trajectories. A ring of 4 trains on 4n = 16, with the same memory on each
rank. Both learn from the same histories. The shorter context takes 4 times as many steps, so that both learn from as
many pulls. Then they play new tasks for 16 trajectories; the shorter context always holds the last 4. Beside them:
Thompson sampling, from which both learned; behaviour cloning, which has no context; and the best arm. Table 5 of the
paper, in small.

    $ python -m bench.in_context_rl            # all seeds
    $ python -m bench.in_context_rl --quick    # less than a minute, one seed, nothing is written
"""

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench import record
from ringlab.models.in_context_rl import CONFIG, TRAJECTORY, choose, cloned, draw_tasks, play, thompson, train
from ringlab.models.transformer import Transformer
from ringlab.support.processes import launch

RUNS = {"n, one process": 1, "4n, ring of 4": 4}  # ranks; each has as many tokens
LEARNER, CLONING, BEST = "Thompson sampling", "behaviour cloning", "the best arm"
SIZES = {"trajectories": 4, "seeds": [0, 1, 2], "steps": 200, "batch": 32, "histories": 1024, "tasks": 128}
QUICK = {"trajectories": 2, "seeds": [0], "steps": 80, "batch": 32, "histories": 512, "tasks": 64}


def by_trajectory(expected: torch.Tensor) -> list[float]:
    """The mean expected reward of a pull in each trajectory, for the expected rewards (B, pulls)."""
    return expected.unflatten(1, (-1, TRAJECTORY)).mean(dim=(0, 2)).tolist()


def run(step: str, *, trajectories: int, steps: int, batch: int, histories: int, tasks: int, **_: Any) -> Any:
    """Train, or only play, and return the mean reward in each trajectory on new tasks: step is "NAME, seed N"."""
    name, _, seed = step.rpartition(", seed ")
    past_rng, rng = (np.random.default_rng([int(seed), i]) for i in range(2))
    pulls, new = 4 * trajectories * TRAJECTORY, draw_tasks(tasks, rng)
    if name == BEST:
        return by_trajectory(new.max(dim=1, keepdim=True).values.expand(-1, pulls))
    if name == LEARNER:
        return by_trajectory(play(partial(thompson, rng=rng), new, pulls, rng)[1])
    past, _ = play(partial(thompson, rng=past_rng), draw_tasks(histories, past_rng), pulls, past_rng)
    player = partial(cloned, past)
    if name in RUNS:
        window = RUNS[name] * trajectories * TRAJECTORY
        all_steps = steps * 4 // RUNS[name]
        weights, _ = launch(train, RUNS[name], past, window, all_steps, batch, int(seed))[0]
        model = Transformer(CONFIG)
        model.load_state_dict(weights)
        player = partial(choose, model, window)
    return by_trajectory(play(player, new, pulls, rng)[1])


def measure(*, folder: Path = record.FOLDER, **sizes: Any) -> record.Results:
    """The whole bench, with a row for each player and seed."""
    machine = record.machine()
    players = [*RUNS, LEARNER, CLONING, BEST]
    steps = [f"{name}, seed {seed}" for seed in sizes["seeds"] for name in players]
    found = record.in_steps("in_context_rl", sizes, steps, partial(run, **sizes), folder)
    rows = [
        {"player": step.rpartition(", seed ")[0], "seed": int(step.rpartition(" ")[2]), "reward": reward}
        for step, reward in found.items()
    ]
    command, dtype = "python -m bench.in_context_rl", "float32"
    return {"command": command, "machine": machine, "dtype": dtype, **sizes, "rows": rows}


def rewards(results: record.Results, player: str) -> torch.Tensor:
    """The mean reward of a pull: (seeds, trajectories)."""
    return torch.tensor([row["reward"] for row in results["rows"] if row["player"] == player], dtype=torch.float64)


def table(results: record.Results) -> str:
    """The results as a table in markdown."""
    n = results["trajectories"]
    out = [
        "# In-context reinforcement learning with n and with 4n trajectories in the context",
        "",
        record.heading(results),
        f"n = {n}, {results['batch']} histories a step; 4n takes {results['steps']} steps, n 4 times as many. "
        f"{results['tasks']} new tasks, seeds {results['seeds']}. The mean reward of a pull, and its standard "
        "deviation over the seeds.",
        "",
        f"| player | first trajectory | trajectory {n} | trajectory {4 * n} | all {4 * n} |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for player in (CLONING, *RUNS, LEARNER, BEST):
        seen = rewards(results, player)
        columns = [seen[:, 0], seen[:, n - 1], seen[:, -1], seen.mean(dim=1)]
        out.append(f"| {player} | {' | '.join(f'{x.mean():.3f} ± {x.std(correction=0):.3f}' for x in columns)} |")
    return "\n".join(out) + "\n"


def main(arguments: Sequence[str] = ()) -> int:
    if "--quick" in arguments:
        record.show_quick(measure, table, **QUICK)
    else:
        record.save("in_context_rl", measure(**SIZES), table)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
