"""Checks of chapter 11: the pairs of a hop, a scan in Python, the arrays passed on."""

from collections.abc import Callable
from typing import Any

from notebooks.checks.answers import NotYet, compare_formula, draws, exercise, items, number, numbers, several


@exercise
def check_pairs_of_a_hop(answer: Callable[[int], list[tuple[int, int]]]) -> str | None:
    """P -> the pairs (from, to) with which ppermute is a hop."""
    for P in (4, 3, 5, 2, 1, *(random.randint(6, 40) for random in draws())):
        given, everyone = sorted(_pair(pair) for pair in items(answer(P), "a list of pairs")), list(range(P))
        if given == sorted((i, (i + 1) % P) for i in everyone):
            continue
        hint = f"each of {P} devices must send once and receive once"
        if any(to not in everyone for _, to in given):
            hint = f"there are devices 0 to {P - 1}: after the last comes the first"
        elif given == sorted((i, (i - 1) % P) for i in everyone):
            hint = "your ring turns the other way; device i sends to i + 1"
        elif given == [(i, i) for i in everyone]:
            hint = "nothing moves: each device sends to itself"
        elif given == [(i, i + 1) for i in range(P - 1)]:
            hint = "the circle is open: a device that receives nothing from ppermute gets zeros"
        raise NotYet(f"P = {P}, you say {given}: {hint}")


def _pair(given: Any) -> tuple[float, float]:
    pair = numbers(given, "pairs (from, to)")
    if len(pair) != 2:
        raise NotYet(f"expected pairs (from, to), got {given!r}")
    return pair[0], pair[1]


@exercise
def check_scan_in_python(answer: Callable[..., tuple[Any, list]]) -> str | None:
    """lax.scan, (body, carry, xs) -> (carry, outputs)."""

    def add(total: int, x: int) -> tuple[int, int]:
        return total + x, total

    def pair(carry: tuple[int, int], x: int) -> tuple[tuple[int, int], str]:  # a carry of two, as m, l, o are three
        return (carry[1], carry[0] + x), f"round {x}"

    carry, outputs = several(answer(add, 10, [1, 2, 3]), ("carry", "outputs"))
    if isinstance(carry, list | tuple) and not isinstance(outputs, list | tuple):
        raise NotYet("return the last carry first, then the list of the outputs")
    carry, outputs = number(carry), items(outputs)
    if carry != 16:
        hint = "the body must get the carry of the round before" if carry == 13 else "return the last carry first"
        raise NotYet(f"10 and then + 1, + 2, + 3 ends with the carry 16, you say {carry}: {hint}")
    if list(outputs) != [10, 11, 13]:
        hint = "in the order of the rounds" if sorted(outputs) == [10, 11, 13] else "keep the body's second result"
        raise NotYet(f"before each sum there were 10, 11, 13; you kept {list(outputs)}: {hint}")
    carry, outputs = several(answer(add, 10, []), ("carry", "outputs"))
    if (number(carry), items(outputs)) != (10, []):
        raise NotYet("with no rounds the carry stays as it is, and nothing is kept")
    for random in draws():
        first, xs = random.randint(-9, 9), [random.randint(-9, 9) for _ in range(random.randint(1, 8))]
        carry, outputs = several(answer(add, first, xs), ("carry", "outputs"))
        if (number(carry), items(outputs)) != (first + sum(xs), [first + sum(xs[:i]) for i in range(len(xs))]):
            raise NotYet(f"from {first} with {xs}, adding, the last carry is {first + sum(xs)}; you say {carry}")
    carry, outputs = several(answer(pair, (0, 1), [5, 7]), ("carry", "outputs"))
    if (numbers(carry), items(outputs)) != ([5, 8], ["round 5", "round 7"]):
        raise NotYet(f"with a carry of two numbers, (0, 1), the last is (5, 8) and outputs are kept; you say {carry}")


@exercise
def check_arrays_passed_on(answer: Callable[[int], int]) -> str | None:
    """P -> arrays that a device passes on in one forward and one backward pass."""
    compare_formula(
        answer,
        lambda P: 6 * P - 4,
        {
            "that is the forward pass; K and V go round again in the backward pass, with dK and dV": lambda P: (
                2 * P - 2
            ),
            "K and V go round twice: in the forward pass, and again in the backward pass": lambda P: 4 * P - 2,
            "dK and dV have one hop more: home": lambda P: 6 * P - 6,
            "K and V need not come home": lambda P: 6 * P,
            "K and V are two arrays, dK and dV are two": lambda P: 3 * P - 2,
            "dQ does not travel": lambda P: 7 * P - 4,
        },
        [(4,), (8,), (5,), (2,), (3,)],
        "K and V: P - 1 hops in the forward pass and again in the backward pass; dK and dV: P hops",
        lambda random: (random.randint(6, 500),),
    )
