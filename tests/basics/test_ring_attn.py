"""The ring, on real processes, against full attention; the simulator of what it sends, its record, its command.

The record has which block each rank used, sent and received in each round, in what order, and the bytes.
"""

import io
import json
import math
import os
import re
import sys
from argparse import ArgumentTypeError, Namespace
from contextlib import nullcontext, redirect_stdout, suppress
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

import ring_attn
from ring_attn import ring_attention
from ringlab import support
from ringlab.basics import ring_attn_command as command
from ringlab.basics.blocking_messages import Recv, Send, ring_programs, simulate_messages
from ringlab.options import new_file
from ringlab.ring import overlap
from ringlab.support import timeline
from ringlab.support.colours import BLOCK_COLOURS
from ringlab.support.devices import cpu_cores
from ringlab.support.drawing import canvas, draw_events, svg
from ringlab.support.processes import RankContext
from ringlab.support.timeline import Event
from tests.attention import DTYPES, assert_attention, random_qkv
from tests.commands import run
from tests.rings import assert_ring, even_lengths, ring, ring_and_events


def ring_of(ranks, world_size, *args):
    """The whole result of a ring: every rank's chunk, joined."""
    return torch.cat(ranks(world_size, ring, *args), dim=2)


@pytest.mark.parametrize("ring", [ring_attention, overlap.ring_attention])
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((1, 2, 120, 8), torch.bfloat16), ((3, 1, 13, 5), torch.float64)],  # the first: equal chunks in every world
    ids=str,
)
def test_full_attention(ranks, world_size, dtype, shape, ring):
    assert_ring(ranks, world_size, *random_qkv(shape, dtype), ring=ring)


@settings(max_examples=15)
@given(data=st.data())
def test_any_chunk_lengths_shape_dtype_scale_and_tile(ranks, world_size, data):
    lengths = data.draw(st.lists(st.integers(1, 9), min_size=world_size, max_size=world_size), label="lengths")
    B, H, D = data.draw(st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 7)), label="B, H, D")
    dtype = data.draw(st.sampled_from(DTYPES), label="dtype")
    largest_score = data.draw(st.sampled_from([None, 0.0, 30.0, 1e4]), label="largest score")
    scale = data.draw(st.sampled_from([None, -0.5, 0.2, 2.0]), label="scale")
    tile = data.draw(st.integers(1, 10), label="tile")
    seed = data.draw(st.integers(0, 2**32), label="seed")
    q, k, v = random_qkv((B, H, sum(lengths), D), dtype, seed=seed, largest_score=largest_score)
    out = ring_of(ranks, world_size, q, k, v, lengths, scale, tile)
    assert_attention(out, q, k, v, scale=scale)


def test_keys_that_nobody_sees_are_as_good_as_none(ranks):
    q, k, v = random_qkv((1, 2, 9, 4))
    q, hidden = q.abs(), torch.arange(9) < 4  # all the keys of rank 0, and one of rank 1
    k[:, :, hidden] = -math.inf  # q > 0: scores of -inf
    assert_attention(ring_of(ranks, 3, q, k, v, [3] * 3), q, k[:, :, ~hidden], v[:, :, ~hidden])
    assert ring_of(ranks, 3, q, torch.full_like(k, -math.inf), v, [3] * 3).count_nonzero() == 0


# The simulator of blocking messages ----------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", range(2, 10))
@pytest.mark.parametrize("hops", [0, 1, 7])
def test_even_odd_delivers_every_message_once(world_size, hops):
    outcome = simulate_messages([hop * hops for hop in ring_programs(world_size)])
    assert (outcome.waits_for, outcome.cycle) == ({}, [])
    one_hop = [(rank, (rank + 1) % world_size) for rank in range(world_size)]
    assert sorted((it.source, it.to) for it in outcome.transfers) == sorted(one_hop * hops)
    for phase in range(outcome.phases):  # a rank takes part in one message at a time
        busy = [rank for it in outcome.transfers if it.phase == phase for rank in (it.source, it.to)]
        assert len(set(busy)) == len(busy) > 0
    if hops == 1:
        assert outcome.phases == (3 if world_size % 2 else 2)


@pytest.mark.parametrize(
    ("programs", "waits_for", "cycle"),
    [
        ([[Send(1)], []], {0: 1}, []),  # rank 1 has ended: nobody will receive
        ([[Recv(1)], [Recv(2)], []], {0: 1, 1: 2}, []),
        ([[Recv(1)], [Recv(2)], [Recv(1)]], {0: 1, 1: 2, 2: 1}, [1, 2]),  # rank 0 only leads into the circle
        ([[Send(1)], [Send(0)], [Recv(1)]], {0: 1, 1: 0, 2: 1}, [0, 1]),
        ([[Recv(2)], [Send(2)], [Recv(1), Send(1)]], {0: 2, 2: 1}, []),  # a message moves before the rest is stuck
        ([[Send(2)], [], [Recv(1)]], {0: 2, 2: 1}, []),  # rank 2 receives, but not from the one that sends
    ],
    ids=["ended", "chain", "tail into circle", "circle with tail", "partly", "another sender"],
)
def test_who_waits_for_whom(programs, waits_for, cycle):
    outcome = simulate_messages(programs)
    assert outcome.waits_for == waits_for
    assert outcome.cycle == cycle


# The record of a ring ------------------------------------------------------------------------------------------------


B, H, D = 2, 3, 5


def expected_events(rank, world_size):
    """(what, round, block) of one rank: it computes, then hops in the simulator's order, P - 1 times."""
    hop = ring_programs(world_size)[rank] if world_size > 1 else []
    for t in range(world_size):
        in_hand, next_block = (rank - t) % world_size, (rank - t - 1) % world_size
        yield "compute", t, in_hand
        if t < world_size - 1:
            for step in hop:
                yield ("send", t, in_hand) if isinstance(step, Send) else ("receive", t, next_block)


def test_who_does_what_with_which_block(ranks, world_size):
    S = 17
    lengths = even_lengths(S, world_size)
    events_seen_by = [events for _, events in ranks(world_size, ring_and_events, *random_qkv((B, H, S, D)), lengths)]
    assert events_seen_by == [events_seen_by[0]] * world_size  # every rank knows all of them
    for rank in range(world_size):
        mine = [it for it in events_seen_by[0] if it.rank == rank]
        assert [(it.what, it.round, it.block) for it in mine] == list(expected_events(rank, world_size))
        times = [time for it in mine for time in (it.start, it.end)]
        assert times == sorted(times)  # one thing after the other: this ring overlaps nothing
        assert times[0] >= 0


def odd_records(context):
    """What is recorded after an error; and of a block that is nobody's."""
    mine, foreign = (torch.full((1, 1, 1, 2), float(x)) for x in (context.rank, 7))
    with suppress(KeyboardInterrupt), timeline.record(mine):
        raise KeyboardInterrupt
    with timeline.span("compute", 0):  # nobody records: in a recording it would look for a tensor
        pass
    with timeline.record(mine) as nothing:
        pass
    with timeline.record(mine) as of_nobody, timeline.span("compute", 0, foreign):
        pass
    return nothing, of_nobody[0].block


def test_nothing_is_recorded_after_an_error_and_a_foreign_block_is_minus_one(ranks):
    assert ranks(3, odd_records) == [([], -1)] * 3


def test_every_event_is_drawn_in_its_blocks_colour():
    ax = Figure().subplots()
    draw_events([Event(0, "compute", 0, 1, 0.25, 0.5, 96), Event(1, "send", 2, 9, 1e-7, 0.125, 7)], ax)
    draw_events([Event(0, "wait", 0, 1, 0, 1, 8)], hatched := Figure().subplots())
    assert [(bar.get_hatch(), bar.get_facecolor()[3]) for bar in hatched.patches] == [("//////", 0)]
    assert [to_hex(bar.get_facecolor()).upper() for bar in ax.patches] == [BLOCK_COLOURS[1], BLOCK_COLOURS[9 % 8]]
    assert [bar.get_x() for bar in ax.patches] == pytest.approx([250, 1e-4])  # milliseconds
    assert [bar.get_width() for bar in ax.patches] == pytest.approx([250, 125])
    assert [round(bar.get_y(), 2) for bar in ax.patches] == [-0.36, 1.1]  # each rank has a lane
    assert [text.get_text() for text in (*ax.texts, *ax.get_yticklabels())] == ["KV1", "rank 0", "rank 1"]
    assert "1 &lt; 2 &amp; 3</desc>" in svg(canvas(9, 9, "1 < 2 & 3")[0])


def test_blocks_that_begin_alike_are_told_apart(ranks):
    """With few numbers in a key, two blocks may share their first one: the record looks at more than that."""
    x = torch.tensor([7.0, 0, 7, 1, 7, 2, 7, 3]).reshape(1, 1, 8, 1)
    _, events = ranks(4, ring_and_events, x, x, x, [2] * 4)[0]
    used = {(it.rank, it.round): it.block for it in events if it.what == "compute"}
    assert used == {(r, t): (r - t) % 4 for r in range(4) for t in range(4)}


# The command ---------------------------------------------------------------------------------------------------------


def table(printed):
    """The printed table of blocks: a row for each round, a column for each rank."""
    rows = re.findall(r"^ +\d+((?: +KV\d+)+)$", printed, flags=re.MULTILINE)
    return [[int(block) for block in re.findall(r"KV(\d+)", row)] for row in rows]


def blocks(world_size):
    return [[(rank - t) % world_size for rank in range(world_size)] for t in range(world_size)]


def given_to_the_ring(context, options, off=0):
    """The chunk of q that the command gives to the ring, and the status that it ends with. `off`: how wrong out is."""
    seen = []

    def ring_forward(q, k, v, **settings):
        seen.append(q)
        out, lse = real(q, k, v, **settings)
        return out + off, lse

    real, args = ring_attn.ring_forward, command.parse(options.split(), context.world_size, context.world_size)
    with mock.patch.object(ring_attn, "ring_forward", ring_forward), redirect_stdout(io.StringIO()) as printed:
        status = command.run(context, ring_attention, args)
    opening, q = seen  # the connections, before a time is taken
    assert opening.shape[2] == 1
    return q, status, printed.getvalue()


def test_the_command_prints_and_writes_what_was_recorded(ranks, tmp_path):
    trace = tmp_path / "trace.json"
    sizes = "--seq-len 38 --batch 2 --heads 3 --head-dim 5"
    (_, status, printed), *others = ranks(4, given_to_the_ring, f"{sizes} --seed 1 --trace {trace}")
    assert [(status, printed)] + [other[1:] for other in others] == [(0, printed)] + [(0, "")] * 3
    assert "P = 4 ranks, S = 38 tokens in chunks of 9 or 10" in printed
    assert "B = 2, H = 3, D = 5, float32" in printed
    assert f"torch {torch.__version__}" in printed
    assert f"{cpu_cores()} cores, {max(1, cpu_cores() // 8)} thread(s) a rank\n" in printed  # of 8 in the pool
    assert table(printed) == blocks(4)
    assert "ok    against full attention in float64" in printed
    events = [Event(**event) for event in json.loads(trace.read_text())]
    assert {(it.round, it.rank): it.block for it in events if it.what == "compute"} == {
        (t, rank): block for t, row in enumerate(blocks(4)) for rank, block in enumerate(row)
    }
    most_sent = 2 * (38 - 9) * 2 * 3 * 5 * 4  # K and V of all tokens but those of the shortest chunk, float32
    assert f"{most_sent:,} bytes" in printed
    assert "<svg" in trace.with_suffix(".svg").read_text()


def test_seed_and_dtype_are_those_of_the_data(ranks):
    """With one token a rank, which is enough."""
    chunks = {}
    for options in (f"--seed {2**64}", "--seed 1", "--dtype bfloat16"):  # 0 in 64 bits, as unless given
        (q, status, printed), *others = ranks(3, given_to_the_ring, f"--seq-len 3 --heads 1 --head-dim 2 {options}")
        dtype = options.removeprefix("--dtype ") if "dtype" in options else "float32"
        assert str(q.dtype) == f"torch.{dtype}"
        assert f"D = 2, {dtype}\n" in printed
        assert [status] + [other[1] for other in others] == [0, 0, 0]
        chunks[options] = q.double()
    zero, one, rounded = chunks.values()
    assert torch.equal(rounded, zero.bfloat16().double())
    assert not torch.equal(one, zero)


def test_a_wrong_result_is_the_status_of_the_only_rank_that_knows(ranks, monkeypatch):
    outcomes = ranks(3, given_to_the_ring, "--seq-len 3 --heads 1 --head-dim 2", 1)
    assert [status for _, status, _ in outcomes] == [1, 0, 0]
    assert "WRONG against full attention in float64" in outcomes[0][2]
    monkeypatch.setenv("WORLD_SIZE", "3")  # under torchrun it is that of its process
    monkeypatch.setattr(command, "join_ring", nullcontext)
    monkeypatch.setattr(command, "run", lambda device, *_: ["auto", "cpu"].index(device))
    assert command.main(ring_attention, ["--device", "cpu"]) == 1


def test_what_the_record_says_by_hand(capsys, monkeypatch, tmp_path):
    """Without matplotlib."""
    monkeypatch.setitem(sys.modules, "ringlab.support.drawing", None)
    monkeypatch.delattr(support, "drawing", raising=False)
    spans = [  # rank, what, round, start, end, bytes
        (0, "compute", 0, 1.5, 2.0, 8),
        (0, "receive", 0, 3.0, 3.5, 48),
        (0, "send", 0, 3.5, 5.0, 40),
        (0, "compute", 1, 5.0, 9.0, 8),
        (1, "compute", 0, 1.0, 3.0, 8),
        (1, "send", 0, 3.0, 3.5, 48),
        (1, "receive", 0, 3.5, 5.0, 40),
        (1, "compute", 1, 5.0, 6.0, 8),
    ]
    events = [Event(rank, what, t, 0, start, end, size) for rank, what, t, start, end, size in spans]
    context = RankContext(0, 2, torch.device("cpu"), "a test")
    args, x = Namespace(seq_len=5, trace=tmp_path / "t.json"), torch.ones(1, 2, 3, 4)
    assert command.tell(context, args, x, [x, x, x], x, events) == 0
    printed = capsys.readouterr().out
    assert f"trace     {args.trace}, without a picture: " in printed
    assert "P = 2 ranks, S = 5 tokens in chunks of 2 or 3\n" in printed
    assert "8.000 s from the first start to the last end" in printed
    assert "4.500 s computing, and 2.000 s on messages and waiting\n" in printed  # a rank's sends and its receives
    assert "at most 48 bytes by a rank, in 1 hop(s)" in printed


BAD_OPTIONS = {
    "--seq-len 2": "--seq-len: 2 for 4 ranks, expected at least one token a rank",
    "--seq-len 0": "--seq-len: '0' given, expected a whole number of 1 or more",
    "--seq-len 99999999999999999999": "q, k and v take more than the ",
    "--batch 1.5": "--batch: '1.5' given, expected a whole number of 1 or more",
    "--dtype int8": "--dtype: invalid choice: 'int8'",
    "--trace tests.json/..": "--trace: 'tests.json/..' given, expected a name ending in .json",
    "--trace t.txt": "--trace: 't.txt' given, expected a name ending in .json",
    "--device cuda": "--device cuda needs a GPU: 0 GPU(s) for 4 process(es) on this host; expected",
}


def test_a_pipe_is_no_file_to_write_and_a_file_no_folder(tmp_path):
    """To open a pipe would wait for a reader for ever: --trace, the doctor's --html and the planner's --plot."""
    os.mkfifo(tmp_path / "x.svg")
    (tmp_path / "file").touch()
    for name in ("x.svg", "file/x.svg", "none/x.svg"):
        with pytest.raises(ArgumentTypeError, match="of a file, in a folder that exists"):
            new_file(".svg")(str(tmp_path / name))
    assert new_file(".svg")(str(tmp_path / "y.svg")) == tmp_path / "y.svg"


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("options", BAD_OPTIONS)
def test_bad_options_end_with_one_line_and_status_2(capsys, options):
    with pytest.raises(SystemExit) as end:
        command.main(ring_attention, options.split())
    assert end.value.code == 2
    [complaint] = capsys.readouterr().err.splitlines()
    assert BAD_OPTIONS[options] in complaint
    assert complaint.count("expected") == 1


@pytest.mark.parametrize(("option", "status"), [("--seq-len=7", 2), ("--help", 0)])
@pytest.mark.parametrize(
    ("rank", "texts"), [({"RANK": 0}, 1), ({"RANK": 1}, 0), ({"RANK": 4, "LOCAL_RANK": 0}, 1), ({"LOCAL_RANK": 1}, 0)]
)
def test_under_torchrun_only_one_rank_of_a_host_speaks(monkeypatch, capsys, option, status, rank, texts):
    for name, value in ({"WORLD_SIZE": 8, "LOCAL_WORLD_SIZE": 4} | rank).items():
        monkeypatch.setitem(os.environ, name, str(value))
    with pytest.raises(SystemExit) as end:
        command.main(ring_attention, [option])
    assert end.value.code == status
    assert sum(map(bool, capsys.readouterr())) == texts


def test_every_option_is_read(monkeypatch):
    """One token for each rank is enough. And q, k and v may fill the memory: 1152 bytes."""
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 12, "SC_PHYS_PAGES": 96}.get)
    options = "--seq-len 4 --batch 2 --heads 3 --head-dim 4 --dtype float64 --device cpu --seed 5 --trace t.json"
    assert command.parse(options.split(), 4, 4) == Namespace(
        seq_len=4, batch=2, heads=3, head_dim=4, dtype=torch.float64, device="cpu", seed=5, trace=Path("t.json")
    )
    for more in ("--seq-len 5", "--batch 3", "--heads 4", "--head-dim 5"):
        with pytest.raises(SystemExit):
            command.parse(f"{options} {more}".split(), 4, 4)


BY_ITSELF = {"worked_example.py": "", "ring_attn.py": "ring      P = 4 ranks, S = 2048 tokens in chunks of 512"}


@pytest.mark.slow
@pytest.mark.parametrize("command", BY_ITSELF)
def test_by_itself_it_starts_its_processes_and_where_nobody_reads_on_it_ends_without_a_word(command):
    done = run(f"python {command} | head -2")
    assert (done.stderr, done.stdout.splitlines()[0].startswith(BY_ITSELF[command])) == ("", True)


@pytest.mark.parametrize(
    ("launched", "status"), [([0, 0, 0, 0], 0), ([1, 0, 0, 0], 1), (RuntimeError("a rank"), 1), (ValueError("bad"), 2)]
)
def test_exit_status(monkeypatch, capsys, launched, status):
    def launch(*args, device):
        assert device == "auto"
        if isinstance(launched, Exception):
            raise launched
        return launched

    monkeypatch.setattr(command, "launch", launch)
    assert command.main(ring_attention, []) == status
    assert capsys.readouterr().err == (f"{launched}\n" if isinstance(launched, Exception) else "")
