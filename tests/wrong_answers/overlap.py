"""Wrong answers to the exercises of chapter 6, and what each must be told."""

from notebooks.checks.overlap import check_hidden_by_overlap, check_overlap_order, check_smallest_chunk


def steps(world_size, *whats):
    """The steps of a rank of the overlapped ring, round by round, in this order in each round."""
    return [(what, t) for t in range(world_size - 1) for what in whats] + [("compute", world_size - 1)]


def all_posts_first(step):
    return step[0] != "post", step[1], step[0]


def computes_last(step):
    return step[0] == "compute", step[1], step[0]


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
    (check_overlap_order, lambda P: P, "not the kind of answer"),
    (check_hidden_by_overlap, lambda computing, messages: computing / messages, "no more than all"),
    (check_hidden_by_overlap, lambda computing, messages: messages / computing, "turned over"),
    (check_hidden_by_overlap, lambda computing, messages: max(0, 1 - computing / messages), "not hidden"),
    (check_hidden_by_overlap, min, "divide it by"),
    (
        check_hidden_by_overlap,
        lambda computing, messages: min(computing, messages) / (computing + messages),
        "all of it",
    ),
    (check_hidden_by_overlap, lambda computing, messages: 0.1, "the rest is"),
    (check_smallest_chunk, 312e12 / 25e9, "only 8 of 32"),
    (check_smallest_chunk, 4 * 312e12 / 25e9, "a shorter chunk"),
    (check_smallest_chunk, 6240, "2 bytes"),
    (check_smallest_chunk, 1560, "K and V travel"),
    (check_smallest_chunk, 7, "you say 7"),
]
