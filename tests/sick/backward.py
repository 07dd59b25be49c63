"""Rings whose gradients are wrong; all-gather, all-to-all and meshes; mistakes that the catalogue does not hold."""

from functools import lru_cache, partial
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from ring_doctor.mistakes_of_other_ways import hosts
from ringlab.basics.naive_attention import accumulation_dtype
from ringlab.training import all_gather, all_to_all, double_ring, hybrid, schedule
from ringlab.training.all_to_all import Exchange
from ringlab.training.flash_ring import flash_backward, ring_flash_attention
from ringlab.training.overlap import post
from tests.planted import patch
from tests.sick.forward import FLASH, flash, last_block_skipped, narrow, pieces
from tests.sick.plain_ring import ByAutograd, PlainRing, moved
from tests.sick.ring import CAUSAL, MASKED, ON_MESH, SickRing, always
from tests.wrong_rings import FLASH as WRONG
from tests.wrong_rings import back_as_they_came, not_added, order_of_rank

right_to_tokens = Exchange.to_tokens
all_gather_attention = partial(ring_flash_attention, schedule=all_gather.AllGather)
all_to_all_attention = partial(ring_flash_attention, schedule=all_to_all.AllToAll)


# Gradients -----------------------------------------------------------------------------------------------------------


def received_and_sent(sent, received, group, *, distance=1):
    """Of the last message both buffers are returned, the one for dk and the other for dv, each summed over its two."""
    works = post(sent, received, group, distance=distance)
    if distance == 1:
        return works
    for work in works:
        work.wait()
    came, went = (x[0].view(2, -1).sum(dim=0) for x in (received, sent))
    received[0].copy_(torch.cat((came, went)))
    return []


def own_kv(k, v, *, hops, **_):
    return ((k, v) for _ in range(hops + 1))


class NoMaskInBackward(PlainRing):
    def seen_in_backward(self, block):
        return torch.ones(self.lengths[self.rank], self.lengths[block], dtype=torch.bool)


class MessagesWithoutGradients(ByAutograd):
    """What arrives has no history: autograd ends at the message."""

    def hop(self, kv, t):
        length = self.lengths[(self.rank - t - 1) % self.P]
        return moved(kv.detach(), (*kv.shape[:3], length, kv.shape[4]), self.group)


class QueriesCopiedInEachRound(ByAutograd):
    """The gradients of the wide copies of q are added in the dtype of q."""

    def forward(self, q, k, v):
        self.q, wide = q, accumulation_dtype(q.dtype)
        return super().forward(q, k.to(wide), v.to(wide))

    def scores(self, q, k, seen):
        return super().scores(self.q.to(q.dtype), k, seen)


# All-to-all, and a mesh -----------------------------------------------------------------------------------------------


def in_turn(heads, world_size):
    """Heads r, r + P, ... of rank r, rank by rank."""
    return [n for rank in range(world_size) for n in range(rank, heads, world_size)]


def back_permuted(exchange, wholes):
    """Only out travels alone."""
    results = right_to_tokens(exchange, wholes)
    return results if len(results) > 1 else [results[0][:, in_turn(results[0].shape[1], len(exchange.order))]]


def kv_heads_dealt_in_turn(q, k, v, *, group, **options):
    """Query heads are dealt out in runs, K/V heads in turn."""
    world_size, (H, G) = dist.get_world_size(group), (q.shape[1], k.shape[1])
    heads = in_turn(G, world_size)
    if world_size > G:
        heads = [rank % G for rank, run in enumerate(torch.arange(H).tensor_split(world_size)) for _ in run]
    return all_to_all_attention(q, k[:, heads], v[:, heads], group=group, **options)


def copies_not_summed(exchange, wholes):
    """Of the copies of a K/V head only the last one sends its gradient home."""
    if len(wholes) > 1:
        rank = dist.get_rank(exchange.group)
        of_later_ranks = {head for share in exchange.keys[rank + 1 :] for head in range(share.start, share.stop)}
        mine = exchange.keys[rank]
        last = torch.tensor([head not in of_later_ranks for head in range(mine.start, mine.stop)])
        wholes = [wholes[0], *(x * last[:, None, None] for x in wholes[1:])]
    return right_to_tokens(exchange, wholes)


@lru_cache(maxsize=1)
def mesh_of(world):
    return init_device_mesh("cpu", hosts(world.size()))


def on_mesh(attention):
    """The same attention on a mesh of all ranks."""

    def on_this(q, k, v, *, group, **options):
        return attention(q, k, v, group=mesh_of(dist.group.WORLD), **options)

    return on_this


right_rounds = double_ring.DoubleRing.rounds_of


def next_turn_early(ring, firsts):
    """At the end of a turn the first block of the next turn is in hand."""
    hosts, per_host = ring.group.shape
    rounds = {t: (k_j.clone(), v_j.clone(), more) for t, k_j, v_j, more in right_rounds(ring, firsts)}
    for t, (k_j, v_j, more) in rounds.items():
        if t % per_host == per_host - 1 and t // per_host < hosts - 1:
            k_j, v_j, _ = rounds[t + 1]
        yield t, k_j, v_j, more


def on_4(case):
    return case.world_size == 4


def heads_move(case):
    return in_turn(case.heads, case.world_size) != list(range(case.heads))


def kv_heads_move(case):
    if 1 < case.kv_heads < case.world_size:
        return True
    return in_turn(case.kv_heads, case.world_size) != list(range(case.kv_heads))


def copied(case):
    """Whether ranks share a K/V head."""
    return case.world_size > 1 and (case.heads // case.kv_heads > 1 and case.kv_heads < case.world_size)


def both(**mistakes):
    return lambda: mock.patch.multiple(Exchange, **mistakes)


def ulysses(patch, shows, **facts):
    return SickRing(all_to_all_attention, patch, shows, CAUSAL, heads=4, **facts)


def d_out_of_another_rank(q, k, v, out, lse, d_out, ring):
    return flash_backward(q, k, v, out, lse, moved(d_out, d_out.shape, ring.group), ring)


def heads_of_v_reversed(q, k, v, **options):
    return ring_flash_attention(q, k, v.flip(1), **options)


class SoftmaxTwice(PlainRing):
    def attend(self, q, k, v, seen):
        _, lse = super().attend(q, k, v, seen)
        p = self.scores(q, k, seen).softmax(dim=-1).masked_fill(~seen, -torch.inf).softmax(dim=-1)
        return p.nan_to_num() @ v.repeat_interleave(q.shape[1] // v.shape[1], dim=1), lse


class ReceivedKeysReversed(PlainRing):
    """The keys of a received block lie in another order than its values."""

    def in_hand(self, kv, own, t):
        return torch.stack((kv[0].flip(-2), kv[1])) if t else kv


class NoMergeOnRank0(PlainRing):
    def merge(self, out, lse, out_j, lse_j, t):
        return (out, lse) if self.rank == 0 else super().merge(out, lse, out_j, lse_j, t)


HYBRID = on_mesh(partial(ring_flash_attention, schedule=hybrid.Hybrid))
DOUBLE = on_mesh(partial(ring_flash_attention, schedule=double_ring.DoubleRing))
EQUAL = {"takes": CAUSAL, "equal_chunks": True}
SICK = {
    "received_and_sent": SickRing(FLASH, flash("post", received_and_sent), **EQUAL),
    "own_queries_only": SickRing(FLASH, WRONG["OwnQueriesOnly"], takes=CAUSAL),
    "own_queries_only/autograd": SickRing(MessagesWithoutGradients.attention, takes=CAUSAL),
    "own_queries_only/all_gather": SickRing(
        all_gather_attention, patch(all_gather, "reduce_scatter", not_added), takes=CAUSAL
    ),
    "keys_of_hop_0": SickRing(FLASH, patch(schedule, "arriving_blocks", own_kv), in_forward=False, **EQUAL),
    "block_left_out_in_backward/pieces": SickRing(
        ring_flash_attention, pieces(last_block_skipped), takes=CAUSAL, in_forward=False
    ),
    "mask_forgotten_in_backward": SickRing(NoMaskInBackward.attention, shows=lambda case: case.causal, takes=CAUSAL),
    "dq_in_16_bits/by_autograd": SickRing(QueriesCopiedInEachRound.attention, shows=narrow, takes=CAUSAL, plain=True),
    "heads_permuted_after_all_to_all": ulysses(both(to_tokens=back_permuted), heads_move),
    "all_to_all_back_in_wrong_token_order": ulysses(
        both(to_tokens=back_as_they_came), lambda case: case.layout != "contiguous" and case.world_size > 1
    ),
    "kv_heads_dealt_in_turn": SickRing(kv_heads_dealt_in_turn, shows=kv_heads_move, takes=CAUSAL, heads=4),
    "replicated_head_gradient_not_summed": ulysses(both(to_tokens=copies_not_summed), copied),
    "positions_of_the_inner_layout": SickRing(
        HYBRID,
        patch(hybrid, "order", order_of_rank),
        lambda case: case.causal and case.layout != "contiguous" and case.world_size > 1,
        ON_MESH,
        heads=4,
    ),
    "slow_hop_a_round_early": SickRing(
        DOUBLE, patch(double_ring.DoubleRing, "rounds_of", next_turn_early), on_4, ON_MESH, equal_chunks=True
    ),
}
UNKNOWN = {  # the catalogue does not hold these
    "d_out_of_another_rank": SickRing(FLASH, flash("flash_backward", d_out_of_another_rank), **EQUAL),
    "heads_of_v_reversed": SickRing(heads_of_v_reversed, shows=lambda case: case.kv_heads > 1, takes=MASKED),
    "softmax_twice": SickRing(SoftmaxTwice.attention, shows=always, takes=CAUSAL),
    "received_keys_reversed": SickRing(ReceivedKeysReversed.attention, equal_chunks=True),
    "no_merge_on_rank_0": SickRing(NoMergeOnRank0.attention, equals=("never_called",)),  # on rank 0 only
}
