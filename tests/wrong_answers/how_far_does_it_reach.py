"""Wrong answers to the exercises of chapter 10, and what each must be told."""

from notebooks.checks.how_far_does_it_reach import (
    check_devices_needed,
    check_longest_sequence,
    check_peak_memory_of_a_ring,
)

WRONG_ANSWERS = [
    (check_peak_memory_of_a_ring, lambda H, G, D, C, w: 6 * H * D * C, "6bch"),
    (check_peak_memory_of_a_ring, lambda H, G, D, C, w: 6 * H * D * C * w, "G heads, not H"),
    (check_peak_memory_of_a_ring, lambda H, G, D, C, w: (2 * H + 4 * G) * D * C, "itemsize"),
    (check_peak_memory_of_a_ring, lambda H, G, D, C, w: (2 * H + 2 * G) * D * C * w, "arrive while"),
    (check_peak_memory_of_a_ring, lambda H, G, D, C, w: (H + 4 * G) * D * C * w, "both q and out"),
    (check_peak_memory_of_a_ring, lambda H, G, D, C, w: (2 * H + 3 * G) * D * C * w, "four of G heads"),
    (check_peak_memory_of_a_ring, lambda H, G, D, C, w: D * C * w, "q and out of H heads"),
    (check_peak_memory_of_a_ring, lambda H, G: H, "ends in TypeError"),
    (check_longest_sequence, lambda memory, state, token, P: P * int((memory - state) / token), "shared out"),
    (check_longest_sequence, lambda memory, state, token, P: P * int(memory / token), "take room too"),
    (check_longest_sequence, lambda memory, state, token, P: int((memory - state / P) / token), "there are P"),
    (check_longest_sequence, lambda memory, state, token, P: int((P * memory - state) / token), "round down on each"),
    (check_longest_sequence, lambda memory, state, token, P: (P * memory - state) / token, "round down on each"),
    (check_longest_sequence, lambda memory, state, token, P: P * int((memory - state / P) / token), "0, not less"),
    (
        check_longest_sequence,
        lambda memory, state, token, P: P * -int((state / P - memory) // token),
        "part of a token",
    ),
    (check_longest_sequence, lambda memory, state, token, P: 7, "memory - state / P"),
    (check_devices_needed, 4e6 * 344_064 / 80e9, "add its 90.2e9"),
    (check_devices_needed, 18, "too few"),
    (check_devices_needed, (90.2e9 + 4e6 * 344_064) / 80e9, "round up"),
    (check_devices_needed, 20, "after adding"),
    (check_devices_needed, 1, "(state + tokens"),
]
