"""Checks of chapter 6: the order of the overlapped ring, the hidden share, the smallest chunk."""

from collections.abc import Callable
from typing import Any

from notebooks.checks.answers import NotYet, exercise


@exercise
def check_overlap_order(answer: Callable[[int], list[tuple[str, int]]]) -> str | None:
    """P -> the ("post", t), ("compute", t), ("wait", t) of one rank of the overlapped ring, with two buffers."""
    idle = None  # told last: what is wrong comes first
    for world_size in (1, 2, 4):
        given = answer(world_size)
        given, where = list(given), f"P = {world_size}: "
        place = {step: i for i, step in enumerate(given)}
        for t in range(world_size):
            needed = ("post", "compute", "wait") if t < world_size - 1 else ("compute",)
            for what in ("post", "compute", "wait"):
                if given.count((what, t)) != (what in needed):
                    hint = "after the last round nobody sends" if what not in needed else "each step once"
                    raise NotYet(f"{where}{(what, t)} is there {given.count((what, t))} times; {hint}")
        if unknown := set(given) - {(what, t) for what in ("post", "compute", "wait") for t in range(world_size)}:
            raise NotYet(f"{where}there is no step {min(unknown)}")
        for t in range(world_size - 1):
            post, compute, wait = (place[what, t] for what in ("post", "compute", "wait"))
            if wait < post:
                raise NotYet(f"{where}('wait', {t}) comes before ('post', {t}): it would wait for nothing")
            if place["compute", t + 1] < wait:
                raise NotYet(f"{where}('compute', {t + 1}) comes before ('wait', {t}): block {t + 1} may not be there")
            if t < world_size - 2 and place["post", t + 1] < wait:
                raise NotYet(f"{where}('post', {t + 1}) comes before ('wait', {t}): block {t + 1} cannot be sent yet")
            if t < world_size - 2 and place["post", t + 1] < compute:
                raise NotYet(f"{where}('post', {t + 1}) fills the buffer of block {t}, which is not computed on yet")
            if not post < compute < wait:
                idle = f"{where}this is exact and hides nothing: compute on block {t} between its post and its wait"
    if idle:
        raise NotYet(idle)


@exercise
def check_hidden_by_overlap(answer: Callable[[float, float], float]) -> str | None:
    """(seconds of computing, seconds of messages) of a round -> the share of the messages' time that is hidden."""
    for computing, messages in ((0.5, 2.0), (2.0, 2.0), (3.0, 2.0)):
        given = answer(computing, messages)
        if abs(given - min(1.0, computing / messages)) < 1e-9:
            continue
        hints = [
            (computing / messages, "no more than all of it can be hidden"),
            (messages / computing, "turned over: of the messages, as long as there is computing"),
            (max(0.0, 1 - computing / messages), "that is the share that is not hidden"),
            (min(computing, messages), "that is the time that is hidden; divide it by the messages' time"),
            (min(computing, messages) / (computing + messages), "divide by the messages' time, not by all of it"),
        ]
        hint = next((hint for wrong, hint in hints if abs(given - wrong) < 1e-9), "the rest is messages - computing")
        raise NotYet(f"computing {computing:g} s, messages {messages:g} s, you say {given:g}: {hint}")


@exercise
def check_smallest_chunk(answer: Any) -> str | None:
    """Tokens of a chunk from which on messages are hidden: F = 312e12, B = 25e9, bfloat16, H = 32, G = 8."""
    hints = {
        12480: "that is F/B; only 8 of 32 heads travel",
        49920: "fewer heads travel than compute, so a shorter chunk is enough",
        6240: "a bfloat16 has 2 bytes",
        1560: "K and V travel, not one of them",
    }
    if abs(answer - 3120) < 1:
        return "a quarter of F/B, because 4 heads for queries share one that travels"
    for wrong, hint in hints.items():
        if abs(answer - wrong) < 1:
            raise NotYet(hint)
    raise NotYet(f"4 C C D H / F seconds of computing, 2 C D G times 2 bytes / B of messages; you say {answer:g}")
