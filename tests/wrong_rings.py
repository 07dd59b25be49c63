"""Rings of this project with one mistake each: a step of the real ring is replaced. The checks must reject all of them.

On each rank: with FLASH["swapped"](): ... SHOWS says where those of FLASH and WAYS show. tests/sick gives some
to the doctor. By ring: BLOCKING, OVERLAPPED, BACKWARD, GROUPED, and FLASH, the trainable ring; WAYS: other schedules.
"""

import contextlib
import math
from dataclasses import replace
from unittest import mock

import torch
import torch.distributed as dist

import ring_attn
from ring_attn import hop
from ringlab.basics import blockwise_attention
from ringlab.basics.blockwise_attention import attend
from ringlab.basics.online_softmax import start, update
from ringlab.basics.ranks import neighbours
from ringlab.support.host_memory import COPIES, HostMemory
from ringlab.training import (
    all_gather,
    all_to_all,
    backward,
    flash_ring,
    fused_block,
    grouped_query,
    hybrid,
    overlap,
    schedule,
)
from ringlab.training.all_to_all import AllToAll, Exchange, heads_of_ranks
from ringlab.training.backward import block_backward
from ringlab.training.causal import BlockSlice
from ringlab.training.double_ring import DoubleRing, DoubleSums
from ringlab.training.overlap import post, two_buffers
from ringlab.training.partition import Partition
from tests.masked import changed, forget, replaced, right_hops, right_keys
from tests.planted import Mistakes, mistakes_of_blocks, patch

# ring_attn.py --------------------------------------------------------------------------------------------------------

BLOCKING = Mistakes()


@BLOCKING.replaces(blockwise_attention, "update")
def no_rescale(state, scores, v):
    """Sums made with an older, smaller max are added to those made with the new one."""
    m, l, o = state
    m, l_block, o_block = update((m, torch.zeros_like(l), torch.zeros_like(o)), scores, v)
    return m, l + l_block, o + o_block


@BLOCKING.replaces(ring_attn, "hop")
def two_seats(block, length, group=None):
    """The neighbour is off by one: each block comes from rank r - 2, so that with an even P half of them never come."""
    return hop(hop(block, length, group), length, group)


@BLOCKING.replaces(ring_attn, "attend")
class one_hop_short:
    """'Count = 1 to N - 1' read as the rounds: the last block is never used."""

    rounds = 0

    def __call__(self, state, q, k, v, *, scale):
        self.rounds += 1
        return state if self.rounds == dist.get_world_size() else attend(state, q, k, v, scale=scale)


@BLOCKING.replaces(ring_attn, "attend")
def output_in_bfloat16(state, q, k, v, *, scale):
    """The running output is rounded to bfloat16 after every block; m and l are kept as they should be."""
    m, l, o = attend(state, q, k, v, scale=scale)
    return m, l, o.bfloat16().to(o.dtype)


@BLOCKING.replaces(ring_attn, "start")
def state_in_q_dtype(q):
    """m, l and o in q's dtype, as in the published code: with bfloat16 a sum of 256 no longer grows by 1."""
    return tuple(x.to(q.dtype) for x in start(q))


# overlap.py ----------------------------------------------------------------------------------------------------------

OVERLAPPED = Mistakes()


def at_once(sent, received, group, **distance):
    """`post`, and wait at once: so a mistake about buffers shows in every run and not in some."""
    for work in post(sent, received, group, **distance):
        work.wait()
    return []


@OVERLAPPED.replaces(overlap, "post")
def nothing_received(sent, received, group):
    """A ring that does not wait reads what was there before. Here that is a copy of the block in hand."""
    for x, y in zip(sent, received, strict=True):
        y.copy_(x)
    return []


@OVERLAPPED.replaces(overlap, "post")
def backwards(sent, received, group):
    return post(sent, received, group, distance=-1)


def one_block_forever(k, v, lengths, rank):
    """One buffer only: the next block overwrites the block in hand before the rank computes on it."""
    block = two_buffers(k, v, lengths, rank)
    return lambda t: block(0)


OVERLAPPED["one_block_forever"] = lambda: mock.patch.multiple(overlap, two_buffers=one_block_forever, post=at_once)

# backward.py and grouped_query.py ------------------------------------------------------------------------------------

BACKWARD, NARROW = Mistakes(mistakes_of_blocks(backward, "block_backward")), Mistakes()  # NARROW: in 16 bits only


@BACKWARD.replaces(backward, "hop")
class gradients_one_rank_from_home:
    """The last hop is left out."""

    hops = 0

    def __call__(self, block, length, group):
        self.hops += 1  # K and V make P - 1, and so do their gradients
        return block if self.hops == 2 * dist.get_world_size(group) - 2 else hop(block, length, group)


@NARROW.replaces(backward, "block_backward")
class DqInTheDtypeOfQ:
    """dQ is summed over the rounds in q's dtype."""

    total = 0.0

    def __call__(self, q, *block):
        d_q, d_k, d_v = block_backward(q, *block)
        before, self.total = self.total, (self.total + d_q).to(q.dtype).to(d_q.dtype)
        return self.total - before, d_k, d_v


def interleaved_fold(q, kv_heads):
    return q.unflatten(1, (-1, kv_heads)).transpose(1, 2).flatten(2, 3)


def interleaved_unfold(x, heads):
    return x.unflatten(2, (heads // x.shape[1], -1)).transpose(1, 2).flatten(1, 2)


GROUPED = {
    "head h uses K/V head h mod G": lambda: mock.patch.multiple(
        grouped_query, fold=interleaved_fold, unfold=interleaved_unfold
    ),
}

# flash_ring.py -------------------------------------------------------------------------------------------------------

FLASH, right_pieces = Mistakes(mistakes_of_blocks(flash_ring, "fused_backward")), Partition.pieces
fused_forward, fused_backward = fused_block.fused_forward, fused_block.fused_backward


@FLASH.replaces(flash_ring, "fused_backward")
def lse_of_the_block(q, k, v, out, lse, d_out, **options):
    return fused_backward(q, k, v, *fused_forward(q, k, v, **options), d_out, **options)


@FLASH.replaces(flash_ring, "fused_backward")
def backward_without_a_mask(*block, causal, **scores):
    return fused_backward(*block, **scores)


def every_piece_a_triangle(partition, rank, block):
    pieces, triangle = right_pieces(partition, rank, block), BlockSlice(slice(None), slice(None), triangle=True)
    return tuple(triangle for _ in pieces) if partition.mask.causal else pieces


FLASH |= {
    "first_query_kept": patch(Partition, "pieces", every_piece_a_triangle),
    "contiguous_slices": patch(
        Partition, "pieces", lambda it, rank, block: right_pieces(replace(it, layout="contiguous"), rank, block)
    ),
}


@FLASH.replaces(flash_ring, "merge_into")
def average(out, lse, out_j, lse_j):
    out.lerp_(out_j.to(out.dtype), 0.5)
    torch.logaddexp(lse, lse_j, out=lse)


# The other ways ------------------------------------------------------------------------------------------------------

right_to_tokens, right_turns, right_send_on = Exchange.to_tokens, DoubleRing.rounds_of, DoubleSums.send_on
right_numbers, right_scores, right_start = HostMemory.numbers, fused_block.capped_scores, flash_ring.nothing_seen


def in_both(name, mistake):
    """Replace a function that all-to-all and hybrid use."""

    @contextlib.contextmanager
    def planted():
        with mock.patch.object(all_to_all, name, mistake), mock.patch.object(hybrid, name, mistake):
            yield

    return planted


def kv_head_modulo(heads, kv_heads, world_size):
    """K/V head r mod G on rank r."""
    queries, _ = heads_of_ranks(heads, kv_heads, world_size)
    return queries, [slice(r % kv_heads, r % kv_heads + 1) for r in range(world_size)]


def last_copy_only(exchange, wholes):
    """The gradients of the copies of a K/V head are not added: that of the last rank stays."""
    rank, keys = dist.get_rank(exchange.group), exchange.keys
    if len(wholes) == 3 and keys[rank] in keys[rank + 1 :]:
        wholes = [wholes[0], 0 * wholes[1], 0 * wholes[2]]
    return right_to_tokens(exchange, wholes)


def order_of_rank(partition, ranks):
    """The tokens stay as they come: those of the first rank, those of the second, ..."""
    lengths = [partition.lengths[rank] for rank in ranks]
    return torch.arange(sum(lengths)).split(lengths)


def back_as_they_came(exchange, wholes):
    """Out goes back as if its tokens were in order of rank."""
    if len(wholes) == 3:
        return right_to_tokens(exchange, wholes)
    lengths = [len(at) for at in exchange.order]
    return right_to_tokens(replace(exchange, order=torch.arange(sum(lengths)).split(lengths)), wholes)


def rows_as_ranks(partition, rows):
    """The partition of the same layout, as if the rows were the ranks of a flat ring."""
    lengths = tuple(sum(some) for some in torch.tensor(partition.lengths).view(rows, -1).tolist())
    return replace(partition, lengths=lengths)


def not_added(total, parts, *, group, async_op):
    """Each rank keeps what its own queries found for its block."""
    rank, world_size, _, _ = neighbours(group)
    total.copy_(parts.view(world_size, -1)[rank])
    return mock.Mock()


def a_turn_is_a_round_short(ring, firsts):
    """The slow hop is due a round early: the last block of a turn is not computed."""
    n, g = ring.group.shape
    for t, k_j, v_j, pieces in right_turns(ring, firsts):
        yield t, k_j, v_j, () if t % g == g - 1 and t < (n - 1) * g else pieces


def not_brought_home(sums, t):
    """The sums of a turn stay where the turn ended."""
    right_send_on(sums, t)
    if t % sums.g == sums.g - 1:
        sums.ended.coming = sums.ended.buffer(sums.g - 1)


def block_of_the_next_rank(memory, which, rank, *size):
    """A rank reads the memory of its neighbour in place of that of the rank before."""
    other = rank if rank == memory.rank or which != COPIES else (rank + 1) % memory.world_size
    return right_numbers(memory, which, other, *size)


def sinks_twice(q, v, sinks=None):
    """Each sink is counted twice, as where two ranks add it."""
    return right_start(q, v, None if sinks is None else sinks + math.log(2))


def first_heads(schedule):
    """The sinks of as many heads as the rank has, but of the first ones."""
    mine = schedule.exchange.queries[dist.get_rank(schedule.exchange.group)]
    return slice(0, mine.stop - mine.start)


def capped_after_the_mask(q, k, *, future=None, **options):
    """A hidden key keeps the score -softcap."""
    scores, slope = right_scores(q, k, **options)
    return scores if future is None else scores.masked_fill(future, -options["softcap"]), slope


@contextlib.contextmanager
def one_hop_less():
    forget()
    with mock.patch.object(Partition, "hops", property(lambda partition: right_hops(partition) - 1)):
        yield
    forget()


WAYS = {
    "K/V head r mod G": in_both("heads_of_ranks", kv_head_modulo),
    "gradients of copies not added": patch(Exchange, "to_tokens", last_copy_only),
    "the layout is not undone": in_both("order", order_of_rank),
    "out goes back in order of rank": patch(Exchange, "to_tokens", back_as_they_came),
    "rows taken for ranks": patch(hybrid, "joined_rows", rows_as_ranks),
    "gathered gradients are not added": patch(all_gather, "reduce_scatter", not_added),
    "the slow hop a round early": patch(DoubleRing, "rounds_of", a_turn_is_a_round_short),
    "sums of a turn not brought home": patch(DoubleSums, "send_on", not_brought_home),
    "the block of another rank": patch(HostMemory, "numbers", block_of_the_next_rank),
    "gradients sent to the next rank, and not home": patch(
        schedule, "post", lambda sent, received, group, distance=1: post(sent, received, group)
    ),
    "sinks counted twice": patch(flash_ring, "nothing_seen", sinks_twice),
    "the sinks of the first heads": patch(AllToAll, "own_heads", property(first_heads)),
    "the mask before the cap": patch(fused_block, "capped_scores", capped_after_the_mask),
    "a document leaks into the next": changed(first=-1),
    "a window of one more": replaced(lambda mask, at, S: right_keys(replace(mask, window=mask.window + 1), at, S)),
    "no global tokens": replaced(lambda mask, at, S: right_keys(mask, at, S)[:1]),
    "a hop too few": one_hop_less,
}

# Where they show -----------------------------------------------------------------------------------------------------

ZIGZAG, STRIPED, FULL = {"causal": True, "layout": "zigzag"}, {"causal": True, "layout": "striped"}, {}
SOMETIMES = {  # of the trainable ring: the cases in which a mistake shows, where not in all
    "backward_without_a_mask": [ZIGZAG, STRIPED],
    "contiguous_slices": [ZIGZAG, STRIPED],
    "first_query_kept": [STRIPED],
}
FOUR, SIX, ON_FOUR = (4, 2, 48), (6, 3, 48), (2, 2)
DOCUMENTS = {"causal": True, "documents": [1, 10, 37], "window": 23}
WINDOW, SHORT = {"causal": True, "window": 20, "global_tokens": 3}, {"causal": True, "window": 5}
SINKS = (4, 2, 48, {"causal": True}, None, torch.float32, 1, 4, 0, 1.0, None, torch.float32)
CAPPED = (4, 2, 48, {"causal": True, "softcap": 2.0})
# fmt: off
SHOWS = {  # where the mistakes of the other ways show: a way, its ranks, a problem
    "K/V head r mod G": [("all-to-all", 4, (8, 2, 48, {})), ("hybrid", (2, 4), (8, 2, 48, {}))],
    "gradients of copies not added": [("all-to-all", 4, (8, 2, 48, {})), ("hybrid", ON_FOUR, (4, 1, 48, {}))],
    "the layout is not undone": [("all-to-all", 3, (*FOUR, ZIGZAG)), ("hybrid", ON_FOUR, (*FOUR, ZIGZAG))],
    "out goes back in order of rank": [("all-to-all", 3, (*FOUR, ZIGZAG))],
    "rows taken for ranks": [("hybrid", ON_FOUR, (*FOUR, STRIPED))],
    "gathered gradients are not added": [("all-gather", 3, (*SIX, {})), ("all-gather", 5, (6, 3, 60, ZIGZAG))],
    "the slow hop a round early": [("double ring", (3, 2), (*FOUR, ZIGZAG))],
    "sums of a turn not brought home": [("double ring", (3, 2), (*FOUR, ZIGZAG))],
    "the block of another rank": [("shared memory", 3, (*FOUR, ZIGZAG)), ("two levels", ON_FOUR, (*FOUR, ZIGZAG))],
    "gradients sent to the next rank, and not home":
        [("ring", 4, (*FOUR, SHORT)), ("double ring", (3, 2), (*FOUR, SHORT))],
    "sinks counted twice": [("ring", 4, SINKS)],
    "the sinks of the first heads": [("all-to-all", 3, SINKS), ("hybrid", ON_FOUR, SINKS)],
    "the mask before the cap": [("ring", 4, CAPPED)],
    "a document leaks into the next": [("ring", 4, (*FOUR, DOCUMENTS)), ("all-gather", 3, (*FOUR, DOCUMENTS))],
    "a window of one more": [("ring", 4, (*FOUR, WINDOW)), ("hybrid", ON_FOUR, (*FOUR, WINDOW))],
    "no global tokens": [("ring", 4, (*FOUR, WINDOW))],
    "a hop too few": [("ring", 4, (*FOUR, SHORT)), ("double ring", (3, 1), (*FOUR, SHORT))],
}
# fmt: on
SHOWS |= {
    wrong: [("ring", 4, (*FOUR, case, None, torch.float32, 1, 16)) for case in SOMETIMES.get(wrong, [ZIGZAG, FULL])]
    for wrong in FLASH
}
