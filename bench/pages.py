"""Write what was measured into its pages, each block between two comments: all results into bench/results/README.md,
some of their numbers into bench/README.md.

$ python -m bench.pages
"""

import re
from statistics import geometric_mean
from typing import Any

from bench import record, speed
from bench.record import BENCHES

PAGE = record.ROOT / "bench/README.md"
PEERS = {  # a row of the full ring's table: its case, and the ring
    "forward": (speed.FORWARD, speed.FULL),
    "causal forward, zigzag": (speed.CAUSAL, speed.ZIGZAG),
    "causal forward and backward, zigzag": (speed.TRAIN, speed.ZIGZAG),
}


def peers(shortest: int, **wanted: Any) -> list[float]:
    """Speeds as a share of the limit, of all lengths from `shortest` on."""
    results = record.load("against_peers")
    every = sorted({row["seq_len"] for row in results["rows"] if shortest <= row["seq_len"]})
    return [share for S in every for share in speed.speeds(results, seq_len=S, **wanted)]


def slowest() -> dict[str, list[float]]:
    """The slowest case from 8,192 tokens on: of 2 ranks, and of 4."""
    float32 = {"dtype": "float32"}
    return {
        row: [min(peers(8192, case=case, method=ring, world_size=P, **float32)) for P in (2, 4)]
        for row, (case, ring) in PEERS.items()
    }


def how_fast() -> str:
    own, peer = record.load("ring_vs_full"), record.load("against_peers")["memory"]
    memory, speeds = own["memory"], [of_two for of_two, _ in slowest().values()]
    alive, kept = (
        max(row[peak] for row in memory["rows"]) / memory["chunk_bytes"]
        for peak in ("peak_bytes", "peak_bytes_as_it_comes")
    )
    worlds = "{}, {} or {}".format(*(row["world_size"] for row in memory["rows"][1:]))
    chunk = 4 * peer["heads"] * peer["chunk"] * peer["head_dim"]  # bytes
    most = max(max(row["peak_bytes"]) for row in peer["rows"])
    learned = f"{alive:.2f} chunks alive with {worlds} ranks, {kept:.1f} with what the allocator keeps"
    fused = f"{min(speeds):.2f} to {max(speeds):.2f}", "PyTorch's fused attention"
    rows = [
        ["`ring_attn.py`", f"{speed.speed_of_ring(own, 2, speed.RING):.2f}", "blockwise attention", learned],
        ["the full ring", *fused, f"{most / chunk:.1f} chunks, in training"],
    ]
    return record.grid("<ring | speed | <as a share of, in one process | <memory of a rank", rows)


def trainable_ring() -> str:
    rows = [[name, *(f"{cell:.2f}" for cell in cells)] for name, cells in slowest().items()]
    striped = [f"{min(peers(2048, method=speed.STRIPED, world_size=P)):.2f}" for P in (2, 4)]
    rows.append(["causal forward, striped, both dtypes, S ≥ 2,048", *striped])
    return record.grid("< | two ranks | four ranks", rows)


def against_others() -> str:
    results = record.load("against_peers")
    of = [speed.over_peer(results, speed.TORCH, it) for it in speed.DTYPES]
    each = (f"{geometric_mean(speeds):.2f} ({min(speeds):.2f})" for speeds in of)
    own = min(speed.over_peer(results, speed.OWN, "float32"))
    rows = [["PyTorch's own context-parallel loop", *each], ["`ring_attn.py`, at least", f"{own:.1f}", ""]]
    return record.grid("< | float32 | bfloat16", rows)


BLOCKS = (how_fast, trainable_ring, against_others)


def renewed(text: str) -> str:
    """bench/README.md with each table made anew. Raises ValueError when it has no place for one."""
    return filled(text, {block.__name__: block() for block in BLOCKS})


def of_results(text: str) -> str:
    """bench/results/README.md with the heading and the tables of all results made anew; new ones at its end."""
    tables = {name: bench.tables for name, bench in BENCHES.items()}
    for name in sorted(tables):
        if not (record.FOLDER / f"{name}.json").exists():
            continue
        results = record.load(name)
        parts = [record.heading(results), *tables[name](results)]
        blocks = {f"{name} {i}": part for i, part in enumerate(parts)}
        if f"<!-- {name} 0 -->" not in text:
            text += f"\n## {name}\n" + "".join(f"\n<!-- {block} -->\n<!-- / -->\n" for block in blocks)
        text = filled(text, blocks)
    return text


def filled(text: str, blocks: dict[str, str]) -> str:
    """The text with each block in its place. Raises ValueError when it has no place for one."""
    for name, block in blocks.items():
        place = re.compile(rf"(<!-- {name} -->\n).*?(<!-- / -->)", re.S)
        if not place.search(text):
            raise ValueError(f"the page has no <!-- {name} --> ... <!-- / -->; expected one for each block")
        text = place.sub(lambda found, block=block: f"{found[1]}{block}\n{found[2]}", text)
    return text


def write() -> None:
    for page, anew in ((PAGE, renewed), (record.FOLDER / "README.md", of_results)):
        page.write_text(anew(page.read_text()))


if __name__ == "__main__":
    write()
