"""The ranking of the ways: the example, by hand, properties, reasons; and rankings with a mistake fail."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringlab.planning.hidden_communication import AttentionLayer
from ringlab.planning.ranking import Row, computing_seconds, digits, rank_ways, show_ranking
from ringlab.planning.ring_memory import STATE, param_count, token_bytes
from ringlab.planning.ways import WAYS, Cluster
from tests.clusters import CHUNK, LAYER, ONE_NIC, TWO, clusters, layers

PLENTY = 1e9


def rows_by_name(cluster, layer=LAYER, chunk=CHUNK, memory=PLENTY, **options):
    return {row.name: row for row in rank_ways(cluster, layer, 3, chunk, memory, **options)}


def check_by_hand():
    """TWO: the seconds of tests/test_two_speeds.py and the bytes of tests/test_ways.py, of both passes."""
    rows = rows_by_name(TWO)
    assert {name: row.seconds for name, row in rows.items()} == pytest.approx(
        {"ring": 14 + 45, "double ring": 8 + 31, "all-gather": 11 + 29, "all-to-all": 16 + 28, "hybrid 2 x 2": 39}
        # Two sequences, 16 tokens of each on a device: 8 s and 20 s a block. Only the gradients' way home is exposed.
        | {"2 rings of 2": 2 * 8 + 2 * 20 + 4}
    )
    assert list(rows) == ["double ring", "hybrid 2 x 2", "all-gather", "all-to-all", "ring", "2 rings of 2"]
    many = rows["2 rings of 2"]
    assert (many.sequences, many.each) == (2, 30)
    assert (many.in_host, many.between_hosts) == (512 + 512 + 2 * 1024, 0)
    assert many.held == STATE * param_count(LAYER, 3) / 4 + 2 * CHUNK * token_bytes(LAYER, 3, "training")
    assert many.why == "hops hidden: 6,000 ms, computing 20,000"
    assert all(row.sequences == 1 and row.each == row.seconds for name, row in rows.items() if row is not many)
    assert (rows["ring"].in_host, rows["ring"].between_hosts) == (3 * 256 + 3 * 256 + 4 * 512,) * 2
    assert computing_seconds(TWO, LAYER, CHUNK) == 4 * 2 + 4 * 5
    slow = replace(TWO, multiprocessors=1, causal=1.5)  # 4 heads on 8 tokens: a quarter of a wave; 32 keys: a wave
    assert computing_seconds(slow, LAYER, CHUNK) == 4 * (4 * 2 + 3 / 2 * 5)
    assert computing_seconds(slow, LAYER, CHUNK, mask="causal") == 1.5 * computing_seconds(slow, LAYER, CHUNK)
    state = STATE * param_count(LAYER, 3) / 4
    assert rows["ring"].held == state + CHUNK * token_bytes(LAYER, 3, "training")
    assert rows["ring"].why == "hops exposed: 12,000 ms, computing 5,000, 1 of 2 NICs"
    assert rows["double ring"].why == "hops exposed: 12,000 ms, computing 10,000, 2 of 2 NICs"
    assert rows["hybrid 2 x 2"].why == "hops exposed: 12,000 ms, computing 10,000, 2 of 2 NICs; exchange"
    assert rows["all-to-all"].why == "both exchanges exposed"
    assert rows["all-gather"].why == "gathers, sums hidden: 9,000 ms, computing 10,000; first, last not"
    one = rows_by_name(ONE_NIC)
    assert one["double ring"].why == "hops exposed: 24,000 ms, computing 10,000, 1 of 1 NICs"
    assert one["hybrid 2 x 2"].why == "hops exposed: 24,000 ms, computing 10,000, 1 of 1 NICs; exchange"
    assert rows_by_name(Cluster(1, 4, 1024, 256))["ring"].why == "hops hidden: 3,000 ms, computing 5,000"
    # A device with too little memory for the longest buffers: these ways come last, and say it
    limit = sorted(row.held for row in rows.values())[2]
    tight = rank_ways(TWO, LAYER, 3, CHUNK, limit)
    assert [row.held <= limit for row in tight] == [True] * 3 + [False] * 3
    assert ["does not fit" in row.why for row in tight] == [False] * 3 + [True] * 3


def test_by_hand():
    check_by_hand()


@given(layers(), clusters(most=6), st.booleans())
def test_any_ranking(layer, cluster, fsdp):
    rows = rank_ways(cluster, layer, 2, 8, PLENTY, fsdp=fsdp)
    seconds = [row.seconds for row in rows if row.sequences == 1]
    assert seconds == sorted(seconds)
    assert all(row.each * (1 + 1e-9) >= computing_seconds(cluster, layer, 8) for row in rows)
    assert [row.sequences for row in rows[len(seconds) :]] == [cluster.hosts] * (cluster.hosts > 1), "they come last"
    names = [row.name for row in rows]
    assert len(set(names)) == len(names)
    assert "ring" in names
    assert ("double ring" in names) == (min(cluster.hosts, cluster.per_host) > 1), "else it is the ring"
    for row in rows:
        assert math.isinf(row.seconds) == (row.name == "all-to-all" and layer.heads < cluster.devices)


def test_the_reason_of_one_device_and_of_a_way_that_is_not_possible():
    (row, *_) = rank_ways(Cluster(1, 1, 1024, 1), LAYER, 1, 8, PLENTY)
    assert row.why == "nothing travels"
    rows = rows_by_name(Cluster(2, 4, 1024, 256, 64))
    assert rows["all-to-all"].why == "all-to-all among 8 ranks, and 4 query heads"
    assert math.isinf(rows["all-to-all"].seconds)
    assert {name for name in rows if name.startswith("hybrid")} == {"hybrid 2 x 4", "hybrid 4 x 2"}


def test_the_table_shows_each_row(capsys):
    rows = [Row("ring", "because", 1.2345, 2e9, 3e7, 8e10), Row("all-to-all", "no heads")]
    rows.append(Row("4 rings of 2", "because", 5.2, 2e9, 0, 8e10, sequences=4))
    show_ranking(rows, 1.0)
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].endswith("computing alone: 1,000 ms")
    assert printed[2:] == [
        "ring            1,234       2    0.03      80     234  because",
        "all-to-all     not possible: no heads",
        "4 rings of 2    5,200       2       0      80   1,200  4 at once, 1,300 ms each; because",
    ]
    assert [digits(x) for x in (0.01789, 5.888, 3804.2)] == ["0.0179", "5.89", "3,804"]


def test_the_example():
    """16 hosts of 8, a million tokens: double ring and hybrid 16 x 8 in less than 300 ms, the ring in 5 times that."""
    cluster, layer = Cluster(16, 8, 990e12, 450e9, 12.5e9), AttentionLayer(32, 8, 128)
    rows = rows_by_name(cluster, layer, 2**20 / 128, 80e9)
    assert list(rows)[:2] == ["double ring", "hybrid 16 x 8"]
    assert max(rows[name].seconds for name in list(rows)[:2]) < 0.3
    assert rows["ring"].seconds > 5 * computing_seconds(cluster, layer, 2**20 / 128)
    assert "1 of 8 NICs" in rows["ring"].why
    assert list(rows)[-2:] == ["all-to-all", "16 rings of 8"]
    assert {name.split()[0] for name in rows} == {way.split()[0] for way in WAYS} | {"16"}


def test_one_card_a_host_and_16_sequences():
    """All ways of one sequence wait for the card: 66.6 GB through 12.5 GB/s. In rings of 8 nothing leaves a host."""
    cluster, layer = Cluster(16, 8, 990e12, 450e9, 12.5e9, nics=1), AttentionLayer(32, 8, 128)
    rows = rows_by_name(cluster, layer, 2**20 / 128, 80e9)
    least, computing = min(row.seconds for row in rows.values()), computing_seconds(cluster, layer, 2**20 / 128)
    many = rows["16 rings of 8"]
    assert computing == pytest.approx(0.2488, abs=1e-4)
    assert least == pytest.approx(1.336, abs=1e-3)
    assert many.each == pytest.approx(computing + 131_072 * 2 * 8 * 128 * 4 / 450e9 / 16)
    assert many.seconds == 16 * many.each > least
