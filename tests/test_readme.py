"""Every command of the README runs and prints what the README shows; every file it names is there."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from statistics import geometric_mean

import pytest

from bench import against_peers, max_context, record, utilisation
from tests.shown import check_shown

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()

# A block of commands: ```console, lines "$ command" followed by what it prints. The set-up and make blocks are ```bash:
# they are what runs these tests.
BLOCKS = re.findall(r"^```console\n(.*?)^```", README, re.M | re.S)
COMMANDS = [
    (match[1], match[2]) for block in BLOCKS for match in re.finditer(r"^\$ (.+)\n((?:(?!\$ ).*\n)*)", block, re.M)
]


def test_there_are_commands():
    assert len(COMMANDS) >= 3


@pytest.mark.parametrize(("command", "shown"), COMMANDS, ids=[command for command, _ in COMMANDS])
def test_a_command_prints_what_the_readme_shows(command, shown):
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        command,
        shell=True,
        cwd=ROOT,
        env=environment,
        text=True,
        capture_output=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    check_shown(shown, done.stdout)


def test_every_link_leads_somewhere():
    links = re.findall(r"(?:\]\(|src=\")(?!https?:|#)([^)#\"]+)", README)
    assert len(links) > 20
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_every_picture_has_alt_text_and_it_fits_on_two_screens():
    assert re.findall(r"!\[\]\(|<img(?![^>]*alt=)", README) == []
    assert len(README.splitlines()) <= 200


def test_the_measured_numbers_are_the_committed_ones():
    results = json.loads((ROOT / "bench/results/ring_vs_full.json").read_text())
    speed = results["speed"]["runs"][0]["rows"][0]["ratio"]
    memory = results["memory"]
    chunks, held = (
        max(row[peak] for row in memory["rows"]) / memory["chunk_bytes"]
        for peak in ("peak_bytes", "peak_bytes_as_it_comes")
    )
    assert f"{speed:.2f} of the speed of blockwise attention" in README
    assert f"{chunks:.2f} chunks of tensors alive" in README
    assert f"up to {held:.1f} chunks" in README


def test_the_numbers_of_the_flash_ring_are_the_committed_ones():
    results = record.load("against_peers")

    def least(case, ring, world_size):
        speeds = [
            row["speed"]
            for row in results["speed"]["rows"]
            if (row["case"], row["method"], row["world_size"], row["dtype"]) == (case, ring, world_size, "float32")
            and row["seq_len"] >= 8192
        ]
        return f"{min(speeds):.2f}"

    for what, case, ring in (
        ("forward", against_peers.FORWARD, against_peers.FULL),
        ("causal in zigzag", against_peers.CAUSAL, against_peers.ZIGZAG),
        ("forward and backward", against_peers.TRAIN, against_peers.ZIGZAG),
    ):
        assert f"{what} {least(case, ring, 2)} and {least(case, ring, 4)}" in README
    assert f"{geometric_mean(against_peers.over_peer(results, against_peers.TORCH, 'float32')):.2f} times" in README
    assert f"at least {min(against_peers.over_peer(results, against_peers.OWN, 'float32')):.1f} times" in README

    text = " ".join(README.split())
    short = {"dtype": "float32", "seq_len": 2048}
    ahead = [
        against_peers.speeds(results, **short, world_size=P, case=case, method=against_peers.TORCH)[0]
        / against_peers.speeds(results, **short, world_size=P, case=case, method=rings[0])[0]
        for case, rings in against_peers.CASES.items()
        for P in results["speed"]["worlds"]
    ]
    assert f"at S = 2048 PyTorch's loop is up to {100 * (max(ahead) - 1):.0f} % ahead" in text
    memory = results["memory"]
    chunk = 4 * memory["heads"] * memory["chunk"] * memory["head_dim"]  # bytes
    peak = max(max(row["peak_bytes"]) for row in memory["rows"]) / chunk
    assert f"Training takes {peak:.1f} chunks of memory" in text


def test_the_numbers_of_the_papers_claims_are_the_committed_ones():
    text = " ".join(README.split())
    knees = record.load("overlap_threshold")["knees"]
    for which, words in (("measured", "with chunks of {}"), ("predicted", "predicts {}")):
        assert words.format(" and ".join(f"{knee[which]:,.0f}" for knee in knees)) in text
    beyond = [100 * row["overhead"] for row in record.load("overlap_threshold")["rows"] if row["hidden"] > 0.99]
    assert f"still takes {min(beyond):.0f} to {max(beyond):.0f} % longer" in text

    results = record.load("max_context")
    ring, (alone,) = (max_context.lengths(results, method) for method in ("ring", "blockwise"))
    assert f"8 ranks train {ring[-1] / ring[0]:.2f} times the sequence of one rank" in text
    assert f"and {ring[-1] / alone:.2f} times that of fused attention" in text

    results = record.load("utilisation")
    ratios = [
        ring / alone
        for which in utilisation.PASSES
        for P in results["worlds"]
        for alone, ring in zip(
            *(utilisation.utilisations(results, of, which, P) for of in ("one device", "ring")), strict=True
        )
    ]
    assert f"reach {min(ratios):.2f} to {max(ratios):.2f} times the share" in text
    last_cells = re.findall(r"(\d\.\d\d) \|$", utilisation.table(results), re.M)
    assert f"{min(last_cells)} to {max(last_cells)} at its length" in text


def test_every_concept_is_on_the_map():
    for path in [
        *ROOT.glob("basics/[a-z]*.py"),
        *ROOT.glob("training/[a-z]*.py"),
        *ROOT.glob("notebooks/*.ipynb"),
        *ROOT.glob("*.py"),
    ]:
        assert str(path.relative_to(ROOT)) in README, path
