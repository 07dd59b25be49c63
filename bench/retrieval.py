"""Line retrieval with 1 x and with 4 x the context: which lines does a model find, by length of the text and by depth?

One rank's memory allows texts of 32 lines. A ring of 4 trains on texts of 128 lines, with the same memory on each rank:
as many tokens, and as many bytes kept for the backward pass (counted). Both take the same number of steps with the same
number of texts. Then both read new texts, also longer ones than they were trained on. Figure 3 of the paper, in small.
The first model also reads each text with its positions squeezed into those of 32 lines (Chen et al. 2023).

    $ python -m bench.retrieval            # all seeds
    $ python -m bench.retrieval --quick    # a minute: a quarter of the lines and ids, one seed, nothing is written
"""

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench import record
from ringlab.models.retrieval import IDS, VALUES, accuracy_by_depth, kept_by_a_step, train
from ringlab.support.processes import RankContext, launch

SQUEEZED = "1 x, positions squeezed"
RUNS = {"1 x, one process": 1, "4 x, ring of 4": 4, SQUEEZED: 1}  # ranks; each has as many tokens
SIZES = {"lines": 32, "ids": IDS, "seeds": [0, 1, 2], "steps": 400, "batch": 16, "questions": 4096}
QUICK = {"lines": 8, "ids": 64, "seeds": [0], "steps": 240, "batch": 16, "questions": 1024}


def lengths(lines: int) -> list[int]:
    """The numbers of lines that all models read: from what one rank trains on to twice what the ring does."""
    return [lines * 2**i for i in range(4)]


def work(context: RankContext, lines: int, steps: int, batch: int, seed: int, ids: int) -> Any:
    """On each rank: the weights, its losses, its tokens in a step, and the bytes that it keeps of them."""
    return *train(context, lines, steps, batch, seed, ids), *kept_by_a_step(context, lines, batch)


def run(step: str, *, lines: int, ids: int, steps: int, batch: int, questions: int, **_: Any) -> dict[str, Any]:
    """Train one model, "NAME, seed N", and let it read new texts."""
    name, _, seed = step.rpartition(", seed ")
    ranks = launch(work, RUNS[name], lines * RUNS[name], steps, batch, int(seed), ids)
    read = []
    for n in lengths(lines):
        squeeze = lines / n if name == SQUEEZED else 1.0
        read.append(accuracy_by_depth(ranks[0][0], n, 2 * questions // n, int(seed), ids, squeeze))
    return {
        "losses": torch.tensor([losses for _, losses, *_ in ranks]).mean(dim=0).tolist(),
        "tokens": [tokens for *_, tokens, _ in ranks],
        "kept_bytes": [kept for *_, kept in ranks],
        "accuracy": read,
    }


def measure(*, folder: Path = record.FOLDER, **sizes: Any) -> record.Results:
    """The whole bench, with a row for each model and seed."""
    machine = record.machine()
    steps = [f"{name}, seed {seed}" for seed in sizes["seeds"] for name in RUNS]
    found = record.in_steps("retrieval", sizes, steps, partial(run, **sizes), folder)
    rows = [
        {"run": step.rpartition(", seed ")[0], "seed": int(step.rpartition(" ")[2]), **row}
        for step, row in found.items()
    ]
    command, dtype = "python -m bench.retrieval", "float32"
    return {"command": command, "machine": machine, "dtype": dtype, **sizes, "rows": rows}


def accuracies(results: record.Results, name: str) -> torch.Tensor:
    """The share of right answers of a run: (seeds, lengths, depths)."""
    return torch.tensor([row["accuracy"] for row in results["rows"] if row["run"] == name], dtype=torch.float64)


def table(results: record.Results) -> str:
    """The results as a table in markdown."""
    lines = lengths(results["lines"])
    out = [
        "# Line retrieval with 1 x and with 4 x the context",
        "",
        record.heading(results),
        f"{results['steps']} steps with {results['batch']} texts each, seeds {results['seeds']}. Right answers in new "
        f"texts, in %: the mean over seeds, and the lowest and highest seed. A guess is right in {100 / VALUES:.0f} %.",
        "",
        "| model | tokens of a rank | kept for the backward pass | " + " | ".join(f"{n} lines" for n in lines) + " |",
        "| --- | ---: | ---: |" + " ---: |" * len(lines),
    ]
    for name in RUNS:
        row = next(row for row in results["rows"] if row["run"] == name)
        shares = 100 * accuracies(results, name).mean(dim=2)  # (seeds, lengths)
        cells = [f"{s.mean():.1f} ({s.min():.1f} to {s.max():.1f})" for s in shares.T]
        kept = f"{max(row['tokens']):,} | {max(row['kept_bytes']) / 2**20:.2f} MiB"
        out.append(f"| {name} | {kept} | {' | '.join(cells)} |")
    return "\n".join(out) + "\n"


def main(arguments: Sequence[str] = ()) -> int:
    if "--quick" in arguments:
        record.show_quick(measure, table, **QUICK)
    else:
        record.save("retrieval", measure(**SIZES), table)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
