"""Wrong answers to the exercises of chapter 5, and what each must be told."""

from notebooks.checks.backward import check_added_so_far, check_bytes_sent_back, check_softmax_backward


def delta(out, d_out):
    return (out * d_out).sum(-1, keepdim=True)


def right_for_two_keys(p, dp, out, d_out):
    return p[:, :2] * (dp[:, :2] - delta(out, d_out))


def right_for_even_worlds(rank, t, P):
    return {(rank - i) % (P + P % 2) for i in range(t + 1)}


WRONG_ANSWERS = [
    (check_softmax_backward, lambda p, dp, out, d_out: p * dp, "delta is missing"),
    (check_softmax_backward, lambda p, dp, out, d_out: dp - delta(out, d_out), "multiply by the weights"),
    (check_softmax_backward, lambda p, dp, out, d_out: p * (dp + delta(out, d_out)), "subtracted"),
    (check_softmax_backward, lambda p, dp, out, d_out: p * (dp - delta(p, dp)), "keys of this block only"),
    (check_softmax_backward, lambda p, dp, out, d_out: p * (dp - (d_out * out).sum()), "one delta for all rows"),
    (check_softmax_backward, lambda p, dp, out, d_out: p * (dp - (d_out * out).sum(-1)), "ends in RuntimeError"),
    (
        check_softmax_backward,  # where n = c, no shape gives it away
        lambda p, dp, out, d_out: p * (dp - (delta(out, d_out) if len(p) == 3 else (d_out * out).sum(-1))),
        "n = 4 queries, c = 4 keys, D = 4: delta belongs to rows",
    ),
    (check_softmax_backward, right_for_two_keys, "n = 4 queries, c = 4 keys, D = 4: expected shape (4, 4), got (4, 2)"),
    (check_softmax_backward, lambda p, dp, out, d_out: p, "off by up to"),
    (check_softmax_backward, lambda p, dp, out, d_out: 1.01 * p * (dp - delta(out, d_out)), "off by up to"),
    (check_softmax_backward, lambda p, dp, out, d_out: None, "expected a tensor"),
    (check_added_so_far, lambda rank, t, P: {(rank + i) % P for i in range(t + 1)}, "the other way"),
    (check_added_so_far, lambda rank, t, P: {(rank - i) % P for i in range(1, t + 1)}, "has just computed"),
    (check_added_so_far, lambda rank, t, P: {rank - i for i in range(t + 1)}, "remainder by P"),
    (
        check_added_so_far,
        lambda rank, t, P: {(rank - i) % 4 for i in range(t + 1)},
        "P = 5, round 0, rank 4, you say [0]",
    ),
    (check_added_so_far, right_for_even_worlds, "P = 5, round 1, rank 0, you say [0, 5]: ranks go from 0 to 4"),
    (check_added_so_far, lambda rank, t, P: set(range(P)), "the block came from rank 3"),
    (check_added_so_far, lambda rank, t, P: rank, "expected a set of numbers, got int"),
    (check_bytes_sent_back, lambda P, n, w: (P - 1) * 2 * n * w, "forward pass"),
    (check_bytes_sent_back, lambda P, n, w: P * 2 * n * max(w, 4), "K and V travel too"),
    (check_bytes_sent_back, lambda P, n, w: (P - 1) * 2 * n * (w + max(w, 4)), "one hop more"),
    (check_bytes_sent_back, lambda P, n, w: P * 2 * n * (w + max(w, 4)), "need not come home"),
    (check_bytes_sent_back, lambda P, n, w: (P - 1) * 2 * n * w + P * 2 * n * w, "never fewer than 4 bytes"),
    (check_bytes_sent_back, lambda P, n, w: (2 * P - 1) * 2 * n * max(w, 4), "in their own dtype"),
    (check_bytes_sent_back, lambda P, n, w: (P - 1) * 2 * n * w + P * 2 * n * 4, "sums of float64"),
    (check_bytes_sent_back, lambda P, n, w: (P - 1) * n * w + P * n * max(w, 4), "count both"),
    (check_bytes_sent_back, lambda P, n, w: (P - 1) * 2 * n * w + P * 3 * n * max(w, 4), "dQ does not travel"),
    (check_bytes_sent_back, lambda P, n, w: (P - 1) * n * (2 * w + 3 * max(w, 4)), "dQ does not travel, and dK"),
    (check_bytes_sent_back, lambda P, n, w: 3 * n * ((P - 1) * w + P * max(w, 4)), "Q and dQ stay"),
    (check_bytes_sent_back, lambda P, n, w: 14 * n * w + 16 * n * max(w, 4), "wrong in 3 of 4 cases; with P = 5"),
    (check_bytes_sent_back, lambda P, n, w: 1.01 * ((P - 1) * 2 * n * w + P * 2 * n * max(w, 4)), "wrong in 4 of 4"),
    (check_bytes_sent_back, lambda P, n, w: "many", "expected a number, got str"),
    (check_bytes_sent_back, 46 * 2**30, "expected a function, got int"),
    (check_softmax_backward, lambda p, dp, out, d_out: p * (dp - (d_out * out).mean(-1, keepdim=True)), "not the mean"),
    (check_softmax_backward, lambda p, dp, out, d_out: p * dp - delta(out, d_out), "off by up to"),
    (check_softmax_backward, lambda p, dp, out, d_out: p * (delta(out, d_out) - dp), "off by up to"),
    (check_added_so_far, lambda rank, t, P: {(rank - t) % P}, "has just computed"),
    (check_added_so_far, lambda rank, t, P: [f"rank {(rank - i) % P}" for i in range(t + 1)], "a number, got str"),
    (check_added_so_far, lambda rank, t, P: {(rank - i) % P for i in range(t + 2)}, "round 0"),
    (
        check_added_so_far,
        lambda rank, t, P: {(rank - i) % P for i in range(t + 1)} if P < 9 else set(range(P)),
        "you say [0, 1, 2, 3, 4, 5, 6, 7, 8",
    ),
    (check_bytes_sent_back, lambda P, n, w: ((P - 1) * 2 * n * w + P * 2 * n * max(w, 4)) / 2**30, "wrong in 4 of 4"),
]
