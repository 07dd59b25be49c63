"""Checks of chapter 11: the pairs of a hop, scan in Python, arrays that travel."""

from collections.abc import Callable
from typing import Any

from notebooks.checks.answers import NotYet, exercise


@exercise
def check_pairs_of_a_hop(answer: Callable[[int], list[tuple[int, int]]]) -> str | None:
    """P -> the pairs (from, to) with which ppermute is a hop."""
    for world_size in (4, 3, 1):
        given = answer(world_size)
        given, everyone = sorted(tuple(pair) for pair in given), list(range(world_size))
        if given == sorted((i, (i + 1) % world_size) for i in everyone):
            continue
        hint = f"each of {world_size} devices must send once and receive once"
        if any(to not in everyone for _, to in given):
            hint = f"there are devices 0 to {world_size - 1}: after the last comes the first"
        elif given == sorted((i, (i - 1) % world_size) for i in everyone):
            hint = "your ring turns the other way; device i sends to i + 1"
        elif given == [(i, i) for i in everyone]:
            hint = "nobody moves: each device sends to itself"
        elif len(given) == world_size - 1:
            hint = "the circle is open: who gets nothing from ppermute gets zeros"
        raise NotYet(f"P = {world_size}, you say {given}: {hint}")


@exercise
def check_scan_in_python(answer: Callable[..., tuple[Any, list]]) -> str | None:
    """Lax.scan, (body, carry, xs) -> (carry, ys)."""
    given = answer(lambda total, x: (total + x, total), 10, [1, 2, 3])
    carry, ys = given
    if carry != 16:
        hint = "the body must get the carry of the round before" if carry == 13 else "return the last carry first"
        raise NotYet(f"10 and then + 1, + 2, + 3 ends with the carry 16, you say {carry}: {hint}")
    if list(ys) != [10, 11, 13]:
        raise NotYet(f"before each sum there were 10, 11, 13; you kept {list(ys)}: keep the body's second result")
    carry, ys = answer(lambda total, x: (total + x, total), 10, [])
    if (carry, list(ys)) != (10, []):
        raise NotYet("with no rounds the carry stays as it is, and nothing is kept")


@exercise
def check_arrays_passed_on(answer: Callable[[int], int]) -> str | None:
    """P -> arrays that a device passes on in one forward and one backward pass."""
    for world_size in (4, 8):
        given = answer(world_size)
        hops = world_size - 1
        hints = {
            2 * hops: "that is the forward pass; K and V go round again in the backward pass, with dK and dV",
            6 * hops: "dK and dV have one hop more: home",
            6 * world_size: "K and V need not come home",
            2 * hops + 2 * world_size: "the backward pass needs K and V too, and they must come again",
            3 * world_size - 2: "K and V are two arrays, dK and dV are two",
        }
        if given != 6 * world_size - 4:
            hint = hints.get(given, "K and V: P - 1 hops, forwards and again backwards; dK and dV: P hops")
            raise NotYet(f"P = {world_size}, you say {given}: {hint}")
