"""The planner's page says what the planner says: its own JavaScript, in the browser, on random inputs."""

import random
from argparse import Namespace
from math import ceil, isinf

import pytest

from book.test_explorers import READY, rows
from ringlab.planning import cost_model
from ringlab.planning.cost_model import advice, advice_on_ways
from ringlab.planning.hidden_communication import AttentionLayer, min_overlap_chunk
from ringlab.planning.presets import GPUS, MODELS
from ringlab.planning.ranking import computing_seconds, digits, rank_ways
from ringlab.planning.ring_memory import STATE, longest_context, param_count, token_bytes
from ringlab.planning.scoreboard import PUBLISHED, grades, predict_file
from ringlab.planning.ways import WAYS, Cluster

CLOSE = 1e-9
INPUTS = 1000
PLANS = """async (inputs) => {
  const [{ say }, { plan }] = await Promise.all(["explorer", "planning"].map((name) => import(`./_static/${name}.js`)));
  return inputs.map((each) => plan(say, each));
}"""
KINDS = ("does not fit: ", "fits on no number", "fits on one device", "one ring of", "one sequence: ")  # of advice


def random_input(draw):
    """A cluster, a layer, a length, a memory. Some do not fit; some have too few heads, or heads that do not divide."""
    kv_heads = draw.choice([1, 2, 3, 4, 8])
    hosts, per_host = draw.choice([1, 2, 2, 3, 4]), draw.choice([1, 2, 2, 3, 4])
    itemsize, layers = draw.choice([1, 2, 4]), draw.randint(1, 80)
    layer = {"heads": kv_heads * draw.choice([1, 2, 3, 4]), "kvHeads": kv_heads, "headDim": draw.choice([64, 80, 128])}
    rates = {"flops": (1e12, 3e15), "bandwidth": (1e9, 1e12), "hostBandwidth": (1e9, 1e11)}
    cluster = {name: float(f"{least * (most / least) ** draw.random():.3g}") for name, (least, most) in rates.items()}
    return {
        "cluster": {"hosts": hosts, "perHost": per_host, **cluster},
        "layer": {**layer, "itemsize": itemsize},
        "layers": layers,
        "seqLen": draw.randint(hosts * per_host, int(2 ** draw.uniform(6, 22))),
        "memory": draw.choice([2e5, 2e9, 16e9, 84.9e9, 8e12]),
    }


def in_python(given):
    """What the planner says of an input of the page."""
    c, layer = given["cluster"], AttentionLayer(*given["layer"].values())
    between = c["hostBandwidth"] if c["hosts"] > 1 else c["bandwidth"]
    cluster = Cluster(c["hosts"], c["perHost"], c["flops"], c["bandwidth"], between)
    P, S, L, memory = cluster.devices, given["seqLen"], given["layers"], given["memory"]
    longest, chunk = longest_context(memory, layer, L, P), ceil(S / P)
    links = {
        "inside": c["bandwidth"] if cluster.per_host > 1 else 0,
        "between": c["hostBandwidth"] if cluster.hosts > 1 else 0,
        "turn": cluster.per_host * c["hostBandwidth"] if min(cluster.hosts, cluster.per_host) > 1 else 0,
    }
    slowest = min(c["bandwidth"], between)
    options = Namespace(devices=P, layers=L, flops=c["flops"], bandwidth=slowest, memory=memory)
    of_ring = advice(S, longest, layer, options)
    ranked = rank_ways(cluster, layer, L, chunk, memory) if longest >= S else []
    many, best = advice_on_ways(ranked, memory) if ranked else ("", of_ring)
    return {
        "words": [of_ring, best, many, *(f"{row.name}: {row.why}" for row in ranked)],
        "numbers": [
            *(longest, chunk, P, slowest, STATE * param_count(layer, L) / P, token_bytes(layer, L, "training")),
            *(
                min_overlap_chunk(c["flops"], rate, layer, visible=1 / 2, backward=backward)
                for rate in links.values()
                if rate
                for backward in (False, True)
            ),
            *(x for row in ranked for x in (row.seconds, row.in_host, row.between_hosts, row.held, row.sequences)),
            *([computing_seconds(cluster, layer, chunk)] if ranked else []),
        ],
    }


def of_page(found):
    """The same, of what the page's module returned."""
    ranked = found["rows"]
    return {
        "words": [found["ofRing"], found["advice"], found["many"], *(f"{row['name']}: {row['why']}" for row in ranked)],
        "numbers": [
            *(found[name] for name in ("longest", "chunk", "P", "slowest", "state", "token")),
            *(each["chunk"] for each in found["thresholds"]),
            *(row[name] for row in ranked for name in ("seconds", "inHost", "between", "held", "sequences")),
            *([found["computing"]] if ranked else []),
        ],
    }


def test_the_page_computes_what_python_computes(watched):
    page = watched.open("planner.html", READY)
    draw = random.Random(0)
    inputs = [random_input(draw) for _ in range(INPUTS)]
    right = list(map(in_python, inputs))
    for given, ours, its in zip(inputs, right, map(of_page, page.evaluate(PLANS, inputs)), strict=True):
        assert its["words"] == ours["words"], given
        assert its["numbers"] == pytest.approx(ours["numbers"], rel=CLOSE, abs=0), given
    of_rings, best, many = zip(*(each["words"][:3] for each in right), strict=True)
    assert {kind for kind in KINDS for words in of_rings if words.startswith(kind)} == set(KINDS)
    assert any("nearly as fast" in words for words in best)
    assert any(many)


CHOICES = [  # hosts, devices of a host, model, gpu, tokens
    (4, 8, "llama-3.1-8b", "h100", 131072),
    (1, 1, "llama-3.2-1b", "b200", 8192),
    (2, 4, "qwen2.5-7b", "l40s", 1000000),  # 28 heads on 4
    (2, 8, "llama-3.1-405b", "h200", 131072),  # does not fit
]


def shown(page):
    """Wait until what was chosen is computed."""
    page.wait_for_selector("#planner-results[aria-busy=false]", state="attached")


def table(given):
    """The rows of ways as the page writes what its module returned: name, ms, and GB inside, between and held."""
    found = given["numbers"][-1 - 5 * len(given["words"][3:]) : -1]
    for name, start in zip(given["words"][3:], range(0, len(found), 5), strict=True):
        seconds, *sizes = found[start : start + 4]
        cells = ["–"] * 4 if isinf(seconds) else [digits(1e3 * seconds), *(digits(x / 1e9) for x in sizes)]
        yield [name.split(":")[0], *cells]


def test_the_page_says_what_its_command_prints(watched, capsys):
    page = watched.open("planner.html", READY)
    for hosts, per_host, model, gpu, seq_len in CHOICES:
        page.select_option("[name=model]", model)
        page.select_option("[name=gpu]", gpu)
        for name, value in (("hosts", hosts), ("per_host", per_host), ("seq_len", seq_len)):
            page.fill(f"[name={name}]", str(value))
        shown(page)
        command, whole = page.inner_text("#planner-command").split("\n\n")
        assert (
            whole == f"ring-plan --model {model} --gpu {gpu} --hosts {hosts} --per-host {per_host} --seq-len {seq_len}"
        )
        assert cost_model.main(command.replace("\\\n", " ").split()[1:]) == 0
        lines = [line.split("  ", 1) for line in capsys.readouterr().out.splitlines()]
        printed = {line[0]: line[1].strip() for line in lines if len(line) == 2}
        assert page.inner_text("#planner-status") == f"Advice: {printed['advice']}."
        facts = page.inner_text("#planner-facts")
        assert f"For many sequences, {printed.get('many sequences')}." in facts or "many sequences" not in printed
        assert f"fits in a ring: {printed['longest context'].split()[0]} tokens" in facts
        known, card = MODELS[model], GPUS[gpu]
        cluster = {"flops": float(f"{card.attention['fused'][0]:.3g}"), "bandwidth": card.link}
        cluster |= {"hosts": hosts, "perHost": per_host, "hostBandwidth": card.card}
        layer = {"heads": known.heads, "kvHeads": known.kv_heads, "headDim": known.head_dim, "itemsize": 2}
        memory = float(f"{card.memory:.3g}")
        its = {"cluster": cluster, "layer": layer, "layers": known.layers, "seqLen": seq_len, "memory": memory}
        cells = [[row[0], row[1], *row[3:6]] for row in rows(page, "ways")] if page.locator("#ways").count() else []
        assert cells == list(table(in_python(its)))
        assert page.locator("#planner-hidden svg.curves").count() == (hosts * per_host > 1)


def test_the_planner_is_driven_by_keys_and_remembers(watched):
    page = watched.open("planner.html", READY)
    page.locator("input[type=range][aria-label*='tokens S']").focus()
    page.keyboard.press("Home")
    assert page.input_value("[name=seq_len]") == "1024"
    shown(page)
    assert "Each has a chunk of 32 tokens" in page.inner_text("#planner-facts")
    page.locator("input[type=range][aria-label*='TFLOP/s']").focus()
    page.keyboard.press("ArrowRight")
    assert page.input_value("[name=gpu]") == ""  # your own numbers
    shown(page)
    flops, said = page.input_value("[name=flops]"), page.inner_text("#planner-status")
    page = watched.open(page.url.removeprefix(f"{watched.address}/"), READY)
    shown(page)
    assert (page.input_value("[name=flops]"), page.inner_text("#planner-status")) == (flops, said)


def test_the_page_says_from_which_length_on_a_way_is_as_fast_as_computing(watched):
    page = watched.open("planner.html#hosts=2&per_host=4&seq_len=4096&host_bandwidth=25", READY)
    shown(page)
    page.wait_for_selector("#planner-lengths[aria-busy=false]", state="attached")
    layer, found = MODELS["llama-3.1-8b"].attention(2), {}
    cluster = Cluster(2, 4, 680e12, 450e9, 25e9)
    for seq_len in (2**i for i in range(24, 9, -1)):
        computing = computing_seconds(cluster, layer, seq_len // 8)
        ranked = [row for row in rank_ways(cluster, layer, 32, seq_len // 8, 8e12) if row.sequences == 1]
        for way in WAYS:
            best = min(row.seconds for row in ranked if row.name.startswith(way))
            if best <= 1.05 * computing and found.get(way, 2 * seq_len) == 2 * seq_len:
                found[way] = seq_len
    assert 2 < len(set(found.values())) <= len(found) <= len(WAYS)
    said = page.locator("#planner-lengths .legend li").all_inner_texts()
    for way, words in zip(WAYS, said, strict=True):
        assert words.startswith(f"{way}: ")
        assert (f"from {found[way]:,} tokens on" if way in found else "at the longest too") in words


REFUSED = [  # field, number, words
    ("kv_heads", "5", "32 query heads on 5 K/V heads; expected a multiple."),
    ("hosts", "65", "65 hosts of 8 are 520 devices; expected 512 at most on this page"),
    ("seq_len", "31", "31 tokens on 32 devices; expected at least a token on each."),
    ("seq_len", "", "tokens S: – was given; expected 1 to 67,108,864."),
    ("layers", "1.5", "layers L: 1.5 was given; expected 1 to 1,000."),
    ("flops", "0", "TFLOP/s that attention reaches on a device: 0 was given; expected 0.001 to 100,000."),
]


def test_numbers_that_no_cluster_has_are_refused_in_a_sentence(watched):
    page = watched.open("planner.html", READY)
    for name, value, words in REFUSED:
        right = page.input_value(f"[name={name}]")
        page.fill(f"[name={name}]", value)
        assert page.inner_text("#planner-status").startswith(words)
        assert not page.is_visible("#planner-results")
        page.fill(f"[name={name}]", right)
        shown(page)
        assert page.inner_text("#planner-status").startswith("Advice: ")


def test_the_scoreboard_shows_every_prediction(watched):
    page = watched.open("planner.html", READY)
    marked = grades(predict_file(PUBLISHED))
    cells = [text.split("\t") for text in page.locator("#scoreboard-table tbody tr").all_inner_texts()]
    of_grades = [
        [" ".join(each.name.split()), digits(each.measured), digits(each.predicted), f"{100 * each.error:+.1f}"]
        for each in marked
    ]
    assert [[row[0].strip(), *(x.split()[0] for x in row[2:4]), row[4].strip()] for row in cells] == of_grades
    assert [row[5].strip() for row in cells] == [each.row["source"] for each in marked]
    page.select_option("#scoreboard-form [name=way]", "hybrid")
    hybrids = sum(each.section == "attention" and each.row["way"] == "hybrid" for each in marked)
    assert page.locator("#scoreboard-table tbody tr:visible").count() == hybrids
    assert page.inner_text("#scoreboard-status") == f"{hybrids} of {len(marked)} rows are shown."
    page.select_option("#scoreboard-form [name=way]", "")
    page.locator("#scoreboard-table th button").nth(4).focus()
    for way in ("ascending", "descending"):
        page.keyboard.press("Enter")
        assert page.locator("#scoreboard-table th").nth(4).get_attribute("aria-sort") == way
        errors = [float(text.split("\t")[4]) for text in page.locator("#scoreboard-table tbody tr").all_inner_texts()]
        assert errors == sorted(errors, reverse=way == "descending")
