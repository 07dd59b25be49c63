"""The planner's page says what the planner says: its own JavaScript, in the browser, on random inputs."""

import random
from argparse import Namespace
from functools import cache
from math import ceil, isinf
from urllib.parse import quote

from book.test_explorers import READY, rows
from ringlab.planning import cost_model
from ringlab.planning.cost_model import advice, advice_on_ways
from ringlab.planning.hidden_communication import AttentionLayer, hidden_share, min_overlap_chunk
from ringlab.planning.presets import GPUS, MODELS
from ringlab.planning.ranking import computing_seconds, digits, rank_ways
from ringlab.planning.ring_memory import STATE, longest_context, param_count, token_bytes
from ringlab.planning.scoreboard import PUBLISHED, grades, predict_file
from ringlab.planning.ways import WAYS, Cluster

CLOSE = 1e-9
INPUTS = 1000
PLANS = """async ([module, inputs]) => {
  const [{ say }, { plan }] = await Promise.all([import("./_static/explorer.js"), import(module)]);
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


def same(a, b):
    return (isinf(a) and isinf(b)) or abs(a - b) <= CLOSE * abs(b)


@cache
def random_inputs():
    """The inputs, and what Python says of each."""
    draw = random.Random(0)
    inputs = [random_input(draw) for _ in range(INPUTS)]
    return inputs, list(map(in_python, inputs))


def differences(page, module, count):
    """The inputs, among the first `count`, of which a module and Python do not say the same."""
    inputs, right = (each[:count] for each in random_inputs())
    shown = map(of_page, page.evaluate(PLANS, [module, inputs]))
    return [
        given
        for given, ours, its in zip(inputs, right, shown, strict=True)
        if its["words"] != ours["words"]
        or len(its["numbers"]) != len(ours["numbers"])
        or not all(map(same, its["numbers"], ours["numbers"]))
    ]


def test_the_page_computes_what_python_computes(watched):
    page = watched.open("planner.html", READY)
    assert differences(page, "./_static/planning.js", INPUTS) == []
    of_rings, best, many = zip(*(each["words"][:3] for each in random_inputs()[1]), strict=True)
    assert {kind for kind in KINDS for words in of_rings if words.startswith(kind)} == set(KINDS)
    assert any("nearly as fast" in words for words in best)
    assert any(many)


PLANTED = [  # right, wrong
    ("backward ? 10 : 4", "backward ? 8 : 4"),
    ("3 * H + 2 * G + 4 * G", "3 * H + 4 * G"),
    ("10 * hidden(layer) ** 2", "12 * hidden(layer) ** 2"),
    ("NEAR = 1.02", "NEAR = 1.5"),
    ("(3 / 2) * twoBuffers", "2 * twoBuffers"),
    ("rates[link] / users[link]", "rates[link]"),  # messages do not share a link
    ("i < more ? 1 : 0", "0"),  # heads that do not divide are lost
    ("size: ((P - 1) / nics)", "size: (P / nics)"),
    ("backward && P > 1 ? gradientBytes", "false ? gradientBytes"),  # the sums do not come home
    ("Math.max(1, seqLen)", "seqLen + 64"),
]


def test_a_mistake_in_a_formula_is_seen(watched, site):
    page = watched.open("planner.html", READY)
    source = (site / "_static/planning.js").read_text()
    for right, wrong in PLANTED:
        assert source.count(right) == 1, right
        planted = source.replace(right, wrong)
        assert differences(page, f"data:text/javascript,{quote(planted)}", 60), right


def numbers_of(row):
    """The cells of a row of ways, but the name and the reason."""
    if isinf(row.seconds):
        return ["–"] * 5
    return [digits(x) for x in (1e3 * row.seconds, row.in_host / 1e9, row.between_hosts / 1e9, row.held / 1e9)]


def typed(number, unit):
    """A number as the page fills it into a field: three digits, in this power of ten."""
    return float(f"{float(f'{number / 10**unit:.3g}')}e{unit}")


def terminal(command, capsys):
    """What a command of the page prints: its lines by their first words."""
    program, *arguments = command.replace("\\\n", " ").split()
    assert program == "ring-plan"
    assert cost_model.main(arguments) == 0
    lines = [line.split("  ", 1) for line in capsys.readouterr().out.splitlines()]
    return {line[0]: line[1].strip() for line in lines if len(line) == 2}


def shown(page):
    """Wait until what was chosen is computed."""
    page.wait_for_selector("#planner-results[aria-busy=false]", state="attached")


CHOICES = [  # hosts, devices of a host, model, gpu, tokens
    (4, 8, "llama-3.1-8b", "h100", 131072),
    (1, 8, "llama-2-13b", "a100-80", 65536),
    (2, 4, "qwen2.5-7b", "l40s", 1000000),  # 28 heads on 4
    (1, 1, "llama-3.2-1b", "b200", 8192),
    (2, 8, "llama-3.1-405b", "h200", 131072),  # does not fit
]


def test_the_page_says_what_its_command_prints(watched, capsys):
    page = watched.open("planner.html", READY)
    for hosts, per_host, model, gpu, seq_len in CHOICES:
        page.select_option("[name=model]", model)
        page.select_option("[name=gpu]", gpu)
        for name, value in (("hosts", hosts), ("per_host", per_host), ("seq_len", seq_len)):
            page.fill(f"[name={name}]", str(value))
        shown(page)
        command, whole = page.inner_text("#planner-command").split("\n\n")
        printed = terminal(command, capsys)
        assert page.inner_text("#planner-status") == f"Advice: {printed['advice']}."
        facts = page.inner_text("#planner-facts")
        if "many sequences" in printed:
            assert f"For many sequences, {printed['many sequences']}." in facts
        longest = printed["longest context"].split()[0]
        assert f"fits in a ring: {longest} tokens" in facts
        assert (
            whole == f"ring-plan --model {model} --gpu {gpu} --hosts {hosts} --per-host {per_host} --seq-len {seq_len}"
        )

        itemsize, known = cost_model.ITEMSIZE["bf16"], MODELS[model]
        layer, flops = known.attention(itemsize), typed(GPUS[gpu].attention["fused"][0], 12)
        cards = GPUS[gpu].card if hosts > 1 else GPUS[gpu].link
        cluster, memory = Cluster(hosts, per_host, flops, GPUS[gpu].link, cards), typed(GPUS[gpu].memory, 9)
        chunk = ceil(seq_len / cluster.devices)
        if "does not fit" in printed["advice"]:
            assert page.locator("#ways").count() == 0
        else:
            ranked = rank_ways(cluster, layer, known.layers, chunk, memory)
            cells = [[row[0], row[1], *row[3:6]] for row in rows(page, "ways")]
            assert cells == [[row.name, *numbers_of(row)][:5] for row in ranked]
        assert page.locator("#planner-hidden svg.curves").count() == (cluster.devices > 1)
        rates = {
            "inside a host": cluster.bandwidth,
            "between hosts": cards,
            "between hosts, double ring": per_host * cards,
        }
        for link, way, least, least_of_all, share in rows(page, "thresholds") if cluster.devices > 1 else []:
            each = min_overlap_chunk(flops, rates[link], layer, visible=1 / 2, backward=way == "backward")
            assert (least, least_of_all) == (f"{ceil(each):,}", f"{ceil(each) * cluster.devices:,}")
            assert share == f"{100 * hidden_share(chunk, each):.0f} %"


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
    assert page.inner_text("#planner-command").count("ring-plan") == 1
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
    words = [
        f"{way}: at most 5 % more than computing from {found[way]:,} tokens on."
        if way in found
        else f"{way}: more than 5 % over computing at the longest too."
        for way in WAYS
    ]
    assert page.locator("#planner-lengths .legend li").all_inner_texts() == words


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
    cells = page.locator("#scoreboard-table tbody tr").all_inner_texts()
    assert len(cells) == len(marked)
    for text, grade in zip(cells, marked, strict=True):
        case, _, measured, predicted, error, source = map(str.strip, text.split("\t"))
        assert case == " ".join(grade.name.split())
        assert [measured.split()[0], predicted.split()[0]] == [digits(grade.measured), digits(grade.predicted)]
        assert (error, source) == (f"{100 * grade.error:+.1f}", grade.row["source"])
    of_attention = [grade for grade in marked if grade.section == "attention"]
    assert page.locator("#scoreboard-picture path title").count() == len(of_attention)

    page.select_option("#scoreboard-form [name=way]", "hybrid")
    hybrids = [grade for grade in of_attention if grade.row["way"] == "hybrid"]
    assert page.locator("#scoreboard-table tbody tr:visible").count() == len(hybrids)
    assert page.inner_text("#scoreboard-status") == f"{len(hybrids)} of {len(marked)} rows are shown."
    page.select_option("#scoreboard-form [name=way]", "")
    page.locator("#scoreboard-table th button").nth(4).focus()
    for way in ("ascending", "descending"):
        page.keyboard.press("Enter")
        assert page.locator("#scoreboard-table th").nth(4).get_attribute("aria-sort") == way
        errors = [float(text.split("\t")[4]) for text in page.locator("#scoreboard-table tbody tr").all_inner_texts()]
        assert errors == sorted(errors, reverse=way == "descending")
