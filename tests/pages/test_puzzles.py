"""The puzzles: right schedules get their stars, wrong ones are told why, and nothing hangs."""

import math
import threading
from dataclasses import replace
from unittest import mock

import pytest
from matplotlib.colors import to_hex
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from notebooks.puzzles import checks, engine, film
from notebooks.puzzles import solutions as right
from notebooks.source.checks.answers import OPEN
from ringlab.support.colours import BLOCK_COLOURS
from tests.commands import LIMIT, assert_legible
from tests.wrong import readers_schedules as tried

pytestmark = pytest.mark.slow

RIGHT = [  # puzzle, schedule, stars
    (1, right.hop, 3),
    (1, tried.hop_of_arrays, 3),
    (2, right.gather, 3),
    (3, right.reduce_scatter, 3),
    (4, right.ring_in_pieces, 3),
    (4, right.ring, 2),
    (4, right.ring_in_one_message, 2),
    (4, tried.ring_by_hand, 1),
    (5, right.grouped, 3),
    (6, right.home, 3),
    (7, right.zigzag, 3),
    (7, tried.zigzag_of_numpy, 3),
    (7, right.stripes, 2),
    (8, right.window_of, 3),
    (9, right.two_rings, 3),
    (9, right.ring_in_one_message, 1),
    (10, right.one_token, 3),
]
WRONG = [  # puzzle, schedule, words of its sentence
    (1, tried.odd_ranks_only_wait, "rank 2 waits for rank 1, which has returned and never sends"),
    (1, tried.all_but_rank_0_send_first, "a deadlock: rank 1 waits for 2, 2 waits for 1, in a circle"),
    (
        1,
        lambda comm, x: comm.send(x, (comm.rank + 1) % comm.P),
        "a tensor (8,) is no rank: the rank comes first, ",
    ),
    (1, lambda comm, x: comm.send(comm.rank + 1, x), "there is no rank 3: with P = 3"),
    (1, lambda comm, x: comm.send(comm.rank - 1, x), "there is no rank -1: with P = 3"),
    (1, tried.at_the_same_time, "send and recv only, no exchange, in: return comm.exchange(right, x, left)"),
    (1, tried.loop, "a loop without end?, in: "),
    (1, tried.sends_for_ever, "more than 600 messages"),
    (2, tried.a_hop_short, "rank 0 returns a list whose number 1 is wrong: these are numbers of rank 0"),
    (1, lambda comm, x: comm.recv(comm.rank), "rank 0 has a message with itself"),
    (1, lambda comm, x: comm.send((comm.rank + 1) % comm.P, 1), "a message is a tensor, not int"),
    (2, lambda comm, x: [x], "rank 0 returns 1 things; expected a list of 3 tensors"),
    (2, tried.two_at_once, "one wire out and one wire in"),
    (2, tried.two_into_one, "one wire out and one wire in"),
    (2, tried.in_float32, "float32 on the way?"),
    (3, tried.all_parts, "expected shape (8,), got (3, 8)"),
    (4, lambda *mine: tried.ring(*mine, hops=-1), "It computed on KV0, KV2"),
    (4, tried.into_its_inputs, "an input was changed in place"),
    (5, tried.grouped_by_hand, "compute with comm.attend, so that the work of each rank is counted"),
    (6, tried.never_home, "rank 0 returns a list whose number 1 is wrong: that is what rank 1 must return"),
    (7, lambda comm, S: range(S * (comm.rank == 0)), "rank 0 takes 24 tokens; each of 3 ranks must take 8"),
    (7, lambda comm, S: range(S // comm.P), "token 0 is on ranks [0, 1, 2]"),
    (7, lambda comm, S: range(8 * comm.rank + 1, 8 * comm.rank + 9), "rank 2 takes token 24; there are tokens 0 to 23"),
    (7, lambda comm, S: range(1, 9) if comm.rank == 0 else range(8 * comm.rank, 8 * comm.rank + 8), "is on no rank"),
    (8, tried.sends_what_nobody_takes, "rank 1 waits for rank 2, which has returned and never receives"),
    (
        9,
        lambda *mine: tried.ring(*mine, to=2),
        "P = 4: rank 0 ends in ValueError: there is no wire between ranks 0 and",
    ),
    (9, tried.ring_by_hand, "computing elsewhere is not on the clock"),
    (10, tried.averages_added, "rank 0 returns a wrong result: off by up to"),
]


@pytest.fixture(autouse=True)
def _a_new_score_card(monkeypatch):
    monkeypatch.setattr(checks, "_best", {})


@pytest.mark.parametrize(("number", "schedule", "stars"), RIGHT)
def test_a_right_schedule_gets_its_stars(number, schedule, stars):
    verdict, ours = checks.solve(number, schedule), schedule.__module__ == right.__name__
    assert verdict.stars == stars, verdict.text
    words = {1: "right, but over the goal", 2: "solved  ", 3: "solved, as well as our best"}  # and never better
    assert ours or f": {words[stars]}" in verdict.text
    assert "better than our best" not in verdict.text
    assert ("it is ours" in verdict.text) == ours
    stars = 0 if ours else stars
    assert f"{number:>3}  {'★' * stars}{'☆' * (3 - stars)}" in checks.score_card().text


TABLES = """
                            P = 3    P = 4    P = 5    goal                 best known
chunks that a rank sends        4        6        8    4, 6, 8              4, 6, 8, no proof
chunks held                 4.125    4.125    4.125    5.125                3.25, no proof
                             P = 3    P = 4    P = 5    goal                 best known
pairs of the busiest rank      108      144      180    125, 165, 205        100, 132, 164, proved
time that ranks are idle     0.375      0.5     0.75    any                  0, proved
proof, pairs of the busiest rank: all ranks compute all pairs together, so one of P has at least a P-th of them.
proof, time that ranks are idle: no time is less than none."""
COUNTED = {  # of `odd`; one rank each sends, receives, computes and holds most
    **{"chunks that a rank sends": 4, "chunks held": 7, "pairs of the busiest rank": 48, "time": 8, "rounds": 8},
    **{"time that ranks are idle": 11, "keys that come to a rank": 10},
    **{"messages": 5, "numbers in the largest message": 384},
}


def test_each_count_is_of_the_busiest_rank_and_stands_in_the_table(monkeypatch):
    sent = [(1, 2, 0, 1, 3), (1, 0, 1, 2, 1), (2, 0, 2, 3, 2), (2, 0, 2, 3, 1), (0, 2, 5, 6, 2)]
    messages = [engine.Message(*each, size * checks.CHUNK, 1.0) for *each, size in sent]
    works = [engine.Work(1, 2, 4, 64, 1.0), engine.Work(1, 4, 5, 32, 1.0), engine.Work(0, 3, 5, 80, 1.0)]
    held = {rank: chunks * checks.CHUNK for rank, chunks in enumerate((5, 7, 1))}
    odd = engine.Run(3, messages, works, held=held, clocks=[6.0, 8.0, 6.5])
    counts = [count for puzzle in checks.PUZZLES for count in puzzle.counts]
    assert {count.name: count.of(odd) for count in counts} == COUNTED
    texts = [checks.solve(number, each).text for number, each in ((4, right.ring), (7, right.stripes))]
    assert "".join(text[text.index("\n") :] for text in texts) == TABLES
    slower = replace(checks.HOP, counts=(replace(checks.HOP.counts[0], best=lambda P: 4),))
    monkeypatch.setattr(checks, "PUZZLES", (slower,))
    assert "solved, and better than our best" in checks.solve(1, right.hop).text


@pytest.mark.parametrize(("number", "schedule", "words"), WRONG)
def test_a_wrong_schedule_is_told_why(number, schedule, words, monkeypatch):
    if schedule is tried.loop:
        monkeypatch.setattr(engine, "SECONDS", 0.1)
    verdict = checks.solve(number, schedule)
    assert verdict.stars == 0
    assert ": not yet. P = " in verdict.text
    assert words in verdict.text
    assert checks.score_card().text.startswith("0 of 30 stars")
    with mock.patch.object(film, "draw") as drawn:
        verdict.draw()
    run, title, *_ = drawn.call_args.args
    assert title == f"puzzle {number}, P = {run.world_size}: {'up to the fault' if run.fault else 'not right yet'}"


def test_every_puzzle_has_answers_of_each_kind():
    numbers = set(range(1, len(checks.PUZZLES) + 1))
    assert {number for number, _, stars in RIGHT if stars == 3} == {number for number, *_ in WRONG} == numbers


@pytest.mark.parametrize(
    ("number", "answer"),
    [(1, ...), (1, tried.nothing_yet), (2, tried.nothing_yet), (2, tried.a_list_of_nothing), (7, tried.nothing_yet)],
)
def test_an_open_puzzle_is_not_wrong(number, answer):
    assert checks.solve(number, answer).text.endswith(OPEN)


@pytest.mark.parametrize("number", [0, 11])
def test_a_puzzle_that_is_not_there_is_an_error(number):
    with pytest.raises(ValueError, match=f"there is no puzzle {number}; expected a number from 1 to 10"):
        checks.solve(number, right.hop)


def test_the_best_try_counts():
    for tokens in (tried.zigzag_of_numpy, lambda comm, S: right.stripes(comm, S)):  # 3 stars, then 2
        checks.solve(7, tokens)
        assert checks.score_card().text.startswith("3 of 30 stars")


def test_the_stop_button_ends_all_ranks(monkeypatch):
    begun, over, threads = threading.Barrier(4), threading.Event(), []

    def computes(comm, x):
        threads.append(threading.current_thread())
        begun.wait()
        while not over.is_set():
            math.sqrt(2)

    class Pressed(float):
        def __gt__(self, other):  # where the notebook's thread begins to wait for so many seconds
            begun.wait()
            raise KeyboardInterrupt

    monkeypatch.setattr(engine, "SECONDS", Pressed(5))
    with pytest.raises(KeyboardInterrupt):
        engine.play(computes, checks.HOP.inputs(3), checks.HOP.wires(3))
    for thread in threads:
        thread.join(LIMIT / 3)
    alive = [thread.is_alive() for thread in threads]
    over.set()
    assert alive == [False] * 3


def record_of(schedule):
    return engine.play(schedule, checks.RING.inputs(4), checks.RING.wires(4))


def test_the_record_is_the_same_in_every_run():
    """The ring of chapter 4: rank r computes on block r - t in round t, and sends it on. The numbers are new."""
    runs = [record_of(right.ring_in_one_message) for _ in range(2)]
    one, other = ([(it.source, it.to, it.begin, it.end, it.size) for it in run.messages] for run in runs)
    assert (
        one == other == [(r, (r + 1) % 4, 2 * t + 1, 2 * t + 2, 2 * checks.CHUNK) for t in range(3) for r in range(4)]
    )
    assert runs[0].messages[0].number != runs[1].messages[0].number
    for run in runs:
        blocks = [[run.owners[work.number] for work in run.works if work.rank == r] for r in range(4)]
        assert blocks == [[(r - t) % 4 for t in range(4)] for r in range(4)]
        assert run.time == 7


def test_memory_is_all_tensors_alive_but_the_inputs():
    """Three chunks and the one that comes. A view takes nothing, nor do the numbers that are gone."""
    assert set(record_of(tried.holds_three_chunks).held.values()) == {4 * checks.CHUNK}


def texts(figure):
    return [text for text in figure.axes[0].texts if text.get_text()]


def film_of(run):
    figure = film.draw(run, "a film", run.owners.get)
    figure.canvas.draw()
    assert_legible(figure, texts(figure))
    return figure


def test_a_film_shows_each_block_in_its_colour():
    run = record_of(right.ring_in_one_message)
    figure = film_of(run)
    boxes = [patch for patch in figure.axes[0].patches if isinstance(patch, FancyBboxPatch)]
    arrows = [patch for patch in figure.axes[0].patches if isinstance(patch, FancyArrowPatch)]
    assert [to_hex(box.get_facecolor()).upper() for box in boxes] == [
        BLOCK_COLOURS[run.owners[work.number]] for work in run.works
    ]
    assert [to_hex(arrow.get_edgecolor()).upper() for arrow in arrows] == [
        BLOCK_COLOURS[run.owners[message.number]] for message in run.messages
    ]
    assert "0 to 1 from 1 to 2" in figure.alt


def test_a_film_of_a_deadlock_says_who_waits_for_whom():
    figure = film_of(engine.play(tried.odd_ranks_only_wait, checks.HOP.inputs(3), checks.HOP.wires(3)))
    assert "waits for 1" in {text.get_text() for text in texts(figure)}
    assert figure.alt.endswith("At the end rank 2 waits for 1.")
