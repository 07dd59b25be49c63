"""Checks of chapter 6: the order of the overlapped ring, the hidden share."""

from notebooks.source.checks.answers import Exercise


def _by_round(*whats, hops=-1):
    """The steps of a round in this order, for P rounds and so many hops more, and the last block."""
    return lambda P: [(what, t) for t in range(P + hops) for what in whats] + [("compute", P - 1)] * -hops


def _first(*whats):
    """All steps of one kind before all of the next."""
    return lambda P: [(what, t) for what in whats for t in range(P if what == "compute" else P - 1)]


check_overlap_order = Exercise(  # P -> the ("post", t), ("compute", t), ("wait", t) of one rank, with two buffers
    right=_by_round("post", "compute", "wait"),
    wrong={
        "this is exact and hides nothing: compute on block t between post and wait": (
            _by_round("post", "wait", "compute")
        ),
        "this is exact and hides nothing; compute on block t after its post, not before it": (
            _by_round("compute", "post", "wait")
        ),
        "('wait', t) comes before ('post', t): it would wait for nothing": _by_round("wait", "post", "compute"),
        "after the last round nobody sends: P - 1 hops": _by_round("post", "compute", "wait", hops=0),
        "each block is computed on, too": _by_round("post", "wait"),
        "('compute', t + 1) comes before ('wait', t): block t + 1 may not be there": _first("compute", "post", "wait"),
        "('post', t + 1) comes before ('wait', t): block t + 1 cannot be sent yet": _first("post", "compute", "wait"),
        "('post', t + 1) fills the buffer of block t, which is not computed on yet": (
            lambda P: _by_round("post", "wait")(P)[:-1] + _first("compute")(P)
        ),
    },
    cases={"in each round post, compute, wait, and after P - 1 hops the last block": [(P,) for P in (3, 4, 5, 2, 1)]},
    draw=lambda random: (random.randint(6, 20),),
)

check_hidden_by_overlap = Exercise(  # seconds of a round -> the share of the messages' time that is hidden
    right=lambda computing, messages: min(1.0, computing / messages),
    wrong={
        "no more than all of it can be hidden": lambda computing, messages: computing / messages,
        "turned over: divide the computing by the messages": lambda computing, messages: messages / computing,
        "turned over: the computing covers the messages": lambda computing, messages: min(1, messages / computing),
        "give a share from 0 to 1, not per cent": lambda computing, messages: 100 * min(1.0, computing / messages),
        "that is the share that is not hidden": lambda computing, messages: max(0.0, 1 - computing / messages),
        "that is the time that is hidden; divide it by the messages' time": min,
        "divide by the messages' time, not by the time of both": (
            lambda computing, messages: min(computing, messages) / (computing + messages)
        ),
        "computing may cover a part of the messages; it need not be all or nothing": (
            lambda computing, messages: float(computing >= messages)
        ),
    },
    cases={
        "computing covers as many seconds of the messages as it lasts, and no more than there are": [
            (0.5, 2.0),
            (2.0, 2.0),
            (3.0, 2.0),
            (2.0, 5.0),
        ]
    },
    draw=lambda random: (random.uniform(0.1, 9), random.uniform(0.1, 9)),
)
