"""The page of all counts of memory: its columns add up, its numbers are those of the code and of the measurements."""

import json
import re
from dataclasses import replace

from bench import max_context, memory
from ring_planner.hidden_communication import AttentionLayer
from ring_planner.memory import peak_bytes, peak_bytes_backward
from tests.commands import ROOT

PAGE = (ROOT / "docs/memory.md").read_text()
INPUTS = {"q", "its own K and V", "the gradient of the output"}
SINGLE, HALF = (AttentionLayer(heads=8, kv_heads=8, head_dim=64, itemsize=itemsize) for itemsize in (4, 2))
C = 2**16  # tokens of a chunk: so many that a tile of scores is nothing beside it
CHUNK = C * 8 * 64  # numbers


def columns(page: str) -> dict[str, dict[str, int]]:
    """The first table: by column, by row, how many chunks."""
    table = re.search(r"\| a rank holds.*?\n\n", page, re.S)[0]
    head, _, *rows = ([cell.strip(" *") for cell in line.split("|")[1:-1]] for line in table.split("\n") if line)
    return {name: {row[0]: int(row[i] or 0) for row in rows} for i, name in enumerate(head[1:], 1)}


def wrong_sums(page: str) -> set[str]:
    """The columns whose numbers do not add up to their last one."""
    return {name for name, column in columns(page).items() if sum(column.values()) != 2 * column["sum"]}


def result(name: str):
    return json.loads((ROOT / f"bench/results/{name}.json").read_text())


def said(letter: str) -> str:
    """What the second table says of a column."""
    return re.search(rf"^\| {letter} \|.*$", PAGE, re.M)[0]


def test_the_columns_add_up():
    assert wrong_sums(PAGE) == set()
    assert wrong_sums(PAGE.replace("| q | | 1 |", "| q | | 2 |")) == {"B"}


def test_the_example_is_what_the_code_counts():
    """A model with grouped queries in bfloat16; each row in bytes."""
    llama = AttentionLayer(heads=32, kv_heads=8, head_dim=128, itemsize=2)
    rows = re.findall(r"^\| .*\| \**([\d,]+)\**( \|)$", PAGE.split("## The table")[0], re.M)
    *parts, total = (int(number.replace(",", "")) for number, _ in rows)
    assert sum(parts) == total == peak_bytes_backward(llama, 131072 // 8) / 2**20
    assert peak_bytes_backward(replace(llama, kv_heads=32), 131072 // 8) / 2**30 == 2.75


def test_the_sums_are_those_of_the_code():
    sums = {name: column["sum"] for name, column in columns(PAGE).items()}
    size = {"heads": 8, "head_dim": 64}
    assert sums == {
        "A": memory.counted("ring", 4 * C, world_size=4, **size) / (4 * CHUNK),
        "B": sums["A"] + 3,
        "C": peak_bytes("ring", HALF, C, 8) / (2 * CHUNK),
        "D": 7,  # below
        "E": peak_bytes_backward(SINGLE, C) / (4 * CHUNK),
        "F": peak_bytes_backward(HALF, C) / (2 * CHUNK),
        "G": round(max_context.counted("ring", C, **size) / (4 * CHUNK)),
        "H": 13,  # below
    }


def test_the_measured_numbers_are_those_of_the_results():
    peers = result("against_peers")["memory"]
    chunk = 4 * peers["heads"] * peers["chunk"] * peers["head_dim"]
    forward, both = ([row["peak_bytes"][i] / chunk for row in peers["rows"] if not row["shared"]] for i in (0, 1))
    tile = max_context.SCORES / chunk
    shared = [max(row["peak_bytes"][i] for row in peers["rows"] if row["shared"]) / chunk for i in (0, 1)]
    assert f"| {shared[0]:.2f}, {shared[1]:.2f} |" in PAGE
    for most, columns_say, instead in ((shared[0], "D", 2 - 4), (shared[1], "H", 2 - 4 + 2 - 4 + 1)):
        assert 0 <= most - (columns(PAGE)[columns_say]["sum"] + instead) <= 1.5 * tile
    for letter, peaks in (("D", forward), ("H", both)):
        assert f"{max(peaks):.2f}" in said(letter)
        assert 0 <= max(peaks) - columns(PAGE)[letter]["sum"] <= 1.5 * tile
    ring = result("ring_vs_full")["memory"]
    alone = max(row["peak_bytes"] for row in ring["rows"]) / ring["chunk_bytes"]
    assert f"{alone:.2f} at most" in said("A")
    kept = max(row["peak_bytes_as_it_comes"] for row in ring["rows"]) / ring["chunk_bytes"]
    assert f"| {kept:.1f} |" in PAGE
    assert f"| {6 + ring['tile_bytes'] / ring['chunk_bytes']:g} |" in PAGE
    masked = result("masked_rings")
    whole = masked["peak_bytes"]["no mask, contiguous"] / masked["chunk_bytes"]
    assert f"{whole:.1f} chunks" in PAGE
    assert 14 <= whole <= 14 + 1.5 * tile


def test_the_other_numbers():
    assert "| 9 |" in PAGE
    assert round(max_context.counted("blockwise", C, heads=8, head_dim=64) / (4 * CHUNK)) == 9
    assert all(f"L + {chunks}" in PAGE for chunks in (1, 6, 22))  # of a layer: columns C and F, and its output alone
