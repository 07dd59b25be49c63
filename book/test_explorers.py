"""The explorers, driven by clicks and keys: what a reader sees is what Python computes."""

import inspect
import json
import math
import random
import re

import pytest

from book import data
from ring_doctor.case import Case
from ring_doctor.catalogue import CATALOGUE
from ring_doctor.report import as_json
from ring_doctor.xray import on_paper
from ringlab.basics.blocking_messages import Recv, Send, simulate_messages
from ringlab.training.layouts import positions

READY = '.explorer[data-ready="yes"]'


def settle(page):
    """Wait until what was chosen is drawn: a microtask and a file later."""
    page.wait_for_load_state("networkidle")


def slide(page, name, to):
    """Move a slider with the keys, as a reader without a mouse does."""
    slider = page.locator(f"input[name={name}]")
    slider.focus()
    while (now := int(slider.input_value())) != to:
        page.keyboard.press("ArrowRight" if now < to else "ArrowLeft")
    settle(page)


def rows(page, table):
    """The cells of a table, row by row."""
    return [row.split("\t") for row in page.locator(f"#{table} tbody").inner_text().split("\n") if row.strip()]


def pair(a, b):
    return f"[{number(a)}, {number(b)}]"


def number(x, none="NaN"):
    return none if x is None else f"{x:.4f}"


def choose(page, P, S, layout, mask, backward):
    slide(page, "P", P)
    page.select_option("[name=S]", str(S))
    settle(page)
    for name in ("causal", "documents", "window"):
        box = page.locator(f"[name={name}]")
        if box.is_enabled() and box.is_checked() != (name in mask):
            box.click()
            settle(page)
    page.locator(f"[name=layout][value={layout}]").click()
    settle(page)
    page.locator(f"[name=pass][value={'backward' if backward else 'forward'}]").click()
    settle(page)


CHOICES = [  # ranks, tokens, layout, mask, backward
    (4, 8, "contiguous", "none", False),
    (4, 8, "contiguous", "causal", True),
    (8, 32, "zigzag", "causal", False),
    (3, 8, "contiguous", "causal documents window", False),
    (5, 20, "zigzag", "causal documents", True),
    (1, 8, "striped", "none", True),
    (2, 16, "striped", "causal window", True),
    (7, 28, "zigzag", "documents", False),
]


def test_the_data_of_the_site_is_what_python_computes(site, tmp_path):
    data.write(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in (site / "data").iterdir()}
    stale = [path.name for path in tmp_path.iterdir() if path.read_text() != (site / "data" / path.name).read_text()]
    assert stale == []


@pytest.mark.parametrize(("P", "S", "layout", "mask", "backward"), CHOICES)
def test_the_ring_shows_what_python_computes(watched, P, S, layout, mask, backward):
    page = watched.open("ring.html", READY)
    choose(page, P, S, layout, mask, backward)
    one = data.ring(P, S, layout, data.MASKS[mask](S))
    token = random.Random(P).randrange(S)
    page.select_option("[name=token]", str(token))
    settle(page)
    places = [positions(layout, S, rank, P).tolist() for rank in range(P)]
    owner = next(rank for rank, tokens in enumerate(places) if token in tokens)
    for t in range(one["hops"] + 1):
        assert f"Round {t}" in page.inner_text("#ring-status")
        shown = rows(page, "states")
        assert len(shown) == t + 1
        if backward:
            x = one["backward"][t][token]
            assert shown[t] == [str(t), pair(*x[:2]), pair(*x[2:4]), pair(*x[4:])]
        else:
            m, l, *x = one["states"][t][token]
            so_far = pair(*x[2:]) if l else "–"
            assert shown[t] == [str(t), f"KV{(owner - t) % P}", number(m, "−∞"), number(l), pair(*x[:2]), so_far]
        pairs = [str(sum(row[r] for row in one["pairs"][: t + 1])) for r in range(P)]
        assert [row[2] for row in rows(page, "ranks")] == pairs
        sent = [sum(len(places[(r - i) % P]) for i in range(t)) * 16 * (1 + backward) for r in range(P)]
        assert [row[1] for row in rows(page, "ranks")] == [f"{n} B" for n in sent]
        if t < one["hops"]:
            page.locator("#step").click()
    assert [row[3] for row in rows(page, "ranks")] == [f"{100 * x:.0f} %" for x in one["time"]["fast"]["idle"]]
    blocks = [[str(t), *(f"KV{(r - t) % P} · {n}" for r, n in enumerate(row))] for t, row in enumerate(one["pairs"])]
    assert rows(page, "rounds") == blocks
    if backward and one["hops"]:
        page.locator("#step").click()
        assert "message home" in page.inner_text("#ring-status")
    assert page.locator("#step").is_disabled()


@pytest.mark.parametrize("name", [*data.WRONG_OUT, *data.WRONG_GRADIENTS])
def test_a_mistake_shows_what_the_doctor_computes(watched, name):
    backward = name in data.WRONG_GRADIENTS
    mask = "causal" if name == "causal_per_block" else "none"
    page = watched.open(f"ring.html#P=4&S=8&{mask}=on&pass={'backward' if backward else 'forward'}&token=6", READY)
    page.select_option("[name=mistake]", name)
    settle(page)
    one = data.ring(4, 8, "contiguous", data.MASKS[mask](8))
    wrong = one["wrong"][name]
    right = one["backward"][-1][6] if backward else one["out"][6]
    pairs = [[pair(*x[i : i + 2]) for i in range(0, len(x), 2)] for x in (right, wrong["rows"][6])]
    assert [row[1:] for row in rows(page, "wrong")] == pairs
    said = page.inner_text("#ring-wrong")
    assert f"{wrong['tokens']} of 8 tokens are wrong. The worst number is off by {number(wrong['off'])}" in said
    assert CATALOGUE[name].what in page.locator("[name=mistake] option:checked").inner_text()


MIDDLES = """(of) => [...document.querySelectorAll(of)].map((each) => {
  const box = each.getBoundingClientRect();
  return [box.x + box.width / 2, box.y + box.height / 2];
})"""


def test_the_blocks_stand_where_they_are_in_hand(watched):
    """After t hops, block j lies on the card of rank (j + t) mod P."""
    page = watched.open("ring.html", READY)
    for t in range(4):
        cards, blocks = page.evaluate(MIDDLES, ".card"), page.evaluate(MIDDLES, ".block")
        for j, block in enumerate(blocks):
            distances = [math.dist(card, block) for card in cards]
            assert distances.index(min(distances)) == (j + t) % 4
        if t < 3:
            page.locator("#step").click()


def test_the_film_plays_and_the_keys_scrub(watched):
    page = watched.open("ring.html", READY)
    page.locator("#play").click()
    page.wait_for_function("document.querySelector('#scrub').value === '3'")
    assert page.locator("#step").is_disabled()
    page.locator("#scrub").focus()
    page.keyboard.press("Home")
    assert "Round 0" in page.inner_text("#ring-status")
    page.keyboard.press("ArrowRight")
    assert "Round 1" in page.inner_text("#ring-status")
    page.locator("#back").click()
    assert "Round 0" in page.inner_text("#ring-status")


def test_a_layout_that_cannot_deal_out_the_tokens_says_why(watched):
    page = watched.open("ring.html#P=3&S=8", READY)
    assert page.locator("[value=zigzag]").is_disabled()
    assert "8 tokens in the zigzag layout on 3 ranks" in page.inner_text("#refused")


def test_an_address_shows_what_its_sender_saw(watched):
    page = watched.open("ring.html", READY)
    choose(page, 3, 12, "zigzag", "causal", True)
    page.select_option("[name=token]", "5")
    settle(page)
    address = page.url
    page = watched.open(address.removeprefix(f"{watched.address}/"), READY)
    assert page.input_value("[name=token]") == "5"
    assert page.locator("[name=S]").input_value() == "12"
    assert page.locator("[value=zigzag]").is_checked()
    assert page.locator("[value=backward]").is_checked()


@pytest.mark.parametrize("order", ["SSSS", "SRSR", "RRR", "SRSRS", "RS", "SSRSSSSS"])
def test_deadlock_shows_what_the_simulator_says(watched, order):
    page = watched.open("deadlock.html", READY)
    P = len(order)
    slide(page, "P", P)
    page.locator("#all-send").click()
    for rank, letter in enumerate(order):
        if letter == "R":  # with the key of a button, not with the mouse
            page.locator(f"#orders [data-rank='{rank}']").focus()
            page.keyboard.press("Enter")
    programs = [[Send((r + 1) % P), Recv((r - 1) % P)][:: 1 if letter == "S" else -1] for r, letter in enumerate(order)]
    outcome = simulate_messages(programs)
    for phase in range(outcome.phases):
        page.locator("#step").click()
        moves = ", ".join(f"{move.source} → {move.to}" for move in outcome.transfers if move.phase == phase)
        assert page.inner_text("#deadlock-status") == f"Phase {phase}: {moves}"
    page.locator("#step").click()
    said = page.inner_text("#deadlock-status")
    if outcome.cycle:
        assert " → ".join(map(str, [*outcome.cycle, outcome.cycle[0]])) in said
        assert page.locator(".waits.circle").count() == len(outcome.cycle)
    else:
        assert f"All {P} messages moved, in {outcome.phases} phases" in said
        assert page.locator(".waits").count() == 0
    states = [f"✗ waits for rank {outcome.waits_for[r]}" if r in outcome.waits_for else "✓ ended" for r in range(P)]
    assert [row[2] for row in rows(page, "programs")] == states


def test_the_even_odd_button_fits_every_number_of_ranks(watched):
    page = watched.open("deadlock.html", READY)
    page.locator("#even-odd").click()
    slide(page, "P", 7)
    assert page.locator("[name=order]").input_value() == "SRSRSRS"


STUCK = {  # puzzle: what the page says at its end
    "my_hop": "0 messages moved. The rest wait for ever. The circle: 0 → 1 → 2 → 3 → 0.",
    "odd_ranks_only_wait": "2 messages moved. The rest wait for ever. No circle: a rank waits for one that has ended.",
    "all_but_rank_0_send_first": "0 messages moved. The rest wait for ever. The circle: 1 → 2 → 3 → 1.",
    "my_gather": "All 6 messages moved, in 6 phases. Every rank has ended.",
}


def test_the_films_of_the_puzzles_play(watched):
    page = watched.open("deadlock.html", READY)
    slide(page, "P", 6)
    for name, puzzle in data.puzzles().items():
        page.select_option("[name=puzzle]", name)
        assert page.locator(".rank").count() == 4
        assert not page.is_visible("#orders")
        for phase in range(1 + max([move[0] for move in puzzle["moves"]], default=-1)):
            page.locator("#step").click()
            moves = ", ".join(f"{source} → {to}" for at, source, to in puzzle["moves"] if at == phase)
            assert page.inner_text("#deadlock-status") == f"Phase {phase}: {moves}"
        page.locator("#step").click()
        assert page.inner_text("#deadlock-status") == STUCK[name]
        words = {"S": "send to", "R": "receive from"}
        programs = [" · ".join(f"{words[letter]} {peer}" for letter, peer in its) for its in puzzle["programs"]]
        assert [row[1] for row in rows(page, "programs")] == [program or "no messages" for program in programs]
        page.select_option("[name=puzzle]", "")
        assert page.locator(".rank").count() == 6


def tiles(text):
    """The words of the tiles of every matrix that an X-ray's text shows."""
    return [re.split(r"\s{2,}", row)[1:] for row in re.findall(r"^ +(rank \d+ {2,}.*)$", text, re.M)]


@pytest.mark.parametrize("name", ["last_block_skipped", "keys_of_hop_0", "causal_per_block", "own_block_twice"])
def test_the_xray_shows_every_tile_of_a_report(watched, name, tmp_path):
    page = watched.open("xray.html", READY)
    report = next((report for known, report in data.xrays() if known == name), None)
    if report:
        page.select_option("[name=example]", f"xray-{name}")
    else:  # a reader's own
        xray = on_paper(Case(3, 12), CATALOGUE[name].variants[0](data.RIGHT)).text()
        report = {"name": "mine", "healthy": False, "verdict": f"SICK: {name}", "remarks": [], "xray": xray}
        (tmp_path / "report.json").write_text(json.dumps(report))
        page.set_input_files("[name=file]", tmp_path / "report.json")
    settle(page)
    said = "(verdict) => document.querySelector('#xray-status').textContent === verdict"
    page.wait_for_function(said, arg=report["verdict"])
    words = {"ok": "✓ ok", "-": "· masked"}
    assert [
        [cell.inner_text() for cell in row.locator(".tile").all()] for row in page.locator("table.tiles tbody tr").all()
    ] == [[words.get(label, f"✗ {label}") for label in row] for row in tiles(report["xray"])]


def test_a_file_that_is_no_report_is_refused_in_a_sentence(watched, tmp_path):
    page = watched.open("xray.html", READY)
    for text in ("not json", "{}"):
        (tmp_path / "other.json").write_text(text)
        page.set_input_files("[name=file]", tmp_path / "other.json")
        page.wait_for_selector("#xray-status:has-text('is no report of the doctor')")
        page.set_input_files("[name=file]", [])


DROP = """([name, text]) => {
  const carried = new DataTransfer();
  carried.items.add(new File([text], name, { type: "application/json" }));
  const place = document.querySelector("#drop");
  for (const what of ["dragenter", "dragover"]) {
    const event = new DragEvent(what, { dataTransfer: carried, bubbles: true, cancelable: true });
    if (place.dispatchEvent(event)) throw new Error(`the browser would open the file: ${what}`);
  }
  if (!place.classList.contains("over")) throw new Error("nothing shows where the file may fall");
  place.dispatchEvent(new DragEvent("drop", { dataTransfer: carried, bubbles: true, cancelable: true }));
}"""


def test_a_report_can_be_dropped(watched):
    page = watched.open("xray.html", READY)
    report = {"name": "mine", "healthy": False, "verdict": "SICK: dropped", "remarks": ["It fell."], "xray": ""}
    page.evaluate(DROP, ["report.json", json.dumps(report)])
    page.wait_for_selector("#xray-status:has-text('SICK: dropped')")
    assert "It fell." in page.inner_text("#xray-report")
    assert page.locator("#drop.over").count() == 0
    page.evaluate(DROP, ["other.txt", "no report"])
    page.wait_for_selector("#xray-status:has-text('other.txt is no report of the doctor')")


def test_the_examples_have_the_fields_of_a_report():
    """Those that the page reads are among those that the doctor writes."""
    written = set(re.findall(r'^ {8}"(\w+)":', inspect.getsource(as_json), re.M))
    for _, report in data.xrays():
        assert set(report) <= written
