"""Overlapped rings with one mistake each. On each rank: with WRONG["lost_block"](): ..."""

from unittest import mock

from ringlab.training import overlap
from ringlab.training.overlap import arriving_blocks, post, two_buffers
from tests.planted import Mistakes

WRONG = Mistakes()


def at_once(sent, received, group):
    """`post`, and wait at once: so a mistake about buffers shows in every run and not in some."""
    for work in post(sent, received, group):
        work.wait()


@WRONG.replaces(overlap, "post")
def nothing_received(sent, received, group):
    """A ring that does not wait reads what was there before. Here that is a copy of the block in hand."""
    for x, y in zip(sent, received, strict=True):
        y.copy_(x)
    return []


@WRONG.replaces(overlap, "post")
def keys_without_values(sent, received, group):
    at_once(sent, received, group)
    received[1].copy_(sent[1])
    return []


@WRONG.replaces(overlap, "post")
def values_before_keys(sent, received, group):
    at_once(sent, received, group)
    keys = received[0].clone()
    received[0].copy_(received[1])
    received[1].copy_(keys)
    return []


def one_block_forever(k, v, lengths, rank):
    """One buffer only: the next block overwrites the block in hand before the rank computes on it."""
    block = two_buffers(k, v, lengths, rank)
    return lambda t: block(0)


@WRONG.replaces(overlap, "arriving_blocks")
def lost_block(k, v, **options):
    """The last round is left out."""
    blocks = [(x.clone(), y.clone()) for x, y in arriving_blocks(k, v, **options)]
    return iter(blocks[:-1])


@WRONG.replaces(overlap, "post")
def backwards(sent, received, group):
    return post(sent, received, group, distance=-1)


WRONG["one_block_forever"] = lambda: mock.patch.multiple(
    overlap, two_buffers=one_block_forever, post=lambda *args: at_once(*args) or []
)
