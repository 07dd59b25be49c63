"""The planner: one plan derived by hand, its advice, its command line, properties, and planners with a mistake."""

import contextlib
import io
import itertools
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planning import cost_model, hidden_communication, ring_memory
from planning.cost_model import OPTIONS, read_options, show_plan
from planning.hidden_communication import Layer
from tests.shown import check_shown

ROOT = Path(__file__).parent.parent
SENSIBLE = {
    "flops": "990e12",
    "bandwidth": "450e9",
    "memory": "80e9",
    "devices": "8",
    "layers": "32",
    "hidden": "4096",
    "kv-heads": "8",
    "dtype": "bf16",
}


def options(**changes):
    """The command line of the sensible plan with some options changed, and without those that are None."""
    values = {**SENSIBLE, **{name.replace("_", "-"): value for name, value in changes.items()}}
    return [word for name, value in values.items() if value is not None for word in (f"--{name}", str(value))]


def plan(**changes):
    """What the planner prints."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert cost_model.main(options(**changes)) == 0
    return printed.getvalue()


def advised(printed):
    """The one line of advice, which is the last line."""
    (line,) = re.findall(r"^advice {16}(\S.*)$", printed, re.MULTILINE)
    assert printed.endswith(f"{line}\n")
    return line


def command(*words):
    return subprocess.run(
        [sys.executable, "-m", "planning.cost_model", *words], cwd=ROOT, capture_output=True, text=True, timeout=60
    )


# A small cluster in round numbers: H = 2 heads on G = 1, D = 128, h = 256, bf16, 2 layers; 4 devices, C = 1000 tokens.
TINY = {"flops": 1e12, "bandwidth": 1e9, "memory": 1e9, "devices": 4, "layers": 2, "hidden": 256, "kv_heads": 1}
WEIGHTS = 2 * (2 * 256 * 256 + 2 * 256 * 128 + 8 * 256 * 256)
TOKEN = 2 * 2 * 256 + 128 * ((4 * 2 + 8) * 2 + (2 + 4) * 4)  # two inputs of a layer; a layer in training
EACH = int((1e9 - 16 * WEIGHTS / 4) / TOKEN)
HOP = 2 * 1000 * 1 * 128 * 2  # bytes: K and V, one head, two bytes a number
FORWARDS = 4 * 1000**2 / 2 * 256 / 1e12  # seconds
BACKWARDS = 10 * 1000**2 / 2 * 256 / 1e12
HAND = """\
4 devices of 1 TFLOP/s, 1 GB/s, 1 GB; modelled, not measured
2 layers, 2 heads on 1, D = 128, bf16: 0.00144 billion weights (feedforward 8h², no embeddings); causal, zigzag
smallest free chunk   1,000 tokens forwards, 1,200 backwards (500 without a mask)
messages hidden       from S = 4,800 on, but the gradients' last hop
memory of a device    0.00577 GB for weights and Adam, 8.19 kB a token
longest context       at most 485,464 tokens, 121,366 a device: loss and feedforward in pieces
a layer at S = 4,000
    forwards          100% hidden; 2.05 ms overlapped, 3.58 ms one after the other
    backwards         83% hidden; 6.91 ms overlapped (1.02 the last hop), 10.8 ms one after the other
    ring              a device sends 0.00154 GB forwards and holds 0.00205 GB
    all-gather        a device sends 0.00154 GB forwards and holds 0.00307 GB
    all-to-all        1 K/V heads for 4 ranks; expected a multiple, or copies of heads
advice                one sequence: ring of 4, 8.96 ms a layer; many: 4 rings of 1, 7.17 ms a sequence
"""


def check_plan():
    assert plan(**TINY, seq_len=4000) == HAND
    # two K/V heads on two devices: free from 2000 and 2400 on; two heads are sent, q and out by all-to-all as well
    two = plan(**{**TINY, "devices": 2, "kv_heads": 2}, seq_len=4000)
    assert "smallest free chunk   2,000 tokens forwards, 2,400 backwards (1,000 without a mask)\n" in two
    assert "    ring              a device sends 0.00205 GB forwards and holds 0.00614 GB\n" in two
    assert "    all-gather        a device sends 0.00205 GB forwards and holds 0.00614 GB\n" in two
    assert "    all-to-all        a device sends 0.00205 GB forwards and holds 0.00614 GB\n" in two


def test_a_plan_by_hand():
    """Every number of HAND, derived."""
    for tokens, pairs, flops, number in ((500, 1, 4, 2), (1000, 1 / 2, 4, 2), (1200, 1 / 2, 10, 2 + 4)):
        computing, message = flops * pairs * tokens**2 * 256 / 1e12, 2 * tokens * 128 * number / 1e9
        assert computing == pytest.approx(message), "a chunk of so many tokens is the smallest free one"
    assert 4 * 1200 == 4800
    assert WEIGHTS == 1_441_792
    assert 16 * WEIGHTS / 4 == 5_767_168
    assert TOKEN == 8192
    assert (EACH, 4 * EACH) == (121_366, 485_464)
    ms = {"a block": 1e3 * FORWARDS, "a hop": 1e3 * HOP / 1e9, "back": 1e3 * BACKWARDS, "a hop back": 3e3 * HOP / 1e9}
    assert ms == pytest.approx({"a block": 0.512, "a hop": 0.512, "back": 1.28, "a hop back": 1.536})
    assert f"{0.512 + 3 * 0.512:.2f}, {4 * 0.512 + 3 * 0.512:.2f}" == "2.05, 3.58"
    assert 1.536 - 0.512 == 1.024  # the gradients' way home
    assert f"{1.28 + 3 * 1.536 + 1.024:.2f}, {4 * 1.28 + 3 * 1.536 + 1.024:.1f}" == "6.91, 10.8"
    assert f"{1000 / 1200:.0%}" == "83%"
    assert 3 * HOP == 1_536_000  # sent
    assert (2 * 2 + 4 * 1) * 1000 * 128 * 2 == 2_048_000  # held by a ring
    assert (2 * 2 + 2 * 4 * 1) * 1000 * 128 * 2 == 3_072_000  # by all-gather
    assert by_hand(4000, 4) == pytest.approx(2.048 + 6.912)
    assert by_hand(4000, 4) < by_hand(4000, 2) < by_hand(4000, 1) == pytest.approx(4 * 7.168)
    check_plan()


def by_hand(seq_len, ring, bandwidth=1e9):
    """Milliseconds of a layer of TINY, both passes: 512 C² and 1280 C² FLOPs a block; 512 C bytes of K and V, 1024 C of
    their gradients."""
    C = seq_len / ring
    forwards, backwards = 512 * C**2 / 1e12, 1280 * C**2 / 1e12
    kv, gradients = 512 * C / bandwidth, 1024 * C / bandwidth
    seconds = forwards + (ring - 1) * max(forwards, kv) + backwards + (ring - 1) * max(backwards, kv + gradients)
    return 1e3 * (seconds + (gradients if ring > 1 else 0))


def sides(seq_len, ring, **link):
    each = by_hand(seq_len, ring, **link) * ring / 4
    return f"many: {4 // ring} rings of {ring}, {each:,.0f} ms a sequence"


FULL = 485_464  # the longest context of TINY; a device holds 121,366
SLOW = {"bandwidth": 1e5}
ADVICE = [  # a plan, and what to do
    (
        {"seq_len": 4000},
        "one sequence: ring of 4, 8.96 ms a layer; many: 4 rings of 1, 7.17 ms a sequence",
    ),
    (
        {"seq_len": FULL},
        f"one ring of 4, {by_hand(FULL, 4):,.0f} ms a layer; it takes all of them to hold the sequence",
    ),
    ({"seq_len": FULL + 1}, "does not fit: it takes 5 such devices"),
    ({"seq_len": 10**6}, "does not fit: it takes 9 such devices"),  # 8192 bytes each and 23 MB of weights
    ({"memory": 3e6}, "does not fit: it takes 8 such devices"),  # 23.1 MB of weights and Adam
    ({"memory": 1e6, "hidden": 65536}, "fits on no number of such devices: a token takes 1.05 MB"),
    ({"devices": 1}, "fits on one device: a ring begins at two"),
    (
        {**SLOW, "seq_len": 121_366},
        f"one sequence: ring of 1, {by_hand(121_366, 1):,.0f} ms a layer; {sides(121_366, 1)}",
    ),
    (
        {**SLOW, "seq_len": 242_732},
        f"one sequence: ring of 2, {by_hand(242_732, 2, **SLOW):,.0f} ms a layer; {sides(242_732, 2, **SLOW)}",
    ),
]


def check_advice():
    for changes, expected in ADVICE:
        assert advised(plan(**{**TINY, **changes})) == expected, changes


def test_advice_by_hand():
    check_advice()


def test_weights_that_do_not_fit_leave_no_context():
    printed = plan(devices=1, memory="1e9")
    assert "longest context       at most 0 tokens, 0 a device" in printed
    assert "a layer at" not in printed
    needed = -(-16 * 32 * (10 * 4096**2 + 2 * 4096 * 1024) // 10**9)
    assert advised(printed) == f"does not fit: it takes {needed} such devices"


LONGEST, HELD = cost_model.longest_context, cost_model.peak_bytes
SMALLEST, RING_SECONDS, HOP_BYTES = (
    hidden_communication.min_overlap_chunk,
    hidden_communication.ring_seconds,
    hidden_communication.hop_bytes,
)
WRONG = {  # a mistake: what of the planner it takes the place of, and the check that must reject it
    "five blocks": ("peak_bytes", lambda method, layer, C, P: HELD(method, layer, C, P) * 5 / 6, check_plan),
    "G ignored": (
        "min_overlap_chunk",
        lambda F, B, layer, **rest: SMALLEST(F, B, Layer(layer.heads, layer.heads, layer.head_dim), **rest),
        check_plan,
    ),
    "no mask": (
        "min_overlap_chunk",
        lambda F, B, layer, visible=1, **rest: SMALLEST(F, B, layer, **rest),
        check_plan,
    ),
    "forwards only": (
        "min_overlap_chunk",
        lambda F, B, layer, backward=False, **rest: SMALLEST(F, B, layer, **rest),
        check_plan,
    ),
    "P hops": ("ring_seconds", lambda P, *times, overlap: RING_SECONDS(P + 1, *times, overlap=overlap), check_plan),
    "no gradients sent": ("hop_bytes", lambda layer, C, backward=False: HOP_BYTES(layer, C), check_plan),
    "gradients that stay away": ("gradient_bytes", lambda layer, C: 0, check_plan),
    "weights not shared out": ("longest_context", lambda m, layer, L, P: P * LONGEST(m, layer, L, 1), check_advice),
    "one token too many": ("longest_context", lambda m, layer, L, P: LONGEST(m, layer, L, P) + P, check_advice),
    "weights that weigh nothing": ("STATE", 0, check_advice),
    "weights without Adam": ("STATE", 4, check_plan),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_planner_with_a_mistake_is_rejected(name):
    what, mistake, check = WRONG[name]
    where = hidden_communication if what in ("ring_seconds", "hop_bytes", "gradient_bytes") else cost_model
    with mock.patch.object(where, what, mistake), pytest.raises(AssertionError):
        check()


@st.composite
def plans(draw):
    """Options of any plan that the command line accepts."""
    kv_heads = draw(st.integers(1, 64))
    heads = kv_heads * draw(st.integers(1, 16))
    devices = draw(st.one_of(st.integers(1, 64), st.integers(1, 10**6)))
    seq_len = draw(st.none() | st.integers(devices, 10**7) | st.integers(devices, 10**12))
    return read_options(
        options(
            flops=draw(st.floats(1e8, 1e17)),
            bandwidth=draw(st.floats(1e5, 1e14)),
            memory=draw(st.floats(1e6, 1e14)),
            devices=devices,
            layers=draw(st.integers(1, 200)),
            heads=heads,
            hidden=heads * draw(st.integers(1, 256)),
            kv_heads=kv_heads,
            dtype=draw(st.sampled_from(list(cost_model.ITEMSIZE))),
            seq_len=seq_len,
        )
    )


@given(plans())
def test_every_plan_has_one_advice_and_it_follows_from_the_numbers(plan):
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        show_plan(plan)
    advice = advised(printed.getvalue())
    assert "nan" not in printed.getvalue()

    P = plan.devices
    layer = Layer(plan.heads, plan.kv_heads, plan.hidden // plan.heads, cost_model.ITEMSIZE[plan.dtype])
    longest = ring_memory.longest_context(plan.memory, layer, plan.layers, P)
    S = longest if plan.seq_len is None else plan.seq_len
    assert ("a layer at S" in printed.getvalue()) == (S > 0)
    holds = partial(ring_memory.longest_context, plan.memory, layer, plan.layers)
    if "on no number" in advice:
        assert holds(10**15) == 0
    elif advice.startswith("does not fit"):
        devices = int(re.search(r"it takes ([\d,]+) such devices", advice)[1].replace(",", ""))
        assert devices > P
        assert holds(devices - 1) < max(1, S) <= holds(devices)
    else:
        assert 0 < S <= longest
        rings = [int(ring) for ring in re.findall(r"rings? of (\d+)", advice)]
        assert all(P % ring == 0 and S / ring <= longest / P for ring in rings)
    if 0 < S <= longest:
        assert "fit:" not in advice


@given(plans())
def test_a_faster_link_and_slower_devices_never_need_longer_chunks(plan):
    layer = Layer(plan.heads, plan.kv_heads, plan.hidden // plan.heads, cost_model.ITEMSIZE[plan.dtype])
    chunk = cost_model.min_overlap_chunk(plan.flops, plan.bandwidth, layer)
    assert cost_model.min_overlap_chunk(plan.flops, 2 * plan.bandwidth, layer) == pytest.approx(chunk / 2)
    assert cost_model.min_overlap_chunk(plan.flops / 2, plan.bandwidth, layer) == pytest.approx(chunk / 2)


def test_every_sensible_plan_ends_with_0():
    grid = {
        "flops": ["100e12", "990e12"],
        "bandwidth": ["12.5e9", "450e9"],
        "memory": ["16e9", "192e9"],
        "devices": ["1", "7", "8", "512"],
        "hidden": ["4096", "8192"],
        "kv_heads": ["1", "8", "32"],
        "dtype": ["fp8", "bf16", "fp32"],
        "seq_len": [None, "8192", "1000000"],
    }
    for values in itertools.product(*grid.values()):
        advised(plan(**dict(zip(grid, values, strict=True))))


NONSENSE = [  # options, and what the message says: what was given and what was expected, with its unit
    ({"flops": "990"}, ["--flops", "'990' was given", "1e+08 to 1e+17", "FLOP/s", "990e12 for 990 TFLOP/s"]),
    ({"flops": "abc"}, ["--flops", "'abc' was given", "a number", "FLOP/s"]),
    ({"flops": "nan"}, ["--flops", "'nan' was given", "FLOP/s"]),
    ({"bandwidth": "inf"}, ["--bandwidth", "'inf' was given", "bytes/s"]),
    ({"bandwidth": "450"}, ["--bandwidth", "'450' was given", "450e9 for 450 GB/s", "slowest link"]),
    ({"memory": "-80e9"}, ["--memory", "'-80e9' was given", "bytes of a device"]),
    ({"memory": "80"}, ["--memory", "'80' was given", "80e9 for 80 GB"]),
    ({"devices": "0"}, ["--devices", "'0' was given", "a whole number, 1 to 1,000,000", "devices in the ring"]),
    ({"devices": "2.5"}, ["--devices", "'2.5' was given", "a whole number"]),
    ({"layers": "-1"}, ["--layers", "'-1' was given", "layers of the model"]),
    ({"kv_heads": "5"}, ["heads is 32 (hidden / 128), kv-heads 5", "a multiple of kv-heads"]),
    ({"kv_heads": "64"}, ["heads is 32 (hidden / 128), kv-heads 64", "a multiple of kv-heads"]),
    ({"hidden": "4097"}, ["hidden is 4097, heads 32 (hidden / 128)", "a multiple of heads"]),
    ({"heads": "0"}, ["--heads", "'0' was given", "query heads"]),
    ({"heads": "31"}, ["hidden is 4096, heads 31", "a multiple of heads"]),
    ({"seq_len": "7"}, ["seq-len is 7 on 8 devices", "a token for each"]),
    ({"seq_len": "1.5"}, ["--seq-len", "'1.5' was given", "a whole number, 1 to 1,000,000,000,000", "tokens"]),
    ({"seq_len": "nan"}, ["--seq-len", "'nan' was given", "a whole number"]),
    ({"dtype": "int4"}, ["--dtype", "'int4'", "bf16"]),
    ({"dtype": None}, ["required", "--dtype"]),
    ({"bandwidth": None, "layers": None}, ["required", "--bandwidth", "--layers"]),
    ({"color": "red"}, ["--color"]),
]


@pytest.mark.parametrize(("changes", "said"), NONSENSE, ids=[str(changes) for changes, _ in NONSENSE])
def test_nonsense_ends_with_2_and_is_explained(changes, said, capsys):
    with pytest.raises(SystemExit) as ended:
        cost_model.main(options(**changes))
    assert ended.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    message = printed.err.splitlines()[-1]
    for part in said:
        assert part in message


def test_the_command_ends_with_2_and_no_traceback():
    done = command(*options(flops="990"))
    assert (done.returncode, done.stdout) == (2, "")
    assert "'990' was given" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_command_plans():
    done = command(*options())
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == plan()
    assert done.stdout.startswith("8 devices of 990 TFLOP/s, 450 GB/s, 80 GB; modelled, not measured\n")
    assert advised(done.stdout).startswith("one ring of 8, 9,248 ms a layer")


def test_the_plan_of_the_docstring_is_the_sensible_one():
    shown = re.search(r"\$ python -m planning.cost_model (--flops.*?)\n\n", cost_model.__doc__, re.DOTALL)[1]
    assert shown.replace("\\", "").split() == options()


def test_without_options_it_prints_the_papers_tables_and_example():
    done = command()
    assert (done.returncode, done.stderr) == (0, "")
    for name in ("hidden_communication", "ring_memory"):
        alone = subprocess.run([sys.executable, "-m", f"planning.{name}"], cwd=ROOT, capture_output=True, text=True)
        assert alone.returncode == 0
        assert alone.stdout in done.stdout
    for part in ("Table 2: ", "Table 1, ", "Table 3: ", "512 devices", "16,384K on 512", "64 are left for the ring"):
        assert part in done.stdout
    check_shown(
        "...\n" + ring_memory.__doc__.split("planning.ring_memory\n    ")[1].split("\n")[0] + "\n...", done.stdout
    )


@pytest.mark.parametrize("table", [hidden_communication, ring_memory])
def test_a_table_that_is_wrong_ends_with_1(table, capsys):
    with mock.patch.object(table, "main", return_value=1):
        assert cost_model.main() == 1


def test_help_names_the_unit_of_every_option():
    done = command("--help")
    assert done.returncode == 0
    text = " ".join(done.stdout.split())
    units = {
        "flops": "FLOP/s",
        "bandwidth": "bytes/s",
        "memory": "bytes of a device",
        "devices": "devices in the ring",
        "layers": "layers of the model",
        "hidden": "width of the model, h",
        "kv-heads": "key/value heads",
        "heads": "query heads",
        "seq-len": "tokens in all",
    }
    assert units.keys() == OPTIONS.keys()
    for name, unit in units.items():
        assert re.search(rf"--{name} X \S*{re.escape(unit)}", text), name
    assert "{fp8,bf16,fp16,fp32}" in text


def test_numbers_are_printed_without_exponents():
    assert [cost_model.digits(x) for x in (0.0179, 5.894, 99.94, 3804.4, 1.43e9)] == [
        "0.0179",
        "5.89",
        "99.9",
        "3,804",
        "1,430,000,000",
    ]
