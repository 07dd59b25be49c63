"""Wrong answers to the exercises of chapter 6, and what each must be told."""

from notebooks.checks.overlap import check_hidden_by_overlap, check_overlap_order


def steps(world_size, *whats):
    """The steps of a rank of the overlapped ring, round by round, in this order in each round."""
    return [(what, t) for t in range(world_size - 1) for what in whats] + [("compute", world_size - 1)]


def all_posts_first(step):
    return step[0] != "post", step[1], step[0]


def computes_last(step):
    return step[0] == "compute", step[1], step[0]


KNOWN = [(0.5, 2.0), (2.0, 2.0), (3.0, 2.0), (2.0, 5.0)]

WRONG_ANSWERS = [
    (check_overlap_order, lambda P: steps(P, "post", "wait", "compute"), "hides nothing"),
    (check_overlap_order, lambda P: steps(P, "wait", "post", "compute"), "wait for nothing"),
    (check_overlap_order, lambda P: [*steps(P, "post", "compute", "wait"), ("post", P - 1)], "nobody sends"),
    (check_overlap_order, lambda P: steps(P, "post", "wait"), "is there 0 times"),
    (check_overlap_order, lambda P: [*steps(P, "post", "compute", "wait"), ("rest", 0)], "no step ('rest', 0)"),
    (check_overlap_order, lambda P: sorted(steps(P, "post", "compute", "wait")), "may not be there"),
    (
        check_overlap_order,
        lambda P: sorted(steps(P, "post", "compute", "wait"), key=all_posts_first),
        "cannot be sent",
    ),
    (
        check_overlap_order,
        lambda P: sorted(steps(P, "post", "compute", "wait"), key=computes_last),
        "fills the buffer",
    ),
    (check_overlap_order, lambda P: P, "expected a list, got int"),
    (check_overlap_order, lambda P: steps(P + P % 2, "post", "compute", "wait"), "P = 5: ('post', 4) is there 1 times"),
    (check_overlap_order, lambda P: steps(4, "post", "compute", "wait"), "P = 5: ('post', 3) is there 0 times"),
    (check_hidden_by_overlap, lambda computing, messages: computing / messages, "no more than all"),
    (check_hidden_by_overlap, lambda computing, messages: messages / computing, "turned over: divide"),
    (check_hidden_by_overlap, lambda computing, messages: min(1, messages / computing), "turned over: the computing"),
    (check_hidden_by_overlap, lambda computing, messages: max(0, 1 - computing / messages), "not hidden"),
    (check_hidden_by_overlap, min, "divide it by"),
    (check_hidden_by_overlap, lambda computing, messages: min(computing, messages) / (computing + messages), "of both"),
    (check_hidden_by_overlap, lambda computing, messages: float(computing >= messages), "all or nothing"),
    (check_hidden_by_overlap, lambda computing, messages: 100 * min(1, computing / messages), "not per cent"),
    (check_hidden_by_overlap, lambda computing, messages: 0.25, "wrong in 3 of 4 cases; with computing = 2.0"),
    (
        check_hidden_by_overlap,
        lambda computing, messages: min(1, round(computing / messages, 2)) * 1.01,
        "wrong in 4 of 4",
    ),
    (check_hidden_by_overlap, lambda computing, messages: min(1, computing / 2), "messages = 5.0 you say 1"),
    (check_hidden_by_overlap, lambda computing, messages: "all", "expected a number"),
    (check_overlap_order, lambda P: ["post", "compute", "wait"] * P, 'expected steps such as ("post", 0), got'),
    (check_overlap_order, lambda P: [("post",)], 'expected steps such as ("post", 0), got'),
    (check_overlap_order, lambda P: {"post": 0}, "expected a list, got dict"),
    (check_overlap_order, lambda P: steps(min(P, 5), "post", "compute", "wait"), "is there 0 times"),
    (check_overlap_order, lambda P: 2 * steps(P, "post", "compute", "wait"), "is there 2 times; each step once"),
    (check_hidden_by_overlap, lambda c, m: min(1, c / m) if (c, m) in KNOWN else 0.5, "right in 4 cases, but with"),
]
