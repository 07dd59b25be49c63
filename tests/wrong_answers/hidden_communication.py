"""Wrong answers to the exercises of chapter 9, and what each must be told."""

from notebooks.checks.hidden_communication import check_fewer_bytes, check_training_chunk, check_unlike_links

WRONG_ANSWERS = [
    (check_training_chunk, 12_480, "enough forwards"),
    (check_training_chunk, 24_960, "that is F/B"),
    (check_training_chunk, 29_952, "of G = H without a mask"),
    (check_training_chunk, 49_920, "only 8 of 32"),
    (check_training_chunk, 7_488, "its bytes are not"),
    (check_training_chunk, 6_240, "without a mask"),
    (check_training_chunk, 59_904, "8 of 32 heads"),
    (check_training_chunk, 9_984, "2 + 4 bytes"),
    (check_training_chunk, 37_440, "five products"),
    (check_training_chunk, 27_456, "the larger one"),
    (check_training_chunk, 1, "you say 1"),
    (check_training_chunk, "many", "not the kind of answer"),
    (check_fewer_bytes, lambda P, H, G: "ring", "= 4 times the bytes"),
    (check_fewer_bytes, lambda P, H, G: "all-to-all" if P > 2 else "ring", "32 heads of K and V cannot be dealt to 3"),
    (check_fewer_bytes, lambda P, H, G: "all-to-all" if G % P == 0 else "ring", "0.8 times"),
    (check_fewer_bytes, lambda P, H, G: "all-to-all" if G % P == 0 and P * G >= H + G else "ring", "as many bytes"),
    (check_fewer_bytes, lambda P, H, G: "ring" if P <= 8 and (P, G) != (8, 32) else "all-to-all", "1.6 times"),
    (check_fewer_bytes, lambda P, H, G: "Ulysses", 'expected "ring"'),
    (check_unlike_links, lambda computing, hops: len(hops) * max(computing, *hops), "last round only computes"),
    (
        check_unlike_links,
        lambda computing, hops: computing + (len(hops) - 1) * (computing + max(hops)),
        "the longer of the two",
    ),
    (
        check_unlike_links,
        lambda computing, hops: computing + (len(hops) - 1) * max(computing, sum(hops) / len(hops)),
        "not the average",
    ),
    (
        check_unlike_links,
        lambda computing, hops: computing + sum(max(computing, hop) for hop in hops[1:]),
        "every round",
    ),
    (check_unlike_links, lambda computing, hops: len(hops) * computing, "computing alone"),
    (check_unlike_links, lambda computing, hops: 1.0, "it is 8 s"),
]
