"""Ways and masks with one mistake each. The check that the right ones pass must reject every one of them.

On each rank: with WRONG["the layout is not undone"](): ... SHOWS says on which ways and problems a mistake shows. The
mistakes of the trainable ring itself are in wrong_flash_rings.py.
"""

import contextlib
import math
from dataclasses import replace
from unittest import mock

import torch
import torch.distributed as dist

from ringlab.basics import chunks
from ringlab.basics.ranks import neighbours
from ringlab.support.host_memory import COPIES, SUMS, HostMemory
from ringlab.training import all_gather, all_to_all, flash_ring, hybrid, overlap, schedule, softcap
from ringlab.training.all_gather import AllGather
from ringlab.training.all_to_all import AllToAll, Exchange
from ringlab.training.double_ring import DoubleRing, DoubleSums
from ringlab.training.overlap import arriving_blocks
from ringlab.training.partition import Partition
from ringlab.training.shared_memory import SharedSums
from ringlab.training.split_heads import heads_of_ranks
from tests.masked import changed, forget, replaced, right_hops, right_keys
from tests.planted import patch

# All-to-all and hybrid -----------------------------------------------------------------------------------------------

right_to_heads, right_to_tokens, right_order = Exchange.to_heads, Exchange.to_tokens, all_to_all.order


def in_both(name, mistake):
    """Replace a function that both modules use."""

    @contextlib.contextmanager
    def planted():
        with mock.patch.object(all_to_all, name, mistake), mock.patch.object(hybrid, name, mistake):
            yield

    return planted


def heads_transposed(exchange, wholes):
    """The heads of out in the order (number on its rank, rank), where (rank, number) is right."""
    results, ranks = right_to_tokens(exchange, wholes), len(exchange.order)
    if len(wholes) == 1:  # out; three are gradients
        results = [x.unflatten(1, (ranks, -1)).transpose(1, 2).flatten(1, 2) for x in results]
    return results


def kv_head_modulo(heads, kv_heads, world_size):
    """K/V head r mod G on rank r."""
    queries, _ = heads_of_ranks(heads, kv_heads, world_size)
    return queries, [slice(r % kv_heads, r % kv_heads + 1) for r in range(world_size)]


def own_copy_twice(exchange, wholes):
    """What a rank computes for its copy of a K/V head is added twice to the gradient of its own tokens."""
    results, rank = right_to_tokens(exchange, wholes), dist.get_rank(exchange.group)
    if len(wholes) == 3:
        for x, whole in zip(results[1:], wholes[1:], strict=True):
            x[:, exchange.keys[rank]] += whole[:, :, exchange.order[rank]]
    return results


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


def back_to_other_ranks(exchange, wholes):
    """Each rank gets the tokens of the next one."""
    return right_to_tokens(replace(exchange, order=(*exchange.order[1:], exchange.order[0])), wholes)


def back_as_they_came(exchange, wholes):
    """Out goes back as if its tokens were in order of rank."""
    if len(wholes) == 3:
        return right_to_tokens(exchange, wholes)
    lengths = [len(at) for at in exchange.order]
    return right_to_tokens(replace(exchange, order=torch.arange(sum(lengths)).split(lengths)), wholes)


def of_other_heads(exchange, tensors):
    """The gradient of out is exchanged with its heads shifted by one."""
    return right_to_heads(exchange, [x.roll(1, dims=1) for x in tensors] if len(tensors) == 1 else tensors)


def rows_as_ranks(partition, rows):
    """The partition of the same layout, as if the rows were the ranks of a flat ring."""
    lengths = tuple(sum(some) for some in torch.tensor(partition.lengths).view(rows, -1).tolist())
    return replace(partition, lengths=lengths)


def contiguous_rows(partition, rows):
    """The partition of the order in which the tokens lie: row after row."""
    return replace(rows_as_ranks(partition, rows), layout="contiguous")


# All-gather ----------------------------------------------------------------------------------------------------------

right_gather, right_scatter, right_rounds = all_gather.all_gather, all_gather.reduce_scatter, AllGather.rounds


class Done:
    """A message that has arrived."""

    def wait(self):
        pass


def not_added(total, parts, *, group, async_op):
    """Each rank keeps what its own queries found for its block."""
    rank, world_size, _, _ = neighbours(group)
    total.copy_(parts.view(world_size, -1)[rank])
    return Done()


def added_for_the_next_rank(total, parts, *, group, async_op):
    _, world_size, _, _ = neighbours(group)
    return right_scatter(total, parts.view(world_size, -1).roll(1, 0).flatten(), group=group, async_op=async_op)


def in_another_order(blocks, own, *, group, async_op):
    """The blocks of the ranks lie in reverse order, where the next reader looks."""
    _, world_size, _, _ = neighbours(group)
    right_gather(blocks, own.clone(), group=group)
    blocks.copy_(blocks.view(world_size, -1).flip(0).flatten())
    return Done()


def values_are_keys(blocks, own, *, group, async_op):
    right_gather(blocks, own.clone(), group=group)
    keys, values = blocks.view(neighbours(group)[1], 2, -1).unbind(1)
    values.copy_(keys)
    return Done()


def one_buffer():
    """The next head arrives in the buffer from which this head is read."""

    def at_once(blocks, own, *, group, async_op):
        right_gather(blocks, own.clone(), group=group)
        return Done()

    def one(k, v, lengths, dtype):
        another = right_buffer(k, v, lengths, dtype)
        return buffers.setdefault(dtype, another) if sending else another

    def rounds(gathering, k, v):
        nonlocal sending
        buffers.clear()
        for step in right_rounds(gathering, k, v):
            sending = False
            yield step
        sending = True

    buffers, sending, right_buffer = {}, True, all_gather.buffer_for_all
    stack = contextlib.ExitStack()
    stack.enter_context(mock.patch.multiple(all_gather, buffer_for_all=one, all_gather=at_once))
    stack.enter_context(mock.patch.object(AllGather, "rounds", rounds))
    return stack


def heads_of_the_group_before(gathering, k, v):
    for t, k_j, v_j, pieces in right_rounds(gathering, k, v):
        served = gathering.heads // gathering.kv_heads
        first = (t - 1) % gathering.kv_heads * served
        yield t, k_j, v_j, tuple(replace(piece, heads=slice(first, first + served)) for piece in pieces)


# The double ring -----------------------------------------------------------------------------------------------------

right_turns, right_send_on = DoubleRing.rounds_of, DoubleSums.send_on


def a_turn_is_a_round_short(ring, firsts):
    """The slow hop is due a round early: the last block of a turn is not computed."""
    n, g = ring.group.shape
    for t, k_j, v_j, pieces in right_turns(ring, firsts):
        yield t, k_j, v_j, () if t % g == g - 1 and t < (n - 1) * g else pieces


def waited_for_early(ring, k, v):
    """The last round of a turn begins only when the block from the other host is there."""
    (n, g), (host, device) = ring.group.shape, ring.group.get_coordinate()
    across, inside = ring.group.get_all_groups()
    lengths = ring.partition.lengths
    hosts = arriving_blocks(k, v, lengths=lengths[:n], group=across)
    following = next(hosts)
    for u in range(n):
        origin = (host - u) % n * g
        for s, block in enumerate(arriving_blocks(*following, lengths=lengths[:g], group=inside)):
            if s == g - 1 and u < n - 1:
                following = next(hosts)
            yield u * g + s, *block, ring.partition.pieces(host * g + device, origin + (device - s) % g)


def rounds_of_host(change):
    """Rounds in which the block in hand is taken for one of another host."""

    def rounds(ring, firsts):
        (n, g), (host, device) = ring.group.shape, ring.group.get_coordinate()
        for t, k_j, v_j, _ in right_turns(ring, firsts):
            u, s = divmod(t, g)
            yield t, k_j, v_j, ring.partition.pieces(host * g + device, change(host, u, n) * g + (device - s) % g)

    return rounds


def the_block_in_hand_goes_on(ring, k, v):
    """Each device sends the block of its last round to the next host, not that of its first: so too late.

    Each rank still meets every block once. Without documents or a window even out and dq are right.
    """
    (n, g), (host, device) = ring.group.shape, ring.group.get_coordinate()
    across, inside = ring.group.get_all_groups()
    lengths = ring.partition.lengths
    for u in range(n):
        origin = (host - u) % n * g
        for s, (k_j, v_j) in enumerate(arriving_blocks(k, v, lengths=lengths[:g], group=inside)):
            last = k_j.clone(), v_j.clone()
            yield u * g + s, k_j, v_j, ring.partition.pieces(host * g + device, origin + (device - s) % g)
        k, v = list(arriving_blocks(*last, lengths=lengths[:n], group=across, hops=1))[-1]


def not_added_between_hosts(sums, u):
    """The next host gets the sums of this host only."""
    for total, part in zip(sums.between.of_round(u), sums.ended.home(), strict=True):
        total.copy_(part)
    sums.between.send_on(u)


def not_brought_home(sums, t):
    """The sums of a turn stay where the turn ended."""
    right_send_on(sums, t)
    if t % sums.g == sums.g - 1:
        sums.ended.coming = sums.ended.buffer(sums.g - 1)


def home_of_another_host(sums):
    """After the last turn the sums go on to the next host, as before. Their own is that many hosts back."""
    n, _ = sums.rings.group.shape
    wrong = lambda sent, received, group, distance: overlap.post(sent, received, group, distance=2)  # noqa: E731
    with mock.patch.object(schedule, "post", wrong):
        sums.pass_on(n - 1)
    return sums.between.home()


# Shared memory -------------------------------------------------------------------------------------------------------

right_numbers = HostMemory.numbers


def block_of_the_next_rank(memory, which, rank, *size):
    """A rank reads the memory of its neighbour in place of that of the rank before."""
    other = rank if rank == memory.rank or which != COPIES else (rank + 1) % memory.world_size
    return right_numbers(memory, which, other, *size)


def gradients_of_its_own(memory, which, rank, *size):
    """A rank adds to its own sums what belongs to others."""
    return right_numbers(memory, which, memory.rank if which == SUMS else rank, *size)


def not_zero(sums, t):
    """The sums begin with those of the pass before."""
    if t == 0:
        sums.own += 1
    return right_sums(sums, t)


right_sums = SharedSums.of_round


# Learned sinks, in every way -----------------------------------------------------------------------------------------

right_start, right_d_sinks, right_backward = (
    flash_ring.nothing_seen,
    flash_ring.sinks_backward,
    flash_ring.ring_backward,
)


def sinks_twice(q, v, sinks=None):
    """Each sink is counted twice, as where two ranks add it."""
    return right_start(q, v, None if sinks is None else sinks + math.log(2))


def of_every_rank(sinks, out, lse, d_out):
    """Each rank returns a whole gradient of the sinks, so that their sum is too large."""
    return right_d_sinks(sinks, out, lse, d_out) * dist.get_world_size()


def of_the_keys_alone(q, k, v, out, lse, d_out, schedule):
    """The backward pass has the lse of the keys, without the sinks."""
    return right_backward(q, k, v, out, flash_ring.ring_forward(q, k, v, schedule)[1], d_out, schedule)


def first_heads(schedule):
    """The sinks of as many heads as the rank has, but of the first ones."""
    mine = schedule.exchange.queries[dist.get_rank(schedule.exchange.group)]
    return slice(0, mine.stop - mine.start)


# A softcap, in every way ---------------------------------------------------------------------------------------------

right_scores = softcap.capped_scores


def slope_of_1(q, k, **options):
    """The backward pass forgets the slope of tanh."""
    scores, slope = right_scores(q, k, **options)
    return scores, torch.ones_like(slope)


def capped_after_the_mask(q, k, *, future=None, **options):
    """A hidden key keeps the score -softcap."""
    scores, slope = right_scores(q, k, **options)
    return scores if future is None else scores.masked_fill(future, -options["softcap"]), slope


def clamped(q, k, *, softcap, future=None, **options):
    """Scores cut off at the cap."""
    scores, slope = right_scores(q, k, softcap=1e6, future=future, **options)
    return scores.clamp(max=softcap).maximum(scores.clamp(max=-softcap)), slope


# Masks, in every way -------------------------------------------------------------------------------------------------


def wrapped(mask, at, seq_len):
    """The first queries see the last keys too, as if the sequence were a circle."""
    first, end = torch.maximum(at + 1 - mask.window, torch.zeros_like(at)), at + 1
    begin = torch.where(at < mask.window - 1, seq_len + at + 1 - mask.window, seq_len)
    return [(first, end), (begin, torch.full_like(at, seq_len))]


def global_tokens_twice(mask, at, seq_len):
    """Global tokens are counted once more inside the window."""
    first, end = torch.maximum(at + 1 - mask.window, torch.zeros_like(at)), at + 1
    return [(first, end), (torch.zeros_like(at), torch.minimum(torch.full_like(at, mask.global_tokens), end))]


def other_window(more):
    return replaced(lambda mask, at, S: right_keys(replace(mask, window=mask.window + more), at, S))


@contextlib.contextmanager
def one_hop_less():
    forget()
    with mock.patch.object(Partition, "hops", property(lambda partition: right_hops(partition) - 1)):
        yield
    forget()


def sent_home_by_the_next_rank(sent, received, group, *, distance=1):
    return overlap.post(sent, received, group)


ZIGZAG, STRIPED = {"causal": True, "layout": "zigzag"}, {"causal": True, "layout": "striped"}
DOCUMENTS = {"causal": True, "documents": [1, 10, 37], "window": 23}
WINDOW = {"causal": True, "window": 20, "global_tokens": 3}
FOUR, SIX, ON_FOUR = (4, 2, 48), (6, 3, 48), (2, 2)
BOTH, GATHER = [("hybrid", ON_FOUR)], [("all-gather", 3), ("all-gather", 5)]
SHARED = [("shared memory", 3), ("two levels", ON_FOUR)]
TWICE = [("double ring", (3, 2)), ("double ring", (4, 2))]
EVERY_WAY = [("ring", 4), ("all-gather", 3), ("all-to-all", 3), ("hybrid", ON_FOUR)]  # masks: each asks in its own way
RING, TWO_WAYS = [("ring", 4)], [("ring", 4), ("hybrid", ON_FOUR)]


def on(ways, *problems):
    return [(way, shape, problem) for way, shape in ways for problem in problems]


VALUES_OF_4 = (4, 2, 48, {}, None, torch.float32, 1, 6, 0, 1.0, 4)  # q and k have 6 numbers in a head


WITH_SINKS = (4, 2, 48, {"causal": True}, None, torch.float32, 1, 4, 0, 1.0, None, torch.float32)

CAPPED = (4, 2, 48, {"causal": True, "softcap": 2.0})


RINGS_THAT_STOP = [("ring", 4), ("ring", 5), ("double ring", (3, 1))]
STOPS_IN_DOCUMENTS = (4, 2, 60, {"causal": True, "documents": [1, 10, 49]})
STOPS_IN_WINDOW = (*FOUR, {"causal": True, "window": 5})
ON_EIGHT, COPIED = ("hybrid", (2, 4), (8, 2, 48, {})), [("all-to-all", 4, (8, 2, 48, {})), *on(BOTH, (4, 1, 48, {}))]
GATHERED = on(GATHER, (*SIX, {}), (*SIX[:2], 60, ZIGZAG))


# fmt: off
REPLACED = {  # name: (home, what is replaced, the mistake, where it shows)
    "no slope": (softcap, "capped_scores", slope_of_1, on(RING, CAPPED)),
    "the mask before the cap": (softcap, "capped_scores", capped_after_the_mask, on(RING, CAPPED)),
    "scores cut off at the cap": (softcap, "capped_scores", clamped, on(RING, CAPPED)),
    "sinks counted twice": (flash_ring, "nothing_seen", sinks_twice, on(TWO_WAYS, WITH_SINKS)),
    "a whole gradient of the sinks on each rank":
        (flash_ring, "sinks_backward", of_every_rank, on(TWO_WAYS, WITH_SINKS)),
    "no sinks in the backward pass": (flash_ring, "ring_backward", of_the_keys_alone, on(TWO_WAYS, WITH_SINKS)),
    "the sinks of the first heads":
        (AllToAll, "own_heads", property(first_heads), [("all-to-all", 3, WITH_SINKS), *on(BOTH, WITH_SINKS)]),
    "the scale of the head dimension of v":
        (chunks, "resolve_scale", lambda *args: 4**-0.5, on(TWO_WAYS, VALUES_OF_4)),
    "heads of out transposed":
        (Exchange, "to_tokens", heads_transposed, [("all-to-all", 4, (8, 4, 48, {})), *on(BOTH, (4, 2, 48, {}))]),
    "a copy's gradient counted twice": (Exchange, "to_tokens", own_copy_twice, COPIED),
    "gradients of copies not added": (Exchange, "to_tokens", last_copy_only, COPIED),
    "back to the wrong ranks":
        (Exchange, "to_tokens", back_to_other_ranks, [("all-to-all", 3, (*FOUR, {})), *on(BOTH, (*FOUR, {}))]),
    "out goes back in order of rank": (Exchange, "to_tokens", back_as_they_came, [("all-to-all", 3, (*FOUR, ZIGZAG))]),
    "the gradient of out by other heads":
        (Exchange, "to_heads", of_other_heads, [("all-to-all", 4, (6, 2, 48, {}))]),
    "rows taken for ranks": (hybrid, "joined_rows", rows_as_ranks, on(BOTH, (*FOUR, STRIPED))),
    "the mask of contiguous rows": (hybrid, "joined_rows", contiguous_rows, on(BOTH, (*FOUR, ZIGZAG))),
    "gathered gradients are not added": (all_gather, "reduce_scatter", not_added, GATHERED),
    "the gradients of the block before": (all_gather, "reduce_scatter", added_for_the_next_rank, GATHERED),
    "blocks in another order": (all_gather, "all_gather", in_another_order, GATHERED),
    "keys as values": (all_gather, "all_gather", values_are_keys, on(GATHER, (*SIX, {}))),
    "query heads of another K/V head": (AllGather, "rounds", heads_of_the_group_before, on(GATHER, (*SIX, {}))),
    "the slow hop a round early": (DoubleRing, "rounds_of", a_turn_is_a_round_short, on(TWICE, (*FOUR, ZIGZAG))),
    "the blocks of this host again":
        (DoubleRing, "rounds_of", rounds_of_host(lambda host, u, n: host), on(TWICE, (*FOUR, ZIGZAG))),
    "the hosts in another order":
        (DoubleRing, "rounds_of", rounds_of_host(lambda host, u, n: (host + u) % n), on(TWICE, (*FOUR, ZIGZAG))),
    "the block in hand goes on": (DoubleRing, "rounds", the_block_in_hand_goes_on, on(TWICE, (*FOUR, DOCUMENTS))),
    "sums not added between hosts": (DoubleSums, "pass_on", not_added_between_hosts, on(TWICE, (*FOUR, ZIGZAG))),
    "sums of a turn not brought home": (DoubleSums, "send_on", not_brought_home, on(TWICE, (*FOUR, ZIGZAG))),
    "sums home to another host": (DoubleSums, "home", home_of_another_host, on(TWICE, (*FOUR, ZIGZAG))),
    "the slow hop waited for early": (DoubleRing, "rounds", waited_for_early, []),  # late only
    "the block of another rank": (HostMemory, "numbers", block_of_the_next_rank, on(SHARED, (*FOUR, ZIGZAG))),
    "sums of another block": (HostMemory, "numbers", gradients_of_its_own, on(SHARED, (*FOUR, ZIGZAG))),
    "sums that do not begin with 0": (SharedSums, "of_round", not_zero, on(SHARED, (*FOUR, ZIGZAG))),
    "gradients sent to the next rank, and not home":
        (schedule, "post", sent_home_by_the_next_rank, on([("ring", 4), ("double ring", (3, 2))], STOPS_IN_WINDOW)),
}
PLANTED = {  # name: (what plants the mistake, where it shows)
    "K/V head r mod G":
        (in_both("heads_of_ranks", kv_head_modulo), [("all-to-all", 4, (8, 2, 48, {})), ON_EIGHT]),
    "the layout is not undone":
        (in_both("order", order_of_rank), [("all-to-all", 3, (*FOUR, ZIGZAG)), *on(BOTH, (*FOUR, ZIGZAG))]),
    "one buffer for two heads": (one_buffer, on(GATHER, (*SIX, {}))),
    "a document leaks into the next": (changed(first=-1), on(EVERY_WAY, (*FOUR, DOCUMENTS))),
    "a document begins one token late": (changed(first=1), on(EVERY_WAY, (*FOUR, DOCUMENTS))),
    "the next token is seen": (changed(end=1), on(EVERY_WAY, (*FOUR, DOCUMENTS), (*FOUR, WINDOW))),
    "a window of one more": (other_window(+1), on(EVERY_WAY, (*FOUR, WINDOW))),
    "a window of one less": (other_window(-1), on(EVERY_WAY, (*FOUR, WINDOW))),
    "a wrap-around from the first rank to the last": (replaced(wrapped), on(EVERY_WAY, (*FOUR, WINDOW))),
    "global tokens inside the window count twice": (replaced(global_tokens_twice), on(EVERY_WAY, (*FOUR, WINDOW))),
    "no global tokens":
        (replaced(lambda mask, at, S: right_keys(mask, at, S)[:1]), on(EVERY_WAY, (*FOUR, WINDOW))),
    "a hop too few": (one_hop_less, on(RINGS_THAT_STOP, STOPS_IN_DOCUMENTS)),
}
# fmt: on
WRONG = {name: patch(*what) for name, (*what, _) in REPLACED.items()}
WRONG |= {name: plant for name, (plant, _) in PLANTED.items()}
SHOWS = {name: cases for name, (*_, cases) in (REPLACED | PLANTED).items()}
