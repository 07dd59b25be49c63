"""What moved since the committed results by more than the noise, on this machine or another.

    $ python -m bench.against_peers                       # or another bench, or all: make bench
    $ python -m bench.compare [--with FILE_OR_COMMIT]     # with HEAD's results where nothing is given

    x         log(seconds of the reference / seconds of the method) in each repetition. Both were measured in turn in
              the same run, so what slows both (a busy moment, another machine) is in no x
    interval  of the median of x: from the k-th smallest to the k-th largest, with the largest k that leaves 95 %
              (n repetitions: 1 - 2 P(fewer than k of n coins show heads)); all of them where n is 5 or less
    width     half of the interval, or of the median interval of the rows with as many repetitions if that is wider: a
              few repetitions may agree by chance
    noise     how far the median moves when nothing has changed. Of each run two are made: the first half of its
              repetitions and the second. In 95 % of the rows they differ by at most q widths; noise = q widths. Of the
              two runs the larger one counts. Fewer than three repetitions: unknown, and nothing moves
    moved     the two intervals have no number in common, and the medians differ by more than the noise

A half has fewer repetitions than a run, so the noise is rather too large. But a job may be slow from its start to its
end; halves do not see that. Keep a copy of the results, measure again and compare with the copy: what moves is noise.
Seconds themselves are compared on the same machine only, and only those of the references. Exit status: 0, whatever
moved, because a bench is no test; 2 where something cannot be compared.
"""

import argparse
import json
import subprocess
import sys
from math import comb, inf, isfinite
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bench import record

Key = tuple[str, str]  # what was measured; the method

LABELS = {"hosts": "hosts=", "per_host": "of ", "world_size": "P=", "rate": "bytes/s=", "dtype": "", "seq_len": "S="}
LABELS |= {"context": "S=", "case": ""}
NO_SIZES = ("command", "repetitions")  # may differ
ROUNDING = 1e-12  # of a difference of two logarithms, and more than that
MACHINE = ("system", "cores", "cpu", "torch")


class Run(NamedTuple):
    """What is compared of a run."""

    x: dict[Key, np.ndarray]  # of every repetition
    references: dict[str, float]  # median seconds, by what was measured
    sizes: dict[str, Any]  # both runs must have the same
    machine: dict[str, Any]


def read(bench: str, results: record.Results) -> Run:
    """The run behind these results. ValueError: they have another form."""
    x: dict[Key, np.ndarray] = {}
    references = {}
    try:
        for row in results["rows"]:  # methods that were measured in turn
            what = ", ".join(f"{sign}{row[name]}" for name, sign in LABELS.items() if name in row)
            base = row["seconds"][results["reference"]]
            references[what] = float(np.median(base))
            for method, seconds in row["seconds"].items():
                if len(seconds) != len(base) or (what, method) in x:
                    raise ValueError(f"{what}, {method}: {len(seconds)} repetitions beside {len(base)}, or there twice")
                if not seconds or not all(s > 0 and isfinite(s) for s in seconds):
                    raise ValueError(f"{what}, {method}: the seconds are {seconds}")
                x[what, method] = np.log(base) - np.log(seconds)
            del x[what, results["reference"]]  # it is 1
        # Lists, such as the numbers of ranks, are no sizes: they only say which rows there are.
        sizes = {name: s for name, s in results.items() if isinstance(s, int | float | str) and name not in NO_SIZES}
        return Run(x, references, sizes, {name: results["machine"].get(name) for name in MACHINE})
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        said = f"no {error}" if isinstance(error, KeyError) else error
        raise ValueError(f"{bench}: results of another form ({said}); measure both with the same code") from error


def interval(x: np.ndarray) -> tuple[float, float]:
    """Where the median of x lies, by its order statistics: see above."""
    n, ordered = len(x), np.sort(x)
    leaves_95 = [k for k in range(1, (n + 1) // 2 + 1) if 2 * sum(comb(n, i) for i in range(k)) <= 0.05 * 2**n]
    k = max(leaves_95, default=1)
    return float(ordered[k - 1]), float(ordered[n - k])


def noises(found: dict[Key, np.ndarray]) -> dict[Key, float]:
    """How far the median of each row moves when nothing has changed: see above. Infinity where that is unknown."""
    noise = dict.fromkeys(found, inf)
    for n in {len(x) for x in found.values() if len(x) > 2}:
        rows = {key: x for key, x in found.items() if len(x) == n}
        own = np.array([np.ptp(interval(x)) / 2 for x in rows.values()])
        width = np.maximum(own, np.median(own))
        halves = np.array([abs(np.median(x[: n // 2]) - np.median(x[n // 2 :])) for x in rows.values()])
        q = np.quantile(np.divide(halves, width, out=np.zeros(len(rows)), where=width > 0), 0.95)
        noise |= dict(zip(rows, (q * width + ROUNDING).tolist(), strict=True))
    return noise


class Row(NamedTuple):
    """A row that both runs have."""

    what: str
    method: str
    committed: float  # speed over that of the reference
    fresh: float
    noise: float  # as a share of the speed
    moved: str  # "up", "down" or ""


def compare(before: Run, after: Run) -> list[Row]:
    """The rows that both runs have."""
    noise_before, noise_after, rows = noises(before.x), noises(after.x), []
    for key in [key for key in before.x if key in after.x]:
        x, y = before.x[key], after.x[key]
        (x_low, x_high), (y_low, y_high) = interval(x), interval(y)
        noise, move = max(noise_before[key], noise_after[key]), float(np.median(y) - np.median(x))
        moved = (y_low > x_high or x_low > y_high) and abs(move) > noise
        direction = ("up" if move > 0 else "down") if moved else ""
        rows.append(Row(*key, *np.exp([np.median(x), np.median(y)]).tolist(), float(np.expm1(noise)), direction))
    return rows


def report(bench: str, committed: record.Results, fresh: record.Results) -> tuple[list[Row], str]:
    """The compared rows, and a text: how many moved, on which machines, and the rows that moved.

    Raises ValueError where a run has another form, or the runs have other sizes.
    """
    before, after = read(bench, committed), read(bench, fresh)
    if said := differences(before.sizes, after.sizes):
        raise ValueError(f"{bench}: other sizes ({said}); measure again with the sizes of the committed run")
    rows = compare(before, after)
    noise = ["unknown" if x == inf else f"{x:.1%}" for x in sorted(row.noise for row in rows)]
    text = f"{bench}: {moved(rows)}; noise {' to '.join(dict.fromkeys(noise[:1] + noise[-1:]))}"
    missing = [len(run.x) - len(rows) for run in (before, after)]
    if any(missing):
        text += f"; {missing[0]} only in the committed run, {missing[1]} only in this one"
    said = differences(before.machine, after.machine)
    if said or not before.machine["cpu"]:
        text += f"\n  another machine, or it is not known ({said or 'no cpu recorded'}): ratios may have moved with it"
    elif shares := [s / before.references[what] for what, s in after.references.items() if what in before.references]:
        text += f"\n  the same machine: the references took {np.median(shares):.2f} of their committed seconds"
    for row in rows:
        if row.moved:
            ratios = f"{row.committed:7.3f} -> {row.fresh:7.3f}  noise {row.noise:6.1%}"
            text += f"\n  {row.moved:4} {ratios}  {row.what}: {row.method}"
    return rows, text


def differences(before: dict[str, Any], after: dict[str, Any]) -> str:
    """Which fields differ, such as "heads 8 -> 4"."""
    fields = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    return ", ".join(f"{name} {before.get(name)} -> {after.get(name)}" for name in fields)


def moved(rows: list[Row]) -> str:
    """How many of these moved."""
    return f"{sum(row.moved != '' for row in rows)} of {len(rows)} moved by more than the noise"


def git(*words: str) -> subprocess.CompletedProcess[str]:
    """What git says about this project."""
    return subprocess.run(["git", *words], cwd=record.ROOT, capture_output=True, text=True, check=False)


def committed_results(given: str) -> dict[str, record.Results]:
    """Results by bench, of a file or of a commit. Raises ValueError where it is neither."""
    if Path(given).is_file():
        try:
            results = json.loads(Path(given).read_text())
            return {results["command"].removeprefix("python -m bench."): results}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{given} is no results file; expected the JSON that a bench writes") from error
    if git("rev-parse", "--verify", "--quiet", f"{given}^{{commit}}").returncode:
        raise ValueError(f"{given!r} is no file and no commit; expected --with FILE_OR_COMMIT, in a git checkout")
    shown = {path.stem: git("show", f"{given}:./bench/results/{path.name}") for path in record.FOLDER.glob("*.json")}
    return {bench: json.loads(each.stdout) for bench, each in shown.items() if each.returncode == 0}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.compare", description="What moved by more than the noise.")
    parser.add_argument("--with", dest="given", default="HEAD", metavar="FILE_OR_COMMIT", help="HEAD if left out")
    given = parser.parse_args(argv).given
    rows: list[Row] = []
    status = 0
    try:
        committed = committed_results(given)
    except (ValueError, OSError) as error:  # OSError: git is not installed
        print(error, file=sys.stderr)
        return 2
    for bench, before in sorted(committed.items()):
        try:
            if not record.FOLDER.joinpath(f"{bench}.json").exists():
                raise ValueError(f"{bench} has no results here; measure them: python -m bench.{bench}")
            if (fresh := record.load(bench)) == before:  # it was not measured again
                continue
            if "reference" not in fresh:
                raise ValueError(f"{bench} keeps no repetitions of methods in turn")
            more, text = report(bench, before, fresh)
            rows += more
            print(text)
        except ValueError as error:
            print(error, file=sys.stderr)
            status = 2
    print(moved(rows))
    return status


if __name__ == "__main__":
    sys.exit(main())
