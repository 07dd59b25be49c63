"""The double ring on meshes of hosts x devices: values, gradients, bytes, the schedule; and wrong double rings.

Every mesh has its ranks host by host: rank r is device r mod g of host r // g.
"""

import functools
import math
import re
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ringlab.support import timeline
from ringlab.training import overlap, schedule
from ringlab.training.double_ring import DoubleRing, DoubleSums, double_ring_attention
from ringlab.training.layouts import shard
from ringlab.training.masks import Mask
from ringlab.training.overlap import arriving_blocks
from tests.flash_rings import CASES, cut, whole
from tests.gradients import gradients
from tests.grouped_queries import assert_four, expected, grouped_inputs
from tests.refusals import all_of, refusal

MESHES = [(1, 1), (1, 3), (3, 1), (2, 2), (2, 3), (3, 2), (2, 4), (4, 2)]
B, H, G, D = 2, 4, 2, 8
LAYOUTS_AND_MASKS = [({"causal": causal, "layout": layout}, None) for causal, layout in CASES]
every_mesh = pytest.mark.parametrize("shape", MESHES, ids=lambda shape: "{}x{}".format(*shape))


def on_rank(context, shape, four, cases, wrong=None):
    """This rank's chunks of out, dq, dk and dv, for each case (options, lengths). The input must not change."""
    mesh, results = init_device_mesh("cpu", shape), []
    with WRONG[wrong]() if wrong else nullcontext():
        for options, lengths in cases:
            mine = cut(context, options.get("layout", "contiguous"), lengths, *four)
            before = [x.clone() for x in mine]
            results.append(gradients(functools.partial(double_ring_attention, mesh=mesh, **options), *mine))
            assert all(torch.equal(x, y) for x, y in zip(mine, before, strict=True)), "the input changed"
            assert all(x.dtype == four[0].dtype for x in results[-1])
    return results


def assert_double_ring(ranks, shape, four, cases, wrong=None):
    per_rank = ranks(math.prod(shape), on_rank, shape, four, cases, wrong)
    for i, (options, lengths) in enumerate(cases):
        right = expected(*four, causal=options.get("causal", False), scale=options.get("scale"))
        layout = options.get("layout", "contiguous")
        assert_four(whole([results[i] for results in per_rank], layout, lengths), right)


@every_mesh
def test_every_layout_and_mesh(ranks, shape):
    assert_double_ring(ranks, shape, grouped_inputs(B, H, G, 6 * math.prod(shape), D), LAYOUTS_AND_MASKS)


@every_mesh
def test_chunks_of_any_length(ranks, shape):
    lengths = [1 + 5 * r % 7 for r in range(math.prod(shape))]
    cases = [({"causal": causal, "scale": 0.7}, lengths) for causal in (False, True)]
    assert_double_ring(ranks, shape, grouped_inputs(B, H, G, sum(lengths), D), cases)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kv_heads", [1, 4])
def test_other_dtypes_and_numbers_of_kv_heads(ranks, dtype, kv_heads):
    assert_double_ring(ranks, (2, 2), grouped_inputs(B, H, kv_heads, 48, D, dtype), LAYOUTS_AND_MASKS[4:])


def on_some_ranks(context, ranks_of_mesh, four):
    """This rank's chunks of out, dq, dk and dv, by its place in the mesh; None where it is not in the mesh."""
    mesh = DeviceMesh("cpu", ranks_of_mesh)
    if mesh.get_coordinate() is None:
        return None
    host, device = mesh.get_coordinate()
    mine = [shard(x, "zigzag", host * mesh.shape[1] + device, mesh.size()) for x in four]
    return gradients(functools.partial(double_ring_attention, mesh=mesh, causal=True, layout="zigzag"), *mine)


@pytest.mark.parametrize("ranks_of_mesh", [[[0, 2], [1, 3]], [[1], [2], [4]], [[0, 3, 4]]], ids=str)
def test_a_mesh_of_some_ranks(ranks, ranks_of_mesh):
    flat = [rank for host in ranks_of_mesh for rank in host]
    four = grouped_inputs(B, H, G, 24, D)
    per_rank = ranks(5, on_some_ranks, ranks_of_mesh, four)
    assert [rank for rank, result in enumerate(per_rank) if result is not None] == sorted(flat)
    assert_four(whole([per_rank[rank] for rank in flat], "zigzag"), expected(*four, causal=True))


# The schedule --------------------------------------------------------------------------------------------------------


def blocks_in_use(context, shape, four, wrong=None):
    """Which block each rank computes on in each round of the forward pass, by (rank, round)."""
    mesh = init_device_mesh("cpu", shape)
    q, k, v, _ = (shard(x, "contiguous", context.rank, context.world_size) for x in four)
    with WRONG[wrong]() if wrong else nullcontext(), timeline.record(k) as events:
        double_ring_attention(q, k, v, mesh=mesh)
    return {(it.rank, it.round): it.block for it in events if it.what == "compute"}


def right_blocks(n, g):
    rounds = [(host, device, u, s) for host in range(n) for device in range(g) for u in range(n) for s in range(g)]
    return {(host * g + device, u * g + s): (host - u) % n * g + (device - s) % g for host, device, u, s in rounds}


@every_mesh
def test_the_blocks_in_hand_are_those_of_the_schedule(ranks, shape):
    P = math.prod(shape)
    used = ranks(P, blocks_in_use, shape, grouped_inputs(1, 2, 1, 2 * P, 4))
    assert used[0] == right_blocks(*shape)


def journal(context, shape, wrong=None):
    """What this rank does in the rounds of a backward pass, in order: rounds, and messages between hosts."""
    mesh, noted = init_device_mesh("cpu", shape), []
    across, _ = mesh.get_all_groups()

    def watched(real, what):
        def post(sent, received, group, **places):
            works = real(sent, received, group, **places)
            if group is not across:
                return works
            number = sum(entry[0] == f"{what} sent" for entry in noted)
            noted.append((f"{what} sent", number))
            return [mock.Mock(wait=functools.partial(wait, works, what, number))]

        return post

    def wait(works, what, number):
        noted.append((f"{what} waited for", number))
        for work in works:
            work.wait()

    k = torch.full((1, 1, 1, 1), float(context.rank))
    with (
        mock.patch.object(overlap, "post", watched(overlap.post, "K and V")),
        mock.patch.object(schedule, "post", watched(schedule.post, "sums")),
        WRONG[wrong]() if wrong else nullcontext(),
    ):
        ring = DoubleRing(Mask("contiguous", (1,) * context.world_size), 1.0, mesh)
        sums = ring.sums(k, k.dtype)
        for t, _, _, _ in ring.rounds(k, k):
            noted.append(("round", t))
            sums.of_round(t)
            sums.send_on(t)
        sums.home()
    return noted


def assert_slow_hops_have_a_turn(journal_of_rank, n, g):
    """n - 1 slow hops of K and V and n of the sums; each, but for the last home, has the time of g rounds."""
    at = {entry: place for place, entry in enumerate(journal_of_rank)}
    assert len(at) == len(journal_of_rank)
    for u in range(n - 1):  # K and V: from before the first round of turn u to after its last
        assert at["K and V sent", u] < at["round", u * g]
        assert at["round", (u + 1) * g - 1] < at["K and V waited for", u] < at["round", (u + 1) * g]
    for u in range(n - 1):  # the sums of turn u: from the first round of turn u + 1 to that of turn u + 2, or the end
        assert at["round", (u + 1) * g] < at["sums sent", u]
        rounds = [t for t in range(n * g) if at["sums sent", u] < at["round", t] < at["sums waited for", u]]
        assert len(rounds) == (g if u < n - 2 else g - 1)  # the last one ends with the pass
    slow = [what for what, _ in journal_of_rank if what.endswith("sent")]
    assert (slow.count("K and V sent"), slow.count("sums sent")) == (n - 1, n if n > 1 else 0)


@every_mesh
def test_a_slow_hop_has_the_time_of_a_turn(ranks, shape):
    for journal_of_rank in ranks(math.prod(shape), journal, shape):
        assert_slow_hops_have_a_turn(journal_of_rank, *shape)


def sent_bytes(context, shape, four):
    """The bytes that this rank sends inside its host and to others: forward, and backward."""
    mesh, sent = init_device_mesh("cpu", shape), [0, 0]
    batch = dist.batch_isend_irecv

    def counted(operations):
        for it in operations:
            if it.op is dist.isend:
                sent[it.peer // shape[1] != context.rank // shape[1]] += it.tensor.nbytes
        return batch(operations)

    q, k, v, d_out = (shard(x, "zigzag", context.rank, context.world_size) for x in four)
    with mock.patch.object(dist, "batch_isend_irecv", counted):
        out = double_ring_attention(*(x.requires_grad_() for x in (q, k, v)), mesh=mesh, causal=True, layout="zigzag")
        forward = list(sent)
        out.backward(d_out)
    return forward, [both - one for both, one in zip(sent, forward, strict=True)]


@every_mesh
def test_it_sends_what_the_docstring_says(ranks, shape):
    n, g = shape
    P, C = n * g, 6
    block = 2 * B * G * C * D * 2  # bytes of K and V in bfloat16; their sums, in float32, have twice as many
    forward = [(P - n) * block, (n - 1) * block]
    sums = [2 * block * (P if g > 1 else 0), 2 * block * (n if n > 1 else 0)]
    backward = [one + other for one, other in zip(forward, sums, strict=True)]
    four = grouped_inputs(B, H, G, P * C, D, torch.bfloat16)
    assert ranks(P, sent_bytes, shape, four) == [(forward, backward)] * P


# Wrong double rings --------------------------------------------------------------------------------------------------

right_rounds, right_send_on = DoubleRing.rounds, DoubleSums.send_on


def a_turn_is_a_round_short(ring, k, v):
    """The slow hop is due a round early: the last block of a turn is not computed."""
    n, g = ring.mesh.shape
    for t, k_j, v_j, pieces in right_rounds(ring, k, v):
        yield t, k_j, v_j, () if t % g == g - 1 and t < (n - 1) * g else pieces


def waited_for_early(ring, k, v):
    """The last round of a turn begins only when the block from the other host is there."""
    (n, g), (host, device) = ring.mesh.shape, ring.mesh.get_coordinate()
    across, inside = ring.mesh.get_all_groups()
    hosts = arriving_blocks(k, v, lengths=ring.mask.lengths[:n], group=across)
    following = next(hosts)
    for u in range(n):
        origin = (host - u) % n * g
        for s, block in enumerate(arriving_blocks(*following, lengths=ring.mask.lengths[:g], group=inside)):
            if s == g - 1 and u < n - 1:
                following = next(hosts)
            yield u * g + s, *block, ring.mask.pieces(host * g + device, origin + (device - s) % g)


def rounds_of_host(change):
    """Rounds in which the block in hand is taken for one of another host."""

    def rounds(ring, k, v):
        (n, g), (host, device) = ring.mesh.shape, ring.mesh.get_coordinate()
        for t, k_j, v_j, _ in right_rounds(ring, k, v):
            u, s = divmod(t, g)
            yield t, k_j, v_j, ring.mask.pieces(host * g + device, change(host, u, n) * g + (device - s) % g)

    return mock.patch.object(DoubleRing, "rounds", rounds)


def the_block_in_hand_goes_on(ring, k, v):
    """Each device sends the block of its last round to the next host, not that of its first: so too late.

    Each rank still meets every block once. In the zigzag layout with two devices even out and dq are right.
    """
    (n, g), (host, device) = ring.mesh.shape, ring.mesh.get_coordinate()
    across, inside = ring.mesh.get_all_groups()
    for u in range(n):
        origin = (host - u) % n * g
        for s, (k_j, v_j) in enumerate(arriving_blocks(k, v, lengths=ring.mask.lengths[:g], group=inside)):
            last = k_j.clone(), v_j.clone()
            yield u * g + s, k_j, v_j, ring.mask.pieces(host * g + device, origin + (device - s) % g)
        k, v = list(arriving_blocks(*last, lengths=ring.mask.lengths[:n], group=across, hops=1))[-1]


def not_added(sums, u):
    """The next host gets the sums of this host only."""
    sums.ended.wait()
    sums.between.of_round(u).copy_(sums.of_turn)
    sums.between.send_on(u)


def not_brought_home(sums, t):
    """The sums of a turn stay where the turn ended."""
    right_send_on(sums, t)
    if t % sums.g == sums.g - 1:
        sums.of_turn = sums.ended.room(sums.g - 1)


def home_of_another_host(sums):
    """After the last turn the sums go on to the next host, as before. Their own is that many hosts back."""
    sums.pass_on(sums.n - 1)
    coming = torch.empty_like(sums.between.room(0))
    for work in overlap.post([sums.between.room(sums.n - 1)], [coming], sums.between.group, places=2):
        work.wait()
    return coming


WRONG = {
    "the slow hop a round early": lambda: mock.patch.object(DoubleRing, "rounds", a_turn_is_a_round_short),
    "the blocks of this host again": lambda: rounds_of_host(lambda host, u, n: host),
    "the hosts in another order": lambda: rounds_of_host(lambda host, u, n: (host + u) % n),
    "the block in hand goes on": lambda: mock.patch.object(DoubleRing, "rounds", the_block_in_hand_goes_on),
    "sums not added between hosts": lambda: mock.patch.object(DoubleSums, "pass_on", not_added),
    "sums of a turn not brought home": lambda: mock.patch.object(DoubleSums, "send_on", not_brought_home),
    "the slow hop waited for early": lambda: mock.patch.object(DoubleRing, "rounds", waited_for_early),
    "sums home to another host": lambda: mock.patch.object(DoubleSums, "home", home_of_another_host),
}


BACKWARD = [wrong for wrong in WRONG if wrong.startswith("sums")] + ["the block in hand goes on"]
LATE = ("the slow hop waited for early", "the block in hand goes on")


@pytest.mark.parametrize("wrong", sorted(set(WRONG) - {"the slow hop waited for early"}))
@pytest.mark.parametrize("shape", [(3, 2), (4, 2)], ids=lambda shape: "{}x{}".format(*shape))
def test_a_wrong_double_ring_is_rejected(ranks, shape, wrong):
    four = grouped_inputs(B, H, G, 6 * math.prod(shape), D)
    with pytest.raises(AssertionError, match="dk: " if wrong in BACKWARD else "out: "):
        assert_double_ring(ranks, shape, four, [({"causal": True, "layout": "zigzag"}, None)], wrong)


def test_blocks_of_a_short_turn_are_missed(ranks):
    used = ranks(4, blocks_in_use, (2, 2), grouped_inputs(1, 2, 1, 8, 4), "the slow hop a round early")[0]
    assert right_blocks(2, 2).items() - used.items() == {((0, 1), 1), ((1, 1), 0), ((2, 1), 3), ((3, 1), 2)}


@pytest.mark.parametrize("wrong", LATE)
def test_a_slow_hop_with_less_time_is_rejected(ranks, wrong):
    for journal_of_rank in ranks(6, journal, (3, 2), wrong):
        with pytest.raises(AssertionError):
            assert_slow_hops_have_a_turn(journal_of_rank, 3, 2)


# Bad input -----------------------------------------------------------------------------------------------------------

X = torch.ones(1, 2, 4, 4)


def call_on_rank(context, ranks_of_mesh, qkv_of_ranks, options_of_ranks, needing_gradients=()):
    mesh = DeviceMesh("cpu", ranks_of_mesh) if isinstance(ranks_of_mesh, list) else ranks_of_mesh
    q, k, v = (x.clone() for x in qkv_of_ranks[context.rank])
    k.requires_grad_(context.rank in needing_gradients)
    return double_ring_attention(q, k, v, mesh=mesh, **options_of_ranks[context.rank])


@pytest.mark.parametrize(
    ("ranks_of_mesh", "words"),
    [
        ([0, 1, 2, 3], ["mesh is a mesh of shape (4,)", "expected hosts x devices", "(2, 4)"]),
        ([[[0, 1], [2, 3]]], ["mesh is a mesh of shape (1, 2, 2)", "expected hosts x devices"]),
        (None, ["mesh is None", "expected hosts x devices"]),
        ([[2, 3], [0, 1]], ["mesh is [[2, 3], [0, 1]]", "expected ranks that rise in each row and in each column"]),
        ([[0, 3, 2, 1]], ["mesh is [[0, 3, 2, 1]]", "expected ranks that rise"]),
    ],
    ids=["one dimension", "three", "none", "hosts in another order", "devices in another order"],
)
def test_a_mesh_that_does_not_fit_is_refused(ranks, ranks_of_mesh, words):
    outcomes = ranks.outcomes(4, call_on_rank, ranks_of_mesh, [(X, X, X)] * 4, [{}] * 4)
    assert re.search(all_of(words), refusal(outcomes))


def test_a_rank_outside_the_mesh_is_refused_alone(ranks):
    *inside, outside = ranks.outcomes(5, call_on_rank, [[0, 1], [2, 3]], [(X, X, X)] * 5, [{}] * 5)
    assert all(torch.equal(out, X) for out in inside)
    assert re.search(all_of(["not in the mesh [[0, 1], [2, 3]]", "expected only its members"]), outside.message)


BAD = {  # what rank 2 of 4 has, and words of the message of all
    "layout": ((X, X, X), {"layout": "zigzag"}, ["disagree", "rank 0: layout=contiguous", "rank 2: layout=zigzag"]),
    "causal": ((X, X, X), {"causal": True}, ["disagree", "rank 0: causal=False", "rank 2: causal=True"]),
    "scale": ((X, X, X), {"scale": 0.25}, ["disagree", "rank 0: scale=0.5", "rank 2: scale=0.25"]),
    "scale is nan": ((X, X, X), {"scale": math.nan}, ["rank 2: scale is nan", "finite"]),
    "dtype": ((X.double(),) * 3, {}, ["disagree", "rank 0: dtype=torch.float32", "rank 2: dtype=torch.float64"]),
    "heads": ((X[:, :1], X, X), {}, ["rank 2: q has 1 heads and k 2; expected a multiple"]),
}


@pytest.mark.parametrize("bad", BAD)
def test_bad_input_of_one_rank_is_refused_on_all(ranks, bad):
    qkv, options, words = BAD[bad]
    qkvs, options_of_ranks = [(X, X, X)] * 4, [{}] * 4
    qkvs[2], options_of_ranks[2] = qkv, options
    outcomes = ranks.outcomes(4, call_on_rank, [[0, 1], [2, 3]], qkvs, options_of_ranks)
    assert re.search(all_of(words), refusal(outcomes))


def test_lengths_that_do_not_fit_the_layout_are_refused(ranks):
    qkvs = [(X[:, :, :length],) * 3 for length in (1, 3, 2, 2)]
    outcomes = ranks.outcomes(4, call_on_rank, [[0, 1], [2, 3]], qkvs, [{"layout": "striped"}] * 4)
    assert re.search(all_of(["the ranks have [1, 3, 2, 2] tokens in the striped layout"]), refusal(outcomes))


def test_ranks_that_disagree_about_gradients_are_refused(ranks):
    outcomes = ranks.outcomes(4, call_on_rank, [[0, 1], [2, 3]], [(X, X, X)] * 4, [{}] * 4, [1])
    words = ["the ranks disagree", "rank 0: gradients=False\n", "rank 1: gradients=True\n"]
    assert re.match(all_of(words), refusal(outcomes))
