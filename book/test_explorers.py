"""The explorers, driven by clicks and keys: what a reader sees is what Python computes, and what `ring-plan` says."""

import contextlib
import csv
import inspect
import io
import json
import math
import random
import re
from itertools import product
from pathlib import Path

import pytest

from bench.scoreboard import grades
from book import data
from book.data import HOSTS, LENGTHS, answer, thresholds
from ring_doctor.case import Case
from ring_doctor.catalogue import CATALOGUE
from ring_doctor.report import as_json
from ring_doctor.xray import on_paper
from ringlab.basics.blocking_messages import Recv, Send, simulate_messages
from ringlab.planning import cost_model
from ringlab.planning.plan import digits
from ringlab.planning.presets import GPUS, MODELS
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


CHOICES = [  # ranks, tokens, layout, mask, backward
    (4, 8, "contiguous", "none", False),
    (4, 8, "contiguous", "causal", True),
    (8, 32, "zigzag", "causal", False),
    (3, 8, "contiguous", "causal documents window", False),
    (5, 20, "zigzag", "documents", True),
    (1, 8, "striped", "none", True),
]


def test_the_data_of_the_site_is_what_python_computes(site):
    """Two rings, the scoreboard and the reports; the planner's answers are compared with the command below."""
    fresh = {"ring-4-8": data.ring_file(4, 8), "ring-3-12": data.ring_file(3, 12), "scoreboard": data.scoreboard()}
    fresh |= {f"xray-{name}": report for name, report in data.xrays()}
    for name, its in fresh.items():
        written = (site / f"data/{name}.js").read_text()
        assert json.loads(written.removeprefix(f'explorer.take("{name}",').removesuffix(")")) == json.loads(
            json.dumps(its)
        )


@pytest.mark.parametrize(("P", "S", "layout", "mask", "backward"), CHOICES)
def test_the_ring_shows_what_python_computes(watched, P, S, layout, mask, backward):
    token, mask_on = random.Random(P).randrange(S), "".join(f"&{name}=on" for name in mask.split() if name != "none")
    asked = f"P={P}&S={S}&layout={layout}{mask_on}&pass={'backward' if backward else 'forward'}&token={token}"
    page = watched.open(f"ring.html#{asked}", READY)
    one = data.ring(P, S, layout, data.MASKS[mask](S))
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
    slide(page, "P", 3)
    for name, value in (("S", "12"), ("token", "5")):
        page.select_option(f"[name={name}]", value)
        settle(page)
    for control in ("[name=causal]", "[value=zigzag]", "[value=backward]"):
        page.click(control)
        settle(page)
    page = watched.open(page.url.removeprefix(f"{watched.address}/"), READY)
    assert [page.input_value(f"[name={name}]") for name in ("P", "S", "token")] == ["3", "12", "5"]
    assert all(page.is_checked(control) for control in ("[name=causal]", "[value=zigzag]", "[value=backward]"))


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


def test_the_simulator_of_the_page_is_that_of_ringlab(watched):
    """Every order of a hop of 2 to 8 ranks, and random programs."""
    page = watched.open("deadlock.html", READY)
    draw = random.Random(0)
    programs = []
    for P in range(2, 9):
        for letters in product((1, -1), repeat=P):
            programs.append([[Send((r + 1) % P), Recv((r - 1) % P)][::way] for r, way in enumerate(letters)])
    for P in (2, 3, 4, 6) * 50:
        peers = [[peer for peer in range(P) if peer != r] for r in range(P)]
        programs.append(
            [[draw.choice((Send, Recv))(draw.choice(each)) for _ in range(draw.randrange(5))] for each in peers]
        )

    def message(step):
        return ["S", step.to] if isinstance(step, Send) else ["R", step.source]

    for_page = [[[[message(step)] for step in one] for one in program] for program in programs]
    found = page.evaluate("(all) => all.map((program) => explorer.simulate(program))", for_page)
    for program, its in zip(programs, found, strict=True):
        right = simulate_messages(program)
        assert sorted(move[:3] for move in its["moves"]) == sorted([m.phase, m.source, m.to] for m in right.transfers)
        assert {int(rank): peer for rank, peer in its["waits"].items()} == right.waits_for
        assert its["circle"] == right.cycle


def test_the_page_judges_puzzles(watched):
    """solved.csv: what a reader writes, a rank after each stroke, and what the page says of it. By hand."""
    page = watched.open("solve.html", READY)
    for row in csv.DictReader(Path(__file__).with_name("solved.csv").open()):
        page.select_option("[name=puzzle]", row["puzzle"])
        page.fill("[name=text]", row["lines"].replace(" / ", "\n"))
        assert row["said"] in page.inner_text("#solve-verdict"), row
    page = watched.open(page.url.removeprefix(f"{watched.address}/"), READY)  # what was written is in the address
    assert row["said"] in page.inner_text("#solve-verdict")


def test_a_number_says_where_it_came_from(watched):
    page = watched.open("ring.html#P=4&S=8&causal=on&layout=contiguous&pass=forward&token=5", READY)
    page.locator("#step").click()
    page.locator("#states [data-round='1']").click()
    one, x = data.ring(4, 8, "contiguous", data.MASKS["causal"](8)), data.tokens(8)[0, 0]
    scores = [number((x[5] @ x[key]).item() / math.sqrt(2)) for key in (2, 3)]
    m, l = one["states"][1][5][:2]
    said = page.inner_text("#why")
    assert f"keys 2, 3. Scores: {', '.join(scores)}. The largest score is now m = {number(m)}" in said
    assert f"= {number(l)}; o is rescaled alike" in said


def test_a_rank_is_chosen_by_a_click_and_the_round_stays(watched):
    page = watched.open("ring.html", READY)
    page.locator("#step").click()
    page.locator(".at").nth(2).click(position={"x": 8, "y": 8})
    assert page.input_value("[name=token]") == "4"
    assert "Round 1" in page.inner_text("#ring-status")


def test_a_bad_address_gives_a_sentence(watched):
    page = watched.open("ring.html#P=4&colour=red", READY)
    assert "colour=red" in page.locator("[role=alert]").inner_text()


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


PLANS = [("llama-3.1-8b", "h100", 1, 131072), ("qwen2.5-7b", "l40s", 2, 32768), ("llama-3.1-405b", "h200", 2, 131072)]


def printed(command):
    with contextlib.redirect_stdout(io.StringIO()) as text:
        assert cost_model.main(command.split()[1:]) == 0
    return text.getvalue()


@pytest.mark.parametrize(("model", "gpu", "hosts", "seq_len"), PLANS)
def test_the_answers_are_those_of_the_command(model, gpu, hosts, seq_len):
    found = answer(MODELS[model], GPUS[gpu], hosts, seq_len)
    said = printed(f"ring-plan --model {model} --gpu {gpu} --hosts {hosts} --seq-len {seq_len}")
    if found is None:
        assert "does not fit" in said
    else:
        first = said.split("GiB  way\n")[1].splitlines()[0].split(maxsplit=3)
        assert first == [*(digits(found[name]) for name in ("speed", "seconds", "gib")), found["way"]]
    assert thresholds(MODELS["llama-3.1-8b"], GPUS["h100"])["between"] > 1e3


def test_the_page_says_what_its_command_prints(watched):
    page = watched.open("planner.html", READY)
    for model, gpu, hosts, seq_len in PLANS:
        for name, value in (("model", model), ("gpu", gpu), ("hosts", hosts), ("seq_len", seq_len)):
            page.select_option(f"[name={name}]", str(value))
        said = printed(page.inner_text("#planner-command"))
        assert len(rows(page, "ways")) == len(HOSTS) * len(LENGTHS)
        if "does not fit" in said:
            assert page.inner_text("#planner-status").startswith("Advice: nothing fits.")
        else:
            way = said.split("GiB  way\n")[1].splitlines()[0].split(maxsplit=3)[3]
            assert page.inner_text("#planner-status").startswith(f"Advice: {way}: ")
    page = watched.open(page.url.removeprefix(f"{watched.address}/"), READY)
    assert page.input_value("[name=model]") == PLANS[-1][0]  # kept in the address


def test_the_scoreboard_shows_every_prediction(watched):
    page = watched.open("planner.html", READY)
    marked = grades()
    cells = [text.split("\t") for text in page.locator("#scoreboard-table tbody tr").all_inner_texts()]
    of_grades = [
        [" ".join(each.name.split()), digits(each.measured), digits(each.predicted), f"{100 * each.error:+.1f}"]
        for each in marked
    ]
    assert [[row[0].strip(), *(x.split()[0] for x in row[2:4]), row[4].strip()] for row in cells] == of_grades
    page.select_option("#scoreboard-form [name=way]", "hybrid")
    hybrids = sum(each.section == "attention" and each.row["way"] == "hybrid" for each in marked)
    assert page.locator("#scoreboard-table tbody tr:visible").count() == hybrids
    page.select_option("#scoreboard-form [name=way]", "")
    page.locator("#scoreboard-table th button").nth(4).focus()
    page.keyboard.press("Enter")
    assert page.locator("#scoreboard-table th").nth(4).get_attribute("aria-sort") == "ascending"
    errors = [float(text.split("\t")[4]) for text in page.locator("#scoreboard-table tbody tr").all_inner_texts()]
    assert errors == sorted(errors)
