"""Checks of chapter 4: the block in hand, the order of messages, the bytes sent, and the ring itself."""

from contextlib import suppress
from random import Random

from notebooks.source.checks.answers import (
    Exercise,
    NotYet,
    StillOpen,
    as_tensor,
    difference,
    draws,
    exercise,
    items,
    near,
)
from notebooks.source.trial import SHAPE, RingFailed, watch_ring, whole_input
from ringlab.basics.blocking_messages import Recv, Send, simulate_messages
from ringlab.basics.naive_attention import naive_attention


def _place(random):
    P = random.randint(6, 40)
    return random.randrange(P), random.randrange(P), P


check_block_in_hand = Exercise(  # that the rank computes on in a round
    right=lambda rank, t, P: (rank - t) % P,
    wrong={
        "your ring turns the other way: blocks come from rank r - 1": "(rank + t) % P",
        "blocks have the numbers 0 to P - 1: take the remainder by P": "rank - t",
    },
    said="each hop brings the block of the rank before",
    cases=[(rank, t, P) for P in (4, 5, 1, 2, 3) for t in range(P) for rank in range(P)],
    draw=_place,
)


@exercise
def check_ring_order(answer):
    """(rank, P) -> the rank's [Send, Recv] of one hop, in an order that does not deadlock."""
    slow = ""
    for world_size in (2, 3, 4, 5, *(random.randint(6, 30) for random in draws())):
        programs = [_steps(answer(rank, world_size)) for rank in range(world_size)]
        for rank, program in enumerate(programs):
            send, receive = Send((rank + 1) % world_size), Recv((rank - 1) % world_size)
            if len(program) != 2 or set(program) != {send, receive}:
                raise NotYet(f"rank {rank} of {world_size}: expected one {send} and one {receive}, got {program}")
        outcome = simulate_messages(programs)
        if outcome.waits_for:
            raise NotYet(f"{world_size} ranks deadlock; these wait for each other in a circle: {outcome.cycle}")
        if outcome.phases > 2 + world_size % 2:
            slow = slow or f"{world_size} ranks need {outcome.phases} phases"
    few = "When even ranks send first, 2 phases are enough, 3 with an odd number of ranks"
    return f"no deadlock, but {slow}: messages wait for each other in a row. {few}" if slow else None


def _steps(given):
    steps = items(given, "a list of one Send and one Recv")
    for step in steps:
        if not isinstance(step, Send | Recv):
            raise NotYet(f"expected a list of one Send and one Recv, got a {type(step).__name__} in it")
    return [Send(int(step.to)) if isinstance(step, Send) else Recv(int(step.source)) for step in steps]


HOP = 2 * 32 * (1_048_576 // 8) * 128 * 2
check_bytes_sent = Exercise(  # by one rank: P = 8, S = 1,048,576, B = 1, H = 32, D = 128, bfloat16
    right=7 * HOP,
    wrong={
        "that is 8 hops; after the last round no rank sends": 8 * HOP,
        "K and V travel, not one of them (or did you count 1 byte a number?)": 7 * HOP // 2,
        "that is one hop": HOP,
        "a bfloat16 has 2 bytes, not 4": 14 * HOP,
        "a block is one chunk, S/P tokens, not the whole sequence (or did you add up all ranks?)": 56 * HOP,
        "bytes, please, not GiB": 14,
    },
    said="hops x (K and V) x H x C x D x bytes of a number",
    remark=f"{7 * HOP / 2**30:g} GiB",
)


@exercise
def check_ring(answer):
    """(q, k, v, lengths) -> the rank's rows of full attention, on real processes, against float64 full attention."""
    random = Random()
    C, D = random.randint(8, 12), random.randint(800, 1000)  # torch's caches of a first call, 100 kB, are little then
    drawn = ([random.randint(2, 4), random.randint(2, 4)], (1, 3, 5)), ([C] * 3, (1, 2, D)), ([C] * 6, (1, 2, D))
    held = {}  # by P: bytes of the rank that holds most
    for lengths, shape in (([4], SHAPE), ([2] * 4, SHAPE), ([3, 3, 2, 2], SHAPE), ([3, 3, 3, 2, 2], SHAPE), *drawn):
        seed, long = random.randrange(2**31), shape[1] == 3
        try:
            ranks = watch_ring(answer, lengths, seed=seed, shape=shape, long=long)
        except RingFailed as failure:
            raise NotYet(f"{failure}{'. ' + MEET if failure.waits else ''}") from failure
        if any(ran.out is ... for ran in ranks):
            raise StillOpen
        whole = whole_input(sum(lengths), seed, shape, long)
        exact = naive_attention(*whole).split(lengths, dim=2)
        scores = (whole[0] @ whole[1].mT).abs().max().item() * shape[2] ** -0.5
        where = f"chunks of {lengths} tokens, rank"
        for rank, (ran, rows) in enumerate(zip(ranks, exact, strict=True)):
            if problem := difference(ran.out, rows):
                out = as_tensor(ran.out, f"a tensor of shape {tuple(rows.shape)}")
                hint = mistake(out, rank, lengths, whole) if out.shape == rows.shape else None
                raise NotYet(f"{where} {rank}: {hint or problem}")
            if (dtype := as_tensor(ran.out).dtype) != rows.dtype:
                raise NotYet(f"{where} {rank}: right, but in {dtype}; q, k and v are float64, and so is the result")
            if problem := difference(ran.out, rows, FLOAT64 * max(1.0, scores)):
                raise NotYet(
                    f"{where} {rank}: {problem}, as float32 rounds. Keep all in float64: the blocks that you send and "
                    "receive, and m, l and o (dtype=q.dtype)"
                )
        for rank in range(len(lengths)):
            if problem := wrong_messages(ranks[rank], rank, lengths, 2 * whole[0][:, :, 0].nbytes):
                raise NotYet(f"{where} {rank}: the result is right. {problem}")
        held[len(lengths)] = max(ran.held for ran in ranks)
    if held[6] - held[3] >= 3 * whole[1][:, :, :C].nbytes:  # all K, all V or all results of three chunks more
        raise NotYet(
            f"chunks of {C} tokens: the result is right. With 6 ranks, one held up to {held[6]:,} bytes beside its "
            f"input, and with 3 {held[3]:,}: the memory grows with the sequence, as that of an all-gather. Use each "
            "block, pass it on, and keep m, l and o only"
        )
    hops = "P - 1 hops on each rank"
    return f"full attention on 1, 4 and 5 processes and on others, in {hops}. You have written Ring Attention"


MEET = (
    "Every rank must send to rank + 1 as often as it receives from rank - 1, even ranks send first and odd ranks "
    "receive first, and wait() ends each isend and irecv"
)
# Errors of float64 on a few tokens are near 1e-15, those of float32 near 1e-7. Where scores are large, their own errors
# are so many times larger, and the relative error of e^score is the error of the score.
FLOAT64 = 1e-11


def elsewhere(messages, rank, P):
    """What is wrong with the messages of a rank that go not to a neighbour; None: nothing."""
    for message in messages:
        if message.peer is None and not message.kind.startswith("recv"):
            return (
                f"But it called a collective, {message.kind} ({message.bytes:,} bytes): one that gathers blocks "
                "needs memory for all of them. In a ring a rank sends to the next rank and receives from the one before"
            )
        if message.peer not in ((rank + 1) % P, (rank - 1) % P, None):
            return (
                f"But it exchanged a message with rank {message.peer} ({message.bytes:,} bytes). In a ring a rank "
                f"sends to rank {(rank + 1) % P} and receives from rank {(rank - 1) % P}, and passes on what comes"
            )
    return None


def wrong_messages(ran, rank, lengths, token):
    """What is wrong with the messages of a rank; None for P - 1 hops. `token`: the bytes of K and V of one token."""
    P = len(lengths)
    if problem := elsewhere(ran.messages, rank, P):
        return problem
    sent = [it for it in ran.messages if it.kind == "send"]
    received = [it for it in ran.messages if it.kind != "send"]
    came, others = sum(m.bytes for m in received), sum(lengths) - lengths[rank]
    went = sum(m.bytes for m in sent)
    counted = (
        f"It received {came:,} bytes in {len(received)} message(s) and sent {went:,} in {len(sent)}; expected "
        f"{token * others:,} bytes received: K and V of {P - 1} block(s), {others} tokens of {token} bytes"
    )
    if came == token * (others + lengths[rank]):
        return f"{counted}. One hop is too many, it brings the rank's own block home: P rounds, but P - 1 hops"
    if came != token * others:
        return f"{counted}. Each other block comes once, in P - 1 hops, and nothing else travels"
    if went > token * (sum(lengths) - min(lengths)):
        return f"{counted}. It sends more than P - 1 blocks: after the last round nobody needs another one"
    return None


def mistake(out, rank, lengths, whole):
    """What the doctor's catalogue says of a ring that returns `out` (B, H, C, D) on this rank; None: nothing."""
    from ring_doctor.asking.case import Case  # it takes a second, and a right ring needs none of it
    from ring_doctor.catalogue import CATALOGUE
    from ring_doctor.mistakes.paper_ring import RIGHT, NotOnPaper, compute

    batch, heads, seq_len, head_dim = whole[0].shape
    case = Case(len(lengths), seq_len, batch=batch, heads=heads, kv_heads=heads, head_dim=head_dim)
    for entry in CATALOGUE.values():
        for variant in entry.variants:
            with suppress(NotOnPaper):
                found = compute(case, variant(RIGHT), (*whole, whole[0]), gradients=False)["out"]
                if near(out, case.cut(found, rank)):
                    return f"{entry.what} Look at {entry.look}"
    return None
