"""Wrong answers to the exercises of chapter 9, and what each must be told."""

from math import ceil, floor

from notebooks.checks.hidden_communication import (
    check_longest_sequence,
    check_peak_memory_backward,
    check_smallest_chunk,
    check_training_chunk,
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
    (check_smallest_chunk, lambda f, b, H, G, w: f / b, "in bfloat16 with G = H only"),
    (check_smallest_chunk, lambda f, b, H, G, w: w / 2 * f / b, "only G of H"),
    (check_smallest_chunk, lambda f, b, H, G, w: w / 2 * H / G * f / b, "a shorter chunk"),
    (check_smallest_chunk, lambda f, b, H, G, w: G / H * f / b, "itemsize bytes"),
    (check_smallest_chunk, lambda f, b, H, G, w: w / 4 * G / H * f / b, "K and V travel"),
    (check_smallest_chunk, lambda f, b, H, G, w: w * G / H * f / b, "two FLOPs"),
    (check_smallest_chunk, lambda f, b, H, G, w: w / 2 * G / H * b / f, "turned over"),
    (check_smallest_chunk, lambda f, b, H, G, w: w / 2 / (H // (2 * G) * 2 or 1) * f / b, "with flops"),
    (check_smallest_chunk, lambda f, b, H, G, w: 1.01 * w / 2 * G / H * f / b, "wrong in 4 of 4 cases"),
    (check_smallest_chunk, lambda f, b, H, G, w: None, "expected a number, got NoneType"),
    (check_smallest_chunk, 3120, "expected a function, got int"),
    (check_training_chunk, lambda r, H, G, w: w / 2 * G / H * r, "forward pass without a mask"),
    (check_training_chunk, lambda r, H, G, w: max(w / 2, (w + 4) / 5) * G / H * r, "both passes without a mask"),
    (check_training_chunk, lambda r, H, G, w: max(w / 2, (w + 4) / 5) / 2 * G / H * r, "more tokens, not fewer"),
    (check_training_chunk, lambda r, H, G, w: w * G / H * r, "forward pass only"),
    (check_training_chunk, lambda r, H, G, w: 2 * (w + 4) / 5 * G / H * r, "backward pass only"),
    (check_training_chunk, lambda r, H, G, w: 2 * max(w / 2, (w + 4) / 5) * r, "only G of H"),
    (check_training_chunk, lambda r, H, G, w: (w + 4) * G / H * r, "five products"),
    (check_training_chunk, lambda r, H, G, w: 2 * (w / 2 + (w + 4) / 5) * G / H * r, "the larger one"),
    (check_training_chunk, lambda r, H, G, w: 2 * 6 / 5 * G / H * r, "wrong in 3 of 5 cases"),
    (check_training_chunk, lambda r, H, G, w: "many", "expected a number"),
    (check_training_chunk, 14_976, "expected a function, got int"),
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
]
