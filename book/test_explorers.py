"""The explorers' numbers are those of full attention and of its gradients. Driven by clicks and keys, the pages show
what Python computes, and what `ring-plan` says."""

import csv
import inspect
import json
import math
import random
import re
from itertools import product
from pathlib import Path

import pytest
import torch

from bench.scoreboard import grades
from book import data
from book.conftest import settle
from ring_doctor.asking.case import Case
from ring_doctor.catalogue import CATALOGUE
from ring_doctor.explaining.xray import on_paper
from ring_doctor.report import as_json, summary
from ring_planner import command as planner
from ring_planner.plan import digits
from ringlab.basics.blocking_messages import Recv, Send, simulate_messages
from ringlab.ring.layouts import positions
from ringlab.support.rounding import exact_attention

HALF = 0.5e-4 + 1e-9  # the numbers have four digits after the point


def sees(name, S):
    """Which keys a query sees, in words: (S, S)."""
    query, key = torch.arange(S)[:, None], torch.arange(S)
    seen = torch.ones(S, S, dtype=torch.bool)
    first = 3 * S // 8
    if "causal" in name:
        seen &= key <= query
    if "documents" in name:
        seen &= (key < first) == (query < first)
    if "window" in name:
        seen &= key > query - (S // 4 + 1)
    return seen


@pytest.mark.parametrize("P", data.RANKS)
def test_every_ring_ends_with_full_attention_and_its_gradients(P, numbers):
    for S in data.seq_lens(P):
        assert_full_attention(P, S, numbers[f"ring-{P}-{S}"])


def assert_full_attention(P, S, shown):
    x = data.tokens(S)
    refused = {layout for layout, its in shown["layouts"].items() if "refused" in its}
    assert refused == ({"zigzag"} if S % (2 * P) else set()) | ({"striped"} if S % P else set())
    for name, one in shown["cases"].items():
        _, mask = name.split(", ")
        visible = sees(mask, S)
        q, k, v = leaves = [x.clone().requires_grad_() for _ in range(3)]
        weights = (q @ k.mT / math.sqrt(2)).masked_fill(~visible, -math.inf).softmax(dim=-1)
        out = weights @ v
        right = [out.detach(), *torch.autograd.grad(out, leaves, x)]
        rows = torch.cat([torch.tensor(one["out"]), torch.tensor(one["backward"][-1])], dim=-1)
        assert (rows - torch.cat([each[0, 0] for each in right], dim=-1)).abs().max() <= HALF, name
        assert torch.tensor([row[4:] for row in one["states"][-1]]).sub(out[0, 0]).abs().max() <= HALF
        assert sum(map(sum, one["pairs"])) == visible.sum()
        assert len(one["pairs"]) == len(one["states"]) == one["hops"] + 1 <= P


def test_the_running_result_is_attention_to_the_blocks_so_far(numbers):
    one, x = numbers["ring-4-8"]["cases"]["contiguous, none"], data.tokens(8)
    for t, rows in enumerate(one["states"]):
        for token, (m, l, *o, a, b) in enumerate(rows):
            blocks = [(token // 2 - i) % 4 for i in range(t + 1)]
            keys = x[:, :, [2 * j + i for j in blocks for i in (0, 1)]]
            right = exact_attention(x[:, :, token : token + 1], keys, keys)["out"].exact[0, 0, 0]
            scores = (x[0, 0, token] @ keys[0, 0].T) / math.sqrt(2)
            assert m == pytest.approx(scores.max().item(), abs=HALF)
            assert l == pytest.approx((scores - scores.max()).exp().sum().item(), abs=HALF)
            assert [a, b] == pytest.approx(right.tolist(), abs=HALF)
            assert o == pytest.approx([a * l, b * l], abs=4 * l * HALF + HALF)


WRONG_ROWS = [  # mask, mistake, and the tokens whose rows it makes wrong
    ("none", "averages_added", range(8)),  # every row adds up P averages
    ("causal", "causal_per_block", range(7)),  # the second token of a chunk sees all of every block; token 7 may
    ("causal", "last_block_skipped", range(6, 8)),  # only the last rank sees a block P - 1 places before its own
]


@pytest.mark.parametrize(("mask", "name", "where"), WRONG_ROWS)
def test_a_mistake_is_wrong_where_it_must_be(mask, name, where, numbers):
    one = numbers["ring-4-8"]["cases"][f"contiguous, {mask}"]
    right, wrong = torch.tensor(one["out"]), torch.tensor(one["wrong"][name]["rows"])
    assert (right - wrong).abs().amax(dim=-1).gt(2 * HALF).nonzero().flatten().tolist() == list(where)
    assert one["wrong"][name]["tokens"] == len(where)
    assert one["wrong"][name]["off"] == pytest.approx((right - wrong).abs().max().item(), abs=2 * HALF)
    backward = [numbers[f"ring-{P}-8"]["cases"]["contiguous, none"]["wrong"]["keys_of_hop_0"]["tokens"] for P in (1, 4)]
    assert backward == [0, 8]  # one rank does not show it


def rows(page, table):
    """The cells of a table, row by row."""
    return [row.split("\t") for row in page.locator(f"#{table} tbody").inner_text().split("\n") if row.strip()]


def pair(a, b):
    return f"[{number(a)}, {number(b)}]"


def number(x, none="NaN"):
    return none if x is None else f"{x:.4f}"


CHOICES = [  # ranks, tokens, layout, mask, backward
    (4, 8, "contiguous", "none", False),
    (8, 32, "zigzag", "causal", False),
    (3, 8, "contiguous", "causal documents window", True),
    (1, 8, "striped", "none", True),
]


@pytest.mark.parametrize(("P", "S", "layout", "mask", "backward"), CHOICES)
def test_the_ring_shows_what_python_computes(watched, P, S, layout, mask, backward):
    token, mask_on = random.Random(P).randrange(S), "".join(f"&{name}=on" for name in mask.split() if name != "none")
    asked = f"P={P}&S={S}&layout={layout}{mask_on}&pass={'backward' if backward else 'forward'}&token={token}"
    page = watched.open(f"ring.html#{asked}")
    one = data.ring(P, S, layout, data.mask_of(mask, S))
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


@pytest.mark.parametrize("backward", [False, True])
def test_a_mistake_shows_what_the_doctor_computes(watched, numbers, backward):
    for name in data.WRONG_GRADIENTS if backward else data.WRONG_OUT:
        mask = "causal" if name == "causal_per_block" else "none"
        page = watched.open(f"ring.html#P=4&S=8&{mask}=on&pass={'backward' if backward else 'forward'}&token=6")
        page.select_option("[name=mistake]", name)
        settle(page)
        one = numbers["ring-4-8"]["cases"][f"contiguous, {mask}"]
        wrong = one["wrong"][name]
        right = one["backward"][-1][6] if backward else one["out"][6]
        pairs = [[pair(*x[i : i + 2]) for i in range(0, len(x), 2)] for x in (right, wrong["rows"][6])]
        assert [row[1:] for row in rows(page, "wrong")] == pairs
        said = f"{wrong['tokens']} of 8 tokens are wrong. The worst number is off by {number(wrong['off'])}"
        assert said in page.inner_text("#ring-wrong")
        assert CATALOGUE[name].what in page.locator("[name=mistake] option:checked").inner_text()


def test_the_numbers_behind_a_gradient_are_exact(watched):
    """Every p and dS that the page explains in round 0: to the last digit those of dense attention in float64."""
    x, visible = data.tokens(8)[0, 0], sees("causal", 8)
    p = (x @ x.mT / math.sqrt(2)).masked_fill(~visible, -math.inf).softmax(dim=-1)
    of_keys = torch.stack([p, p * (x @ x.mT - (x * (p @ x)).sum(dim=-1, keepdim=True))])
    page = watched.open("ring.html#P=2&S=8&causal=on&pass=backward&token=0")
    page.click("[data-round='0']")
    for token in range(8):
        page.select_option("[name=token]", str(token))
        shown = torch.tensor([float(x) for x in re.findall(r"-?\d+\.\d{4}", page.inner_text("#why"))][:-8])
        own = slice(token, 4 * (token // 4) + 4)  # the queries of its rank that see it
        assert (shown - of_keys[:, own, token].flatten()).abs().max() <= HALF


MIDDLES = """(of) => [...document.querySelectorAll(of)].map((each) => {
  const box = each.getBoundingClientRect();
  return [box.x + box.width / 2, box.y + box.height / 2];
})"""


def test_the_blocks_stand_where_they_are_in_hand(watched):
    """After t hops, block j lies on the card of rank (j + t) mod P."""
    page = watched.open("ring.html")
    for t in range(4):
        cards, blocks = page.evaluate(MIDDLES, ".card"), page.evaluate(MIDDLES, ".block")
        for j, block in enumerate(blocks):
            distances = [math.dist(card, block) for card in cards]
            assert distances.index(min(distances)) == (j + t) % 4
        page.press("#scrub", "ArrowRight")


def test_the_simulator_of_the_page_is_that_of_ringlab(watched):
    """Every order of a hop of 2 to 6 ranks, and random programs."""
    page = watched.open("deadlock.html")
    draw = random.Random(0)
    orders = [order for P in range(2, 7) for order in product((1, -1), repeat=P)]
    programs = [[[Send((r + 1) % len(o)), Recv((r - 1) % len(o))][::way] for r, way in enumerate(o)] for o in orders]
    for P in (2, 3, 4, 6) * 40:
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
    page = watched.open("solve.html")
    for row in csv.DictReader(Path(__file__).with_name("solved.csv").open()):
        page.select_option("[name=puzzle]", row["puzzle"])
        page.fill("[name=text]", row["lines"].replace(" / ", "\n"))
        assert row["said"] in page.inner_text("#solve-verdict"), row
    page.reload()  # what was written is in the address
    settle(page)
    assert row["said"] in page.inner_text("#solve-verdict")


def tiles(grids):
    """The words of the tiles of every matrix of an X-ray."""
    words = {"ok": "✓ ok", "-": "· masked"}
    return [[words.get(label, f"✗ {label}") for label in row] for grid in grids for row in grid["tiles"]]


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


def test_the_xray_shows_every_tile_of_a_report_and_refuses_other_files(watched):
    page = watched.open("xray.html")
    grids = on_paper(Case(3, 12), CATALOGUE["own_block_twice"].variants[0](data.RIGHT)).grids()
    own = {"name": "mine", "healthy": False, "verdict": "SICK: mine", "remarks": ["It fell."], "grids": grids}
    fields = set(re.findall(r'"(\w+)"', inspect.getsource(as_json) + inspect.getsource(summary)))
    for name, report in [*data.xrays(), ("", own)]:
        assert set(report) <= fields
        if name:
            page.select_option("[name=example]", f"xray-{name}")
            settle(page)
        else:
            page.evaluate(DROP, ["report.json", json.dumps(report)])
        page.wait_for_selector(f"#xray-status:has-text('✗ {report['verdict']}')")
        assert report["remarks"][-1] in page.inner_text("#xray-report")
        shown = page.locator("table.tiles tbody tr").all()
        assert [row.locator(".tile").all_inner_texts() for row in shown] == tiles(report["grids"])
    for text in ("not json", "{}"):
        page.set_input_files("[name=file]", {"name": "other.json", "mimeType": "", "buffer": text.encode()})
        page.wait_for_selector("#xray-status:has-text('other.json is no report of the doctor')")
        page.set_input_files("[name=file]", [])


def assert_as_printed(found, said):
    """An answer has the numbers of the first row that ring-plan prints."""
    first = re.split("GiB  way;.*\n", said)[1].splitlines()[0].split(maxsplit=4)
    del first[2]  # its sequences
    many = {"speed": 4, "seconds": 4, "gib": 3}  # digits, as ring-plan prints them
    assert first == [*(digits(found[name], count) for name, count in many.items()), found["way"]]


PLANS = [
    ("llama-3.1-8b", "h100", 1, 131072),
    ("deepseek-v3.2", "b200", 8, 32768),
    ("llama-3.1-405b", "h200", 2, 131072),
]


def test_the_planner_says_what_its_command_prints(watched, numbers, capsys):
    page = watched.open("planner.html")
    for model, gpu, hosts, seq_len in PLANS:
        for name, value in (("model", model), ("gpu", gpu), ("hosts", hosts), ("seq_len", seq_len)):
            page.select_option(f"[name={name}]", str(value))
        settle(page)
        assert len(rows(page, "ways")) == len(data.HOSTS) * len(data.LENGTHS)
        fits = planner.main(page.inner_text("#planner-command").split()[1:]) == 0
        said = capsys.readouterr().out
        its = numbers[f"planner-{model}"]
        found = its["answers"][gpu][data.HOSTS.index(hosts)][data.LENGTHS.index(seq_len)]
        advice = page.inner_text("#planner-status")
        assert fits == (found is not None)
        of_indexer = "the indexer, which chooses 2,048, is not modelled"
        assert (of_indexer in page.inner_text("#planner-facts")) == (of_indexer in said) == (model == "deepseek-v3.2")
        if found is None:
            assert "does not fit" in said
            assert advice.startswith("Advice: nothing fits.")
        else:
            assert_as_printed(found, said)
            assert advice.startswith(f"Fastest: {found['way']}: ")
        assert its["thresholds"]["h100"]["between"] > its["thresholds"]["h100"]["inside"] > 100
    page.reload()
    settle(page)
    assert page.input_value("[name=model]") == PLANS[-1][0]  # kept in the address


def test_the_scoreboard_shows_every_prediction(watched):
    page = watched.open("planner.html")
    marked = grades()
    cells = [text.split("\t") for text in page.locator("#scoreboard-table tbody tr").all_inner_texts()]
    of_grades = [
        [" ".join(each.name.split()), digits(each.measured), digits(each.predicted), f"{100 * each.error:+.1f}"]
        for each in marked
    ]
    assert [[row[0].strip(), *(x.split()[0] for x in row[2:4]), row[4].strip()] for row in cells] == of_grades
    board = data.scoreboard()
    assert f"in {board['right']} of {board['questions']} cases" in page.inner_text("#scoreboard-summary")
    page.select_option("#scoreboard-form [name=way]", "hybrid")
    hybrids = sum(each.section == "attention" and each.row["way"] == "hybrid" for each in marked)
    assert page.locator("#scoreboard-table tbody tr:visible").count() == hybrids
    page.select_option("#scoreboard-form [name=way]", "")
    page.press("#scoreboard-table th button >> nth=4", "Enter")
    assert page.locator("#scoreboard-table th").nth(4).get_attribute("aria-sort") == "ascending"
    errors = [float(text.split("\t")[4]) for text in page.locator("#scoreboard-table tbody tr").all_inner_texts()]
    assert errors == sorted(errors)
