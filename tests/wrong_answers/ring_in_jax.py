"""Wrong answers to the exercises of chapter 11, and what each must be told."""

from notebooks.checks.ring_in_jax import check_arrays_passed_on, check_pairs_of_a_hop, check_scan_in_python


def adding_scan(body, carry, xs):
    """Right for numbers, where the body adds."""
    outputs = []
    for x in xs:
        outputs.append(body(carry, x)[1])
        carry = carry + x
    return carry, outputs


def last_output_only(body, carry, xs):
    output = []
    for x in xs:
        carry, output = body(carry, x)
    return carry, [output]


def right_scan(body, carry, xs):
    outputs = []
    for x in xs:
        carry, output = body(carry, x)
        outputs.append(output)
    return carry, outputs


def reversed_outputs(body, carry, xs):
    carry, outputs = right_scan(body, carry, xs)
    return carry, outputs[::-1]


WRONG_ANSWERS = [
    (check_pairs_of_a_hop, lambda P: [(i, i + 1) for i in range(P)], "after the last comes the first"),
    (check_pairs_of_a_hop, lambda P: [(i, (i - 1) % P) for i in range(P)], "the other way"),
    (check_pairs_of_a_hop, lambda P: [(i, i) for i in range(P)], "nothing moves"),
    (check_pairs_of_a_hop, lambda P: [(i, i + 1) for i in range(P - 1)], "the circle is open"),
    (check_pairs_of_a_hop, lambda P: [(0, i) for i in range(P)], "send once and receive once"),
    (check_pairs_of_a_hop, lambda P: [(0, 1), (1, 2), (2, 3), (3, 0)], "P = 3"),
    (check_pairs_of_a_hop, lambda P: [(i, (i + 1) % (P - P % 2)) for i in range(P)], "P = 3"),
    (check_pairs_of_a_hop, lambda P: P, "expected a list of pairs, got int"),
    (check_scan_in_python, lambda body, carry, xs: ([], carry), "the last carry first"),
    (check_scan_in_python, lambda body, carry, xs: (body(carry, xs[-1])[0], []), "of the round before"),
    (check_scan_in_python, lambda body, carry, xs: (carry + sum(xs), list(xs)), "second result"),
    (check_scan_in_python, last_output_only, "second result"),
    (check_scan_in_python, lambda body, carry, xs: (16, [10, 11, 13]), "with no rounds"),
    (check_scan_in_python, adding_scan, "ends in TypeError"),
    (check_scan_in_python, lambda body, carry, xs: carry, "expected 2 values (carry, outputs), got int"),
    (check_arrays_passed_on, lambda P: 2 * (P - 1), "that is the forward pass"),
    (check_arrays_passed_on, lambda P: 2 * (P - 1) + 2 * P, "round twice"),
    (check_arrays_passed_on, lambda P: 6 * (P - 1), "home"),
    (check_arrays_passed_on, lambda P: 6 * P, "need not come home"),
    (check_arrays_passed_on, lambda P: 3 * P - 2, "two arrays"),
    (check_arrays_passed_on, lambda P: 7 * P - 4, "dQ does not travel"),
    (check_arrays_passed_on, lambda P: 20, "wrong in 4 of 5 cases; with P = 8"),
    (check_arrays_passed_on, lambda P: 12 * (P // 2) - 4, "wrong in 2 of 5 cases; with P = 5"),
    (check_arrays_passed_on, lambda P: None, "expected a number"),
    (check_pairs_of_a_hop, lambda P: {i: (i + 1) % P for i in range(P)}, "expected a list of pairs, got dict"),
    (check_pairs_of_a_hop, lambda P: [(i, (i + 1) % P, 0) for i in range(P)], "expected pairs (from, to), got"),
    (check_pairs_of_a_hop, lambda P: [((i + 1) % P, i) for i in range(P)], "the other way"),
    (check_pairs_of_a_hop, lambda P: 2 * [(i, (i + 1) % P) for i in range(P)], "send once and receive once"),
    (check_pairs_of_a_hop, lambda P: [(i, (i + 1) % P) for i in range(min(P, 5))], "send once and receive once"),
    (check_scan_in_python, lambda body, carry, xs: right_scan(body, carry, xs)[::-1], "return the last carry first"),
    (check_scan_in_python, lambda body, carry, xs: right_scan(body, carry, xs[::-1]), "second result"),
    (check_scan_in_python, reversed_outputs, "in the order of the rounds"),
]
