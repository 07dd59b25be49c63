"""Messages that share links: by hand, bounds of any schedule, the simulated ring again; and wrong rules fail."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringlab.planning.shared_links import Task, TaskGraph, play
from ringlab.planning.simulated_ring import duration, simulate_timeline

RATES = {"link": 2, "slow": 1}


def check_by_hand(player):
    def ends(*tasks, slowdown=1):
        return [end for _, end in player(tasks, RATES, slowdown)]

    message = Task(0, 6, (), ("link",))
    assert ends(message) == [3]
    assert ends(message, message) == [6, 6]
    assert ends(message, replace(message, size=2)) == [4, 2]  # 2 s at 1 byte/s, then alone
    assert ends(Task(0, 1), message, replace(message, after=(0,))) == [1, 5, 6]
    assert ends(Task(0, 6, (), ("slow", "link"))) == [6]
    assert ends(Task(0, 4, (), ("link", "slow")), Task(1, 2, (), ("slow",)), message) == [6, 4, 6]
    assert ends(replace(message, alike=2), replace(message, size=2)) == [7, 3]  # three share: 2/3 bytes/s each
    assert ends(Task(0, 0, (), ("link",)), replace(message, after=(0,))) == [0, 3]  # no bytes, no time
    assert ends() == []
    late, own = replace(message, latency=5), Task(1, 4)
    assert ends(late, late) == [11, 11]
    assert ends(late, message) == [8, 3]  # in its latency a message uses no link
    assert ends(replace(late, size=0), own) == [0, 4]  # no message, no latency
    slows = replace(message, slows=(1,))
    assert ends(slows, own, Task(0, 4), slowdown=2) == [3, 5.5, 4]  # 1.5 of 4 s are done when the message has ended
    assert ends(replace(slows, latency=1), own, slowdown=2) == [4, 5.5]  # 1 s alone, 3 s beside the message
    assert ends(slows, slows, own, slowdown=2) == [6, 6, 7]  # two messages slow no more than one
    assert player([Task(0, 1), Task(0, 2, (0,)), Task(1, 4, (0, 0))], {}, 1) == [(0, 1), (1, 3), (1, 5)]


def test_by_hand():
    check_by_hand(play)


@st.composite
def task_lists(draw):
    """Tasks after some of the tasks before them, on up to three links, and the links' rates."""
    rates = {link: draw(st.integers(1, 9)) for link in "abc"}
    tasks = []
    for i in range(draw(st.integers(1, 12))):
        after = tuple(draw(st.sets(st.integers(0, i - 1), max_size=3))) if i else ()
        links = tuple(draw(st.sets(st.sampled_from("abc"), max_size=2)))
        tasks.append(Task(0, draw(st.integers(0, 20)), after, links, draw(st.integers(1, 3))))
    return tasks, rates


@given(task_lists())
def test_no_link_carries_more_than_it_can_and_no_step_begins_too_early(task_graph):
    tasks, rates = task_graph
    times = play(tasks, rates)
    near = 1 + 1e-9
    for task, (begin, end) in zip(tasks, times, strict=True):
        assert begin == max((times[before][1] for before in task.after), default=0)
        least = task.size / min(rates[link] / task.alike for link in task.links) if task.links else task.size
        assert (end - begin) * near >= least - 1e-9
    for link, rate in rates.items():
        carried = [(times[i], task.size * task.alike) for i, task in enumerate(tasks) if link in task.links]
        for _, until in times:  # all that was carried by then, at least
            done = sum(size for (_, end), size in carried if end <= until)
            assert done <= rate * until * near + 1e-9


@given(st.lists(st.integers(1, 20), min_size=1, max_size=8), st.integers(1, 9))
def test_one_link_loses_nothing(sizes, rate):
    """From 0 on there is always a message on the link: it is busy until all bytes are carried."""
    times = play([Task(0, size, (), ("a",)) for size in sizes], {"a": rate})
    assert max(end for _, end in times) == pytest.approx(sum(sizes) / rate)
    assert [end for _, end in times] == pytest.approx(
        [sum(min(size, other) for other in sizes) / rate for size in sizes]  # equal parts, as long as both are there
    )


@given(task_lists(), st.integers(2, 5))
def test_all_rates_and_speeds_larger_by_a_factor(task_graph, factor):
    tasks, rates = task_graph
    slow = play(tasks, rates)
    faster = [replace(task, size=task.size if task.links else task.size / factor) for task in tasks]
    fast = play(faster, {link: factor * rate for link, rate in rates.items()})
    assert [end for _, end in fast] == pytest.approx([end / factor for _, end in slow])


@st.composite
def rings(draw):
    P = draw(st.integers(1, 6))
    rounds = [draw(st.lists(st.integers(0, 20), min_size=P, max_size=P)) for _ in range(P)]
    return rounds, draw(st.lists(st.integers(1, 20), min_size=P, max_size=P))


@given(rings())
def test_a_ring_takes_as_long_as_the_simulated_ring(ring):
    """Ranks and links of any speed: the same rule of two ranks that are both ready."""
    computing, hops = ring
    P = len(hops)
    task_graph = TaskGraph(P, lambda source, target: (source,))
    task_graph.turn(task_graph.start, lambda r: (r + 1) % P, P, lambda r, t: computing[t][r], lambda r, t: 1.0, None)
    times = play(task_graph.tasks, {r: 1 / hop for r, hop in enumerate(hops)})
    assert max(end for _, end in times) == pytest.approx(duration(simulate_timeline(computing, hops)))


@pytest.mark.parametrize(
    ("task", "says"),
    [
        (Task(0, -1), "task 1 .* expected a size and a latency of 0 or more"),
        (Task(0, 1, (), ("link",), latency=-1), "task 1 .* expected a size and a latency of 0 or more"),
        (Task(0, 1, (1,)), "task 1 .* after earlier tasks"),
        (Task(0, 1, (2,)), "task 1 .* after earlier tasks"),
        (Task(0, 1, (-1,)), "task 1 .* after earlier tasks"),
        (Task(0, 1, (), ("link", "none")), r"task 1 uses \['none'\]; expected a rate above 0"),
        (Task(0, 1, (), ("dead",)), r"task 1 uses \['dead'\]; expected a rate above 0"),
    ],
)
def test_bad_input(task, says):
    with pytest.raises(ValueError, match=says):
        play([Task(0, 1), task], {"link": 1, "dead": 0})


def test_messages_do_not_speed_up_computing():
    with pytest.raises(ValueError, match=r"slowdown is 0\.5; expected 1"):
        play([], {}, 0.5)
