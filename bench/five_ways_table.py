"""Five ways to share a sequence: measured times beside predicted times, and how good the predictions are."""

from itertools import combinations
from statistics import geometric_mean, mean, median

from bench import record
from bench.five_ways_predicted import FORWARD, ROTATIONS, TRAIN, Row, messages, peer, predicted, timed
from ringlab.planning.calibrate import wire
from ringlab.planning.ways import WAYS

NEAR = 0.15  # a good prediction is so near
NOISE = 0.05  # two ways whose times differ by a smaller share are equally fast


def cells(results: record.Results) -> list[tuple[Row, str]]:
    """(row, forward or training) of every cell. All ways are measured in each cell."""
    return [(row, which) for which in (FORWARD, TRAIN) for row in results["rows"]]


def errors(results: record.Results) -> list[float]:
    """Measured / predicted - 1, for each way in each cell."""
    return [
        median(timed(row, way, which)) / predicted(results, row, way, which) - 1
        for row, which in cells(results)
        for way in WAYS
    ]


def excess(results: record.Results, row: Row, which: str) -> float:
    """The measured time of the way with the smallest predicted time, over that of the fastest way, less 1."""
    measured = {way: median(timed(row, way, which)) for way in WAYS}
    advised = min(WAYS, key=lambda way: predicted(results, row, way, which))
    return measured[advised] / min(measured.values()) - 1


def pairs_in_order(results: record.Results) -> tuple[int, int]:
    """(pairs of ways predicted in the right order, pairs), for the pairs whose order is beyond noise.

    In such a pair one way was faster in all repetitions, and its median by more than NOISE.
    """
    right = of = 0
    for row, which in cells(results):
        for a, b in combinations(WAYS, 2):
            one, other = timed(row, a, which), timed(row, b, which)
            apart = max(one) < min(other) or max(other) < min(one)
            if apart and abs(median(one) - median(other)) > NOISE * min(median(one), median(other)):
                of += 1
                right += (predicted(results, row, a, which) < predicted(results, row, b, which)) == (
                    max(one) < min(other)
                )
    return right, of


def over_peers(results: record.Results) -> dict[str, list[float]]:
    """In every cell: the speed of each way, and of the fastest way, over the faster rotation of PyTorch's loop."""
    ratios: dict[str, list[float]] = {name: [] for name in (*WAYS, "fastest")}
    for row, which in cells(results):
        peers = min(median(timed(row, peer(rotation), which)) for rotation in ROTATIONS)
        mine = {way: median(timed(row, way, which)) for way in WAYS}
        for name, seconds in {**mine, "fastest": min(mine.values())}.items():
            ratios[name].append(peers / seconds)
    return ratios


def table(results: record.Results) -> str:
    """The results as tables in markdown."""
    shape = f"H = {results['heads']}, G = {results['kv_heads']}, D = {results['head_dim']}"
    wrong, (right, pairs) = errors(results), pairs_in_order(results)
    late = [excess(results, row, which) for row, which in cells(results)]
    lines = [
        "# Five ways to share a sequence, on two hosts with a slow link between them",
        "",
        record.heading(results),
        f"B = 1, {shape}, causal, zigzag. Two hosts: network namespaces, each with one core and one link. The ranks of "
        "a host share the core, so 2 or 4 ranks compute on each core at a time: the machine is oversubscribed. MB/s: "
        "what the link carries each way. Median seconds of 3 (S = 16,384) or more repetitions, in turn; in brackets "
        "measured over predicted. Predicted: modelled by ringlab.planning.seconds, from a calibration of the same "
        "hosts just before, by ringlab.planning.calibrate; five_ways_predicted.py adds what a shared core and gloo "
        "cost.",
        "",
        f"- Ways in cells: {len(wrong)}. Measured is within 15 % of predicted in "
        f"{mean(abs(error) <= NEAR for error in wrong):.0%} of them; half are within {median(map(abs, wrong)):.0%}.",
        "- The way that is predicted to be the fastest is the fastest one, or takes at most 5 % longer, in "
        f"{sum(share <= NOISE for share in late)} of {len(late)} cells (a mesh, a link, an S and a pass).",
        f"- Pairs of ways of which one was faster in all repetitions, and by more than 5 %: {right} of {pairs} are "
        "predicted in this order.",
    ]
    names = [*WAYS, *(peer(rotation) for rotation in ROTATIONS)]
    for which in (FORWARD, TRAIN):
        lines += ["", f"{which.capitalize()}{' (forward and backward)' * (which == TRAIN)}:", ""]
        lines += [
            f"| hosts x ranks | S | MB/s | {' | '.join(names)} |",
            f"| ---: | ---: | ---: |{' ---: |' * len(names)}",
        ]
        for row in results["rows"]:
            here = [f"{row['hosts']} x {row['per_host']}", f"{row['seq_len']:,}", f"{row['rate'] / 1e6:g}"]
            for name in names:
                seconds = median(timed(row, name, which))
                ratio = f" ({seconds / predicted(results, row, name, which):.2f})" if name in WAYS else ""
                here.append(f"{seconds:.3f}{ratio}")
            lines.append(f"| {' | '.join(here)} |")
    lines += ["", "Speed over the faster rotation of PyTorch's loop, in the same job, over all cells:", ""]
    lines += ["| | slowest cell | geometric mean |", "| --- | ---: | ---: |"]
    for name, ratios in over_peers(results).items():
        lines.append(f"| {name} | {min(ratios):.2f} | {geometric_mean(ratios):.2f} |")
    lines += ["", "Calibrations that the predictions are made from; all devices at once, MB/s of a device:", ""]
    lines += [
        "| hosts x ranks | MB/s | GFLOP/s of a rank | memory, GB/s | send inside | send between | all-gather "
        "| all-to-all | slowdown | took, s |",
        f"| ---: | ---: |{' ---: |' * 8}",
    ]
    for place in results["machines"]:
        machine = place["machine"]
        cluster = machine["cluster"]
        flops = " / ".join(f"{cluster[name] / 1e9:.1f}" for name in ("flops", "backward_flops"))
        kinds = (("send", "inside"), ("send", "between"), ("all-gather", "between"), ("all-to-all", "between"))
        here = [f"{place['hosts']} x {place['per_host']}", f"{place['rate'] / 1e6:g}", flops]
        here += [f"{cluster['memory_bandwidth'] / 1e9:.1f}"]
        here += [f"{wire(messages(machine, *kind))[1] / 1e6:.1f}" for kind in kinds]
        lines.append(f"| {' | '.join(here)} | {cluster['slowdown']:.2f} | {machine['made']['seconds']:.0f} |")
    return "\n".join(lines) + "\n"
