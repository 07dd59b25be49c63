"""Wrong answers to the exercises of chapter 10, and what each must be told."""

from math import ceil, floor

from notebooks.checks.how_far_does_it_reach import (
    check_fewer_bytes,
    check_longest_sequence,
    check_peak_memory_backward,
)


def peak(tensors, sums, wide=None):
    """`tensors` and `sums` are how many of H heads and how many of G heads."""

    def answer(H, G, C, D, w):
        (a, b), (c, d) = tensors, sums
        return ((a * H + b * G) * w + (c * H + d * G) * (wide or max(w, 4))) * C * D

    return answer


def longest(room, rounded=floor, least=0):
    return lambda memory, state, token, P: P * max(least, rounded(room(memory, state, P) / token))


def right_room(memory, state, P):
    return memory - state / P


WRONG_ANSWERS = [
    (check_peak_memory_backward, lambda H, G, C, D, w: (5 * H + 12 * G) * w * C * D, "4 bytes, or 8"),
    (check_peak_memory_backward, peak((4, 8), (1, 4), wide=4), "sums of float64"),
    (check_peak_memory_backward, lambda H, G, C, D, w: (5 * H + 12 * G) * C * D, "not bytes"),
    (check_peak_memory_backward, peak((12, 0), (5, 0)), "G heads, not H"),
    (check_peak_memory_backward, peak((4, 6), (1, 4)), "K and V travel in two buffers"),
    (check_peak_memory_backward, peak((4, 8), (1, 2)), "sums of dK and dV travel in two buffers"),
    (check_peak_memory_backward, peak((4, 8), (0, 4)), "sum of dQ"),
    (check_peak_memory_backward, peak((3, 6), (1, 4)), "of the block in hand"),
    (check_peak_memory_backward, peak((3, 8), (1, 4)), "gradient of out"),
    (check_peak_memory_backward, lambda H, G, C, D, w: (2 * H + 4 * G) * w * C * D, "the forward pass"),
    (check_peak_memory_backward, lambda H, G, C, D, w: (6 * H + 6 * H) * C * D * w, "wrong in 4 of 4"),
    (check_peak_memory_backward, lambda H, G, C, D, w: 44 * H * C * D, "with H = 32, G = 8"),
    (check_peak_memory_backward, lambda H, G: H, "is called with 5 argument(s); yours takes 2 (H, G)"),
    (check_longest_sequence, longest(lambda memory, state, P: memory - state), "shared out"),
    (check_longest_sequence, longest(lambda memory, state, P: memory), "take room too"),
    (check_longest_sequence, lambda memory, state, token, P: max(0, int((memory - state / P) / token)), "there are P"),
    (
        check_longest_sequence,
        lambda memory, state, token, P: max(0, int((P * memory - state) / token)),
        "on each, then",
    ),
    (check_longest_sequence, longest(right_room, float), "a part of a token: round down on each"),
    (check_longest_sequence, longest(right_room, int, least=-99), "0, not less"),
    (check_longest_sequence, longest(right_room, floor, least=-99), "0, not less"),
    (check_longest_sequence, longest(right_room, ceil), "part of a token: round down"),
    (check_longest_sequence, longest(lambda memory, state, P: memory - state / (P // 2 * 2 or 1)), "P = 3 you say"),
    (check_longest_sequence, lambda memory, state, token, P: 7, "memory - state / P"),
    (check_fewer_bytes, lambda P, H, G: "ring", "= 4 times the bytes"),
    (check_fewer_bytes, lambda P, H, G: "all-to-all" if P > 2 else "ring", "32 heads of K and V cannot be dealt to 3"),
    (check_fewer_bytes, lambda P, H, G: "all-to-all" if G % P == 0 else "ring", "0.8 times"),
    (check_fewer_bytes, lambda P, H, G: "all-to-all" if G % P == 0 and P * G >= H + G else "ring", "as many bytes"),
    (check_fewer_bytes, lambda P, H, G: "ring" if P <= 8 and (P, G) != (8, 32) else "all-to-all", "1.6 times"),
    (
        check_fewer_bytes,
        lambda P, H, G: "all-to-all" if P % 2 == 0 and G % P == 0 and P * G > H + G else "ring",
        "P = 5, 20 heads on 10",
    ),
    (check_fewer_bytes, lambda P, H, G: "Ulysses", 'expected "ring"'),
]
