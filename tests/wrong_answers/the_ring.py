"""Wrong answers to the exercises of chapter 4, and what each must be told."""

import math
from functools import wraps
from unittest import mock

import torch
import torch.distributed as dist

from notebooks import trial
from notebooks.checks.the_ring import check_block_in_hand, check_bytes_sent, check_ring, check_ring_order
from ringlab.basics.blocking_messages import Recv, Send
from ringlab.basics.blockwise_attention import attend
from ringlab.basics.online_softmax import finish, start
from tests.rings_of_readers import WAITING_RINGS, WRONG_RINGS


@wraps(check_ring)
def check_ring_soon(answer):
    """The same check, for rings that wait for ever."""
    with mock.patch.object(trial, "SECONDS", 1.0):
        return check_ring(answer)


HOP = 2 * 32 * 131072 * 128 * 2  # bytes of a K and a V block


def hop(block, length, to=1, all_send_first=False):
    """Pass the block to rank + `to` and return the one that comes, of `length` tokens."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    received = block.new_empty(*block.shape[:-2], length, block.shape[-1])
    if all_send_first or rank // to % 2 == 0:
        dist.send(block, (rank + to) % world_size)
        dist.recv(received, (rank - to) % world_size)
    else:
        dist.recv(received, (rank - to) % world_size)
        dist.send(block, (rank + to) % world_size)
    return received


def ring(q, k, v, lengths, fold=attend, rounds=0, scale=None, **hopping):
    """The right ring, but for what it is told: how to fold in a block, how many rounds more or less, how to hop."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    state, block = start(q), torch.stack((k, v))
    for t in range(world_size + rounds):
        state = fold(state, q, *block, scale=scale or q.shape[-1] ** -0.5)
        if t < world_size + rounds - 1:
            block = hop(block, lengths[(rank - t - 1) % world_size], **hopping)
    return finish(state)[0]


def deadlock(q, k, v, lengths):
    return ring(q, k, v, lengths, all_send_first=True)


def a_rank_that_never_sends(q, k, v, lengths):
    if dist.get_rank() == 2:
        return q
    return ring(q, k, v, lengths)


def a_hop_short(q, k, v, lengths):
    return ring(q, k, v, lengths, rounds=-1 if len(lengths) > 1 else 0)


def no_round_for_one(q, k, v, lengths):
    return ring(q, k, v, lengths, rounds=-1)


def a_hop_too_many(q, k, v, lengths):
    return ring(q, k, v, lengths, rounds=1)


def wrong_neighbour(q, k, v, lengths):
    return ring(q, k, v, lengths, to=2)


def no_remainder(q, k, v, lengths):
    """The last rank sends to rank P."""
    if dist.get_rank() == len(lengths) - 1 > 0:
        dist.isend(torch.stack((k, v)), dist.get_rank() + 1)
    return ring(q, k, v, lengths)


def backwards(q, k, v, lengths):
    return ring(q, k, v, lengths, to=-1)


def exchanged(q, k, v, lengths):
    return ring(q, v, k, lengths)


def own_max(state, q, k, v, scale):
    m, l, o = state
    scores = q @ k.transpose(-2, -1) * scale
    p = torch.exp(scores - scores.amax(-1, keepdim=True))
    return m, l + p.sum(-1), o + p @ v


def a_max_of_each_block(q, k, v, lengths):
    kept = []

    def fold(*args, **options):
        kept.append(own_max(*args, **options))
        return kept[-1]

    ring(q, k, v, lengths, fold=fold)
    return kept[-1][2] / kept[-1][1][..., None]


def stale_block(q, k, v, lengths):
    """Computes on its own block twice, in rounds 0 and 1."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    state, block = start(q), torch.stack((k, v))
    for t in range(world_size):
        state = attend(state, q, *block, scale=q.shape[-1] ** -0.5)
        if t < world_size - 1:
            received = hop(block, lengths[(rank - t - 1) % world_size])
            block = block if t == 0 else received
    return finish(state)[0]


def own_block_only(q, k, v, lengths):
    state = start(q)
    for t in range(len(lengths)):
        state = attend(state, q, k, v, scale=q.shape[-1] ** -0.5)
        if t < len(lengths) - 1:
            hop(torch.stack((k, v)), lengths[dist.get_rank()])
    return finish(state)[0]


def only_keys_travel(q, k, v, lengths):
    state, block = start(q), k.contiguous()
    for t in range(len(lengths)):
        state = attend(state, q, block, v, scale=q.shape[-1] ** -0.5)
        if t < len(lengths) - 1:
            block = hop(block, k.shape[2])
    return finish(state)[0]


def only_values_travel(q, k, v, lengths):
    state, block = start(q), v.contiguous()
    for t in range(len(lengths)):
        state = attend(state, q, k, block, scale=q.shape[-1] ** -0.5)
        if t < len(lengths) - 1:
            block = hop(block, k.shape[2])
    return finish(state)[0]


def never_rescaled(state, q, k, v, scale):
    m, l, o = state
    scores = q @ k.transpose(-2, -1) * scale
    m = torch.maximum(m, scores.amax(-1))
    p = torch.exp(scores - m[..., None])
    return m, l + p.sum(-1), o + p @ v


def no_rescale(q, k, v, lengths):
    return ring(q, k, v, lengths, fold=never_rescaled)


def own_average(state, q, k, v, scale):
    m, l, o = state
    return m, torch.ones_like(l), o + torch.softmax(q @ k.transpose(-2, -1) * scale, -1) @ v


def sum_of_averages(q, k, v, lengths):
    return ring(q, k, v, lengths, fold=own_average)


def mean_of_averages(q, k, v, lengths):
    return sum_of_averages(q, k, v, lengths) / len(lengths)


def no_scale(q, k, v, lengths):
    return ring(q, k, v, lengths, scale=1.0)


def never_divided(q, k, v, lengths):
    """Returns o of the state."""
    kept = []

    def fold(*args, **options):
        kept.append(attend(*args, **options))
        return kept[-1]

    ring(q, k, v, lengths, fold=fold)
    return kept[-1][2]


def not_contiguous(q, k, v, lengths):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if world_size > 1:
        dist.send(k, (rank + 1) % world_size)
    return ring(q, k, v, lengths)


def equal_lengths_only(q, k, v, lengths):
    return ring(q, k, v, [q.shape[2]] * len(lengths))


def four_ranks_only(q, k, v, lengths):
    """On 5 ranks, the last chunk is left out."""
    return ring(q, k, v, lengths, rounds=-1 if len(lengths) == 5 else 0)


def a_name_of_the_notebook(q, k, v, lengths):
    return ring_of_another_cell(q, k, v, lengths)  # noqa: F821


def a_loop_without_end(q, k, v, lengths):
    while True:
        math.sqrt(2)


def three_rows(q, k, v, lengths):
    return ring(q, k, v, lengths)[:, :, :1]


def nearly(q, k, v, lengths):
    return ring(q, k, v, lengths) * 1.001


def leaves(q, k, v, lengths):
    raise SystemExit(0)


def right_order(rank, P):
    steps = [Send((rank + 1) % P), Recv((rank - 1) % P)]
    return steps if rank % 2 == 0 else steps[::-1]


class Nested:
    def ring(self, q, k, v, lengths):
        return ring(q, k, v, lengths)


WRONG_ANSWERS = [
    (check_block_in_hand, lambda rank, t, world_size: (rank + t) % world_size, "the other way"),
    (check_block_in_hand, lambda rank, t, world_size: rank - t, "take the remainder"),
    (check_block_in_hand, lambda rank, t, world_size: rank, "does not hold KV0"),
    (check_block_in_hand, lambda rank, t, P: (rank - t) % (P + P % 2), "P = 5, round 1: rank 0 does not hold KV5"),
    (check_ring_order, lambda r, P: [Send((r + 1) % P), Recv((r - 1) % P)], "circle: [0, 1]"),
    (check_ring_order, lambda r, P: [Recv((r - 1) % P)], "rank 0 of 2: expected one Send(to=1) and one Recv(source=1)"),
    (check_ring_order, lambda r, P: [Send((r - 1) % P), Recv((r + 1) % P)][:: 1 - 2 * (r % 2)], "rank 0 of 3"),
    (
        check_ring_order,
        lambda r, P: [Send((r + 1) % P), Recv((r - 1) % P)][:: -1 if r % 2 and P % 2 == 0 else 1],
        "3 ranks deadlock",
    ),
    (check_bytes_sent, 8 * HOP, "8 hops"),
    (check_bytes_sent, 7 * HOP // 2, "K and V travel"),
    (check_bytes_sent, HOP, "that is one hop"),
    (check_bytes_sent, 14 * HOP, "a bfloat16 has 2 bytes"),
    (check_bytes_sent, 56 * HOP, "not the whole sequence"),
    (check_bytes_sent, 7 * HOP + 1, "hops x"),
    (check_bytes_sent, None, "expected a number, got NoneType"),
    (
        check_ring_soon,
        deadlock,
        "still waiting after 1 s; rank 0, 1, 2, 3 in: dist.send(block, (rank + to) % world_size). This is a",
    ),
    (check_ring_soon, a_rank_that_never_sends, "rank 2 has ended. Every rank must send"),
    (check_ring, a_hop_short, "KV1 comes last: a hop or a round short"),
    (check_ring, no_round_for_one, "as if it had met no block"),
    (check_ring, a_hop_too_many, "P rounds, but P - 1 hops"),
    (check_ring, wrong_neighbour, "KV0, KV2 and should have met each of 4 blocks once. Wrong neighbour?"),
    (check_ring, no_remainder, "rank 3 ends in ValueError: there is no rank 4; rank 3 has rank 0 as its next"),
    (check_ring, backwards, "a rank sends to rank + 1, so the hop after round t brings"),
    (check_ring, exchanged, "K and V are exchanged"),
    (check_ring, a_max_of_each_block, "carry one running max"),
    (check_ring, stale_block, "A stale block"),
    (check_ring, own_block_only, "its own block only"),
    (check_ring, only_keys_travel, "only the keys travel"),
    (check_ring, only_values_travel, "only the values travel"),
    (check_ring, no_rescale, "no rescale"),
    (check_ring, sum_of_averages, "the weights add up to P"),
    (check_ring, mean_of_averages, "you average the blocks' own averages"),
    (check_ring, no_scale, "not divided by sqrt(D)"),
    (check_ring, never_divided, "finish(state)"),
    (check_ring, not_contiguous, "send k.contiguous()"),
    (check_ring, equal_lengths_only, "the length of the block that comes"),
    (check_ring, four_ranks_only, "chunks of [3, 3, 3, 2, 2] tokens, rank 0"),
    (check_ring, a_name_of_the_notebook, "without the notebook"),
    (check_ring_soon, a_loop_without_end, "rank 0 in: math.sqrt(2). Rank 0 did not wait"),
    (check_ring, three_rows, "expected shape (2, 2, 4, 4), got (2, 2, 1, 4)"),
    (check_ring, nearly, "off by up to"),
    (check_ring, leaves, "rank 0 ends in SystemExit"),
    (check_ring, lambda q, k, v, lengths: q, "define it with def"),
    (check_ring, 5, "expected a function, got int"),
    *((check_ring, answer, reason) for answer, reason in WRONG_RINGS),
    *((check_ring_soon, answer, reason) for answer, reason in WAITING_RINGS),
    (check_block_in_hand, lambda rank, t, P: (rank - t) % 5 if P == 5 else (rank - t) % 4, "with rank = "),
    (check_block_in_hand, lambda rank, t, P: f"KV{(rank - t) % P}", "expected a number, got str"),
    (check_block_in_hand, lambda rank, t, P: (rank - t - 1) % P, "round 0: rank 0 does not hold KV3"),
    (check_ring_order, lambda r, P: ["send", "recv"], "one Send and one Recv, got a str in it"),
    (check_ring_order, lambda r, P: Send((r + 1) % P), "expected a list of one Send and one Recv, got Send"),
    (check_ring_order, lambda r, P: right_order(r, P)[:: -1 if P > 5 and r % 2 else 1], "ranks deadlock"),
    (check_ring_order, lambda r, P: [Recv((r - 1) % P), Send((r + 1) % P)], "2 ranks deadlock"),
    (check_bytes_sent, 14, "not GiB"),
    (check_bytes_sent, [7 * HOP], "expected a number, got list"),
    (check_bytes_sent, f"{7 * HOP}", "expected a number, got str"),
    (check_ring, Nested().ring, "define it with def at the left margin"),
]
