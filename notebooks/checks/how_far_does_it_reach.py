"""Checks of chapter 10: peak memory of the backward pass, the longest sequence, ring or all-to-all."""

from collections.abc import Callable
from math import ceil, floor
from random import Random

from notebooks.checks.answers import NotYet, compare_formula, draws, exercise


@exercise
def check_peak_memory_backward(answer: Callable[..., float]) -> str | None:
    """(H, G, C, D, bytes of a number) -> bytes that a device of the trainable ring holds in the backward pass."""

    def peak(tensors: tuple[int, int], sums: tuple[int, int], wide: int | None = None) -> Callable[..., int]:
        """The formula for so many times H and so many times G heads, in the dtype and as sums of `wide` bytes."""
        (a, b), (c, d) = tensors, sums
        return lambda H, G, C, D, w: ((a * H + b * G) * w + (c * H + d * G) * (wide or max(w, 4))) * C * D

    right = peak((4, 8), (1, 4))
    compare_formula(
        answer,
        lambda H, G, C, D, itemsize: right(H, G, C, D, itemsize),
        {
            "the sums are float32 at least: 4 bytes, or 8": lambda H, G, C, D, w: (5 * H + 12 * G) * w * C * D,
            "sums of float64 are float64: 8 bytes": peak((4, 8), (1, 4), wide=4),
            "these are numbers, not bytes": lambda H, G, C, D, w: (5 * H + 12 * G) * C * D,
            "K and V have G heads, not H": peak((12, 0), (5, 0)),
            "K and V travel in two buffers, beside the rank's own k and v": peak((4, 6), (1, 4)),
            "the sums of dK and dV travel in two buffers": peak((4, 8), (1, 2)),
            "the sum of dQ takes room too": peak((4, 8), (0, 4)),
            "dq, dk and dv of the block in hand take room too": peak((3, 6), (1, 4)),
            "the gradient of out takes room too": peak((3, 8), (1, 4)),
            "that is the forward pass": peak((2, 4), (0, 0)),
        },
        [(32, 8, 1000, 128, 2), (6, 3, 7, 64, 4), (5, 5, 10, 8, 8), (9, 1, 33, 16, 2)],
        "count the list: heads of q, out, d_out, dq; heads of k, v, dk, dv, in buffers; then the sums in float32",
        lambda random: (
            *(random.randint(1, 8) * (G := random.randint(1, 8)), G),
            random.randint(1, 5000),
            random.randint(1, 128),
            random.choice((2, 4, 8)),
        ),
    )
    return "with G = H and bfloat16 that is 22 chunks"


def _drawn(random: Random) -> tuple[int, int, int, int]:
    """memory, state, token and P with which rounding of float64 decides nothing."""
    memory, state, token, P = (random.randint(1, most) for most in (9999, 9999, 50, 40))
    return (memory, state, token, P) if (memory * P - state) % (token * P) else _drawn(random)


@exercise
def check_longest_sequence(answer: Callable[..., int]) -> str | None:
    """(memory, state, token, P) -> the most tokens that P devices hold beside their share of the state."""

    def room(memory: float, state: float, token: float, P: int) -> float:
        return (memory - state / P) / token

    compare_formula(
        answer,
        lambda memory, state, token, P: P * max(0, floor(room(memory, state, token, P))),
        {
            "where the state does not fit there is no room for tokens: 0, not less": lambda *a: a[3] * int(room(*a)),
            "where the state does not fit, there is no room: 0, not less": lambda *a: a[3] * floor(room(*a)),
            "the state is shared out: a device holds state / P": lambda m, s, t, P: P * max(0, int((m - s) / t)),
            "parameters, gradients and moments take room too": lambda m, s, t, P: P * int(m / t),
            "that is what one device holds; there are P": lambda *a: max(0, int(room(*a))),
            "a device cannot hold a part of a token: round down": lambda *a: a[3] * max(0, ceil(room(*a))),
            "every device holds whole tokens: round down on each, then multiply": lambda m, s, t, P: max(
                0, int((P * m - s) / t)
            ),
            "a device cannot hold a part of a token: round down on each": lambda *a: a[3] * max(0, room(*a)),
        },
        [(100, 40, 7, 4), (100, 0, 7, 2), (100, 500, 7, 4), (100, 36, 7, 5), (90, 100, 4, 3), (50, 9, 3, 1)],
        "on each device memory - state / P bytes are left for tokens",
        _drawn,
    )


@exercise
def check_fewer_bytes(answer: Callable[[int, int, int], str]) -> str | None:
    """(P, H, G) -> "ring" or "all-to-all", whichever sends fewer bytes; "ring" where they are equal or it must."""
    cases = [
        (8, 32, 32),
        (3, 32, 32),
        (4, 32, 8),
        (2, 8, 8),
        (8, 32, 8),
        (16, 32, 8),
        (1, 8, 8),
        (5, 20, 10),
        (3, 9, 9),
    ]
    for random in draws():
        G = random.randint(1, 40)
        cases += [(P, random.randint(1, 8) * G, G) for P in range(1, G + 2)]
    for P, H, G in cases:
        given = answer(P, H, G)
        if not isinstance(given, str):
            raise NotYet(f'expected "ring" or "all-to-all", got {type(given).__name__}')
        given = given.strip().lower()
        possible, ring, swapped = G % P == 0, P * G, H + G
        if given == ("all-to-all" if possible and ring > swapped else "ring"):
            continue
        hint = f"the ring sends P G/(H + G) = {ring / swapped:.2g} times the bytes of all-to-all"
        if given not in ("ring", "all-to-all"):
            hint = 'expected "ring" or "all-to-all"'
        elif not possible:
            hint = f"{G} heads of K and V cannot be dealt to {P} devices"
        elif ring == swapped:
            hint = 'both send as many bytes: "ring", whose bytes hide'
        raise NotYet(f"P = {P}, {H} heads on {G}, you say {given!r}: {hint}")
    return "and remember that the ring's bytes hide behind computing"
