"""Renew the measured numbers of bench/README.md from the results in bench/results.

    $ python -m bench.pages

The sentences are written by hand. Here they stand once more, as far as a number needs words around it to be found, with
each number in «». A sentence that changes on a page must change here too: the command says which words it cannot find.
"""

import re
import sys
from collections.abc import Iterator
from statistics import geometric_mean

from bench import (
    against_peers,
    generation,
    longest_training,
    loss_curves,
    masked_rings,
    max_context,
    record,
    shared_memory,
    training_speed,
)

NUMBER = r"(\d+(?:[,.]\d+)*(?:e-\d+)?)"
EVERY = [(dtype, case) for dtype in shared_memory.DTYPES for case in shared_memory.CASES]
PAGES = [record.ROOT / "bench/README.md"]


def ring_to_learn_from() -> Iterator[str]:
    results = record.load("ring_vs_full")
    (run,) = (run for run in results["speed"]["runs"] if run["world_size"] == 2)
    memory = results["memory"]
    chunks, process = (
        max(row[peak] for row in memory["rows"]) / memory["chunk_bytes"]
        for peak in ("peak_bytes", "peak_bytes_as_it_comes")
    )
    worlds = "«{}», «{}» or «{}» ranks alike".format(*(row["world_size"] for row in memory["rows"][1:]))
    yield f"Two ranks, S = «{results['speed']['seq_len']:,}», float32"
    yield f"«{run['rows'][0]['ratio']:.2f}» of the speed of blockwise attention"
    yield f"| `ring_attn.py` | «{run['rows'][0]['ratio']:.2f}» | blockwise"
    yield f"| «{chunks:.2f}» chunks, with {worlds} |"
    yield f"at most «{chunks:.2f}» chunks of tensors alive, with {worlds}"
    yield f"up to «{process:.1f}» chunks"


def trainable_ring() -> Iterator[str]:
    results = record.load("against_peers")
    shortest = 8192
    yield f"float32, S ≥ «{shortest:,}»"

    def least(case: str, ring: str, world_size: int) -> float:
        return min(
            row["speed"]
            for row in results["speed"]["rows"]
            if (row["case"], row["method"], row["world_size"], row["dtype"]) == (case, ring, world_size, "float32")
            and row["seq_len"] >= shortest
        )

    of_two, of_memory = [], []
    for what, case, ring, in_memory in (
        ("forward", against_peers.FORWARD, against_peers.FULL, against_peers.MEMORY),
        ("causal forward, zigzag", against_peers.CAUSAL, against_peers.ZIGZAG, against_peers.ZIGZAG_MEMORY),
        ("causal forward and backward, zigzag", against_peers.TRAIN, against_peers.ZIGZAG, against_peers.ZIGZAG_MEMORY),
    ):
        cells = [least(case, each, P) for P in (2, 4) for each in (ring, in_memory)]
        of_two.append(cells[0])
        of_memory.append(cells[1])
        yield f"| {what} | {' | '.join(f'«{cell:.2f}»' for cell in cells)} |"
    yield f"| the trainable ring | «{min(of_two):.2f}» to «{max(of_two):.2f}» |"
    yield f"| the same in shared memory | «{min(of_memory):.2f}» to «{max(of_memory):.2f}» |"
    over_torch = [
        ratio
        for dtype in against_peers.DTYPES
        for ratio in against_peers.over_peer(results, against_peers.TORCH, dtype, shared=True)
    ]
    yield f"cases of «{results['speed']['lengths'][0]:,}» to «{results['speed']['lengths'][-1]:,}» tokens"
    yield f"is «{geometric_mean(over_torch):.2f}» times as fast as PyTorch's own context-parallel loop"
    yield f"and at least «{min(over_torch):.2f}» times"
    wide, narrow = (
        geometric_mean(against_peers.over_peer(results, against_peers.TORCH, dtype)) for dtype in against_peers.DTYPES
    )
    yield f"With messages it is «{wide:.2f}» times as fast as that loop in float32, «{narrow:.2f}» times in bfloat16"
    yield f"at least «{min(against_peers.over_peer(results, against_peers.OWN, 'float32')):.1f}» times as fast as"
    for P, words in ((2, "two ranks"), (4, "four")):
        short = {"world_size": P, "seq_len": 2048}
        train = {"case": against_peers.TRAIN, "method": against_peers.ZIGZAG_MEMORY}
        wide, narrow = (
            against_peers.speeds(results, dtype=dtype, **short, **train)[0] for dtype in against_peers.DTYPES
        )
        yield f"«{wide:.2f}» of the limit on {words} in float32, and «{narrow:.2f}» in bfloat16"
    striped = [
        row["speed"]
        for row in results["speed"]["rows"]
        if row["method"] == against_peers.STRIPED_MEMORY and row["seq_len"] >= 2048
    ]
    yield f"Striped chunks reach «{min(striped):.2f}» to «{max(striped):.2f}» (S ≥ 2,048)"
    memory = results["memory"]
    chunk = 4 * memory["heads"] * memory["chunk"] * memory["head_dim"]  # bytes
    most = [
        max(max(row["peak_bytes"]) for row in memory["rows"] if row["shared"] == shared) for shared in (False, True)
    ]
    yield f"raining takes «{most[0] / chunk:.1f}» chunks"
    yield f"in shared memory «{most[1] / chunk:.1f}»"
    for before, peak in zip(("attention in one process", "the same"), most, strict=True):
        yield f"{before} | «{peak / chunk:.1f}» chunks, in training |"


def on_one_host() -> Iterator[str]:
    results = record.load("shared_memory")
    steps = [(P, S, dtype, case) for P in results["worlds"] for S in results["lengths"] for dtype, case in EVERY]
    memory, loop, messages = shared_memory.MEMORY, shared_memory.LOOP, shared_memory.MESSAGES
    over_loop, over_messages = (
        [shared_memory.ratio(results, *step, memory, over) for step in steps] for over in (loop, messages)
    )
    yield f"«{results['lengths'][0]}» to «{results['lengths'][-1]:,}» tokens on 2 or 4 ranks"
    yield f"In the geometric mean of «{len(steps)}» cases, the ring in shared memory is"
    yield f"in shared memory is «{geometric_mean(over_loop):.2f}» times as fast as that loop"
    yield f"that loop and «{geometric_mean(over_messages):.2f}» times as fast as the ring with messages"
    of_loop = [1 / x for x, step in zip(over_loop, steps, strict=True) if step[:2] == (4, 256)]
    yield f"With 4 ranks of 64 tokens, it takes «{min(of_loop):.2f}» to «{max(of_loop):.2f}» of the loop's time"
    yield f"It is slower than the loop in «{sum(x < 1 for x in over_loop)}» of the cases"


def papers_claims() -> Iterator[str]:
    results = record.load("overlap_threshold")
    (fast, slow), megabyte = results["knees"], 1e6
    yield f"Over «{fast['rate'] / megabyte:.0f}» MB/s the ring waits for no message"
    yield f"once chunks have «{fast['measured']:,.0f}» tokens, over «{slow['rate'] / megabyte:.0f}» MB/s"
    yield f"once they have «{slow['measured']:,.0f}»."
    yield f"of the same run predict «{fast['predicted']:,.0f}» and «{slow['predicted']:,.0f}»"
    beyond = [100 * row["overhead"] for row in results["rows"] if row["hidden"] > 0.99]
    yield f"still takes «{min(beyond):.0f}» to «{max(beyond):.0f}» % longer"

    results = record.load("max_context")
    ring, (alone,) = (max_context.lengths(results, method) for method in ("ring", "blockwise"))
    yield f"8 ranks train on «{ring[-1] / ring[0]:.2f}» times the sequence of one rank"
    yield f"That is «{ring[-1] / alone:.2f}» times the sequence of fused attention"


def whole_model() -> Iterator[str]:
    off = {run: each.max() for run, each in loss_curves.differences(record.load("loss_curves")).items()}
    yield f"The largest difference is «{max(off['ring of 4'], off['2 x 2, dp x cp']):.1e}» of the loss"
    yield f"off by one rounding error differs by «{off[loss_curves.ROUNDED]:.1e}»"
    yield f"A ring in bfloat16 differs by «{off[loss_curves.BF16]:.1e}»"

    results = record.load("longest_training")
    yield f"sequence that trains with «{results['budget'] // 2**20}» MiB a rank"
    for again, row, words in (
        (False, "all activations kept", "the ring of 4 reaches"),
        (True, "activation checkpointing", "nothing is free, and it reaches"),
    ):
        naive, one, rings = (longest_training.lengths(results, way, again) for way in ("naive", "blockwise", "ring"))
        yield f"| {row} | {' | '.join(f'«{S:,}»' for S in (*naive, *one, *rings))} |"
        yield f"{words} «{rings[-1] / one[0]:.2f}» times as far"
    most = max(abs(row["chunk"] / row["predicted_chunk"] - 1) for row in results["rows"])
    yield f"predicts every length to «{100 * most:.1f}» %"

    results = record.load("training_speed")
    peaks = {(row["method"], row["world_size"]): f"«{row['peak_bytes'] / 1e6:.1f}» MB" for row in results["rows"]}
    one, ring, memory, loop = (getattr(training_speed, name) for name in ("ONE", "RING", "MEMORY", "TORCH"))
    for P in (2, 4):
        alone, *speeds = (training_speed.speed(results, method, P) for method in (one, ring, memory, loop))
        ratios = " | ".join(f"«{each / alone:.2f}»" for each in speeds)
        yield f"| {P} | {ratios} | {peaks[ring, P]} | {peaks[one, P]} |"


def documents_and_windows() -> Iterator[str]:
    results = record.load("masked_rings")
    worlds = results["worlds"]
    rows = [row for P in worlds for row in masked_rings.rows_of(results, P, masked_rings.DOCUMENTS)]
    for striped, words in ((False, "contiguous or zigzag chunks reach"), (True, "Striped chunks need hops and reach")):
        mine = [row for row in rows if (row["layout"] == "striped") == striped]
        speeds = [masked_rings.speed(results, row, which) for row in mine for which in masked_rings.PASSES]
        yield f"{words} «{min(speeds):.2f}» to «{max(speeds):.2f}»"
    windows = [masked_rings.rows_of(results, P, masked_rings.WINDOW)[0] for P in worlds]
    costs = [masked_rings.cost(results, row, which) for row in windows for which in masked_rings.PASSES]
    yield f"leaves «{100 * sum(windows[0]['pairs']) / results['seq_len'] ** 2:.1f}»% of the pairs"
    yield f"In contiguous chunks it takes «{min(costs):.2f}» to «{max(costs):.2f}» times this share"
    kernel = [masked_rings.cost_one_by_one(results, worlds[-1], which) for which in masked_rings.PASSES]
    yield f"the documents one by one take «{min(kernel):.2f}» times their share or more"


def new_token() -> Iterator[str]:
    results = record.load("generation")
    row = results["rows"][-1]
    one, merge, ring = (
        generation.milliseconds(results, way, 4)[-1] for way in (generation.ONE, generation.MERGE, generation.RING)
    )
    yield f"«{row['world_size']}» ranks, a context of «{row['context']:,}» tokens"
    yield f"gives «{row['bytes'][generation.MERGE]:,}» bytes to the merge"
    yield f"would send «{row['bytes'][generation.RING]:,}» bytes in a ring"
    yield f"The ring takes «{ring / merge:.0f}» times as long as the merge"
    yield f"merge takes «{merge / one:.1f}» times as long as one process"


MEASURED = (
    ring_to_learn_from,
    trainable_ring,
    on_one_host,
    papers_claims,
    whole_model,
    documents_and_windows,
    new_token,
)


def renewed(texts: list[str]) -> list[str]:
    """The texts with the numbers of the results, wherever the lines of a sentence are broken.

    Raises ValueError when no text has the words around a number.
    """
    for said in (sentence for sentences in MEASURED for sentence in sentences()):
        words = [r"\s+".join(map(re.escape, part.split(" "))) for part in re.split("«.*?»", said)]
        numbers, pattern = re.findall("«(.*?)»", said), re.compile(NUMBER.join(f"({part})" for part in words))
        if not any(map(pattern.search, texts)):
            raise ValueError(f"no page has these words: {said}; expected them on a page, or not in bench/pages.py")

        def with_numbers(found: re.Match, numbers: list[str] = numbers) -> str:
            return "".join(numbers[i // 2] if i % 2 else part for i, part in enumerate(found.groups()))

        texts = [pattern.sub(with_numbers, text) for text in texts]
    return texts


def main() -> int:
    for page, text in zip(PAGES, renewed([page.read_text() for page in PAGES]), strict=True):
        page.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
