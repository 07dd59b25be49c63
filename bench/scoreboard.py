"""A planner that the world has graded: times that others measured, beside the times that this planner predicts.

    error       predicted / measured - 1; of a speed, its inverse is a time
    interval    of a kind of row: measured / predicted of nine in ten, as a normal distribution of few rows has it
    a kind      attention, a step or a prefill; best kernels or a framework; inside a host or over hosts
    left out    a publisher's rows, predicted with constants and intervals of the other publishers' rows only

A question of which way wins: two ways, or layouts, that one source measured on the same work. The planner is right if
it predicts the order, or if the loser is within 5 % of the winner.

The rows of published.json are of two sets, and each publisher is in one of them: "fitted", with which constants were
fitted, and "graded", with which none was. A row names who measured it and where it was printed, the level of its
kernels, and its GPU. A row with "apart" is not counted, and says why.

Shapes: numbers only.

It prints all, and writes ring_planner/errors.json: what ring-plan reads.

    $ python -m bench.scoreboard
    ...
    errors in %                                                       rows       median  nine in ten        worst
    ...
        attention, best kernels, one host                               52          5.1         15.8         47.3
    ...
        step, framework, hosts                                          17          3.0          9.8         11.9
    ...
        all times                                                      105          4.3         13.3         47.3
    ...
        apart: MooreThreads/SimuMax docs/b200/b200_release_v1.2_summar   7         28.1         46.0         46.0
    ...
    which way wins, or loses by less than 5 %: 67 of 71 right
    ...
    intervals of other publishers' rows hold for 70 of 81 rows

Source: every row says where it was printed.
"""

import json
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import combinations, groupby
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

from ring_planner.hidden_communication import AttentionLayer
from ring_planner.memory import step_bytes
from ring_planner.plan import ERRORS, kind_of
from ring_planner.presets import GIB, Model, gpu_named, model_named
from ring_planner.round_costs import FRAMEWORK, HOST_LATENCY, efficiency, realistic
from ring_planner.seconds import Pass, pass_of
from ring_planner.step import KERNELS, Step, step_seconds
from ring_planner.ways import Cluster

Row = dict[str, Any]

PUBLISHED = Path(__file__).with_name("published.json")
SETS = ("fitted", "graded")
PASSES = {"forward": (False,), "backward": (True,), "training": (False, True)}  # backward?
ITEMSIZE = {"bf16": 2, "fp16": 2, "fp32": 4, "fp8": 1}
BACKWARD = 0.88  # of the forward pass's FLOP/s, where one is not measured: the median of the kernels that have both
GRID = (1.0, 1.05, 1.1, 1.15, 1.2, 1.25, 1.3, 1.35, 1.4, 1.45, 1.5)  # of FRAMEWORK, to fit it
NEAR = 1.05  # a loser that is slower by less is no loser
T = (6.31, 2.92, 2.35, 2.13, 2.02, 1.94, 1.89, 1.86, 1.83, 1.81, 1.80, 1.78, 1.77, 1.76, 1.75)  # Student's, 5 % above
UNITS = {"ms": 1e3, "s": 1.0, "us": 1e6}
MEASURES = (*UNITS, "tokens_s_a_gpu", "peak_gib")  # measured_...


def layer_of(row: Row) -> AttentionLayer:
    """The attention of a row."""
    return AttentionLayer(row["heads"], row["kv_heads"], row["head_dim"], ITEMSIZE[row.get("dtype") or "bf16"])


def unlimited(
    flops: tuple[float, float], heads: float, tokens: float, multiprocessors: int, *, causal: bool
) -> tuple[float, float]:
    """FLOP/s of a kernel on infinitely many blocks, forward and backward, from those it reached on some."""
    reached = efficiency(heads, tokens, multiprocessors, causal=causal)
    return flops[0] / reached, flops[1] / reached


def kernel_flops(row: Row) -> tuple[float, float]:
    """FLOP/s of the kernel on infinitely many blocks, forward and backward. Not measured: see BACKWARD.

    It was measured under the row's mask on one device; we assume, with a device's share of the tokens and all heads. If
    then it would pass the GPU's peak, it was measured on more: its speed is taken as it is.
    """
    forward, backward, gpu = row["forward_flops"], row["backward_flops"], gpu_named(row["gpu"])
    measured = forward or backward / BACKWARD, backward or forward * BACKWARD
    heads, chunk = row["heads"] * (row.get("batch") or 1), row["seq_len"] / row["hosts"] / row["per_host"]
    long = unlimited(measured, heads, chunk, gpu.multiprocessors, causal=row["mask"] == "causal")
    return measured if max(long) > gpu.peak["bf16"] else long


def attention_seconds(row: Row) -> float:
    """Seconds of a row of attention."""
    forward, backward = kernel_flops(row)
    gpu, card = gpu_named(row["gpu"]), row.get("card") or math.inf
    nominal = Cluster(row["hosts"], row["per_host"], forward, row["link"], card, memory_bandwidth=row["hbm"])
    nominal = replace(nominal, backward_flops=backward, multiprocessors=gpu.multiprocessors)
    cluster = realistic(nominal, gpu.host_share, gpu.bandwidth_share)
    work = Pass(
        cluster,
        layer_of(row),
        chunk=row["seq_len"] / cluster.devices,
        mask=row["mask"],
        layout=row.get("layout") or "zigzag",
        batch=row.get("batch") or 1,
        ours=False,
    )
    year = KERNELS[row.get("kernels", "best")]
    split = row.get("inside") if row["way"] == "hybrid" else None
    return (FRAMEWORK[year] if year else 1.0) * sum(
        pass_of(row["way"], replace(work, backward=each), split) for each in PASSES[row["pass"]]
    )


def step_of(row: Row) -> Step:
    """The Step of a row of "steps" or "serving"."""
    gpu = gpu_named(row["gpu"])
    names = ("hosts", "per_host", "seq_len", "batch", "cp", "tp", "recompute", "linear_dtype", "way", "kernels", "loss")
    options: Row = {"ours": False, "eager": row.get("eager", False)}
    options |= {name: row[name] for name in names if row.get(name) is not None}
    task, named = "train" if "recompute" in row else "prefill", row["model"]
    model = model_named(named) if isinstance(named, str) else Model(source=row["source"], **named)
    return Step(model, gpu, task=task, **options)


@dataclass(frozen=True)
class Grade:
    """What was measured, and what was predicted for it."""

    section: str
    row: Row
    what: str  # a name of MEASURES

    @property
    def measured(self) -> float:
        return self.row[f"measured_{self.what}"]

    @cached_property
    def predicted(self) -> float:
        """In the unit of what was measured."""
        if self.what == "peak_gib":
            return sum(step_bytes(step_of(self.row)).values()) / GIB
        return self.in_unit(self.seconds())

    def in_unit(self, seconds: float) -> float:
        """Seconds in the unit of what was measured."""
        return UNITS[self.what] * seconds if self.what in UNITS else step_of(self.row).tokens / seconds

    @property
    def year(self) -> int | None:
        """That of FRAMEWORK, for a step that several GPUs share."""
        return step_of(self.row).year if self.section == "steps" else None

    def seconds(self, framework: Mapping[int, float] = FRAMEWORK) -> float:
        """Seconds that are predicted, with another FRAMEWORK than that which was fitted."""
        row = self.row
        if self.section == "attention":
            return attention_seconds(row)
        if "megabytes" in row:
            gpu = gpu_named(row["gpu"])
            return HOST_LATENCY + 1e6 * row["megabytes"] / (gpu.host_share * gpu.host_bandwidth)
        terms = step_seconds(step_of(row))
        times = framework[self.year] / FRAMEWORK[self.year] if self.year else 1.0
        return sum(terms.values()) + (times - 1) * terms["attention"]

    def ratio(self, framework: Mapping[int, float] = FRAMEWORK) -> float:
        """Measured over predicted seconds."""
        seconds = self.seconds(framework)
        own = self.measured / UNITS[self.what] if self.what in UNITS else step_of(self.row).tokens / self.measured
        return own / seconds

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1

    @property
    def publisher(self) -> str:
        """Who measured it."""
        return self.row["source"].split(",")[0].split()[0].split("/")[0]

    @property
    def kind(self) -> str:
        """The kind of row whose errors count for a question like it."""
        if "megabytes" in self.row:
            return "message"
        section = {"attention": "attention", "steps": "step", "serving": "prefill"}[self.section]
        return kind_of(section, self.row.get("kernels", "best"), self.row["hosts"])

    @property
    def name(self) -> str:
        """The case in one line."""
        row = self.row
        if self.section == "attention":
            split, gpus = row.get("inside") if row["way"] == "hybrid" else None, row["hosts"] * row["per_host"]
            way = f"{row['way']} {gpus // split} x {split}" if split else row["way"]
            heads, tokens = f"{row['heads']}/{row['kv_heads']}", f"{row['seq_len'] / 1024:g}K"
            size = f"{row['gpu']} x {gpus}"
            return f"{size:<9} {tokens:>5} {heads:>6} {row['pass']:<8} {row.get('layout') or 'zigzag':<10} {way}"
        gpus = f"{row['hosts'] * row['per_host']} GPUs" if row.get("hosts") else None
        shared = [f"{name.upper()} {row[name]}" for name in ("cp", "tp") if row.get(name)]
        model = step_of(row).model.name if row.get("model") else None
        words = model, row.get("message"), gpus, *shared, row.get("recompute"), row.get("linear_dtype")
        return ", ".join(str(each) for each in words if each)


def grades(*sets: str, apart: bool = False) -> list[Grade]:
    """A grade for each measured number of these sets (none: of all); with `apart`, of the rows that are counted apart.
    Set by set, in each the attention, then the steps."""
    content = json.loads(PUBLISHED.read_text())
    return [
        Grade(section, row, what)
        for which in sets or SETS
        for section in ("attention", "steps", "serving")
        for row in content[section]
        for what in MEASURES
        if row["set"] == which and row.get(f"measured_{what}") is not None and ("apart" in row) == apart
    ]


def times(marked: Iterable[Grade]) -> list[Grade]:
    """Those of a time or a speed."""
    return [grade for grade in marked if grade.what != "peak_gib"]


def summary(errors: Sequence[float]) -> dict[str, float]:
    """The median of the errors, the one that nine in ten do not pass, and the worst."""
    sizes = sorted(map(abs, errors))
    return {"median": median(sizes), "nine in ten": sizes[math.ceil(0.9 * len(sizes)) - 1], "worst": sizes[-1]}


def same_work(grade: Grade) -> str:
    """What two rows share that differ in the way, or in the layout, only."""
    work = ("source", "gpu", "hosts", "per_host", "heads", "kv_heads", "head_dim", "batch", "seq_len", "mask", "pass")
    return json.dumps([grade.row.get(name) for name in work])


def questions(marked: Sequence[Grade]) -> list[tuple[Grade, Grade, bool]]:
    """Pairs of ways or layouts for the same work, the faster first, and is the planner right?"""
    of_attention, answers = [grade for grade in marked if grade.section == "attention"], []
    for _, group in groupby(sorted(of_attention, key=same_work), same_work):
        for pair in combinations(group, 2):
            fast, slow = sorted(pair, key=lambda grade: grade.measured)
            if fast.name != slow.name:
                right = fast.predicted < slow.predicted or slow.measured <= NEAR * fast.measured
                answers.append((fast, slow, right))
    return answers


def interval(ratios: Sequence[float]) -> tuple[float, float]:
    """Where nine in ten further ratios lie: a normal distribution of the logarithms, known from these few rows."""
    logs, n = [math.log(each) for each in ratios], len(ratios)
    half = T[min(n - 2, len(T) - 1)] * stdev(logs) * math.sqrt(1 + 1 / n) if n > 1 else math.inf
    half = max(half, math.log(NEAR))
    return math.exp(mean(logs) - half), math.exp(mean(logs) + half)


def intervals(marked: Sequence[Grade], ratio: Callable[[Grade], float]) -> dict[str, Row]:
    """By kind of row: how many rows there are, the interval of their ratios, and how many are of each GPU. A single
    row has none."""
    found = {}
    for kind in sorted({grade.kind for grade in marked}):
        ratios = [ratio(grade) for grade in marked if grade.kind == kind]
        if len(ratios) > 1:
            low, high = interval(ratios)
            gpus = Counter(sorted(gpu_named(grade.row["gpu"]).name for grade in marked if grade.kind == kind))
            found[kind] = {"rows": len(ratios), "low": round(low, 3), "high": round(high, 3), "gpus": gpus}
    return found


def fitted(marked: Sequence[Grade]) -> dict[int, float]:
    """FRAMEWORK with the smallest mean of |log(measured / predicted)| over the steps of its year, or over all steps
    where no row is of that year."""

    def off(rows: Sequence[Grade], times: float) -> float:
        return mean(abs(math.log(grade.ratio(dict.fromkeys(FRAMEWORK, times)))) for grade in rows)

    shared = [grade for grade in marked if grade.year]
    of_year = {year: [grade for grade in shared if grade.year == year] or shared for year in FRAMEWORK}
    return {year: min(GRID, key=lambda x: off(rows, x)) for year, rows in of_year.items()}


def left_out(marked: Sequence[Grade]) -> list[tuple[Grade, float, Row | None]]:
    """Of each row: its ratio, and the interval of its kind, both from the rows of all other publishers."""
    found = []
    for publisher in dict.fromkeys(grade.publisher for grade in marked):
        others = [grade for grade in marked if grade.publisher != publisher]
        framework = fitted(others)
        known = intervals(others, partial(Grade.ratio, framework=framework))
        own = [grade for grade in marked if grade.publisher == publisher]
        found += [(grade, grade.ratio(framework), known.get(grade.kind)) for grade in own]
    return found


def show_errors(name: str, errors: Sequence[float]) -> None:
    seen = " ".join(f"{100 * value:12.1f}" for value in summary(errors).values())
    print(f"    {name[:62]:<62}{len(errors):>4} {seen}")


def show(marked: Sequence[Grade]) -> None:
    """Print measured and predicted numbers, by source."""
    for source, group in groupby(marked, lambda grade: grade.row["source"]):
        print(source)
        for grade in group:
            unit = {"tokens_s_a_gpu": "tokens/s", "peak_gib": "GiB"}.get(grade.what, grade.what)
            numbers = " ".join(f"{x:10.4g}" if x < 1e4 else f"{x:10,.0f}" for x in (grade.measured, grade.predicted))
            print(f"    {grade.name:<66} {numbers} {unit:<8} {100 * grade.error:+6.1f} %")


def main() -> int:
    marked, apart = grades(), grades(apart=True)
    show([*marked, *apart])
    print(f"errors in %{'rows':>59}       median  nine in ten        worst")
    for kind in sorted({grade.kind for grade in times(marked)}):
        show_errors(kind, [grade.error for grade in times(marked) if grade.kind == kind])
    show_errors("all times", [grade.error for grade in times(marked)])
    worst = max(times(marked), key=lambda grade: abs(grade.error))
    print(f"        the worst: {' '.join(worst.name.split())}: {worst.row.get('note', 'no reason is known')}")
    show_errors("memory", [grade.error for grade in marked if grade.what == "peak_gib"])
    for source in dict.fromkeys(grade.row["source"] for grade in apart):
        show_errors(f"apart: {source}", [grade.error for grade in apart if grade.row["source"] == source])
    answers = questions(marked)
    print(f"which way wins, or loses by less than 5 %: {sum(right for *_, right in answers)} of {len(answers)} right")
    for fast, slow, right in answers:
        if not right:
            print(f"    measured: {fast.name.strip()} is faster than {slow.name.strip()}")
    out = [(ratio, known) for _, ratio, known in left_out(times(marked)) if known]
    held = sum(known["low"] <= ratio <= known["high"] for ratio, known in out)
    print(f"intervals of other publishers' rows hold for {held} of {len(out)} rows")
    ERRORS.write_text(json.dumps(intervals(times(marked), Grade.ratio), indent=1) + "\n")
    errors = summary([grade.error for grade in times(marked)])
    return 0 if errors["median"] <= 0.08 and errors["nine in ten"] <= 0.25 and held >= 0.85 * len(out) else 1


if __name__ == "__main__":
    sys.exit(main())
