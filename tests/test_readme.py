"""Every command of the README runs and prints what the README shows; every file it names is there."""

import json
import re
import textwrap
from functools import partial
from statistics import geometric_mean

import pytest

import published_example
import ring_attn
from bench import (
    against_peers,
    generation,
    longest_training,
    loss_curves,
    masked_rings,
    max_context,
    record,
    training_speed,
    utilisation,
)
from ringlab.doctor.catalogue import CATALOGUE
from tests.commands import ROOT, run
from tests.shown import check_shown

README = (ROOT / "README.md").read_text()
MEASURED = (ROOT / "bench/README.md").read_text()

# Commands are lines "$ command" followed by what they print: in the README's blocks ```console, and in the docstring of
# the ring. The set-up and make blocks are ```bash: they are what runs these tests.
BLOCKS = re.findall(r"^```console\n(.*?)^```", README, re.M | re.S)
SHOWN = {}  # by command, what each document shows of its output
for block in [*BLOCKS, "".join(re.findall(r"^    (\$ .*\n)((?:    .*\n)*)", ring_attn.__doc__, re.M)[0])]:
    for command, shown in re.findall(r"^ *\$ (.+)\n((?:(?!\$ ).*\n)*)", block, re.M):
        SHOWN.setdefault(command, []).append(textwrap.dedent(shown))


def test_there_are_commands():
    assert len(SHOWN) >= 3
    assert "torchrun --nproc_per_node=4 ring_attn.py" in SHOWN


@pytest.mark.parametrize(
    "command", [pytest.param(it, marks=pytest.mark.slow if "-m ringlab.doctor" in it else ()) for it in SHOWN]
)
def test_a_command_prints_what_is_shown(command):
    done = run(command)
    assert done.returncode == (1 if "published_example" in command else 0), done.stderr  # the doctor's sick patient
    for shown in SHOWN[command]:
        check_shown(shown, done.stdout)


def test_every_picture_has_alt_text_and_it_fits_on_two_screens():
    assert re.findall(r"!\[\]\(|<img(?![^>]*alt=)", README + MEASURED) == []
    assert len(README.splitlines()) <= 245


def test_the_number_of_known_mistakes_is_that_of_the_catalogue():
    assert f"each of {len(CATALOGUE)} known mistakes" in words(README)


def words(text: str) -> str:
    """The text with single spaces, so that a sentence is found wherever its lines are broken."""
    return " ".join(text.split())


def test_the_numbers_of_the_ring_to_learn_from_are_the_committed_ones():
    results = json.loads((ROOT / "bench/results/ring_vs_full.json").read_text())
    speed = results["speed"]["runs"][0]["rows"][0]["ratio"]
    memory = results["memory"]
    chunks, process = (
        max(row[peak] for row in memory["rows"]) / memory["chunk_bytes"]
        for peak in ("peak_bytes", "peak_bytes_as_it_comes")
    )
    assert results["speed"]["runs"][0]["world_size"] == 2
    assert results["speed"]["seq_len"] == 8192
    assert [row["world_size"] for row in memory["rows"]][1:] == [2, 4, 8]
    for page in (words(README), words(MEASURED)):
        assert f"{speed:.2f} of the speed of blockwise attention" in page
        assert re.search(rf"{chunks:.2f} chunks( of tensors alive)?, with 2, 4 or 8 ranks alike", page)
    assert f"up to {process:.1f} chunks" in MEASURED
    assert "Two ranks, S = 8,192, float32" in MEASURED


def test_the_numbers_of_the_trainable_ring_are_the_committed_ones():
    results = record.load("against_peers")
    text = words(MEASURED)
    shortest = 8192
    assert "float32, S ≥ 8,192" in text
    assert "two ranks in float32, S ≥ 8,192" in README

    def least(case, ring, world_size):
        speeds = [
            row["speed"]
            for row in results["speed"]["rows"]
            if (row["case"], row["method"], row["world_size"], row["dtype"]) == (case, ring, world_size, "float32")
            and row["seq_len"] >= shortest
        ]
        assert len(speeds) > 1
        return min(speeds)

    of_two = []
    for what, case, ring in (
        ("forward", against_peers.FORWARD, against_peers.FULL),
        ("causal forward, zigzag", against_peers.CAUSAL, against_peers.ZIGZAG),
        ("causal forward and backward, zigzag", against_peers.TRAIN, against_peers.ZIGZAG),
    ):
        of_two.append(least(case, ring, 2))
        assert f"| {what} | {of_two[-1]:.2f} | {least(case, ring, 4):.2f} |" in text
    assert f"{min(of_two):.2f} to {max(of_two):.2f} of PyTorch's fused attention" in words(README)
    over_torch = geometric_mean(against_peers.over_peer(results, against_peers.TORCH, "float32"))
    assert f"it is {over_torch:.2f} times as fast as PyTorch's own" in text
    assert f"at least {min(against_peers.over_peer(results, against_peers.OWN, 'float32')):.1f} times" in text

    short = {"dtype": "float32", "seq_len": 2048}
    ahead = [
        against_peers.speeds(results, **short, world_size=P, case=case, method=against_peers.TORCH)[0]
        / against_peers.speeds(results, **short, world_size=P, case=case, method=rings[0])[0]
        for case, rings in against_peers.CASES.items()
        for P in results["speed"]["worlds"]
    ]
    assert f"at S = 2,048 PyTorch's loop is up to {100 * (max(ahead) - 1):.0f} % faster" in text
    memory = results["memory"]
    chunk = 4 * memory["heads"] * memory["chunk"] * memory["head_dim"]  # bytes
    peak = max(max(row["peak_bytes"]) for row in memory["rows"]) / chunk
    assert f"Training takes {peak:.1f} chunks of memory" in text
    assert f"training takes {peak:.1f} chunks." in words(README)


def test_the_numbers_of_the_papers_claims_are_the_committed_ones():
    text = words(MEASURED)
    results = record.load("overlap_threshold")
    (fast, slow), megabyte = results["knees"], 1e6
    measured = f"Over {fast['rate'] / megabyte:.0f} MB/s the ring waits for no message once chunks have "
    measured += f"{fast['measured']:,.0f} tokens, over {slow['rate'] / megabyte:.0f} MB/s once they have "
    assert f"{measured}{slow['measured']:,.0f}. " in text
    assert f"of the same run predict {fast['predicted']:,.0f} and {slow['predicted']:,.0f}" in text
    beyond = [100 * row["overhead"] for row in results["rows"] if row["hidden"] > 0.99]
    assert f"still takes {min(beyond):.0f} to {max(beyond):.0f} % longer" in text

    results = record.load("max_context")
    ring, (alone,) = (max_context.lengths(results, method) for method in ("ring", "blockwise"))
    assert f"8 ranks train on {ring[-1] / ring[0]:.2f} times the sequence of one rank" in text
    assert f"That is {ring[-1] / alone:.2f} times the sequence of fused attention" in text

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
    assert f"they reach {min(last_cells)} to {max(last_cells)} times" in text


def test_the_numbers_of_training_a_whole_model_are_the_committed_ones():
    text = words(MEASURED)
    off = {run: each.max() for run, each in loss_curves.differences(record.load("loss_curves")).items()}
    assert f"The largest difference is {max(off['ring of 4'], off['2 x 2, dp x cp']):.1e} of the loss" in text
    assert f"off by one rounding error differs by {off[loss_curves.ROUNDED]:.1e}" in text
    assert f"A ring in bfloat16 differs by {off[loss_curves.BF16]:.1e}" in text

    results = record.load("longest_training")
    assert f"with {results['budget'] // 2**20} MiB a rank" in text
    for again, name in ((False, "all activations kept"), (True, "activation checkpointing")):
        naive, one, rings = (longest_training.lengths(results, it, again) for it in ("naive", "blockwise", "ring"))
        assert f"| {name} | {' | '.join(f'{S:,}' for S in (*naive, *one, *rings))} |" in text
        assert f"reaches {rings[-1] / one[0]:.2f} times as far" in text
    most = max(abs(row["chunk"] / row["predicted_chunk"] - 1) for row in results["rows"])
    assert f"predicts every length to {100 * most:.1f} %" in text

    results = record.load("training_speed")
    peaks = {(row["method"], row["world_size"]): f"{row['peak_bytes'] / 1e6:.1f} MB" for row in results["rows"]}
    one, ring, loop = training_speed.ONE, training_speed.RING, training_speed.TORCH
    for P in (2, 4):
        speeds = [training_speed.speed(results, method, P) for method in (one, ring, loop)]
        ratios = f"{speeds[1] / speeds[0]:.2f} | {speeds[2] / speeds[0]:.2f}"
        assert f"| {P} | {ratios} | {peaks[ring, P]} | {peaks[one, P]} |" in text


def test_the_numbers_of_documents_and_windows_are_the_committed_ones():
    text, results = words(MEASURED), record.load("masked_rings")
    worlds, cost = results["worlds"], partial(masked_rings.cost, results)
    rows = [row for P in worlds for row in masked_rings.rows_of(results, P, masked_rings.DOCUMENTS)]
    for striped, said in ((False, "contiguous or zigzag chunks reach"), (True, "Striped chunks need hops and reach")):
        mine = [row for row in rows if (row["layout"] == "striped") == striped]
        speeds = [masked_rings.speed(results, row, which) for row in mine for which in masked_rings.PASSES]
        assert f"{said} {min(speeds):.2f} to {max(speeds):.2f}" in text
    windows = [masked_rings.rows_of(results, P, masked_rings.WINDOW)[0] for P in worlds]
    costs = [cost(row, which) for row in windows for which in masked_rings.PASSES]
    assert f"leaves {sum(windows[0]['pairs']) / results['seq_len'] ** 2:.1%} of the pairs" in text
    assert f"In contiguous chunks it takes {min(costs):.2f} to {max(costs):.2f} times this share" in text
    kernel = [masked_rings.cost_one_by_one(results, worlds[-1], which) for which in masked_rings.PASSES]
    assert f"the documents one by one take {min(kernel):.2f} times their share or more" in text


def test_the_numbers_of_generation_are_the_committed_ones():
    text, results = words(MEASURED), record.load("generation")
    row = results["rows"][-1]
    one, merge, ring = (
        generation.milliseconds(results, way, 4)[-1] for way in (generation.ONE, generation.MERGE, generation.RING)
    )
    assert f"{row['world_size']} ranks, a context of {row['context']:,} tokens" in text
    assert f"gives {row['bytes'][generation.MERGE]:,} bytes to the merge" in text
    assert f"would send {row['bytes'][generation.RING]:,} bytes in a ring" in text
    assert f"The ring takes {ring / merge:.0f} times as long as the merge" in text
    assert f"takes {one / merge:.1f} times as long as the merge" in text


def test_the_numbers_of_the_published_page_are_those_of_its_check():
    wrong = [bool(letter) for *_, letters in published_example.PUBLISHED for letter in letters]
    assert f"{sum(wrong)} of its {len(wrong)} rows of numbers are wrong" in words(README)


def test_the_minutes_of_the_map_are_those_of_the_chapters_and_add_up():
    minutes = [(int(read), int(more)) for read, more in re.findall(r"\| (\d+) \+ (\d+) \|$", README, re.M)]
    chapters = [path.read_text() for path in sorted(ROOT.glob("notebooks/[0-9]*.py"))]
    for of_map, chapter in zip(minutes, chapters, strict=True):
        read, more = re.search(r"(\d+) minutes to read, (\d+) for the exercises", chapter).groups()
        assert of_map == (int(read), int(more))
    read, more = (sum(column) for column in zip(*minutes, strict=True))
    assert f"{read} minutes for all chapters, {read + more} with exercises" in words(README)
    shortest = [minutes[chapter - 1][0] for chapter in (1, 3, 4)]
    assert 50 <= sum(shortest) + 10 <= 70  # and ten for ring_attn.py: "about an hour"


def test_every_concept_is_on_the_map():
    for path in [
        *ROOT.glob("ringlab/basics/[a-z]*.py"),
        *ROOT.glob("ringlab/training/[a-z]*.py"),
        *ROOT.glob("ringlab/models/[a-z]*.py"),
        *ROOT.glob("notebooks/*.ipynb"),
        *ROOT.glob("*.py"),
    ]:
        assert str(path.relative_to(ROOT)) in README, path
