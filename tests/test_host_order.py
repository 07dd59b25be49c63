"""The order of hosts in a ring: against every order, in racks, by properties; and wrong searches fail."""

from itertools import permutations
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringlab.planning import host_order
from ringlab.planning.host_order import best_order, improved_order, racks, score


@st.composite
def networks(draw, least=1, most=6):
    hosts = draw(st.integers(least, most))
    row = st.lists(st.integers(1, 9), min_size=hosts, max_size=hosts)
    return draw(st.lists(row, min_size=hosts, max_size=hosts))


UNLIKE = [[0, 2, 8, 5, 1], [1, 0, 3, 8, 6], [6, 1, 0, 5, 8], [4, 7, 9, 0, 9], [2, 4, 9, 5, 0]]


def check_order(search, bandwidths):
    hosts = range(len(bandwidths))
    order = search(bandwidths)
    assert sorted(order) == [*hosts]
    assert order[0] == 0
    hops = [bandwidths[order[i - 1]][order[i]] for i in hosts]
    assert score(order, bandwidths) == (min(hops), sum(hops))
    every = [[bandwidths[each[i - 1]][each[i]] for i in hosts] for each in permutations(hosts)]
    assert min(hops) == max(map(min, every)), "its slowest hop is not the fastest possible"
    assert sum(hops) == max(sum(each) for each in every if min(each) == min(hops))


@given(networks())
def test_it_is_the_best_of_all_orders(bandwidths):
    check_order(best_order, bandwidths)


@given(networks(least=2, most=7))
def test_the_quick_search_finds_an_order_that_is_at_most_the_best(bandwidths):
    order = improved_order(bandwidths)
    assert sorted(order) == [*range(len(bandwidths))]
    assert order[0] == 0
    assert score(order, bandwidths) <= score(best_order(bandwidths), bandwidths)
    hosts = range(len(bandwidths))
    assert score(order, bandwidths) >= min(score(each, bandwidths) for each in permutations(hosts))


@given(st.lists(st.integers(0, 3), min_size=10, max_size=16))
def test_hosts_in_racks_leave_each_rack_once(of_host):
    """More hosts than are tried exactly; the best order is known: a hop between racks for each rack."""
    between = len(set(of_host)) if len(set(of_host)) > 1 else 0
    order = best_order(racks(of_host, 50, 10))
    assert score(order, racks(of_host, 50, 10))[1] == 50 * (len(of_host) - between) + 10 * between


def test_all_orders_are_tried_up_to_nine_hosts():
    with mock.patch.object(host_order, "improved_order", return_value="quick"):
        assert best_order([[1.0] * 9] * 9) == tuple(range(9))
        assert best_order([[1.0] * 10] * 10) == "quick"


@pytest.mark.parametrize("bandwidths", [[], [[1, 1]], [[1, 1], [1]], [[0, 1], [0, 0]], [[1, -1], [1, 1]]])
def test_bad_input(bandwidths):
    with pytest.raises(ValueError, match="expected a row for each host, of bytes/s above 0 to each other"):
        best_order(bandwidths)


def test_one_host_and_two():
    assert best_order([[0]]) == (0,)
    assert best_order([[0, 5], [3, 0]]) == (0, 1)
    assert score((0, 1), [[0, 5], [3, 0]]) == (3, 8)
