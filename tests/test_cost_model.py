"""The planner: one plan derived by hand, its advice, its command line, properties, and planners with a mistake."""

import contextlib
import io
import re
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

from ringlab.planning import cost_model, hidden_communication, ring_memory
from ringlab.planning.cost_model import ITEMSIZE
from ringlab.planning.ranking import digits
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
        [sys.executable, "-m", "ringlab.planning.cost_model", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )


# A small cluster in round numbers: H = 2 heads on G = 1, D = 128, h = 256, bf16, 2 layers; 4 devices, C = 1000 tokens.
TINY = {"flops": 1e12, "bandwidth": 1e9, "memory": 1e9, "devices": 4, "layers": 2, "hidden": 256, "kv_heads": 1}
TOKEN = 8192  # bytes: the inputs of two layers, 2 · 2 · 256; one layer in training, 128 · ((4·2 + 8) · 2 + (2 + 4) · 4)
# A block of 1000 tokens takes 0.512 ms and, backward, 1.28 ms. A hop takes 0.512 ms, with gradients 1.536 ms; the last
# hop has gradients only, 1.024 ms. Overlapped: 0.512 + 3 · 0.512, and 1.28 + 3 · 1.536 + 1.024. A rank sends 3 hops of
# 512 kB. It holds 8 heads of 256 kB, by all-gather 12. The 4 devices share 1,441,792 parameters of 16 bytes.
HAND = """\
4 devices of 1 TFLOP/s, 1 GB/s, 1 GB; modelled, not measured
2 layers, 2 query heads on 1, D = 128, bf16: 0.00144 billion parameters (feedforward 8h², no embeddings); causal, zigzag
smallest chunk        that hides its messages: 1,000 tokens forward, 1,200 tokens backward (500 forward without a mask)
messages hidden       from S = 4,800 on, except the last hop of the gradients
memory of a device    0.00577 GB for parameters, gradients and Adam, 8.19 kB a token
longest context       485,464 tokens at most, 121,366 a device; loss and feedforward in pieces
a layer at S = 4,000
    forward           100% hidden; 2.05 ms with overlap, 3.58 ms without
    backward          83% hidden; 6.91 ms with overlap (1.02 of it the last hop), 10.8 ms without
    ring              forward, a device sends 0.00154 GB; its peak memory is 0.00205 GB
    all-gather        forward, a device sends 0.00154 GB; its peak memory is 0.00307 GB
    all-to-all        1 K/V heads for 4 ranks; expected a multiple, or copies of heads
not counted           logits, 14 bytes for each token and word: --model and --gpu count the whole step
advice                one sequence: a ring of 4, 8.96 ms a layer; many: 4 rings of 1, 7.17 ms a sequence
"""


def check_plan():
    assert plan(**TINY, seq_len=4000) == HAND
    # Two K/V heads on two devices: hidden from 2000 and 2400 on. All-to-all sends half of q, k, v and out, 8 heads.
    two = plan(**{**TINY, "devices": 2, "kv_heads": 2}, seq_len=4000)
    assert "messages: 2,000 tokens forward, 2,400 tokens backward (1,000 forward without a mask)\n" in two
    for method in ("ring", "all-gather", "all-to-all"):
        assert f"    {method:<18}forward, a device sends 0.00205 GB; its peak memory is 0.00614 GB\n" in two


def test_a_plan_by_hand():
    assert by_hand(4000, 4) == pytest.approx(2.048 + 6.912)
    assert by_hand(4000, 4) < by_hand(4000, 2) < by_hand(4000, 1) == pytest.approx(4 * 7.168)
    check_plan()


def by_hand(seq_len, ring, bandwidth=1e9):
    """Milliseconds of a layer of TINY, both passes, for the longest chunk.

    A block costs 512 C² and 1280 C² FLOPs. K and V have 512 C bytes, their gradients 1024 C.
    """
    C = -(-seq_len // ring)
    forward, backward = 512 * C**2 / 1e12, 1280 * C**2 / 1e12
    kv, gradients = 512 * C / bandwidth, 1024 * C / bandwidth
    seconds = forward + (ring - 1) * max(forward, kv) + backward + (ring - 1) * max(backward, kv + gradients)
    return 1e3 * (seconds + (gradients if ring > 1 else 0))


def many(seq_len, ring, **link):
    each = by_hand(seq_len, ring, **link) * ring / 4
    return f"many: {4 // ring} rings of {ring}, {each:,.0f} ms a sequence"


FULL = 485_464  # the longest context of TINY; a device holds 121,366
SLOW = {"bandwidth": 1e5}
LAST = "fewer devices cannot hold the sequence"
ADVICE = [  # a plan, and what to do
    ({"seq_len": 4000}, "one sequence: a ring of 4, 8.96 ms a layer; many: 4 rings of 1, 7.17 ms a sequence"),
    ({"seq_len": FULL}, f"one ring of 4, {by_hand(FULL, 4):,.0f} ms a layer; {LAST}"),
    ({"seq_len": FULL + 1}, "does not fit: it takes 5 such devices"),
    ({"seq_len": 10**6}, "does not fit: it takes 9 such devices"),  # 8192 bytes each and 23 MB of parameters
    ({"memory": 3e6}, "does not fit: it takes 8 such devices"),  # 23.1 MB of parameters and Adam
    ({"memory": 1e6, "hidden": 65536}, "fits on no number of such devices: a token takes 1.05 MB"),
    ({"devices": 1}, "fits on one device: a ring begins at two"),
    (
        {**SLOW, "seq_len": 121_366},
        f"one sequence: a ring of 1, {by_hand(121_366, 1):,.0f} ms a layer; {many(121_366, 1)}",
    ),
    (
        {**SLOW, "seq_len": 121_367},  # one token too many for one device
        f"one sequence: a ring of 2, {by_hand(121_367, 2, **SLOW):,.0f} ms a layer; {many(121_367, 2, **SLOW)}",
    ),
    (
        {**SLOW, "seq_len": 242_732},
        f"one sequence: a ring of 2, {by_hand(242_732, 2, **SLOW):,.0f} ms a layer; {many(242_732, 2, **SLOW)}",
    ),
    (
        {**SLOW, "seq_len": 242_733},  # chunks of two devices would have 121,366.5 tokens: one has 121,367
        f"one ring of 4, {by_hand(242_733, 4, **SLOW):,.0f} ms a layer; {LAST}",
    ),
]


def check_advice():
    for changes, expected in ADVICE:
        assert advised(plan(**{**TINY, **changes})) == expected, changes


def test_advice_by_hand():
    check_advice()


def test_the_longest_chunk_counts_where_chunks_differ():
    """By hand: 5 tokens on 4 devices are chunks of 2, 1, 1 and 1. The ring is as slow as the chunk of 2."""
    assert advised(plan(**TINY, seq_len=5)).startswith(f"one sequence: a ring of 1, {by_hand(5, 1):.3g} ms")
    at_5, at_8 = (plan(**TINY, seq_len=seq_len).split("\n    ring")[0].split("a layer at S")[1] for seq_len in (5, 8))
    assert at_5.replace(" = 5", "") == at_8.replace(" = 8", "")


@pytest.mark.parametrize("name", ITEMSIZE)
def test_bytes_of_a_dtype_are_those_of_torch(name):
    of_torch = {"fp8": torch.float8_e4m3fn, "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    w = of_torch[name].itemsize
    assert ITEMSIZE[name] == w
    # TINY by hand: w/2 · 1/2 · 2 · 1000 tokens, and (w + 4)/5 · 1/2 · 2 · 1000, and a K and a V in three hops
    printed = plan(**TINY, seq_len=4000, dtype=name)
    assert f"messages: {500 * w:,} tokens forward, {200 * (w + 4):,} tokens backward" in printed
    assert f"    ring              forward, a device sends {3 * 2 * 1000 * 128 * w / 1e9:.3g} GB" in printed


def test_a_model_that_does_not_fit_leaves_no_context():
    printed = plan(devices=1, memory="1e9")
    assert "longest context       0 tokens at most, 0 a device" in printed
    assert "a layer at" not in printed
    needed = -(-16 * 32 * (10 * 4096**2 + 2 * 4096 * 1024) // 10**9)
    assert advised(printed) == f"does not fit: it takes {needed} such devices"


HOSTS = {"devices": None, "hosts": 16, "per_host": 8, "host_bandwidth": "12.5e9", "seq_len": 2**20}
NONSENSE = [  # options, and what the message says: what was given and what was expected, with its unit
    ({"flops": "990"}, ["--flops", "990 was given", "1e+08 to 1e+18", "FLOP/s", "990e12 for 990 TFLOP/s"]),
    ({"flops": "abc"}, ["--flops", "invalid number value: 'abc'"]),
    ({"flops": "nan"}, ["--flops", "nan was given", "FLOP/s"]),
    ({"bandwidth": "inf"}, ["--bandwidth", "inf was given", "bytes/s"]),
    ({"bandwidth": "450"}, ["--bandwidth", "450 was given", "450e9 for 450 GB/s", "slowest link"]),
    ({"memory": "-80e9"}, ["--memory", "expected one argument"]),
    ({"memory": "80"}, ["--memory", "80 was given", "80e9 for 80 GB"]),
    ({"devices": "0"}, ["--devices", "0 was given", "a whole number, 1 to 1e+12"]),
    ({"devices": "2.5"}, ["--devices", "2.5 was given", "a whole number"]),
    ({"devices": "1e13"}, ["--devices", "1e13 was given", "a whole number"]),
    ({"layers": "-1"}, ["--layers", "-1 was given", "a whole number"]),
    ({"layers": "many"}, ["--layers", "invalid count value: 'many'"]),
    ({"kv_heads": "5"}, ["heads 32, kv-heads 5", "a multiple of the next", "default: hidden / 128"]),
    ({"kv_heads": "64"}, ["heads 32, kv-heads 64", "a multiple of the next"]),
    ({"hidden": "4097"}, ["hidden is 4097, heads 32", "a multiple of the next"]),
    ({"heads": "0"}, ["--heads", "0 was given", "a whole number"]),
    ({"heads": "31"}, ["hidden is 4096, heads 31", "a multiple of the next"]),
    ({"seq_len": "7"}, ["seq-len is 7 on 8 devices", "a token on each"]),
    ({"seq_len": "1.5"}, ["--seq-len", "1.5 was given", "a whole number, 1 to 1e+12"]),
    ({"seq_len": "nan"}, ["--seq-len", "nan was given", "a whole number"]),
    ({"dtype": "int4"}, ["--dtype", "'int4'", "bf16"]),
    ({"dtype": None}, ["required", "--dtype"]),
    ({"bandwidth": None, "layers": None}, ["required", "--bandwidth", "--layers"]),
    ({"color": "red"}, ["--color"]),
    ({"devices": None}, ["hosts was not given", "--devices only, or --hosts and --per-host"]),
    ({"per_host": 4}, ["hosts was not given", "--devices only"]),
    ({"nics": 4}, ["hosts was not given", "--devices only"]),
    ({"host_bandwidth": "1e9"}, ["hosts was not given", "--devices only"]),
    ({**HOSTS, "per_host": None}, ["hosts is 16", "--per-host too"]),
    ({**HOSTS, "devices": 8}, ["devices is 8", "16 x 8 = 128", "expected one number"]),
    ({**HOSTS, "host_bandwidth": None}, ["hosts is 16", "--host-bandwidth too, in bytes/s"]),
    ({**HOSTS, "host_bandwidth": "12.5"}, ["--host-bandwidth", "12.5 was given", "12.5e9 for 100 Gbit/s"]),
    ({**HOSTS, "nics": 9}, ["nics is 9", "8 at most, one for each device"]),
    ({**HOSTS, "nics": 0}, ["--nics", "0 was given", "a whole number"]),
    ({**HOSTS, "hosts": 129}, ["hosts x per-host is 1,032", "1,024 at most"]),
    ({**HOSTS, "seq_len": 127}, ["seq-len is 127 on 128 devices", "a token on each"]),
]


def ranked(printed):
    """The ways of a ranking, in order, with their milliseconds."""
    rows = re.findall(r"^(ring|double ring|all-\w+(?:-all)?|hybrid \d+ x \d+) +([\d,.]+) ", printed, re.MULTILINE)
    return {way: float(ms.replace(",", "")) for way, ms in rows}


def test_a_plan_for_hosts():
    """16 hosts of 8: the double ring and all-to-all in each host are 5 times as fast as one ring of 128."""
    printed = plan(**HOSTS)
    first, model, *_ = printed.splitlines()
    assert first == (
        "hosts of devices: 16 of 8; 990 TFLOP/s, 80 GB, 450 GB/s inside, NICs of a host: 8 of 12.5 GB/s; "
        "simulated, not measured"
    )
    assert model == plan().splitlines()[1]
    assert "a layer at S = 1,048,576, forward + backward\n" in printed
    ways = ranked(printed)
    assert [*ways.values()] == sorted(ways.values())
    assert max(ways["double ring"], ways["hybrid 16 x 8"]) < 300
    assert ways["ring"] > 1300
    assert "all-to-all     not possible: all-to-all among 128 ranks, and 32 query heads\n" in printed
    assert advised(printed) == "double ring: 254 ms a layer (nearly as fast: hybrid 16 x 8); the ring takes 1,370 ms"
    assert plan(**{**HOSTS, "devices": 128}) == printed


def test_weights_and_fewer_cards_take_longer():
    free, one_nic = (ranked(plan(**HOSTS, nics=nics)) for nics in (8, 1))
    assert one_nic["double ring"] > 2 * free["double ring"]
    assert one_nic["ring"] == free["ring"]  # it uses one anyway
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert cost_model.main([*options(**HOSTS), "--fsdp"]) == 0
    assert "with the weights of FSDP on the same links" in printed.getvalue()
    weighed = ranked(printed.getvalue())
    assert all(free[way] <= weighed[way] for way in free)
    assert weighed["ring"] > free["ring"]


def test_many_sequences_on_hosts_with_one_card():
    said = "many sequences        16 rings of 8: 249 ms a layer for each, 3,983 ms until all are done\n"
    printed = plan(**HOSTS, nics=1)
    assert said in printed
    assert advised(printed).startswith("double ring: 1,336 ms")
    assert said not in plan(**HOSTS, nics=1, memory="40e9"), "a host cannot hold the sequence"


@pytest.mark.parametrize("seq_len", [4000, FULL])
def test_one_host_takes_as_long_as_the_ring_of_its_devices(seq_len):
    """TINY in one host, by the formulas of the plan without hosts.

    Where hops are exposed, these count the gradients of one hop too many: at most a block's computing too much.
    """
    printed = plan(**{**TINY, "devices": None}, hosts=1, per_host=4, seq_len=seq_len)
    right, block = by_hand(seq_len, 4), 1280 * (seq_len / 4) ** 2 / 1e9
    least = right if seq_len == FULL else right - block
    shown = [float(digits(ms).replace(",", "")) for ms in (least, right)]
    assert shown[0] <= ranked(printed)["ring"] <= shown[1]
    assert advised(printed).split(":")[0] in ranked(printed)
    assert "double ring" not in printed, "it is the ring"


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
    assert "990 was given" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_command_plans():
    done = command(*options())
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == plan()
    assert done.stdout.startswith("8 devices of 990 TFLOP/s, 450 GB/s, 80 GB; modelled, not measured\n")
    assert advised(done.stdout).startswith("one ring of 8, 9,248 ms a layer")


def test_the_plan_of_the_docstring_is_the_sensible_one():
    for first, expected in (("flops", options()), ("hosts", options(**HOSTS))):
        shown = re.search(
            rf"\$ python -m ringlab.planning.cost_model (--{first}.*?)\n\n", cost_model.__doc__, re.DOTALL
        )[1]
        assert sorted(shown.replace("\\", "").split()) == sorted(expected)


def test_without_options_it_prints_the_papers_tables_and_example():
    done = command()
    assert (done.returncode, done.stderr) == (0, "")
    for name in ("hidden_communication", "ring_memory"):
        alone = subprocess.run(
            [sys.executable, "-m", f"ringlab.planning.{name}"], cwd=ROOT, capture_output=True, text=True
        )
        assert alone.returncode == 0
        assert alone.stdout in done.stdout
    for part in ("Table 2 (", "Table 1, ", "Table 3: ", "512 devices", "16,384K on 512", "64 are left for the ring"):
        assert part in done.stdout
    check_shown(
        "...\n" + ring_memory.__doc__.split("ringlab.planning.ring_memory\n    ")[1].split("\n")[0] + "\n...",
        done.stdout,
    )


@pytest.mark.parametrize("table", [hidden_communication, ring_memory])
def test_a_table_that_is_wrong_ends_with_1(table, capsys):
    with mock.patch.object(table, "main", return_value=1):
        assert cost_model.main([]) == 1


def test_help_names_the_unit_of_every_option():
    done = command("--help")
    assert done.returncode == 0
    text = " ".join(done.stdout.split())
    first_words = re.findall(r"--([a-z-]+) [XN] ([a-zA-Z/]+)", text.partition("options:")[2])
    assert ", ".join(map(" ".join, first_words)) == (
        "flops FLOP/s, bandwidth bytes/s, memory bytes, layers layers, hidden width, kv-heads key/value, "
        "devices devices, hosts hosts, per-host devices, nics network, heads query, host-bandwidth bytes/s, "
        "seq-len tokens, vocab words, feedforward inner, batch sequences, cp devices, tp devices"
    )
    assert "--fsdp with --hosts: a layer's weights use the same links" in text
    assert "{fp8,bf16,fp16,fp32} dtype" in text
    assert "{fp8,bf16,fp16,fp32}" in text
