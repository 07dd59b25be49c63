"""Checks of chapter 6: the order of the overlapped ring, the hidden share."""

from notebooks.source.checks.answers import Exercise, NotYet, draws, exercise, items, number


@exercise
def check_overlap_order(answer):
    """P -> the ("post", t), ("compute", t), ("wait", t) of one rank of the overlapped ring, with two buffers."""
    idle = None  # told last: what is wrong comes first
    for world_size in (3, 4, 5, 2, 1, *(random.randint(6, 20) for random in draws())):
        given, where = [_step(step) for step in items(answer(world_size))], f"P = {world_size}: "
        place = {step: i for i, step in enumerate(given)}
        for t in range(world_size):
            needed = ("post", "compute", "wait") if t < world_size - 1 else ("compute",)
            for what in ("post", "compute", "wait"):
                if given.count((what, t)) != (what in needed):
                    hint = "after the last round nobody sends" if what not in needed else "each step once"
                    raise NotYet(f"{where}{(what, t)} is there {given.count((what, t))} times; {hint}")
        if unknown := set(given) - {(what, t) for what in ("post", "compute", "wait") for t in range(world_size)}:
            raise NotYet(f"{where}there is no step {min(unknown)}")
        for t in range(world_size - 1):
            post, compute, wait = (place[what, t] for what in ("post", "compute", "wait"))
            if wait < post:
                raise NotYet(f"{where}('wait', {t}) comes before ('post', {t}): it would wait for nothing")
            if place["compute", t + 1] < wait:
                raise NotYet(f"{where}('compute', {t + 1}) comes before ('wait', {t}): block {t + 1} may not be there")
            if t < world_size - 2 and place["post", t + 1] < wait:
                raise NotYet(f"{where}('post', {t + 1}) comes before ('wait', {t}): block {t + 1} cannot be sent yet")
            if t < world_size - 2 and place["post", t + 1] < compute:
                raise NotYet(f"{where}('post', {t + 1}) fills the buffer of block {t}, which is not computed on yet")
            if not post < compute < wait:
                idle = idle or f"{where}this is exact and hides nothing: compute on block {t} between post and wait"
    if idle:
        raise NotYet(idle)


def _step(given):
    if not isinstance(given, list | tuple) or len(given) != 2 or not isinstance(given[0], str):
        raise NotYet(f'expected steps such as ("post", 0), got {given!r}')
    return given[0], number(given[1])


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
