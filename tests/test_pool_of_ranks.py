"""The pool of ranks that the other tests stand on notices a rank that dies or hangs, and goes on with new ones."""

import os
import time

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from ringlab.support import pool
from ringlab.support.pool import LostRank, Raised, Ranks
from tests.commands import ends_soon


def world_of(context):
    return context.rank, context.world_size, dist.get_rank(), dist.get_world_size()


def misbehave(context, how):
    if context.rank == 1:
        if how == "die":
            os._exit(3)
        if how == "hang":
            time.sleep(60)
        if how == "raise":
            raise OverflowError("too much")
    return context.rank


UNDER_WAY = []  # messages that rank 0 does not wait for


def send_on(context, number, received):
    """Rank 0 sends a number to rank 1, which returns it, or raises before it receives it."""
    message = torch.tensor([number])
    if context.rank == 0:
        UNDER_WAY.append((message, dist.isend(message, 1)))
        return None
    if not received:
        raise OverflowError("too much")
    dist.recv(message, 0)
    return message.item()


def test_a_message_of_a_call_that_raised_is_never_received():
    ranks = Ranks(size=2)
    try:
        assert isinstance(ranks.outcomes(2, send_on, 1, False)[1], Raised)
        assert ranks(2, send_on, 2, True) == [None, 2]
    finally:
        ranks.stop()


def raise_or_hang(context):
    if context.rank == 1:
        raise OverflowError("too much")
    time.sleep(600)


def test_once_a_rank_has_raised_the_others_have_a_time_of_grace(monkeypatch):
    monkeypatch.setattr(pool, "GRACE", 0.5)
    ranks = Ranks(size=2, seconds=600)
    try:
        with ends_soon(), pytest.raises(LostRank, match=r"(?s)\[0\] did not answer in time.*rank 1 raised: .*too much"):
            ranks(2, raise_or_hang)
    finally:
        ranks.stop()


def test_the_pool_survives_what_its_ranks_do(monkeypatch):
    ranks = Ranks(size=3)
    try:
        for world_size in (2, 1, 3):
            expected = [(rank, world_size, rank, world_size) for rank in range(world_size)]
            assert ranks(world_size, world_of) == expected

        with pytest.raises(LostRank, match="rank 1 died"):
            ranks(2, misbehave, "die")
        assert ranks(2, world_of) == [(0, 2, 0, 2), (1, 2, 1, 2)]

        with monkeypatch.context() as patch:
            patch.setattr(ranks, "seconds", 1)
            with pytest.raises(LostRank, match=r"rank\(s\) \[1\] did not answer in time"):
                ranks(2, misbehave, "hang")

        outcomes = ranks.outcomes(2, misbehave, "raise")
        assert outcomes[0] == 0
        assert isinstance(outcomes[1], Raised)
        assert (outcomes[1].kind, outcomes[1].message) == ("OverflowError", "too much")
        with pytest.raises(RuntimeError, match=r"(?s)rank 1 raised: .*OverflowError: too much"):
            ranks(2, misbehave, "raise")
        assert ranks(2, world_of) == [(0, 2, 0, 2), (1, 2, 1, 2)]
    finally:
        ranks.stop()


def test_a_property_test_ends_when_a_rank_is_lost():
    """It looks for no smaller example: each would cost the start of new processes."""
    ranks, examples = Ranks(size=2), []

    @given(st.integers())
    def property_test(number):
        examples.append(number)
        ranks(2, misbehave, "die" if number else "live")

    try:
        with pytest.raises(LostRank):
            property_test()
    finally:
        ranks.stop()
    assert [bool(number) for number in examples] == [False] * (len(examples) - 1) + [True]
