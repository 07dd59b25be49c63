"""Agreement: on real ranks, one of which calls with something other, all refuse in the same sentence, and soon."""

import os
import pickle
import random
import re
import signal
import time
from contextlib import nullcontext, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh

import ring_attn
from ringlab.ring import backward, flash_ring, overlap
from ringlab.ring.layouts import Layout
from ringlab.support import agreement, exchange, pipes
from ringlab.support.agreement import LONG, NEW_GROUP, SOON, WRONG, agree, agree_same, home_of, of_every_rank, one_pass
from ringlab.support.pipes import FACTS, HEAD, LONGEST, REPLY, Inbox, host_of_process, inbox_of_job
from ringlab.support.processes import Raised, Ranks, launch
from tests.every_way import FLAT, ON_MESH, WAYS, ranks_of
from tests.mistakes import as_on_hosts, assert_refused, attempt

B, H, G, C, D = 1, 4, 2, 4, 8


def raising(seq_len, rank, world_size):
    raise ZeroDivisionError("this layout cannot count")


def backwards(seq_len, rank, world_size):
    return torch.arange(seq_len).tensor_split(world_size)[world_size - 1 - rank]


class Groups:
    """Groups and meshes of the whole job, made by every rank; of the rest, what one rank alone may give."""

    def __init__(self, P):
        self.flat = [None, dist.new_group()]
        rows = [(n, P // n) for n in range(1, P + 1) if P % n == 0]
        if P == 4:
            rows.append((2, 2))  # a second one of this shape
        self.meshes = [DeviceMesh("cpu", torch.arange(P).view(shape)) for shape in rows]
        part = dist.new_group([other for other in range(P) if other != 1])  # rank 1 is not in it
        pair = dist.new_group([0, 1])
        # A rank that is alone in a group waits for nobody.
        self.odd = [5, "job", (2, 2), *([part, pair] if P > 2 else [])]


def tensors(rng, dtype=torch.float32, heads=H, kv_heads=G, head_dim=D):
    generator = torch.Generator().manual_seed(rng.randrange(1000))
    shapes = [(B, heads, C, head_dim), (B, kv_heads, C, head_dim), (B, kv_heads, C, head_dim)]
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


DTYPES = [torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.complex64]
TENSORS = {  # what becomes of q, k and v
    "dtype": lambda rng, qkv: [x.detach().to(dtype) for dtype in [rng.choice(DTYPES)] for x in qkv],
    "one dtype": lambda rng, qkv: [qkv[0], qkv[1].detach().to(rng.choice(DTYPES)), qkv[2]],
    "None": lambda rng, qkv: rng.choice([[None, *qkv[1:]], [qkv[0], None, qkv[2]], [*qkv[:2], None]]),
    "array": lambda rng, qkv: [x.detach().numpy() for x in qkv],
    "heads": lambda rng, qkv: [torch.cat([qkv[0]] * 2, dim=1), *qkv[1:]],
    "head dim of v": lambda rng, qkv: [*qkv[:2], qkv[2][..., :3]],
    "device": lambda rng, qkv: [x.detach().to("meta") for x in qkv],
    "gradients": lambda rng, qkv: [x.detach() for x in qkv],
}
OPTIONS = {  # an option: values that no right call below has
    "layout": ["striped", "spiral", ["zigzag"], 3, Layout("own", raising), Layout("contiguous", backwards)],
    "documents": [[0], "ab", [1.5], [7, 7], np.array([[3]])],
    "window": [1, 0, 2.5, "all", np.float32(2)],
    "global_tokens": [-1, 3, None, 1.0],
    "scale": [0.123, float("nan"), "half", [1.0]],
    "softcap": [3.0, 0.0, "much", True],
    "sinks": [torch.zeros(H), torch.zeros(3), 1.0, torch.zeros(H, dtype=torch.int64)],
    "schedule": [Layout, "Ring", None, 3, agree],
    "causal": ["contradicts"],
}
FUNCTIONS = [
    ring_attn.ring_attention,
    overlap.ring_attention,
    backward.ring_attention,
    flash_ring.scaled_dot_product_attention,
]


def one_call(rng, groups, odd):
    """A call of a random way; if `odd`, with one thing other. Returns what it is, and the call."""
    way = rng.choice([*WAYS])
    schedule = (FLAT | ON_MESH)[way]
    group = rng.choice(groups.meshes if way in ON_MESH else groups.flat)
    causal, layout = rng.random() < 0.5, rng.choice(["contiguous", "zigzag"])
    options = {"schedule": schedule, "group": group, "layout": layout, "causal": causal}
    qkv, attention = tensors(rng), flash_ring.ring_flash_attention
    kind = rng.choice(["tensor", "option", "option", "group", "function", "order", "way"])
    pick = random.Random(rng.random())  # so that ranks that are not odd draw the same
    if odd and kind == "tensor":
        kind = f"tensor: {pick.choice(list(TENSORS))}"
        qkv = TENSORS[kind.removeprefix("tensor: ")](pick, qkv)
    elif odd and kind == "option":
        name = pick.choice(list(OPTIONS))
        options[name] = not causal if name == "causal" else pick.choice(OPTIONS[name])
        kind = f"{name}={options[name]}"
    elif odd and kind == "group":
        options["group"] = pick.choice([each for each in groups.flat + groups.meshes + groups.odd if each is not group])
    elif odd and kind == "way":
        options["schedule"] = pick.choice([each for each in (FLAT | ON_MESH).values() if each is not schedule])
    elif odd and kind == "function":
        attention = pick.choice([*FUNCTIONS, agree, of_every_rank])
        kind = f"function: {attention.__module__}.{attention.__name__}"
        if attention in (agree, of_every_rank):
            return kind, partial(attention, (lambda: 1) if attention is agree else torch.ones(3))
        options = {"group": options["group"]}
    elif kind == "order":
        return kind, partial(in_order, attention, options, [qkv, tensors(rng)], pick.choice([-1, 0]) if odd else 1)
    return kind, partial(attention, *qkv, **options)


def in_order(attention, options, inputs, step):
    """Two calls, and their backward passes: in one order, in the other, or another call in place of them."""
    outs = [attention(*qkv, **options) for qkv in inputs]
    for out in outs[:: step or 1]:
        (attention(*inputs[0], **options) if step == 0 else out).sum().backward()


def calls_on_rank(context, seeds, hosts=None):
    """Of each seed: what was other on one rank, what this rank raised, and how long it waited in vain at most."""
    P, said, waited = context.world_size, [], Inbox.wait
    groups = Groups(P)
    groups.odd = groups.odd if hosts is None else []  # between hosts a rank without the group reaches nobody
    for seed in seeds:
        rng = random.Random(f"{P} {seed}")
        kind, call = one_call(rng, groups, odd=context.rank == rng.randrange(P))
        in_vain = [timedelta(0)]

        def wait(inbox, kind, of, limit, in_vain=in_vain):
            try:
                return waited(inbox, kind, of, limit)
            except RuntimeError:
                in_vain.append(limit)
                raise

        with mock.patch.object(Inbox, "wait", wait), nullcontext() if hosts is None else as_on_hosts(hosts):
            try:
                call()
                said.append((kind, "no error", "", max(in_vain)))
            except Exception as error:
                said.append((kind, type(error).__name__, str(error), max(in_vain)))
                if not isinstance(error, ValueError):
                    break
        forget_who_went_alone(inbox_of_job())
    return said


def forget_who_went_alone(inbox):
    """Or it would be refused for ever: each next call, whatever was other in it, and those of other tests."""
    dist.barrier()  # all have told what they had to tell
    with suppress(RuntimeError):
        inbox.wait(REPLY, inbox.rank, timedelta(0))  # nobody sends it, but all that has arrived is read
    inbox.arrived.clear()
    inbox.went_alone = False
    dist.barrier()


PARTS = [(P, range(25 * part, 25 * (part + 1)), None) for P in (2, 3, 4) for part in range(40)]


@pytest.mark.parametrize(
    ("P", "seeds", "hosts"),
    [
        *((P, range(16), None) for P in (3, 4)),
        *((len(hosts), range(16), hosts) for hosts in ("aab", "abab", "abcd")),
        *(pytest.param(*part, marks=pytest.mark.exhaustive) for part in PARTS),
    ],
)
def test_all_ranks_refuse_what_is_other_on_one(ranks, P, seeds, hosts):
    for seed, of_ranks in zip(seeds, zip(*ranks(P, calls_on_rank, seeds, hosts), strict=True), strict=True):
        kinds, errors, messages, waits = zip(*of_ranks, strict=True)
        what = f"{P} ranks, seed {seed}: {kinds}: {messages}"
        assert set(errors) == {"ValueError"}, f"{errors} of {what}"
        assert len(set(messages)) == 1, what
        assert "an earlier call" not in messages[0], what
        assert max(waits) <= SOON, f"{max(waits)} for {what}"
    ranks(1, repr)  # another job ends these groups: each has three threads


@pytest.fixture
def three():
    """Ranks of their own: what is wrong with them afterwards is seen by no other test."""
    pool = Ranks(3)
    yield pool
    pool.stop()


def without_one(context, hosts, who):
    """Two agreements; to the second, with a shorter limit, one rank never comes. What the others say."""
    group = dist.new_group(timeout=timedelta(seconds=1))
    with as_on_hosts(hosts):
        agree(lambda: None)
        if context.rank == who:
            return "stays away"
        try:
            agree(lambda: None, group)
        except RuntimeError as error:
            return str(error)


@pytest.mark.parametrize("who", [0, 1, 2])
def test_a_rank_that_never_comes_ends_the_wait_of_all(three, who):
    """Also of those of its host, and of the other hosts."""
    said = three(3, without_one, "aab", who)
    assert all(re.search("stays away|[Tt]imed out|Connection closed", words) for words in said), said


def first_of_a_job(context):
    """The first agreement of a job. Rank 0 is in no group, and says so before the others can be asked."""
    group = dist.new_group([1, 2])
    if context.rank > 0:
        time.sleep(0.5)
    agree(lambda: None, None if context.rank else group)


def test_ranks_that_come_later_hear_of_one_in_no_group(three):
    assert_refused(three, 3, "rank 0: global rank 0 is not in the group", first_of_a_job)


def calls_after_one_alone(context, seconds):
    """What each call says, or its error. Rank 2 is not in the group of the first one, and goes on, late."""
    group, mine = dist.new_group([0, 1]), torch.full((1, 1, 4, 8), float(context.rank), dtype=torch.float64)
    said, soon = [], timedelta(seconds=0.5)
    inbox_of_job()
    dist.barrier()  # all have pipes: rank 2 reaches the others, however busy the machine is
    with mock.patch.object(agreement, "SOON", soon), mock.patch.object(exchange, "SOON", soon):
        for call in range(4):
            try:
                flash_ring.ring_flash_attention(mine, mine, mine, group=None if call else group)
                said.append("right")
            except (ValueError, RuntimeError) as error:
                said.append(str(error))
            if context.rank == 2 and call == 0:
                time.sleep(seconds)
    return said


@pytest.mark.parametrize("seconds", [0, 1])
def test_after_a_call_outside_its_group_a_rank_is_no_more_believed(three, seconds):
    """It may be a call behind the others: their numbers would be those of another call, without a word."""
    first, second, alone = three(3, calls_after_one_alone, seconds)
    assert first[0] == second[0] == "right"
    assert "rank 2: global rank 2 is not in the group" in first[1]
    refused = [*first[2:], *second[2:], *alone[1:]]  # its last call may find nobody
    assert all(re.search("rank 2: an earlier call of this rank|Timed out", words) for words in refused), refused


def agree_on_facts(context, long, hosts, size):
    """The facts of all, twice; and how many words went between hosts for each."""
    between = mock.patch.object(exchange, "between_hosts", side_effect=exchange.between_hosts)
    found = []
    inbox_of_job().known.clear()
    with as_on_hosts(hosts), between as gathers:
        for _ in range(2):
            before = gathers.call_count
            facts = agree(lambda: (context.rank, "x" * size if context.rank in long else "x"))
            found.append((facts, gathers.call_count - before))
    return found


@pytest.mark.parametrize("long", [(), (2,)], ids=str)
@pytest.mark.parametrize("hosts", ["aaa", "aba", "abb"])
def test_facts_of_any_length_arrive_whole(ranks, long, hosts):
    """Even where they are longer than all pipes together. What all said before, short, is not said again.

    Between hosts the first rank of each says a word; and where it differs, how long it is in full, and that.
    """
    facts = [(rank, "x" * 100_000 if rank in long else "x") for rank in range(3)]
    for rank, found in enumerate(ranks(3, agree_on_facts, long, hosts, 100_000)):
        speaks = rank in {hosts.index(host) for host in set(hosts)} and len(set(hosts)) > 1
        assert found == [(facts, 3 * speaks), (facts, (3 if long else 1) * speaks)]


def same_facts(context, hosts, watched):
    """Two agreements on the same facts, in which no rank says anything in full."""
    with as_on_hosts(hosts), mock.patch.object(agreement, "in_full", side_effect=AssertionError("said in full")):
        return [list(agree(lambda: watched)) for _ in range(2)]


@pytest.mark.parametrize("hosts", ["aaa", "aba", "abc", ["a", (), ()]])
def test_the_same_facts_are_never_said_in_full(ranks, hosts):
    assert ranks(3, same_facts, hosts, {"length": 7}) == [[[{"length": 7}] * 3] * 2] * 3


def other_memories(context, forgets):
    """Unequal facts, which some ranks have forgotten; and then facts that are other than those remembered."""
    for _ in range(2):
        found = [list(agree(lambda: context.rank))]
    if context.rank in forgets:
        inbox_of_job().known.clear()
    found += [list(agree(lambda: context.rank)), list(agree(lambda: min(context.rank, 1)))]
    with mock.patch.object(agreement, "MANY", 3):
        for fact in range(9):
            agree(lambda fact=fact: (fact, context.rank))
        assert len(inbox_of_job().known) <= 3 + 2
    return [*found, list(agree(lambda: context.rank))]


@pytest.mark.parametrize("forgets", [(), (1,), (0, 2)])
def test_what_a_rank_remembers_is_never_taken_for_what_is_said(ranks, forgets):
    assert ranks(3, other_memories, forgets) == [[[0, 1, 2], [0, 1, 2], [0, 1, 1], [0, 1, 2]]] * 3


def pairs_and_three(context):
    """Two pairs, whose ranks say the same two things; then three ranks of both pairs say these, too."""
    groups = [dist.new_group(members) for members in ([0, 1], [2, 3], [0, 1, 2])]
    for group in groups:
        if context.rank in dist.get_process_group_ranks(group):
            found = [list(agree(lambda: context.rank % 2, group)) for _ in range(2)]
    return found


def test_what_was_said_in_one_group_is_not_taken_for_what_is_said_in_another(ranks):
    assert ranks(4, pairs_and_three) == [[[0, 1, 0]] * 2] * 3 + [[[0, 1]] * 2]


def agree_beside_nccl(context, members):
    """A group whose messages are for the memory of GPUs, and its limit, with torch's own checks of collectives."""
    seconds = timedelta(seconds=77)
    both = [dist.new_group(ranks, timeout=seconds, backend="cuda:gloo") for ranks in members]
    (group,) = (each for each, ranks in zip(both, members, strict=True) if context.rank in ranks)
    assert [device.type for device in group._device_types] == ["cuda"]
    limits = mock.patch.object(exchange, "between_hosts", side_effect=exchange.between_hosts)
    detail = mock.patch.object(c10d, "get_debug_level", return_value=c10d.DebugLevel.DETAIL)
    with (
        as_on_hosts("abcd"),
        limits as gathers,
        detail,
        mock.patch.object(c10d, "is_nccl_available", return_value=True),
    ):
        facts = [agree(lambda x=x: (x, context.rank), group) for x in "xyz"]
    return facts, {call.args[-1] for call in gathers.call_args_list}


def test_between_hosts_no_gpu_has_a_part_in_an_agreement(ranks):
    """Nor need there be one here; and TORCH_DISTRIBUTED_DEBUG=DETAIL does not end it."""
    members = [(0, 3), (1, 2)]
    for rank, (facts, limits) in enumerate(ranks(4, agree_beside_nccl, members)):
        [mine] = [of_group for of_group in members if rank in of_group]
        assert facts == [[(x, each) for each in mine] for x in "xyz"]
        assert limits == {timedelta(seconds=77)}


def numbers(context, hosts):
    """Ranks 1 and 2 agree alone first, then all, then each of two pairs, then all. What number each agreement had."""
    few, one, other = (dist.new_group(members) for members in ([1, 2], [0, 1], [2, 3]))
    pair = one if context.rank < 2 else other
    with as_on_hosts(hosts):
        calls = [None, pair, None]
        if context.rank in (1, 2):
            calls = [few] * 3 + calls
        return [agree(lambda: context.rank, group).number for group in calls], agree(lambda: context.rank, pair)


@pytest.mark.parametrize("hosts", ["aaaa", "abab"])
def test_ranks_that_agreed_without_the_others_count_as_they_do(ranks, hosts):
    found = ranks(4, numbers, hosts)
    of_all = [calls[-3:] for calls, _ in found]
    assert len({(first, last) for first, _, last in of_all}) == 1
    assert all(first < middle < last for first, middle, last in of_all)
    assert [pair for _, pair in found] == [[0, 1], [0, 1], [2, 3], [2, 3]]


def same_or_not(context, given, options):
    """Ranks 0 and 3 in a group; rank 3, its last one, gives something other."""
    group = dist.new_group([0, 3])
    if context.rank in (0, 3):
        return agree_same(lambda: (context.rank, given[context.rank == 3]), group, **options)
    return None


def test_facts_that_must_be_the_same(ranks):
    same = {"layout": "zigzag", "scale": 0.5, "text": "x" * 1000}
    alike = ranks(4, same_or_not, [same, dict(same)], {})
    assert alike == [[0, 3], None, None, [0, 3]]
    others = {**same, "scale": 0.25, "text": "y" * 1000, "window": 3}
    said = "the ranks disagree about scale, text, window; expected one of each\n"
    said += f"rank 0: scale=0.5, text={'x' * LONG}, window=None\nrank 1: scale=0.25, text={'y' * LONG}, window=3"
    outcomes = ranks.outcomes(4, same_or_not, [same, others], {"expected": "one of each"})
    assert [outcomes[rank].message for rank in (0, 3)] == [said] * 2


def test_a_check_says_in_which_function_it_is():
    def check():
        return lambda: None

    here = f"{__name__}.test_a_check_says_in_which_function_it_is"
    assert home_of(check) == home_of(check()) == home_of(partial(partial(check))) == here
    assert home_of(agreement.members) == "ringlab.support.agreement.members"


def agree_in_a_mesh(context, hosts):
    mesh = DeviceMesh("cpu", torch.arange(6).view(2, 3))
    with as_on_hosts(hosts):
        return agree(lambda: context.rank, mesh)


@pytest.mark.parametrize("hosts", ["aaabbb", "ababab"])
def test_a_mesh_over_hosts_counts_its_ranks_row_by_row(ranks, hosts):
    assert ranks(6, agree_in_a_mesh, hosts) == [[*range(6)]] * 6


def give(context, hosts, sizes, calls):
    """What all ranks give; `calls` of the ranks. A rank without a call agrees instead."""
    mine = torch.arange(sizes[context.rank], dtype=torch.int16).to(torch.uint8) + context.rank
    with as_on_hosts(hosts):
        if calls[context.rank] is None:
            return agree(lambda: None)
        return of_every_rank(mine, None, calls[context.rank])


@pytest.mark.parametrize("size", [0, 1, LONGEST])
@pytest.mark.parametrize("hosts", ["aaa", "aba"])
def test_every_rank_gets_the_numbers_of_all(ranks, hosts, size):
    right = torch.arange(size, dtype=torch.int16).to(torch.uint8) + torch.arange(3, dtype=torch.uint8)[:, None]
    assert all(torch.equal(found, right) for found in ranks(3, give, hosts, [size] * 3, [size % 7] * 3))


@pytest.mark.parametrize(
    ("hosts", "sizes", "calls", "words"),
    [
        ("aaa", [9] * 3, [1, 2, 1], "rank 0: of_every_rank, call 1 with 9 bytes\nrank 1: of_every_rank, call 2 with"),
        ("aaa", [9, 9, 7], [0, 0, 0], "rank 1: of_every_rank, call 0 with 9 bytes\nrank 2: of_every_rank, call 0 wit"),
        ("aaa", [9] * 3, [WRONG] * 3, "other input than agreed; expected the same call on every rank"),
        ("aaa", [9] * 3, [1, None, 1], "rank 1: tests.basics.test_agreement.give\nrank 2: of_every_rank, call 1"),
        ("aba", [9] * 3, [4, 4, WRONG], "rank 2: other input than agreed; expected the same call on every rank"),
    ],
)
def test_ranks_in_other_calls_all_say_so(ranks, hosts, sizes, calls, words):
    assert_refused(ranks, 3, words, give, hosts, sizes, calls)


def complain(context, words):
    def check():
        if word := words[context.rank]:
            raise OverflowError("too much") if word == "too much" else ValueError(word)

    group = dist.new_group([rank for rank, word in enumerate(words) if word is not None])
    if words[context.rank] is not None:
        agree(check, group)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["", "1 is odd", "", "3 is odd"], "rank 1: 1 is odd\nrank 3: 3 is odd"),
        ([None, "", None, "odd"], "rank 1: odd"),
        (["", "", "too much", ""], "rank 2: OverflowError: too much"),
        (["odd"] * 4, "odd"),
        (["odd", "odd", "even", "odd"], "rank 0: odd\nrank 1: odd\nrank 2: even\nrank 3: odd"),
    ],
)
def test_agree_raises_everybodys_complaint_on_every_rank(ranks, words, said):
    """None: not in the group, whose ranks are counted."""
    outcomes = [it for it in ranks.outcomes(4, complain, words) if it is not None]
    assert [(it.kind, it.message) for it in outcomes] == [("ValueError", said)] * (4 - words.count(None))


def limits_in_a_mesh(context):
    """How long an agreement waits in a mesh whose columns wait 50 s and whose rows 70."""
    mesh = DeviceMesh("cpu", torch.arange(4).view(2, 2))
    limits = [timedelta(seconds=50), timedelta(seconds=70)]
    with (
        mock.patch.object(agreement, "time_limit", side_effect=limits),
        mock.patch.object(Inbox, "wait", autospec=True, side_effect=Inbox.wait) as wait,
    ):
        agree(lambda: None, mesh)
    return {call.args[3] for call in wait.call_args_list}


def test_an_agreement_in_a_mesh_waits_as_long_as_the_shorter_limit(ranks):
    assert ranks(4, limits_in_a_mesh) == [{timedelta(seconds=50)}] * 4


def after_an_error_in_a_part(context):
    """A pass of ranks 1 and 2 ends by an error. Their group is refused; the job, and their next group, go on."""
    groups = [dist.new_group([1, 2]) for _ in range(2)]
    if context.rank:
        with suppress(MemoryError), one_pass(groups[0]):
            raise MemoryError
    said = [list(agree(lambda: context.rank))]
    for group in reversed(groups) if context.rank else ():
        try:
            said.append(list(agree(lambda: context.rank, group)))
        except ValueError as error:
            said.append(str(error))
    return said


def test_an_error_in_a_part_of_a_job_ends_no_other_group(ranks):
    found = ranks(3, after_an_error_in_a_part)
    assert [each[0] for each in found] == [[0, 1, 2]] * 3
    assert found[1] == found[2]
    assert NEW_GROUP in found[1][2]


def after_an_error_in_a_row(context):
    mesh = DeviceMesh("cpu", torch.arange(3).view(3, 1))
    with suppress(MemoryError), one_pass(mesh.get_group(1)):
        raise MemoryError
    return str(attempt(agree, lambda: None, mesh))


def test_an_error_in_one_group_of_a_mesh_ends_the_mesh(ranks):
    assert all(said.endswith(NEW_GROUP) for said in ranks(3, after_an_error_in_a_row))


# An error in a pass --------------------------------------------------------------------------------------------------


def after_an_error(context, way, shape, who, backwards, kind=MemoryError):
    """An error ends the first pass, forward or backward, on the ranks `who`, which go on. What the next one says."""
    limit, mesh = timedelta(seconds=60), None
    if way in ON_MESH:
        mesh = DeviceMesh("cpu", torch.arange(context.world_size).view(shape))
    options = {"schedule": (FLAT | ON_MESH)[way], "group": mesh or dist.new_group(timeout=limit)}
    qkv, said = tensors(random.Random(context.rank)), []
    kernel = mock.patch.object(flash_ring, "fused_backward" if backwards else "fused_forward", side_effect=kind)
    for broken in (context.rank in who, False):
        try:
            with kernel if broken else nullcontext():
                flash_ring.ring_flash_attention(*qkv, **options).sum().backward()
        except (Exception, KeyboardInterrupt) as error:
            said.append((type(error).__name__, str(error)))
        else:
            said.append(("no error", ""))
        dist.barrier()
    return said


@pytest.mark.parametrize("backwards", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize(("way", "shape"), [("ring", 3), ("all-to-all", 3), ("double ring", (3, 2))])
def test_a_group_in_which_an_error_ended_a_pass_is_refused_on_every_rank(ranks, way, shape, backwards):
    P = ranks_of(shape)
    error = KeyboardInterrupt if (way, backwards) in (("ring", False), ("all-to-all", True)) else MemoryError
    first, then = zip(*ranks(P, after_an_error, way, shape, range(P), backwards, error), strict=True)
    assert {kind for kind, _ in first} == {error.__name__}
    assert {kind for kind, _ in then} == {"ValueError"}
    assert len(set(then)) == 1
    assert then[0][1].endswith("expected a new process group")


# Pipes ---------------------------------------------------------------------------------------------------------------

on_linux = pytest.mark.skipif(not host_of_process(), reason="pipes need Linux")


def two_kinds(context):
    """Two messages of rank 0 in two parts each, which arrive by turns: facts and a reply; then one of a full part."""
    inbox, parts = inbox_of_job(), [b"a" * LONGEST, b"b" * LONGEST, b"c", b"d"]
    if context.rank == 0:
        for i, part in enumerate(parts):
            os.write(inbox.sink(1), HEAD.pack((FACTS, REPLY)[i % 2], 0, i > 1, len(part)) + part)
        inbox.send(FACTS, 1, parts[0])
        return None
    found = [inbox.wait(kind, 0, timedelta(seconds=60)) for kind in (FACTS, REPLY, FACTS)]
    return found == [parts[0] + parts[2], parts[1] + parts[3], parts[0]]


@on_linux
def test_parts_of_messages_of_two_kinds_are_told_apart(ranks):
    assert ranks(2, two_kinds) == [None, True]


def forbidden(path, flags, right=os.open):
    if path.startswith("/proc"):
        raise PermissionError(13, "Permission denied", path)
    return right(path, flags)


def without_a_pipe(context):
    with mock.patch.object(os, "open", forbidden) if context.rank == 1 else nullcontext():
        agree(lambda: None)


@on_linux
def test_a_pipe_that_may_not_be_opened_ends_the_job_with_its_reason():
    with pytest.raises(RuntimeError, match="Permission denied: rank 0 has a pipe that cannot be opened"):
        launch(without_a_pipe, 3)


def without_room(context):
    full = mock.patch.object(os, "pipe", side_effect=OSError(24, "Too many open files"))
    with full if context.rank == 1 else nullcontext():
        inbox = Inbox(dist.new_group())
    dist.barrier()
    return inbox.hosts_of(range(3)), inbox.within_reach(SOON)


@on_linux
def test_a_rank_that_can_make_no_pipe_is_a_host_by_itself(ranks):
    assert ranks(3, without_room) == [(([0, 2], (0, 1)), [2]), (([1], (0, 1)), []), (([0, 2], (0, 1)), [0])]


@on_linux
def test_a_process_that_may_not_read_its_proc_has_no_pipes():
    here = host_of_process()
    with mock.patch.object(Path, "read_text", return_value="of another boot\n"):
        assert host_of_process() != here  # a host of the same name
    with mock.patch.object(os, "getuid", return_value=os.getuid() + 1):
        assert host_of_process() != here  # who may not write here
    for own in ("pid", "net", "user"):  # a container with one thing of its own
        with mock.patch.object(os, "readlink", lambda path, own=own, to=os.readlink: to(path)[path.endswith(own) :]):
            assert host_of_process() != here
    with mock.patch.object(Path, "read_text", side_effect=PermissionError):
        assert host_of_process() == ()


@on_linux
@pytest.mark.usefixtures("alone")
def test_a_pipe_that_is_gone_or_of_an_earlier_job_is_not_taken(monkeypatch):
    monkeypatch.setattr(pipes, "STALE", 0.05)
    inbox = inbox_of_job()
    here = pickle.loads(inbox.store.get("0"))
    _, (path, number) = here
    for place in (("/proc/0/fd/0", number), (path, number + 1)):
        inbox.store.set("1", pickle.dumps(((), place)))
        with pytest.raises(RuntimeError, match="Connection closed by peer: rank 1 has ended"):
            inbox.sink(1)
    late = mock.Mock(wraps=time, sleep=lambda _: inbox.store.set("1", pickle.dumps(here)))
    monkeypatch.setattr(pipes, "time", late)
    monkeypatch.setattr(pipes, "STALE", 60.0)
    assert os.fstat(inbox.sink(1)).st_ino == number


def gone(context, waits):
    """Rank 1 closes its end of its pipe, as the system does when it ends; rank 0 waits for it, or sends."""
    agree(lambda: None)
    inbox = inbox_of_job()
    if context.rank == 1:
        os.dup2(os.open(os.devnull, os.O_RDWR), inbox.fds[0])
        return None
    try:
        if waits:
            inbox.wait(REPLY, 1, timedelta(seconds=60))
        while True:
            inbox.send(REPLY, 1, b"x")
    except RuntimeError as error:
        return str(error)


@on_linux
@pytest.mark.parametrize(("waits", "said"), [(True, "Connection closed by peer"), (False, "Broken pipe")])
def test_a_rank_that_has_ended_is_noticed_at_once(waits, said):
    found = launch(gone, 2, waits)[0]
    assert found == f"{said}: rank 1 has ended"
    assert Raised("RuntimeError", found, "").lost_connection


def with_a_child(context):
    """Rank 1 forks a process that goes on, as a loader of data does, and closes its own end of its pipe."""
    agree(lambda: None)
    inbox = inbox_of_job()
    if context.rank == 1:
        read, write = os.pipe()
        if (child := os.fork()) == 0:
            os.write(write, b"%d open" % len(inbox.fds))  # it has closed its ends, and forgets their numbers
            signal.pause()
        said = os.read(read, 6)
        dist.barrier()
        os.dup2(os.open(os.devnull, os.O_RDWR), inbox.fds[0])
        dist.barrier()
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return said
    dist.barrier()
    try:
        inbox.wait(FACTS, 1, timedelta(seconds=60))
    except RuntimeError as error:
        return str(error)
    finally:
        dist.barrier()


@on_linux
def test_a_rank_that_has_ended_is_noticed_though_its_child_lives():
    assert launch(with_a_child, 2) == ["Connection closed by peer: rank 1 has ended", b"0 open"]


def waits_for_a_late_message(context, awake, never, limit):
    inbox = inbox_of_job()
    if context.rank == 1:
        time.sleep(0.05)
        return inbox.send(REPLY, 0, b"late")
    with mock.patch.object(pipes, "AWAKE", awake), mock.patch(never, side_effect=AssertionError(never)):
        return inbox.wait(REPLY, 1, limit)


@on_linux
@pytest.mark.parametrize(("awake", "never", "days"), [(60.0, "select.poll", 1), (0.0, "os.sched_yield", 365)])
def test_a_rank_looks_again_and_again_and_then_sleeps(ranks, awake, never, days):
    """Also where the time limit is longer than the system can sleep."""
    assert ranks(2, waits_for_a_late_message, awake, never, timedelta(days=days)) == [b"late", None]
