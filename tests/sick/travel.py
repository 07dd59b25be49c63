"""Rings in which a block does not arrive, arrives twice, or another one arrives."""

from contextlib import ExitStack

import torch
import torch.nn.functional as F

from ring_attn import ring_attention
from ringlab.basics.ranks import neighbours
from ringlab.training import overlap, schedule
from ringlab.training.flash_ring import ring_flash_attention
from ringlab.training.overlap import post
from ringlab.training.partition import Partition
from tests import wrong_overlapped_rings, wrong_rings
from tests.planted import patch
from tests.sick.plain_ring import ByAutograd, Hop, PlainRing, moved
from tests.sick.ring import CAUSAL, MASKED, SickRing, always, from_2, from_3
from tests.wrong_flash_rings import WRONG

OVERLAPPED = wrong_overlapped_rings.WRONG
right_pieces = Partition.pieces


def several(*patches):
    """One context manager of several."""

    def enter():
        stack = ExitStack()
        for planted in patches:
            stack.enter_context(planted())
        return stack

    return enter


def pieces(mistake):
    return patch(Partition, "pieces", mistake)


def last_block_skipped(partition, rank, block):
    """Nothing is computed of the block that arrives last, from rank r + 1."""
    world_size = len(partition.lengths)
    return () if world_size > 1 and block == (rank + 1) % world_size else right_pieces(partition, rank, block)


def last_needed_block_skipped(partition, rank, block):
    """Nothing is computed of the block that arrives last; with a window that is not the block of rank r + 1."""
    distance = (rank - block) % len(partition.lengths)
    return () if distance == partition.hops > 0 else right_pieces(partition, rank, block)


def own_block_twice(partition, rank, block):
    return right_pieces(partition, rank, block) * (2 if rank == block else 1)


class OneRoundMore(PlainRing):
    def rounds(self):
        return self.P + 1

    def send_on(self, sums, t):
        """After P + 1 rounds the sums are one rank past their home, and go back; but for that all hops are usual."""
        if t < self.P:
            return super().send_on(sums, t)
        return sums


def times_distance(factor, *modules):
    """Every message goes that many times as far."""

    def further(sent, received, group, *, distance=1):
        _, world_size, _, _ = neighbours(group)
        if distance * factor % world_size == 0:
            for x, y in zip(sent, received, strict=True):
                y.copy_(x)
            return []
        return post(sent, received, group, distance=distance * factor)

    return several(*(patch(module, "post", further) for module in modules))


def one_buffer(own_too):
    """The next block lies in the buffer of the block in hand before the rank computes on that."""

    def blocks(k, v, *, lengths, group, hops):
        hand = torch.stack((k, v))
        for t in range(hops):
            arrived = moved(hand, hand.shape, group)
            yield tuple(arrived if t or own_too else hand)
            hand = arrived
        yield tuple(hand)

    return patch(schedule, "arriving_blocks", blocks)


def values_without_keys(k, v, **options):
    return ((k, v_j) for _, v_j in overlap.arriving_blocks(k, v, **options))


def gradients_stay(sent, received, group, **_):
    for x, y in zip(sent, received, strict=True):
        y.copy_(x)
    return []


def own_chunk(q, k, v, *, causal=False, layout="contiguous", scale=None, group=None):
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=True)


class TwoWays(ByAutograd):
    """Blocks come from both sides. `pairs` of them: with an even P one more block comes, from one side."""

    def pairs(self):
        return (self.P - 1) // 2

    def from_side(self, kv, rank, distance):
        return Hop.apply(kv, (*kv.shape[:3], self.lengths[rank % self.P], kv.shape[4]), self.group, distance)

    def blocks(self, k, v):
        before = after = torch.stack((k, v))
        yield 0, before
        for t in range(1, self.pairs() + 1):
            before = self.from_side(before, self.rank - t, 1)
            after = self.from_side(after, self.rank + t, -1)
            yield t, before
            yield self.P - t, after


class OppositeTwice(TwoWays):
    def pairs(self):
        return self.P // 2


class KeysOnly(ByAutograd):
    def in_hand(self, kv, own, t):
        return torch.stack((kv[0], own[1]))


class ValuesOnly(ByAutograd):
    def in_hand(self, kv, own, t):
        return torch.stack((own[0], kv[1]))


class Exchanged(ByAutograd):
    def hop(self, kv, t):
        return super().hop(kv.flip(0), t)


class Nothing(ByAutograd):
    def hop(self, kv, t):
        return kv


def masked(case):
    return case.causal and case.world_size > 2


def far_keys_seen(case):
    """Whether a query sees a key of another rank."""
    rank_of = torch.empty(case.seq_len, dtype=torch.int64)
    for rank in range(case.world_size):
        rank_of[case.positions(rank)] = rank
    return bool((case.visible() & (rank_of[:, None] != rank_of)).any())


def even(case):
    return case.world_size % 2 == 0


def wide(case):
    return case.world_size > 1 and case.dtype.itemsize > 2


def sent_as(dtype, *modules):
    """Every message of these modules travels in this dtype."""

    def rounded(sent, received, group, **distance):
        return post([x.to(dtype).to(x.dtype) for x in sent], received, group, **distance)

    return several(*(patch(module, "post", rounded) for module in modules))


def two_seats_show(case):
    """An odd number of ranks meets all blocks, in another order; two ranks meet their own only."""
    return case.world_size > 1 and (case.world_size % 2 == 0 or case.causal)


def ring(patch, shows=from_2, **facts):
    return SickRing(ring_flash_attention, patch, shows, CAUSAL, equal_chunks=True, **facts)


FORWARD = {"gradients": False, "grouped": False, "equal_chunks": True}


def overlapped(name, **facts):
    return SickRing(overlap.ring_attention, OVERLAPPED[name], **FORWARD, **facts)


def blocking(name, **facts):
    return SickRing(ring_attention, wrong_rings.WRONG[name], **FORWARD, **facts)


def by_autograd(ring):
    return SickRing(ring.attention, takes=CAUSAL, equal_chunks=True)


SICK = {
    "last_block_skipped": SickRing(ring_flash_attention, pieces(last_block_skipped), takes=CAUSAL),
    "last_block_skipped/needed": SickRing(
        ring_flash_attention, pieces(last_needed_block_skipped), far_keys_seen, MASKED
    ),
    "last_block_skipped/forward": SickRing(
        ring_flash_attention, pieces(last_block_skipped), takes=CAUSAL, in_backward=False
    ),
    "last_block_skipped/overlap": overlapped("lost_block", shows=always),
    "own_block_twice": SickRing(OneRoundMore.attention, shows=always, takes=CAUSAL),
    "own_block_twice/flash": SickRing(ring_flash_attention, pieces(own_block_twice), takes=CAUSAL),
    "own_block_twice/forward": SickRing(
        ring_flash_attention, pieces(own_block_twice), always, CAUSAL, in_backward=False
    ),
    "two_seats": ring(times_distance(2, overlap, schedule), two_seats_show),
    "two_seats/blocks_only": ring(times_distance(2, overlap)),
    "two_seats/ring_attn": blocking("two_seats", shows=lambda case: case.world_size % 2 == 0),
    "other_way": ring(times_distance(-1, overlap, schedule), masked),
    "other_way/blocks_only": ring(times_distance(-1, overlap), from_3),
    "stale_first_block": ring(WRONG["StaleBlock"]),
    "stale_first_block/forward": ring(WRONG["StaleBlock"], in_backward=False),
    "stale_first_block/ring_attn": blocking("stale_block"),
    "overwritten_in_hand": ring(one_buffer(own_too=False), from_3),
    "overwritten_in_hand/own_too": ring(one_buffer(own_too=True)),
    "opposite_block_twice": SickRing(OppositeTwice.attention, shows=even, takes=CAUSAL),
    "opposite_block_missed": SickRing(TwoWays.attention, shows=even, takes=CAUSAL),
    "sent_in_16_bits": ring(sent_as(torch.bfloat16, overlap), wide, in_xray=False),
    "sent_in_16_bits/gradients_too": ring(sent_as(torch.bfloat16, overlap, schedule), wide, in_xray=False),
    "sent_in_16_bits/float16": ring(sent_as(torch.float16, overlap), wide, in_xray=False),
    "keys_without_values": ring(WRONG["keys_without_values"]),
    "keys_without_values/autograd": by_autograd(KeysOnly),
    "keys_without_values/overlap": overlapped("keys_without_values"),
    "keys_without_values/ring_attn": blocking("keys_without_values"),
    "values_without_keys": ring(patch(schedule, "arriving_blocks", values_without_keys)),
    "values_without_keys/autograd": by_autograd(ValuesOnly),
    "keys_and_values_exchanged": ring(OVERLAPPED["values_before_keys"]),
    "keys_and_values_exchanged/autograd": by_autograd(Exchanged),
    "keys_and_values_exchanged/overlap": overlapped("values_before_keys"),
    "never_called": SickRing(own_chunk, takes=CAUSAL),
    "nothing_moves": ring(OVERLAPPED["nothing_received"]),
    "nothing_moves/gradients_too": ring(
        several(OVERLAPPED["nothing_received"], patch(schedule, "post", gradients_stay))
    ),
    "nothing_moves/autograd": by_autograd(Nothing),
    "nothing_moves/overlap": overlapped("nothing_received", equals=("never_called",)),
}
