"""Renew the measured numbers of bench/README.md from the results in bench/results.

    $ python -m bench.pages

The sentences are written by hand. Here they stand once more, as far as a number needs words around it to be found, with
each number in «». A sentence that changes on a page must change here too: the command says which words it cannot find.
"""

import re
import sys
from collections.abc import Iterator
from statistics import geometric_mean
from typing import Any

from bench import (
    against_peers,
    generation,
    longest_training,
    loss_curves,
    masked_rings,
    record,
    ring_vs_full,
    training_speed,
)

NUMBER = r"(\d+(?:[,.]\d+)*(?:e-\d+)?)"
PAGES = [record.ROOT / "bench/README.md"]


def ring_to_learn_from() -> Iterator[str]:
    results = record.load("ring_vs_full")
    memory, speed = results["memory"], ring_vs_full.speed(results, 2, ring_vs_full.RING)
    chunks, process = (
        max(row[peak] for row in memory["rows"]) / memory["chunk_bytes"]
        for peak in ("peak_bytes", "peak_bytes_as_it_comes")
    )
    worlds = "«{}», «{}» or «{}» ranks alike".format(*(row["world_size"] for row in memory["rows"][1:]))
    yield f"Two ranks, S = «{results['seq_len']:,}», float32"
    yield f"«{speed:.2f}» of the speed of blockwise attention"
    yield f"| `ring_attn.py` | «{speed:.2f}» | blockwise"
    yield f"| «{chunks:.2f}» chunks, with {worlds} |"
    yield f"at most «{chunks:.2f}» chunks of tensors alive, with {worlds}"
    yield f"up to «{process:.1f}» chunks"


def trainable_ring() -> Iterator[str]:
    results = record.load("against_peers")
    lengths = sorted({row["seq_len"] for row in results["rows"]})
    yield f"float32, S ≥ «{8192:,}»"

    def from_length(shortest: int, **wanted: Any) -> list[float]:
        long = [S for S in lengths if shortest <= S]
        return [speed for S in long for speed in against_peers.speeds(results, seq_len=S, **wanted)]

    of_two, of_memory = [], []
    for what, case, ring, in_memory in (
        ("forward", against_peers.FORWARD, against_peers.FULL, against_peers.MEMORY),
        ("causal forward, zigzag", against_peers.CAUSAL, against_peers.ZIGZAG, against_peers.ZIGZAG_MEMORY),
        ("causal forward and backward, zigzag", against_peers.TRAIN, against_peers.ZIGZAG, against_peers.ZIGZAG_MEMORY),
    ):
        cells = [
            min(from_length(8192, case=case, method=each, world_size=P, dtype="float32"))
            for P in (2, 4)
            for each in (ring, in_memory)
        ]
        of_two.append(cells[0])
        of_memory.append(cells[1])
        yield f"| {what} | {' | '.join(f'«{cell:.2f}»' for cell in cells)} |"
    yield f"| the trainable ring | «{min(of_two):.2f}» to «{max(of_two):.2f}» |"
    yield f"| the same in shared memory | «{min(of_memory):.2f}» to «{max(of_memory):.2f}» |"
    shared, messages = (  # in float32 and in bfloat16
        [against_peers.over_peer(results, against_peers.TORCH, dtype, shared=each) for dtype in against_peers.DTYPES]
        for each in (True, False)
    )
    yield f"training, with «{lengths[0]:,}» to «{lengths[-1]:,}» tokens"
    for blocks, speeds in (("travel as messages", messages), ("stay in shared memory", shared)):
        wide, narrow = map(geometric_mean, speeds)
        yield f"blocks {blocks} | «{wide:.2f}» | «{narrow:.2f}» |"
    yield f"the slowest case has «{min(map(min, shared)):.2f}» of the loop's speed"
    yield f"at least | «{min(against_peers.over_peer(results, against_peers.OWN, 'float32')):.1f}» |"
    for P, words in ((2, "two ranks"), (4, "four ranks")):
        train = {"case": against_peers.TRAIN, "method": against_peers.ZIGZAG_MEMORY, "world_size": P, "seq_len": 2048}
        wide, narrow = (against_peers.speeds(results, dtype=dtype, **train)[0] for dtype in against_peers.DTYPES)
        yield f"| {words} | «{wide:.2f}» | «{narrow:.2f}» |"
    striped = from_length(2048, method=against_peers.STRIPED_MEMORY)
    yield f"Striped chunks reach «{min(striped):.2f}» to «{max(striped):.2f}» (S ≥ 2,048)"
    memory = results["memory"]
    chunk = 4 * memory["heads"] * memory["chunk"] * memory["head_dim"]  # bytes
    most = [
        max(max(row["peak_bytes"]) for row in memory["rows"] if row["shared"] == shared) for shared in (False, True)
    ]
    for before, peak in zip(("attention in one process", "the same"), most, strict=True):
        yield f"{before} | «{peak / chunk:.1f}» chunks, in training |"


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
    one, ring, memory, loop = (getattr(training_speed, name) for name in ("ONE", "RING", "MEMORY", "TORCH"))
    for P in (2, 4):
        (peaks,) = (row["peak_bytes"] for row in results["rows"] if row["world_size"] == P)
        alone, *speeds = (training_speed.speed(results, method, P) for method in (one, ring, memory, loop))
        cells = [f"«{each / alone:.2f}»" for each in speeds] + [f"«{peaks[it] / 1e6:.1f}» MB" for it in (ring, one)]
        yield f"| {P} | {' | '.join(cells)} |"


def documents_and_windows() -> Iterator[str]:
    results = record.load("masked_rings")
    worlds = results["worlds"]
    for layouts, words in (
        (("contiguous", "zigzag"), "contiguous or zigzag chunks reach"),
        (("striped",), "Striped chunks need hops and reach"),
    ):
        speeds = [
            masked_rings.speed(results, P, f"{masked_rings.DOCUMENTS}, {layout}", which)
            for P in worlds
            for layout in layouts
            for which in masked_rings.PASSES
        ]
        yield f"{words} «{min(speeds):.2f}» to «{max(speeds):.2f}»"
    window, S = f"{masked_rings.WINDOW}, contiguous", results["seq_len"]
    costs = [masked_rings.cost(results, P, window, which) for P in worlds for which in masked_rings.PASSES]
    share = sum(masked_rings.pairs(masked_rings.cases(worlds[0], S)[window][0])) / S**2
    yield f"leaves «{100 * share:.1f}»% of the pairs"
    yield f"In contiguous chunks it takes «{min(costs):.2f}» to «{max(costs):.2f}» times this share"
    kernel = [masked_rings.cost(results, worlds[-1], "one by one", which) for which in masked_rings.PASSES]
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


MEASURED = (ring_to_learn_from, trainable_ring, whole_model, documents_and_windows, new_token)


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
