"""Overlapped rings with one mistake each. On each rank: with WRONG["lost_block"](): ..."""

from unittest import mock

from ringlab.training import overlap
from ringlab.training.overlap import post, two_buffers


def at_once(sent, received, group):
    """`post`, and wait at once: so a mistake about buffers shows in every run and not in some."""
    for work in post(sent, received, group):
        work.wait()


def nothing_received(sent, received, group):
    """A ring that does not wait reads what was there before. Here that is a copy of the block in hand."""
    for x, y in zip(sent, received, strict=True):
        y.copy_(x)
    return []


def keys_without_values(sent, received, group):
    at_once(sent, received, group)
    received[1].copy_(sent[1])
    return []


def values_before_keys(sent, received, group):
    at_once(sent, received, group)
    keys = received[0].clone()
    received[0].copy_(received[1])
    received[1].copy_(keys)
    return []


def one_block_forever(k, lengths, rank):
    """One buffer only: the next block overwrites the block in hand before the rank computes on it."""
    block = two_buffers(k, lengths, rank)
    return lambda t: block(0)


def lost_block(k, v, **options):
    """The last round is left out."""
    blocks = [(x.clone(), y.clone()) for x, y in overlap_blocks(k, v, **options)]
    return iter(blocks[:-1])


def backwards(sent, received, group):
    return post(sent, received, group, places=-1)


overlap_blocks = overlap.arriving_blocks
WRONG = {
    **{
        mistake.__name__: lambda mistake=mistake: mock.patch.object(overlap, "post", mistake)
        for mistake in (nothing_received, keys_without_values, values_before_keys, backwards)
    },
    "one_block_forever": lambda: mock.patch.multiple(
        overlap, two_buffers=one_block_forever, post=lambda *args: at_once(*args) or []
    ),
    "lost_block": lambda: mock.patch.object(overlap, "arriving_blocks", lost_block),
}
