"""The same 100 steps of training on one process, in a ring, on a mesh, and in bfloat16: do the losses agree?

Every run is `ringlab.models.train` with the same text, the same batches and the same first weights. In float32 the runs
differ in the order of their sums only, so their losses may differ by rounding errors, and by what training makes of
these. How far is that? One more run on one process answers it: each of its weights starts off by one rounding error, up
or down. A mesh that computes the same as one process ends about as far off.

    $ python -m bench.loss_curves
"""

import json
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import torch
from torch import nn

from bench import record
from ringlab.models import train
from ringlab.support.processes import RankContext, launch

ONE, ROUNDED, BF16 = "one process", "one process, weights off by one rounding", "ring of 4, bf16"
RUNS = {  # the number of ranks, and the options
    ONE: (1, []),
    "ring of 4": (4, ["--cp", "4"]),
    "2 x 2, dp x cp": (4, ["--dp", "2", "--cp", "2"]),
    ROUNDED: (1, []),
    BF16: (4, ["--cp", "4", "--dtype", "bf16"]),
}
TEXT = Path(train.__file__).parent.parent / "ring"  # it changes with the code
SIZES = {"steps": 100, "seq_len": 256, "batch": 4, "layers": 2, "hidden": 64}


def off_by_one_rounding(model: nn.Module) -> None:
    """Move every weight to the next float32, up or down."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            up = torch.randint(2, weight.shape, generator=generator).bool()
            weight.copy_(torch.where(up, weight.nextafter(weight + 1), weight.nextafter(weight - 1)))


def run_rounded(context: RankContext, arguments: list[str]) -> None:
    """A run of `ringlab.models.train` whose weights start off by one rounding error."""
    shard = train.shard_weights

    def off_and_sharded(model: nn.Module, *args: Any) -> None:
        off_by_one_rounding(model)
        shard(model, *args)

    with mock.patch.object(train, "shard_weights", off_and_sharded):
        run(context, arguments)


def run(context: RankContext, arguments: list[str]) -> None:
    """One rank of `ringlab.models.train` with these options."""
    train.train(context, train.parse(arguments))


def losses(name: str, **sizes: int) -> list[float]:
    """The loss of every step of a run."""
    world_size, options = RUNS[name]
    options = [*options, f"--data={TEXT}", *(f"--{size.replace('_', '-')}={value}" for size, value in sizes.items())]
    with TemporaryDirectory() as folder:
        launch(run_rounded if name == ROUNDED else run, world_size, [*options, f"--out={folder}"])
        return [json.loads(line)["loss"] for line in Path(folder, "loss.jsonl").read_text().splitlines()]


def measure(**sizes: int) -> record.Results:
    """The whole bench, with a row for each run."""
    made = record.made("loss_curves", "float32 and bfloat16")
    found = record.in_steps("loss_curves", sizes, {name: (name,) for name in RUNS}, partial(losses, **sizes))
    rows = [{"run": name, "world_size": RUNS[name][0], "losses": each} for name, each in found.items()]
    return {**made, **sizes, "rows": rows}


def curves(results: record.Results) -> dict[str, torch.Tensor]:
    """The losses of each run, float64."""
    return {row["run"]: torch.tensor(row["losses"], dtype=torch.float64) for row in results["rows"]}


def differences(results: record.Results) -> dict[str, torch.Tensor]:
    """For each other run, how far its losses are from those of one process, as a share of them."""
    each = curves(results)
    return {name: (losses / each[ONE] - 1).abs() for name, losses in each.items() if name != ONE}


def table(results: record.Results) -> str:
    """The results as a table in markdown."""
    off, rows = differences(results), []
    for name, losses in curves(results).items():
        drift = [f"{off[name][:10].max():.1e}", f"{off[name].max():.1e}"] if name in off else ["", ""]
        rows.append([name, f"{losses[0]:.4f}", f"{losses[-1]:.4f}", *drift])
    return record.page(
        "The same losses on every mesh",
        results,
        f"{results['steps']} steps of `ringlab.models.train`: {results['layers']} layers, hidden {results['hidden']}, "
        f"{results['batch']} sequences of {results['seq_len']} tokens in a step, the project's own text. Difference: "
        "of the loss of a step from that of one process, as a share of it; the largest so far.",
        record.grid("<run | first loss | last loss | difference in steps 1 to 10 | in all steps", rows),
    )


if __name__ == "__main__":
    record.save("loss_curves", measure(**SIZES), table)
