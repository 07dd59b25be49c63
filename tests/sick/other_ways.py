"""All-gather, all-to-all, hybrid and double ring with a mistake each."""

import dataclasses
import math
from functools import lru_cache, partial
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_gather_single
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ring_doctor.mistakes_of_other_ways import hosts
from ringlab.basics.naive_attention import accumulation_dtype, resolve_scale
from ringlab.training import all_gather, all_to_all, double_ring, hybrid
from ringlab.training.all_to_all import Exchange
from ringlab.training.flash_ring import ring_flash_attention
from ringlab.training.layouts import positions
from tests.planted import patch
from tests.sick.masks import BY_RANK, blocks
from tests.sick.ring import CAUSAL, ON_MESH, SickRing, from_2
from tests.wrong_schedules import WRONG, back_as_they_came, order_of_rank

right_to_heads, right_to_tokens = Exchange.to_heads, Exchange.to_tokens
all_gather_attention = partial(ring_flash_attention, schedule=all_gather.AllGather)
all_to_all_attention = partial(ring_flash_attention, schedule=all_to_all.AllToAll)


# All-gather --------------------------------------------------------------------------------------------------------


class Gather(torch.autograd.Function):
    """(B, G, C, D) -> (P, B, G, C, D). The gradient is summed over the ranks, and each rank keeps its slice."""

    @staticmethod
    def forward(ctx, x, gathering):
        ctx.gathering = gathering
        blocks = [torch.empty_like(x) for _ in range(gathering.P)]
        dist.all_gather(blocks, x.contiguous(), group=gathering.group)
        return torch.stack(blocks)

    @staticmethod
    def backward(ctx, d_blocks):
        d_blocks = d_blocks.contiguous()
        dist.all_reduce(d_blocks, group=ctx.gathering.group)
        return ctx.gathering.slice_of(d_blocks), None


class Gathering:
    """Attention on the gathered K and V, in plain steps. A sick way is a subclass with another step."""

    def __init__(self, C, causal, layout, group):
        self.group, self.rank, self.P = group, dist.get_rank(group), dist.get_world_size(group)
        self.C, self.S, self.causal, self.layout = C, C * self.P, causal, layout

    @classmethod
    def attention(cls, q, k, v, *, causal, layout, scale, group):
        self, n, dtype = cls(k.shape[2], causal, layout, group), q.shape[1] // k.shape[1], accumulation_dtype(q.dtype)
        blocks = (Gather.apply(x.to(dtype), self) for x in (k, v))
        joined = (torch.cat([x[j] for j in order], dim=2) for x, order in zip(blocks, self.orders(), strict=True))
        k, v = (x.repeat_interleave(n, dim=1) for x in joined)
        s = resolve_scale(scale, q.shape[-1]) * q.to(dtype) @ k.mT
        if causal:
            s = s.masked_fill(~self.seen(), -torch.inf)
        return (s.softmax(dim=-1) @ v).to(q.dtype)

    def orders(self):
        """The order of the blocks of K, and of those of V."""
        return range(self.P), range(self.P)

    def at(self, rank):
        return positions(self.layout, self.S, rank, self.P)

    def keys_at(self):
        """Where the gathered keys stand in the sequence: (S,)."""
        return torch.cat([self.at(rank) for rank in range(self.P)])

    def seen(self):
        return self.keys_at() <= self.at(self.rank)[:, None]

    def slice_of(self, d_blocks):
        return d_blocks[self.rank]


class InOrderOfArrival(Gathering):
    def arrived(self):
        return [(self.rank - n) % self.P for n in range(self.P)]

    def orders(self):
        return self.arrived(), self.arrived()


class FromTheRankAfter(InOrderOfArrival):
    def arrived(self):
        return [(self.rank + n) % self.P for n in range(self.P)]


class ValuesInOrderOfArrival(InOrderOfArrival):
    def orders(self):
        return range(self.P), self.arrived()


class FromTheFirstKey(Gathering):
    """A triangle of C x S that begins at the first key."""

    def seen(self):
        return torch.ones(self.C, self.S, dtype=torch.bool).tril(self.diagonal())

    def diagonal(self):
        return 0


class ToTheLastKey(FromTheFirstKey):
    def diagonal(self):
        return self.S - self.C


class InOrder(Gathering):
    """The keys are put in the order of the sequence before the mask is made."""

    def seen(self):
        return super().seen()[:, self.keys_at()]


class FromTheFirstKeyInOrder(InOrder, FromTheFirstKey):
    pass


class ToTheLastKeyInOrder(InOrder, ToTheLastKey):
    pass


class FirstSlice(Gathering):
    def slice_of(self, d_blocks):
        return d_blocks[0]


class LastSlice(Gathering):
    def slice_of(self, d_blocks):
        return d_blocks[-1]


class NextSlice(Gathering):
    def slice_of(self, d_blocks):
        return d_blocks[(self.rank + 1) % self.P]


class RunOfTheSequence(Gathering):
    """The rank cuts its slice out of the gradient in the order of the sequence."""

    def slice_of(self, d_blocks):
        in_order = torch.cat(list(d_blocks), dim=2)[:, :, self.keys_at().argsort()]
        return in_order[:, :, self.rank * self.C : (self.rank + 1) * self.C]


def keys_in_gathered_order(q, k, v, *, causal, layout, scale, group):
    """The mask counts the gathered keys as they lie, rank by rank."""
    group = group or dist.group.WORLD
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    S, n, dtype = k.shape[2] * world_size, q.shape[1] // k.shape[1], accumulation_dtype(q.dtype)
    gathered = (all_gather_single(x.to(dtype).contiguous(), 0, group).chunk(world_size) for x in (k, v))
    k, v = (torch.cat(blocks, dim=2).repeat_interleave(n, dim=1) for blocks in gathered)
    s = resolve_scale(scale, q.shape[-1]) * q.to(dtype) @ k.mT
    if causal:
        s = s.masked_fill(torch.arange(S) > positions(layout, S, rank, world_size)[:, None], -torch.inf)
    return (s.softmax(dim=-1) @ v).to(q.dtype)


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


def kv_heads_tiled(q, k, v, *, group, **options):
    """Where P is more than G, K and V are copied as a whole until P divides the number of their heads."""
    if (world_size := dist.get_world_size(group)) > k.shape[1]:
        k, v = (x.repeat(1, math.lcm(world_size, x.shape[1]) // x.shape[1], 1, 1) for x in (k, v))
    return all_to_all_attention(q, k, v, group=group, **options)


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


def undone_by_its_own_order(partition, ranks):
    at = [partition.positions(rank) for rank in ranks]
    return torch.cat(at).argsort().split([len(of_rank) for of_rank in at])


# On a mesh ---------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def mesh_of(world):
    return init_device_mesh("cpu", hosts(world.size()))


def on_mesh(attention):
    """The same attention on a mesh of all ranks."""

    def on_this(q, k, v, *, group, **options):
        return attention(q, k, v, group=mesh_of(dist.group.WORLD), **options)

    return on_this


right_groups = DeviceMesh.get_all_groups


def groups_exchanged(mesh):
    """The group of a row in the place of the group of a column, and the reverse; where they are as large."""
    rows, per_row = mesh.shape
    return right_groups(mesh)[::-1] if rows == per_row else right_groups(mesh)


right_rounds = double_ring.DoubleRing.rounds


def next_turn_early(ring, k, v):
    """At the end of a turn the first block of the next turn is in hand."""
    (hosts, per_host), rounds = (
        ring.group.shape,
        [(k_j.clone(), v_j.clone()) for _, k_j, v_j, _ in right_rounds(ring, k, v)],
    )
    for t, k_j, v_j, pieces in right_rounds(ring, k, v):
        if t % per_host == per_host - 1 and t // per_host < hosts - 1:
            k_j, v_j = rounds[t + 1]
        yield t, k_j, v_j, pieces


def one_turn(ring, k, v):
    """The blocks of other hosts come and are not used."""
    for t, k_j, v_j, pieces in right_rounds(ring, k, v):
        yield t, k_j, v_j, pieces if t < ring.group.shape[1] else ()


def first_turn_only(sums, u):
    sums.ended.wait()
    for total, part in zip(sums.between.of_round(u), sums.coming, strict=True):
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


def gathering(way, shows=from_2):
    return SickRing(way.attention, shows=shows, takes=CAUSAL, equal_chunks=True)


def both(**mistakes):
    return lambda: mock.patch.multiple(Exchange, **mistakes)


HYBRID = on_mesh(partial(ring_flash_attention, schedule=hybrid.Hybrid))
DOUBLE = on_mesh(partial(ring_flash_attention, schedule=double_ring.DoubleRing))
SICK = {
    "own_queries_only/all_gather": SickRing(
        all_gather_attention, WRONG["gathered gradients are not added"], takes=CAUSAL
    ),
    "keys_in_gathered_order": SickRing(keys_in_gathered_order, shows=masked_layout, takes=CAUSAL, equal_chunks=True),
    "gathered_in_order_of_arrival": gathering(
        InOrderOfArrival,
        lambda case: blocks(case) and case.layout != "striped",  # there all earlier ranks' blocks have one mask
    ),
    "gathered_in_order_of_arrival/from_the_rank_after": gathering(
        FromTheRankAfter,
        lambda case: blocks(case) and (case.layout != "striped" or case.world_size > 2),  # of two: the same triangles
    ),
    "gathered_in_order_of_arrival/values": gathering(ValuesInOrderOfArrival),
    "causal_from_the_first_gathered_key": gathering(FromTheFirstKey, blocks),
    "causal_from_the_first_gathered_key/in_order": gathering(FromTheFirstKeyInOrder, blocks),
    "causal_to_the_last_gathered_key": gathering(ToTheLastKey, blocks),
    "causal_to_the_last_gathered_key/in_order": gathering(ToTheLastKeyInOrder, blocks),
    "wrong_slice_of_the_gradient": gathering(FirstSlice),
    "wrong_slice_of_the_gradient/last": gathering(LastSlice),
    "wrong_slice_of_the_gradient/run": gathering(RunOfTheSequence, other_layout),
    "gradients_not_sent_home/gathered": gathering(NextSlice),
    "groups_exchanged": SickRing(
        HYBRID,
        patch(DeviceMesh, "get_all_groups", groups_exchanged),
        lambda case: case.causal and on_4(case),
        ON_MESH,
        heads=4,
        equal_chunks=True,  # others end the process: the groups would send other numbers of bytes
    ),
    "heads_permuted_after_all_to_all": ulysses(both(to_tokens=back_permuted), heads_move, in_xray=False),
    "heads_permuted_after_all_to_all/both_passes": ulysses(
        both(to_tokens=back_permuted, to_heads=there_permuted), heads_move
    ),
    "kv_heads_dealt_in_turn": SickRing(
        kv_heads_dealt_in_turn, shows=kv_heads_move, takes=CAUSAL, heads=4, in_xray=False
    ),
    "kv_heads_dealt_in_turn/tiled": SickRing(
        kv_heads_tiled,
        shows=lambda case: 1 < case.kv_heads < min(case.heads, case.world_size),
        takes=CAUSAL,
        heads=12,
        in_xray=False,
    ),
    "all_to_all_back_in_wrong_token_order": ulysses(both(to_tokens=back_as_they_came), other_layout),
    "all_to_all_back_in_wrong_token_order/both_passes": ulysses(
        both(to_tokens=back_as_they_came, to_heads=there_in_runs), other_layout
    ),
    "replicated_head_gradient_not_summed": ulysses(both(to_tokens=copies_not_summed), copied, in_xray=False),
    "replicated_head_gradient_counted_twice": ulysses(both(to_tokens=copies_summed_twice), copied, in_xray=False),
    "positions_of_contiguous/all_to_all": ulysses(patch(all_to_all, "order", order_of_rank), masked_layout, **BY_RANK),
    "layout_undone_the_wrong_way": ulysses(patch(all_to_all, "order", undone_by_its_own_order), masked_layout),
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
        DOUBLE, patch(double_ring.DoubleRing, "rounds", next_turn_early), on_4, ON_MESH, equal_chunks=True
    ),
    "next_host_missing": SickRing(DOUBLE, patch(double_ring.DoubleRing, "rounds", one_turn), on_4, ON_MESH),
    "host_sum_not_added": SickRing(DOUBLE, patch(double_ring.DoubleSums, "pass_on", first_turn_only), on_4, ON_MESH),
    "host_sum_not_added/overwritten": SickRing(DOUBLE, WRONG["sums not added between hosts"], on_4, ON_MESH),
}
