"""Checks of chapter 14: who stores a new token, the bytes of a token."""

from notebooks.source.checks.answers import Exercise


def _in_turn(C, N, P):
    return [C + len(range(rank, N - 1, P)) for rank in range(P)]


check_caches = Exercise(  # how many tokens each rank holds after N new tokens
    right=_in_turn,
    wrong={
        "the last new token is returned and never computed: it has no K and V": lambda C, N, P: _in_turn(C, N + 1, P),
        "rank 0 stores the first new token, so the first ranks have one more": lambda C, N, P: _in_turn(C, N, P)[::-1],
        "rank 0 stores new token number 0": lambda C, N, P: _in_turn(C, N, P)[-1:] + _in_turn(C, N, P)[:-1],
        "then rank 0 fills up alone; they store in turn": lambda C, N, P: [C + N - 1] + [C] * (P - 1),
        "then the last rank fills up alone; they store in turn": lambda C, N, P: [C] * (P - 1) + [C + N - 1],
        "if all ranks store a token, it counts P times": lambda C, N, P: [C + N - 1] * P,
        "if all ranks store a token, it counts P times; and the last one is not stored": lambda C, N, P: [C + N] * P,
        "new tokens are stored, too": lambda C, N, P: [C] * P,
        "that is the number of slots; count the tokens in them": lambda C, N, P: [C - (-(N - 1) // P)] * P,
        "N - 1 is not always a multiple of P: some ranks have one more": lambda C, N, P: [C + (N - 1) // P] * P,
    },
    cases={
        "rank n mod P stores new token number n, for n = 0 ... N - 2": [
            (4, 12, 4),
            (4, 8, 3),
            (10, 7, 5),
            (3, 1, 2),
            (2, 5, 1),
        ]
    },
    draw=lambda random: (random.randint(0, 99), random.randint(1, 99), random.randint(1, 12)),
    remark="no rank has more than one token more than another",
)


def _bytes(count):
    """The bytes of so many numbers a layer."""
    return lambda layers, *case: 4 * layers * count(*case)


check_bytes_of_a_token = Exercise(  # one new token of each prompt, float32
    right=lambda layers, B, H, G, D, C, P: layers * B * H * (D + 2) * 4,
    wrong={
        "o alone is not enough: m and l of each head travel too": _bytes(lambda B, H, G, D, C, P: B * H * D),
        "one of m and l is missing": _bytes(lambda B, H, G, D, C, P: B * H * (D + 1)),
        "m, l and o belong to a query head: there are H of them, not G": _bytes(
            lambda B, H, G, D, C, P: B * G * (D + 2)
        ),
        "that is a ring, which moves K and V; here they stay": _bytes(
            lambda B, H, G, D, C, P: (P - 1) * 2 * B * G * C * D
        ),
        "the number of keys does not matter: o is a sum over them": _bytes(
            lambda B, H, G, D, C, P: B * H * (D + 2) * C
        ),
        "a rank gives its own part once, for any P": _bytes(lambda B, H, G, D, C, P: B * H * (D + 2) * P),
        "a rank gives its own part once, not P - 1 times": _bytes(lambda B, H, G, D, C, P: B * H * (D + 2) * (P - 1)),
        "one sequence has that; there are B of them": _bytes(lambda B, H, G, D, C, P: H * (D + 2)),
        "one layer has that": lambda layers, B, H, G, D, C, P: B * H * (D + 2) * 4,
        "these are numbers; a float32 has 4 bytes": lambda layers, B, H, G, D, C, P: layers * B * H * (D + 2),
        "m, l and o are float32, 4 bytes each, not 2": lambda layers, B, H, G, D, C, P: layers * B * H * (D + 2) * 2,
    },
    cases={
        "for each head of each prompt: m, l, and the D numbers of o": [
            (32, 1, 32, 8, 128, 16_384, 8),
            (2, 3, 6, 2, 16, 10, 5),
            (4, 2, 8, 4, 64, 1000, 3),
        ]
    },
    draw=lambda random: tuple(random.randint(1, 99) for _ in range(7)),
    remark="C, G and P do not appear",
)
