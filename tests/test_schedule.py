"""The schedule of the ring: its blocks, its sums, the mask that ranks agree on; and attention on another schedule."""

import re
from contextlib import nullcontext
from dataclasses import dataclass
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ringlab.training import schedule
from ringlab.training.flash_ring import FlashRing
from ringlab.training.layouts import LAYOUTS
from ringlab.training.masks import Mask
from ringlab.training.overlap import two_buffers
from ringlab.training.schedule import Ring, TravellingSums, agree_on_mask
from tests.flash_rings import CASES, cut, whole
from tests.gradients import gradients
from tests.grouped_queries import assert_four, expected, grouped_inputs
from tests.refusals import all_of, refusal

LENGTHS = {1: (3,), 3: (2, 5, 1), 5: (3, 1, 4, 1, 2)}
WINDOW = {1: 1, 3: 2, 5: 4}  # such that the blocks make fewer hops than P - 1, where there are any


# Blocks and their sums -----------------------------------------------------------------------------------------------


def added(rank):
    """What a rank adds to dK and to dV, shaped as (2, 1, 1, 1, 1)."""
    return torch.tensor([1.0, 2.0], dtype=torch.float64).view(2, 1, 1, 1, 1) * 10**rank


def walk(context, mask, wrong=None):
    """By round: k and v in hand, and their sums as they arrive. At last, the sums at home."""
    k = torch.full((2, 1, mask.lengths[context.rank], 3), float(context.rank))
    with WRONG[wrong]() if wrong else nullcontext():
        ring = Ring(mask, 1.0, None)
        sums, rounds = ring.sums(k, torch.float64), []
        for t, k_j, v_j, pieces in ring.rounds(k, k + 0.5):
            d_kv = sums.of_round(t)
            rounds.append((t, k_j.clone(), v_j.clone(), pieces, d_kv.clone()))
            d_kv += added(context.rank)
            sums.send_on(t)
        return rounds, sums.home()


def assert_walk(ranks, mask, wrong=None):
    """Block j = (r - t) mod P, to whose sums the ranks j ... j + t - 1 have added; at home, ranks j ... j + hops."""
    P = len(mask.lengths)
    for rank, (rounds, home) in enumerate(ranks(P, walk, mask, wrong)):
        assert [t for t, *_ in rounds] == list(range(mask.hops + 1))
        for t, k_j, v_j, pieces, d_kv in rounds:
            j = (rank - t) % P
            block = torch.full((2, 1, mask.lengths[j], 3), float(j))
            assert torch.equal(k_j, block)
            assert torch.equal(v_j, block + 0.5)
            assert pieces == mask.pieces(rank, j)
            assert_sums(d_kv, mask.lengths[j], [(j + i) % P for i in range(t)])
        assert_sums(home, mask.lengths[rank], [(rank + i) % P for i in range(mask.hops + 1)])


def assert_sums(d_kv, length, visited):
    """The sums of a block (2, 2, 1, C_j, 3) are what these ranks have added."""
    right = sum(map(added, visited), torch.zeros(2, 2, 1, length, 3, dtype=torch.float64))
    assert d_kv.shape == right.shape, "sums of another block"
    assert torch.equal(d_kv, right), "wrong sums"


def masks(size):
    """Blocks that go all the way round, and blocks that a window stops before."""
    return Mask("contiguous", LENGTHS[size]), Mask("contiguous", LENGTHS[size], causal=True, window=WINDOW[size])


@pytest.mark.parametrize("size", LENGTHS)
def test_every_block_comes_and_its_sums_come_home_complete(ranks, size):
    flat, window = masks(size)
    assert (flat.hops, window.hops) == (size - 1, size // 2)
    assert_walk(ranks, flat)
    assert_walk(ranks, window)


def not_zeroed(*block):
    """The first sums are what was in the buffer before."""
    room, calls = two_buffers(*block), iter([True])
    room(0).fill_(7)
    return lambda t: torch.empty_like(room(t)) if next(calls, False) else room(t)


def one_hop_short(sums):
    """The sums of the last round stay where they are: on the last rank that the block has visited."""
    sums.wait()
    return sums.room(sums.hops)


WRONG = {
    "not zeroed": lambda: mock.patch.object(schedule, "two_buffers", not_zeroed),
    "one hop short": lambda: mock.patch.object(TravellingSums, "begin_home", one_hop_short),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("size", [3, 5])
def test_wrong_sums_are_rejected(ranks, size, wrong):
    for mask in masks(size):
        with pytest.raises(AssertionError, match=r"wrong sums|sums of another block"):
            assert_walk(ranks, mask, wrong)


# The agreed mask -----------------------------------------------------------------------------------------------------

X = torch.ones(1, 2, 3, 4)


def agreed(context, chunks, options_of_ranks):
    """The mask and the scale, of the chunk of this rank: q, k and v are the same."""
    x, options = chunks[context.rank], {"layout": "contiguous", **options_of_ranks[context.rank]}
    return agree_on_mask(x, x, x, options.pop("scale", None), None, **options)


def test_the_ranks_agree_on_a_mask_of_all_lengths(ranks):
    chunks = [torch.ones(1, 2, length, 4) for length in LENGTHS[5]]
    right = Mask("contiguous", LENGTHS[5], causal=True, window=4), 0.5
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


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"layout": "zigzag"}, ["9 tokens in the zigzag layout on 3 ranks"]),
        ({"window": 3}, ["window is 3 with causal=False"]),
        ({"causal": True, "documents": (4, 4)}, ["documents of 4, 4 tokens, 8 in all, for a sequence of 9"]),
    ],
)
def test_a_mask_that_does_not_fit_is_refused_on_all(ranks, options, words):
    assert re.search(all_of(words), refusal(ranks.outcomes(3, agreed, [X] * 3, [options] * 3)))


# Another schedule ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OtherWayRound:
    """Rank r has block (r + t) mod P in hand. All blocks are gathered first; their sums are added up at the end."""

    mask: Mask
    scale: float
    pieces_of: int = 1  # 0: a mistake, the pieces of the rank's own block whichever is in hand

    def rounds(self, k, v):
        rank, blocks = dist.get_rank(), [None] * dist.get_world_size()
        dist.all_gather_object(blocks, (k, v))
        for t in range(len(blocks)):
            j = (rank + t) % len(blocks)
            yield t, *blocks[j], self.mask.pieces(rank, (rank + self.pieces_of * t) % len(blocks))

    def sums(self, k, dtype):
        B, G, _, D = k.shape
        return SumsOfAll([torch.zeros(2, B, G, C, D, dtype=dtype) for C in self.mask.lengths])


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


def other_way_round(context, four, mask, pieces_of):
    """This rank's chunks of out, dq, dk and dv."""
    mine = cut(context, mask.layout, list(mask.lengths) if mask.layout == "contiguous" else None, *four)
    it = OtherWayRound(mask, four[0].shape[-1] ** -0.5, pieces_of)
    return gradients(lambda q, k, v: FlashRing.apply(q, k, v, it), *mine)


def assert_other_way_round(ranks, mask, pieces_of=1):
    four = grouped_inputs(1, 4, 2, mask.seq_len, 8)
    per_rank = ranks(len(mask.lengths), other_way_round, four, mask, pieces_of)
    lengths = mask.layout == "contiguous"
    assert_four(whole(per_rank, mask.layout, lengths), expected(*four, causal=mask.causal))


@pytest.mark.parametrize("size", LENGTHS)
def test_attention_on_another_schedule(ranks, size):
    for causal, layout in CASES:
        assert_other_way_round(ranks, Mask(layout, LENGTHS[size] if layout == "contiguous" else (4,) * size, causal))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_schedule_with_the_pieces_of_another_block_is_rejected(ranks, layout):
    with pytest.raises(AssertionError, match="numbers are wrong"):
        assert_other_way_round(ranks, Mask(layout, (4,) * 3, causal=True), pieces_of=0)
