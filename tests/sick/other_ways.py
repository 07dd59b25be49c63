"""All-gather, all-to-all, hybrid and double ring with a mistake each."""

import dataclasses
from functools import lru_cache, partial
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from ring_doctor.mistakes_of_other_ways import hosts
from ringlab.training import all_gather, all_to_all, double_ring, hybrid
from ringlab.training.all_to_all import Exchange
from ringlab.training.flash_ring import ring_flash_attention
from tests.planted import patch
from tests.sick.ring import CAUSAL, ON_MESH, SickRing
from tests.wrong_rings import WAYS as WRONG
from tests.wrong_rings import back_as_they_came, order_of_rank

right_to_heads, right_to_tokens = Exchange.to_heads, Exchange.to_tokens
all_gather_attention = partial(ring_flash_attention, schedule=all_gather.AllGather)
all_to_all_attention = partial(ring_flash_attention, schedule=all_to_all.AllToAll)


# All-to-all --------------------------------------------------------------------------------------------------------


def in_turn(heads, world_size):
    """Heads r, r + P, ... of rank r, rank by rank."""
    return [n for rank in range(world_size) for n in range(rank, heads, world_size)]


def back_permuted(exchange, wholes):
    """Only out travels alone."""
    results = right_to_tokens(exchange, wholes)
    return results if len(results) > 1 else [results[0][:, in_turn(results[0].shape[1], len(exchange.order))]]


def there_permuted(exchange, tensors):
    """The backward pass of `back_permuted`: only the gradient of out travels alone."""
    if len(tensors) == 1:
        order = torch.tensor(in_turn(tensors[0].shape[1], len(exchange.order)))
        tensors = [tensors[0][:, order.argsort()]]
    return right_to_heads(exchange, tensors)


def in_runs(exchange):
    """The same exchange for ranks that hold runs of the sequence."""
    lengths = [len(at) for at in exchange.order]
    return dataclasses.replace(exchange, order=torch.arange(sum(lengths)).split(lengths))


def there_in_runs(exchange, tensors):
    return right_to_heads(exchange if len(tensors) > 1 else in_runs(exchange), tensors)


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


def copies_summed_twice(exchange, wholes):
    """Each copy gets the sum of all copies. Then the sums travel home and are added."""
    if len(wholes) > 1:
        mine, G = exchange.keys[dist.get_rank(exchange.group)], exchange.keys[-1].stop
        sums = [x.new_zeros(x.shape[0], G, *x.shape[2:]) for x in wholes[1:]]
        for total, x in zip(sums, wholes[1:], strict=True):
            total[:, mine] = x
            dist.all_reduce(total, group=exchange.group)
        wholes = [wholes[0], *(total[:, mine] for total in sums)]
    return right_to_tokens(exchange, wholes)


# On a mesh ---------------------------------------------------------------------------------------------------------


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
    rounds = {t: (k_j.clone(), v_j.clone(), pieces) for t, k_j, v_j, pieces in right_rounds(ring, firsts)}
    for t, (k_j, v_j, pieces) in rounds.items():
        if t % per_host == per_host - 1 and t // per_host < hosts - 1:
            k_j, v_j, _ = rounds[t + 1]
        yield t, k_j, v_j, pieces


def first_turn_only(sums, u):
    for total, part in zip(sums.between.of_round(u), sums.ended.home(), strict=True):
        total += part * (u == 0)
    sums.between.send_on(u)


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


def other_layout(case):
    return case.layout != "contiguous" and case.world_size > 1


def masked_layout(case):
    return case.causal and other_layout(case)


def ulysses(patch, shows, **facts):
    return SickRing(all_to_all_attention, patch, shows, CAUSAL, heads=4, **facts)


def both(**mistakes):
    return lambda: mock.patch.multiple(Exchange, **mistakes)


HYBRID = on_mesh(partial(ring_flash_attention, schedule=hybrid.Hybrid))
DOUBLE = on_mesh(partial(ring_flash_attention, schedule=double_ring.DoubleRing))
SICK = {
    "own_queries_only/all_gather": SickRing(
        all_gather_attention, WRONG["gathered gradients are not added"], takes=CAUSAL
    ),
    "heads_permuted_after_all_to_all": ulysses(both(to_tokens=back_permuted), heads_move, in_xray=False),
    "heads_permuted_after_all_to_all/both_passes": ulysses(
        both(to_tokens=back_permuted, to_heads=there_permuted), heads_move
    ),
    "kv_heads_dealt_in_turn": SickRing(
        kv_heads_dealt_in_turn, shows=kv_heads_move, takes=CAUSAL, heads=4, in_xray=False
    ),
    "all_to_all_back_in_wrong_token_order": ulysses(both(to_tokens=back_as_they_came), other_layout),
    "all_to_all_back_in_wrong_token_order/both_passes": ulysses(
        both(to_tokens=back_as_they_came, to_heads=there_in_runs), other_layout
    ),
    "replicated_head_gradient_not_summed": ulysses(both(to_tokens=copies_not_summed), copied, in_xray=False),
    "replicated_head_gradient_counted_twice": ulysses(both(to_tokens=copies_summed_twice), copied, in_xray=False),
    "positions_of_the_inner_layout": SickRing(
        HYBRID, patch(hybrid, "order", order_of_rank), masked_layout, ON_MESH, heads=4
    ),
    "positions_of_the_inner_layout/striped": SickRing(
        HYBRID,
        WRONG["rows taken for ranks"],
        lambda case: case.causal and on_4(case) and case.layout == "striped",
        ON_MESH,
        heads=4,
    ),
    "slow_hop_a_round_early": SickRing(
        DOUBLE, patch(double_ring.DoubleRing, "rounds_of", next_turn_early), on_4, ON_MESH, equal_chunks=True
    ),
    "host_sum_not_added": SickRing(DOUBLE, patch(double_ring.DoubleSums, "pass_on", first_turn_only), on_4, ON_MESH),
}
