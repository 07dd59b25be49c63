"""Checks of chapter 4: the block in hand, the order of messages, the bytes sent."""

from collections.abc import Callable
from typing import Any

from basics.blocking_messages import Recv, Send, simulate_messages
from notebooks.checks.answers import NotYet, exercise


@exercise
def check_block_in_hand(answer: Callable[[int, int, int], int]) -> str | None:
    """(rank, round, P) -> the block that the rank computes on."""
    for world_size in (4, 5):
        for t in range(world_size):
            for rank in range(world_size):
                given = answer(rank, t, world_size)
                expected = (rank - t) % world_size
                if given != expected:
                    other_way = " (your ring turns the other way)" if given == (rank + t) % world_size else ""
                    where = f"P = {world_size}, round {t}, rank {rank}"
                    raise NotYet(f"{where} does not hold KV{given}{other_way}")


@exercise
def check_ring_order(answer: Callable[[int, int], list[Send | Recv]]) -> str | None:
    """(rank, P) -> the rank's [Send, Recv] of one hop, in an order that does not deadlock."""
    for world_size in (2, 3, 4, 5, 8):
        programs = [answer(rank, world_size) for rank in range(world_size)]
        for rank, program in enumerate(programs):
            expected = {Send((rank + 1) % world_size), Recv((rank - 1) % world_size)}
            if len(program) != 2 or set(program) != expected:
                raise NotYet(f"rank {rank} of {world_size} must send to its next and receive from its previous rank")
        outcome = simulate_messages(programs)
        if outcome.waits_for:
            raise NotYet(f"{world_size} ranks deadlock; these wait for each other in a circle: {outcome.cycle}")


@exercise
def check_bytes_sent(answer: Any) -> str | None:
    """Bytes one rank sends: P = 8, S = 1,048,576, B = 1, H = 32, D = 128, bfloat16."""
    hop = 2 * 32 * (1_048_576 // 8) * 128 * 2
    hints = {
        8 * hop: "that is 8 hops; after the last round nobody sends",
        7 * hop // 2: "K and V travel, not one of them (or did you count 1 byte a number?)",
        hop: "that is one hop",
        14 * hop: "a bfloat16 has 2 bytes, not 4",
    }
    if answer == 7 * hop:
        return f"{7 * hop / 2**30:g} GiB"
    raise NotYet(hints.get(answer, "hops x (K and V) x H x C x D x bytes of a number"))
