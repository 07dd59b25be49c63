"""Messages that share links: by hand, bounds of any schedule, the simulated ring again; and wrong rules fail."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringlab.planning.shared_links import Schedule, Step, play
from ringlab.planning.simulated_ring import duration, simulate_timeline

RATES = {"link": 2, "slow": 1}


def check_by_hand(player):
    def ends(*steps):
        return [end for _, end in player(steps, RATES)]

    message = Step(0, 6, (), ("link",))
    assert ends(message) == [3]
    assert ends(message, message) == [6, 6]
    assert ends(message, replace(message, size=2)) == [4, 2]  # 2 s at 1 byte/s, then alone
    assert ends(Step(0, 1), message, replace(message, after=(0,))) == [1, 5, 6]
    assert ends(Step(0, 6, (), ("slow", "link"))) == [6]
    assert ends(Step(0, 4, (), ("link", "slow")), Step(1, 2, (), ("slow",)), message) == [6, 4, 6]
    assert ends(replace(message, alike=2), replace(message, size=2)) == [7, 3]  # three share: 2/3 bytes/s each
    assert ends(Step(0, 0, (), ("link",)), replace(message, after=(0,))) == [0, 3]  # no bytes, no time
    assert ends() == []
    assert player([Step(0, 1), Step(0, 2, (0,)), Step(1, 4, (0, 0))], {}) == [(0, 1), (1, 3), (1, 5)]


def test_by_hand():
    check_by_hand(play)


def changed(**changes):
    """A player that sees each step with a change, which is made from the step."""

    def player(steps, rates):
        return play([replace(step, **{name: new(step) for name, new in changes.items()}) for step in steps], rates)

    return player


WRONG = {
    "alike are one": changed(alike=lambda step: 1),
    "the first link only": changed(links=lambda step: step.links[:1]),
    "the last link only": changed(links=lambda step: step.links[-1:]),
    "nothing waits": changed(after=lambda step: ()),
    "nobody shares": lambda steps, rates: [play([replace(step, after=())], rates)[0] for step in steps],
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_rule_is_rejected(name):
    with pytest.raises(AssertionError):
        check_by_hand(WRONG[name])


@st.composite
def schedules(draw):
    """Steps after some of the steps before them, on up to three links, and the links' rates."""
    rates = {link: draw(st.integers(1, 9)) for link in "abc"}
    steps = []
    for i in range(draw(st.integers(1, 12))):
        after = tuple(draw(st.sets(st.integers(0, i - 1), max_size=3))) if i else ()
        links = tuple(draw(st.sets(st.sampled_from("abc"), max_size=2)))
        steps.append(Step(0, draw(st.integers(0, 20)), after, links, draw(st.integers(1, 3))))
    return steps, rates


@given(schedules())
def test_no_link_carries_more_than_it_can_and_no_step_begins_too_early(schedule):
    steps, rates = schedule
    times = play(steps, rates)
    near = 1 + 1e-9
    for step, (begin, end) in zip(steps, times, strict=True):
        assert begin == max((times[before][1] for before in step.after), default=0)
        least = step.size / min(rates[link] / step.alike for link in step.links) if step.links else step.size
        assert (end - begin) * near >= least - 1e-9
    for link, rate in rates.items():
        carried = [(times[i], step.size * step.alike) for i, step in enumerate(steps) if link in step.links]
        for _, until in times:  # all that was carried by then, at least
            done = sum(size for (_, end), size in carried if end <= until)
            assert done <= rate * until * near + 1e-9


@given(st.lists(st.integers(1, 20), min_size=1, max_size=8), st.integers(1, 9))
def test_one_link_loses_nothing(sizes, rate):
    """From 0 on there is always a message on the link: it is busy until all bytes are carried."""
    times = play([Step(0, size, (), ("a",)) for size in sizes], {"a": rate})
    assert max(end for _, end in times) == pytest.approx(sum(sizes) / rate)
    assert [end for _, end in times] == pytest.approx(
        [sum(min(size, other) for other in sizes) / rate for size in sizes]  # equal parts, as long as both are there
    )


@given(schedules(), st.integers(2, 5))
def test_all_rates_and_speeds_larger_by_a_factor(schedule, factor):
    steps, rates = schedule
    slow = play(steps, rates)
    faster = [replace(step, size=step.size if step.links else step.size / factor) for step in steps]
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
    schedule = Schedule(P, lambda source, target: (source,))
    schedule.turn(schedule.start, lambda r: (r + 1) % P, P, lambda r, t: computing[t][r], lambda r, t: 1.0, None)
    times = play(schedule.steps, {r: 1 / hop for r, hop in enumerate(hops)})
    assert max(end for _, end in times) == pytest.approx(duration(simulate_timeline(computing, hops)))


@pytest.mark.parametrize(
    ("step", "says"),
    [
        (Step(0, -1), "step 1 .* expected a size of 0 or more"),
        (Step(0, 1, (1,)), "step 1 .* after earlier steps"),
        (Step(0, 1, (2,)), "step 1 .* after earlier steps"),
        (Step(0, 1, (-1,)), "step 1 .* after earlier steps"),
        (Step(0, 1, (), ("link", "none")), r"step 1 uses \['none'\]; expected a rate above 0"),
        (Step(0, 1, (), ("dead",)), r"step 1 uses \['dead'\]; expected a rate above 0"),
    ],
)
def test_bad_input(step, says):
    with pytest.raises(ValueError, match=says):
        play([Step(0, 1), step], {"link": 1, "dead": 0})
