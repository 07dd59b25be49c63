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
from tests.planted import patch
from tests.sick.plain_ring import ByAutograd, PlainRing, moved
from tests.sick.ring import CAUSAL, SickRing, always, from_2, from_3
from tests.wrong_rings import BLOCKING, OVERLAPPED
from tests.wrong_rings import FLASH as WRONG

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


def own_chunk(q, k, v, *, causal=False, layout="contiguous", scale=None, group=None):
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=True)


class Nothing(ByAutograd):
    def hop(self, kv, t):
        return kv


def masked(case):
    return case.causal and case.world_size > 2


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


def blocking(name, **facts):
    return SickRing(ring_attention, BLOCKING[name], **FORWARD, **facts)


SICK = {
    "last_block_skipped": SickRing(ring_flash_attention, pieces(last_block_skipped), takes=CAUSAL),
    "own_block_twice": SickRing(OneRoundMore.attention, shows=always, takes=CAUSAL),
    "two_seats": ring(times_distance(2, overlap, schedule), two_seats_show),
    "two_seats/blocks_only": ring(times_distance(2, overlap)),
    "two_seats/ring_attn": blocking("two_seats", shows=lambda case: case.world_size % 2 == 0),
    "other_way": ring(times_distance(-1, overlap, schedule), masked),
    "stale_first_block": ring(WRONG["StaleBlock"]),
    "overwritten_in_hand": ring(one_buffer(own_too=False), from_3),
    "sent_in_16_bits": ring(sent_as(torch.bfloat16, overlap), wide, in_xray=False),
    "keys_without_values": ring(WRONG["keys_without_values"]),
    "values_without_keys": ring(patch(schedule, "arriving_blocks", values_without_keys)),
    "keys_and_values_exchanged": ring(OVERLAPPED["values_before_keys"]),
    "never_called": SickRing(own_chunk, takes=CAUSAL),
    "nothing_moves": ring(OVERLAPPED["nothing_received"]),
}
