"""The schedule of the ring: its blocks, its sums, the mask that ranks agree on; and attention on another schedule."""

import re
from contextlib import nullcontext
from dataclasses import dataclass
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ringlab.training import schedule
from ringlab.training.flash_ring import ring_flash_attention
from ringlab.training.layouts import LAYOUTS
from ringlab.training.masks import Mask
from ringlab.training.overlap import two_buffers
from ringlab.training.partition import Partition
from ringlab.training.schedule import Ring, Schedule, TravellingSums, agree_on_partition
from tests.grouped_queries import assert_four
from tests.refusals import all_of, refusal
from tests.ways import CASES, Problem, checked_gradients, cut, whole

LENGTHS = {1: (3,), 3: (2, 5, 1), 5: (3, 1, 4, 1, 2)}
WINDOW = {1: 1, 3: 2, 5: 4}  # such that the blocks make fewer hops than P - 1, where there are any


# Blocks and their sums -----------------------------------------------------------------------------------------------


def added(rank):
    """What a rank adds to dK and to dV, shaped as (2, 1, 1, 1, 1)."""
    return torch.tensor([1.0, 2.0], dtype=torch.float64).view(2, 1, 1, 1, 1) * 10**rank


def walk(context, partition, wrong=None):
    """By round: k and v in hand, and their sums as they arrive. At last, the sums at home."""
    k = torch.full((2, 1, partition.lengths[context.rank], 3), float(context.rank))
    with WRONG[wrong]() if wrong else nullcontext():
        ring = Ring(partition, 1.0)
        sums, rounds = ring.sums(k, k, torch.float64), []
        for t, k_j, v_j, pieces in ring.rounds(k, k + 0.5):
            d_kv = sums.of_round(t)
            rounds.append((t, k_j.clone(), v_j.clone(), pieces, torch.stack(d_kv)))
            for x, more in zip(d_kv, added(context.rank), strict=True):
                x += more
            sums.send_on(t)
        return rounds, torch.stack(sums.home())


def assert_walk(ranks, partition, wrong=None):
    """Block j = (r - t) mod P, to whose sums the ranks j ... j + t - 1 have added; at home, ranks j ... j + hops."""
    P = len(partition.lengths)
    for rank, (rounds, home) in enumerate(ranks(P, walk, partition, wrong)):
        assert [t for t, *_ in rounds] == list(range(partition.hops + 1))
        for t, k_j, v_j, pieces, d_kv in rounds:
            j = (rank - t) % P
            block = torch.full((2, 1, partition.lengths[j], 3), float(j))
            assert torch.equal(k_j, block)
            assert torch.equal(v_j, block + 0.5)
            assert pieces == partition.pieces(rank, j)
            assert_sums(d_kv, partition.lengths[j], [(j + i) % P for i in range(t)])
        assert_sums(home, partition.lengths[rank], [(rank + i) % P for i in range(partition.hops + 1)])


def assert_sums(d_kv, length, visited):
    """The sums of a block (2, 2, 1, C_j, 3) are what these ranks have added."""
    right = sum(map(added, visited), torch.zeros(2, 2, 1, length, 3, dtype=torch.float64))
    assert d_kv.shape == right.shape, "sums of another block"
    assert torch.equal(d_kv, right), "wrong sums"


def partitions(size):
    """Blocks that go all the way round, and blocks that a window stops before."""
    return Partition(Mask(), "contiguous", LENGTHS[size]), Partition(
        Mask(True, None, WINDOW[size]), "contiguous", LENGTHS[size]
    )


@pytest.mark.parametrize("size", LENGTHS)
def test_every_block_comes_and_its_sums_come_home_complete(ranks, size):
    flat, window = partitions(size)
    assert (flat.hops, window.hops) == (size - 1, size // 2)
    assert_walk(ranks, flat)
    assert_walk(ranks, window)


def not_zeroed(*block):
    """The first sums are what was in the buffer before."""
    buffer, calls = two_buffers(*block), iter([True])
    buffer(0).fill_(7)
    return lambda t: torch.empty_like(buffer(t)) if next(calls, False) else buffer(t)


def one_hop_short(sums):
    """The sums of the last round stay where they are: on the last rank that the block has visited."""
    sums.wait()
    return sums.both(sums.buffer(sums.hops))


WRONG = {
    "not zeroed": lambda: mock.patch.object(schedule, "two_buffers", not_zeroed),
    "one hop short": lambda: mock.patch.object(TravellingSums, "begin_home", one_hop_short),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("size", [3, 5])
def test_wrong_sums_are_rejected(ranks, size, wrong):
    for partition in partitions(size):
        with pytest.raises(AssertionError, match=r"wrong sums|sums of another block"):
            assert_walk(ranks, partition, wrong)


# The agreed mask -----------------------------------------------------------------------------------------------------

X = torch.ones(1, 2, 3, 4)


def agreed(context, chunks, options_of_ranks):
    """The mask and the scale, of the chunk of this rank: q, k and v are the same."""
    x, options = chunks[context.rank], {"layout": "contiguous", **options_of_ranks[context.rank]}
    return agree_on_partition(x, x, x, options.pop("scale", None), None, **options)


def test_the_ranks_agree_on_a_mask_of_all_lengths(ranks):
    chunks = [torch.ones(1, 2, length, 4) for length in LENGTHS[5]]
    right = Partition(Mask(causal=True, window=4), "contiguous", LENGTHS[5]), 0.5
    assert ranks(5, agreed, chunks, [{"causal": 1, "window": 4}] * 5) == [right] * 5


@pytest.mark.parametrize(
    ("chunk", "options", "words"),
    [
        (X, {"causal": True}, ["the ranks disagree", "rank 0: causal=False", "rank 1: causal=True"]),
        (X, {"scale": 2.0}, ["the ranks disagree", "rank 0: scale=0.5", "rank 1: scale=2.0"]),
        (X.clone().requires_grad_(), {}, ["the ranks disagree", "rank 1: gradients=True"]),
        (X[0], {}, ["rank 1: ", "expected"]),
        (X[:, :, :2], {"layout": "zigzag"}, ["the ranks disagree", "rank 1: layout=zigzag"]),
    ],
    ids=["causal", "scale", "gradients", "shape", "layout"],
)
def test_one_rank_that_is_wrong_is_refused_on_all(ranks, chunk, options, words):
    outcomes = ranks.outcomes(3, agreed, [X, chunk, X], [{}, options, {}])
    assert re.search(all_of(words), refusal(outcomes))


# Another schedule ----------------------------------------------------------------------------------------------------


class OtherWayRound(Schedule):
    """Rank r has block (r + t) mod P in hand. All blocks are gathered first; their sums are added up at the end."""

    def block_of_pieces(self, rank, j):
        return j

    def rounds(self, k, v):
        rank, blocks = dist.get_rank(), [None] * dist.get_world_size()
        dist.all_gather_object(blocks, (k, v))
        for t in range(len(blocks)):
            j = (rank + t) % len(blocks)
            yield t, *blocks[j], self.partition.pieces(rank, self.block_of_pieces(rank, j))

    def sums(self, k, v, dtype):
        B, G, _, D = k.shape
        return SumsOfAll([torch.zeros(2, B, G, C, D, dtype=dtype) for C in self.partition.lengths])


class PiecesOfTheOwnBlock(OtherWayRound):
    """A mistake: the pieces of the rank's own block, whichever is in hand."""

    def block_of_pieces(self, rank, j):
        return rank


@dataclass(frozen=True)
class SumsOfAll:
    """The sums of every block, on every rank."""

    blocks: list

    def of_round(self, t):
        return self.blocks[(dist.get_rank() + t) % len(self.blocks)]

    def send_on(self, t):
        pass

    def home(self):
        for block in self.blocks:
            dist.all_reduce(block)
        return self.blocks[dist.get_rank()]


OTHER = {"right": OtherWayRound, "wrong": PiecesOfTheOwnBlock}


def other_way_round(context, problem, which):
    """This rank's chunks of out, dq, dk and dv, by a schedule that this project does not have."""
    mine = cut(context, problem.layout, problem.lengths, *problem.inputs())
    return checked_gradients(ring_flash_attention, mine, {**problem.options, "schedule": OTHER[which]})


def assert_other_way_round(ranks, size, problem, which="right"):
    per_rank = ranks(size, other_way_round, problem, which)
    assert_four(whole(per_rank, problem.layout, problem.lengths), problem.right())


@pytest.mark.parametrize("size", LENGTHS)
def test_attention_on_a_schedule_of_ones_own(ranks, size):
    for causal, layout in CASES:
        lengths = LENGTHS[size] if layout == "contiguous" else None
        options = {"causal": causal, "layout": layout}
        assert_other_way_round(ranks, size, Problem(4, 2, sum(lengths or [4] * size), options, lengths, head_dim=8))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_schedule_with_the_pieces_of_another_block_is_rejected(ranks, layout):
    with pytest.raises(AssertionError, match="numbers are wrong"):
        assert_other_way_round(ranks, 3, Problem(4, 2, 12, {"causal": True, "layout": layout}), "wrong")
