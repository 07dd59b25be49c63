"""The puzzles: what each asks, what it counts, the best known, and what is proved.

    solve(4, my_ring)     runs my_ring on 3, 4 and 5 ranks, and shows the verdict, the score and the film

A result counts only if every rank returns what float64 attention of the whole sequence returns (or whatever the puzzle
asks). The numbers are new in each run. Stars: 1 for a right result, 2 for the goal, 3 for the best known.
"""

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from numpy import ndarray
from torch import Tensor

from notebooks.puzzles import film, solutions
from notebooks.puzzles.engine import Run, Wires, play
from notebooks.source.checks.answers import OPEN, NotYet, StillOpen, difference, items, plain
from ringlab.basics.naive_attention import naive_attention
from ringlab.support.drawing import Picture

WORLDS = (3, 4, 5)
SHOWN = 4  # the film shows this number of ranks, or the run that failed
H, C, D = 2, 4, 16  # heads, tokens of a rank, numbers of a head
CHUNK = H * C * D * 8  # bytes of a rank's K, or V, or Q, in float64
NEAR = 1e-10  # float64 rounds sums of some hundred numbers to 1e-13; float32 anywhere on the way costs 1e-8
WINDOWS = {3: 3, 4: 7, 5: 4}  # puzzle 8: keys that a query sees
Inputs = list[tuple[Any, ...]]  # by rank
Schedule = Callable[..., Any]
Best = Callable[[int], float]  # P -> a count


@dataclass(frozen=True)
class Count:
    """Something that a puzzle counts: the fewer, the better."""

    name: str
    of: Callable[[Run], float]
    best: Best  # the fewest that we know
    proof: str = ""  # why no schedule needs fewer; "": perhaps one does
    goal: Best | None = None  # enough for two stars; None: the best

    def enough(self, world_size: int) -> float:
        return (self.goal or self.best)(world_size)


@dataclass(frozen=True)
class Puzzle:
    title: str
    inputs: Callable[[int], Inputs]
    right: Callable[[Inputs], list[Any]]  # what each rank must return; None: anything
    wires: Callable[[int], Wires]  # for P ranks
    counts: tuple[Count, ...]
    block: str = "KV"  # what the film calls a block
    number_of: Callable[[float | None], int | None] | None = None  # of the block, from its first number; None: by owner
    trial: Callable[..., tuple[Run, str]] | None = None  # runs a schedule and says what is wrong; None: `played`


class Verdict:
    """What is said of a schedule, its stars and its film. A notebook shows them."""

    def __init__(self, text: str, stars: int, draw: Callable[[], Picture] | None = None) -> None:
        self.text, self.stars, self.draw = text, stars, draw

    def __repr__(self) -> str:
        return self.text

    def _ipython_display_(self) -> None:
        print(self.text)
        if self.draw:
            self.draw()._ipython_display_()


_best: dict[int, int] = {}  # by number of the puzzle: the stars of the reader's best schedule so far


def solve(number: int, schedule: Schedule) -> Verdict:
    """Run the reader's schedule for the puzzle of this number on each number of ranks, and judge it."""
    if number not in range(1, len(PUZZLES) + 1):
        raise ValueError(f"there is no puzzle {number!r}; expected a number from 1 to {len(PUZZLES)}")
    puzzle = PUZZLES[number - 1]
    head = f"puzzle {number} · {puzzle.title}: "
    if schedule is ...:
        return Verdict(head + OPEN, 0)
    runs: dict[int, Run] = {}
    for world_size in WORLDS:
        inputs = puzzle.inputs(world_size)
        try:
            run, problem = (puzzle.trial or played)(schedule, inputs, puzzle)
        except StillOpen:  # there is a `...` in a list
            return Verdict(head + OPEN, 0)
        if any(output is ... for output in run.outputs.values()):
            return Verdict(head + OPEN, 0)
        if problem:
            title = f"puzzle {number}, P = {world_size}: {'up to the fault' if run.fault else 'not right yet'}"
            return Verdict(f"{head}not yet. P = {world_size}: {problem}", 0, _film(puzzle, run, title))
        runs[world_size] = run
    enough, best = (_reach(puzzle, runs, operator.attrgetter(name)) for name in ("enough", "best"))
    stars = 3 if best else 1 + enough
    ours = getattr(schedule, "__module__", "") == solutions.__name__
    if not ours:
        _best[number] = max(stars, _best.get(number, 0))
    shown = _film(puzzle, runs[SHOWN], f"puzzle {number}, P = {SHOWN}")
    better = any(count.of(run) < count.best(P) - 1e-9 for P, run in runs.items() for count in puzzle.counts)
    word = {1: "right, but over the goal", 2: "solved", 3: "solved, as well as our best"}[stars]
    if stars == 3 and better:
        word = "solved, and better than our best"
    word += " (it is ours, of solutions.py, and counts in no score)" if ours else ""
    return Verdict(f"{head}{word}  {'★' * stars}{'☆' * (3 - stars)}\n{_table(puzzle, runs)}", stars, shown)


def _film(puzzle: Puzzle, run: Run, title: str) -> Callable[[], Picture]:
    return lambda: film.draw(run, title, puzzle.number_of or run.owners.get, puzzle.block)


def played(schedule: Schedule, inputs: Inputs, puzzle: Puzzle) -> tuple[Run, str]:
    P = len(inputs)
    run = play(schedule, inputs, puzzle.wires(P))
    problem = run.fault or _wrong(run, puzzle.right(inputs))
    return run, problem


def _reach(puzzle: Puzzle, runs: dict[int, Run], wanted: Callable[[Count], Best]) -> bool:
    return all(
        count.of(run) <= wanted(count)(world_size) + 1e-9 for world_size, run in runs.items() for count in puzzle.counts
    )


def _table(puzzle: Puzzle, runs: dict[int, Run]) -> str:
    """The counts of each run, beside the goal and the best known."""
    width = max(len(count.name) for count in puzzle.counts)
    lines = [f"{'':{width}}" + "".join(f"{f'P = {P}':>9}" for P in runs) + "    goal                 best known"]
    for count in puzzle.counts:
        got = "".join(f"{count.of(run):>9.4g}" for run in runs.values())
        goal, best = (_short([of(P) for P in runs]) for of in (count.enough, count.best))
        lines.append(f"{count.name:{width}}{got}    {goal:<21}{best}{', proved' if count.proof else ', no proof'}")
    lines += [f"proof, {count.name}: {count.proof}" for count in puzzle.counts if count.proof]
    return "\n".join(lines)


def _short(values: list[float]) -> str:
    if math.inf in values:
        return "any"
    written = [f"{value:.4g}" for value in values]
    return written[0] if len(set(written)) == 1 else ", ".join(written)


def _wrong(run: Run, right: list[Any]) -> str:
    """What is wrong with the results, in a sentence; "": nothing."""
    for rank, expected in enumerate(right):
        if expected is None:
            continue
        output = run.outputs[rank]
        if output is ...:
            raise StillOpen
        if isinstance(expected, Tensor):
            if problem := _off(output, expected):
                problem = _of_another(run, output, rank, right) or problem
                return f"rank {rank} returns a wrong result: {problem}{_met(run, rank)}"
            continue
        several = isinstance(output, list | Tensor | ndarray)
        if not several or len(output) != len(expected):
            what = f"{len(output)} things" if several else type(output).__name__
            return f"rank {rank} returns {what}; expected a list of {len(expected)} tensors"
        for i, (mine, x) in enumerate(zip(output, expected, strict=True)):
            if problem := _off(mine, x):
                problem = _of_another(run, mine, rank, [each and each[i] for each in right]) or problem
                return f"rank {rank} returns a list whose number {i} is wrong: {problem}"
    return ""


def _of_another(run: Run, x: Any, rank: int, right: list[Any]) -> str:
    """Whose numbers a wrong result has, or whose result it is; "": nobody's."""
    if not isinstance(x, Tensor):
        return ""
    owners = {run.owners.get(number) for number in x.flatten().tolist()}
    if len(owners) == 1 and None not in owners:
        return f"these are numbers of rank {owners.pop()}"
    others = (j for j, result in enumerate(right) if j != rank and isinstance(result, Tensor) and not _off(x, result))
    return next((f"that is what rank {j} must return" for j in others), "")


def _met(run: Run, rank: int) -> str:
    """On which blocks a rank computed, from the record."""
    blocks = [run.owners.get(work.number) for work in run.works if work.rank == rank]
    named = ", ".join("computed keys" if block is None else f"KV{block}" for block in blocks)
    return f". It computed on {named}" if blocks else ""


def _off(x: Any, expected: Tensor) -> str:
    problem = difference(x, expected, NEAR)
    digits = ". Some digits are lost: float32 on the way?" if problem and not difference(x, expected) else ""
    return f"{problem}{digits}" if problem else ""


# What the puzzles share ---------------------------------------------------------------------------------------------


def _random(*shape: int) -> Tensor:
    """Numbers that no earlier run had."""
    generator = torch.Generator()
    generator.seed()
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def _one_each(world_size: int, *more: Any) -> Inputs:
    return [(_random(8), *more) for _ in range(world_size)]


def _qkv(world_size: int, *more: Any, heads: tuple[int, int, int] = (H, H, H)) -> Inputs:
    return [(*(_random(1, each, C, D) for each in heads), *more) for _ in range(world_size)]


def _whole(inputs: Inputs, i: int) -> Tensor:
    return torch.cat([mine[i] for mine in inputs], dim=2)


def _rows(out: Tensor, world_size: int) -> list[Tensor]:
    return list(out.chunk(world_size, dim=2))


def _attention(inputs: Inputs) -> list[Tensor]:
    q, k, v = (_whole(inputs, i) for i in range(3))
    heads = q.shape[1] // k.shape[1]
    out = naive_attention(q, k.repeat_interleave(heads, 1), v.repeat_interleave(heads, 1))
    return _rows(out, len(inputs))


def _chunks(best: Best, **more: Any) -> Count:
    """Chunks (of K, or of V) that the busiest rank sends."""

    def sent(run: Run) -> float:
        return max(sum(it.size for it in run.messages if it.source == rank) for rank in range(run.world_size)) / CHUNK

    return Count("chunks that a rank sends", sent, best, **more)


def _timed(best: Best, proof: str = "", name: str = "time", **more: Any) -> Count:
    return Count(name, lambda run: run.time, best, proof, **more)


SHARED = "all ranks compute all pairs together, so one of P has at least a P-th of them."
DOUBLING = "a message joins what two ranks know, so after t rounds a result depends on at most 2^t ranks."

# 1 to 3: messages alone -----------------------------------------------------------------------------------------------

HOP = Puzzle(
    "one hop, blocking",
    inputs=_one_each,
    right=lambda inputs: [inputs[rank - 1][0] for rank in range(len(inputs))],
    wires=lambda P: Wires(blocking=True),
    counts=(_timed(lambda P: 2 + P % 2, "of P messages, P // 2 move at once: a blocking rank is in one at a time."),),
    block="x",
)

GATHER = Puzzle(
    "everybody gets everything",
    inputs=_one_each,
    right=lambda inputs: [[mine[0] for mine in inputs]] * len(inputs),
    wires=lambda P: Wires(time=lambda source, to, size: size / 64),
    counts=(
        _timed(lambda P: P - 1, "a rank lacks P - 1 blocks, and its one wire in brings a block in a unit of time."),
    ),
    block="x",
)


def _summed(number: float | None) -> int | None:
    """The chunk of a (partial) sum: n ranks' first numbers of chunk j are n (1 + j / 100) together."""
    count = int(number or 0)
    return round(100 * (number / count - 1)) if number and count and 1 <= count <= 8 else None


def _to_sum(world_size: int) -> Inputs:
    inputs = []
    for _ in range(world_size):
        xs = _random(world_size, 8)
        xs[:, 0] = 1 + torch.arange(world_size) / 100  # tells the film which chunk it is
        inputs.append((xs,))
    return inputs


SUM = Puzzle(
    "sums, a part for each rank",
    inputs=_to_sum,
    right=lambda inputs: list(torch.stack([mine[0] for mine in inputs]).sum(dim=0)),
    wires=lambda P: Wires(time=lambda source, to, size: size / 64),
    counts=(
        _timed(lambda P: P - 1, "P - 1 other parts need its numbers, and its wire out takes a part in a unit of time."),
    ),
    block="sum ",
    number_of=_summed,
)

# 4 to 6: the ring -----------------------------------------------------------------------------------------------------


def _blocks(world_size: int) -> Wires:
    """K and V of a chunk travel in a unit of time, and a rank computes on them in another."""
    return Wires(time=lambda source, to, size: size / (2 * CHUNK), block=H * C * C)


def _pairs(run: Run) -> float:
    """Query-key pairs of the busiest rank, of one head of keys."""
    return max(sum(it.pairs for it in run.works if it.rank == rank) for rank in range(run.world_size)) / H


def _share(heads: int) -> Count:
    """With so many query heads on a head of keys."""
    return Count("pairs of the busiest rank", _pairs, lambda P: heads * C * C * P, SHARED)


def _computed(schedule: Schedule, inputs: Inputs, puzzle: Puzzle) -> tuple[Run, str]:
    """play, where all computing must be counted."""
    run, problem = played(schedule, inputs, puzzle)
    pairs, needed = sum(work.pairs for work in run.works), inputs[0][0].shape[1] * (C * len(inputs)) ** 2
    how = "comm.gradients" if puzzle is HOME else "comm.attend"
    if not problem and pairs < needed:
        problem = (
            f"{how} computed {pairs:g} of {needed:g} query-key pairs; computing elsewhere is not on the clock: "
            f"compute with {how}, so that the work of each rank is counted"
        )
    return run, problem


def _held(run: Run) -> float:
    return max(run.held.values()) / CHUNK


RING = Puzzle(
    "the ring",
    inputs=_qkv,
    right=_attention,
    wires=_blocks,
    counts=(
        _chunks(lambda P: 2 * (P - 1)),
        Count("chunks held", _held, lambda P: 3 + 2 / D + 1 / (H * C), goal=lambda P: 5 + 2 / D),
    ),
)

GROUPED = Puzzle(
    "grouped queries",
    inputs=partial(_qkv, heads=(2 * H, H, H)),
    right=_attention,
    wires=lambda P: replace(_blocks(P), block=2 * H * C * C),
    counts=(_chunks(lambda P: 2 * (P - 1)), _share(2)),
    trial=_computed,
)


def _for_gradients(world_size: int) -> Inputs:
    q, k, v, d_out = (_random(1, H, C * world_size, D) for _ in range(4))
    scores = q @ k.mT / math.sqrt(D)
    delta = (d_out * (torch.softmax(scores, -1) @ v)).sum(-1)
    whole = (q, k, v, d_out, torch.logsumexp(scores, -1), delta)
    return list(zip(*(x.chunk(world_size, dim=2) for x in whole), strict=True))


def _gradients(inputs: Inputs) -> list[list[Tensor]]:
    q, k, v = (_whole(inputs, i).requires_grad_() for i in range(3))
    naive_attention(q, k, v).backward(_whole(inputs, 3))
    return [list(mine) for mine in zip(*(_rows(x.grad, len(inputs)) for x in (q, k, v)), strict=True)]


HOME = Puzzle(
    "the gradients' trip home",
    inputs=_for_gradients,
    right=_gradients,
    wires=_blocks,
    counts=(_chunks(lambda P: 4 * (P - 1), goal=lambda P: 4 * P - 2), _share(1)),
    trial=_computed,
)

# 7 and 8: masks -------------------------------------------------------------------------------------------------------


def _idle(run: Run) -> float:
    """Time in which a rank neither computes nor has a message under way, until the last rank ends; of all ranks."""
    idle = 0.0
    for rank in range(run.world_size):
        spans = [(work.begin, work.end) for work in run.works if work.rank == rank]
        spans += [(message.begin, message.end) for message in run.messages if rank in (message.source, message.to)]
        now = 0.0
        for begin, end in [*sorted(spans), (run.time, run.time)]:
            idle += max(0.0, begin - now)
            now = max(now, end)
    return idle


TOKENS = 2 * C  # of a rank, in puzzle 7


def _dealt(tokens: Schedule, inputs: Inputs, puzzle: Puzzle) -> tuple[Run, str]:
    """Ask each rank for its tokens, and let a causal ring run with them."""
    P, S = len(inputs), inputs[0][0]
    run = play(tokens, inputs, puzzle.wires(P))
    if run.fault or any(run.outputs.get(rank) is ... for rank in range(P)):
        return run, run.fault
    places = []
    for rank in range(P):
        try:
            mine = [plain(x) for x in items(run.outputs[rank], f"a list of tokens, 0 to {S - 1}")]
        except NotYet as problem:
            return run, f"rank {rank}: {problem}"
        if len(mine) != S // P:
            return run, f"rank {rank} takes {len(mine)} tokens; each of {P} ranks must take {S // P} of the {S}"
        places.append(mine)
    owners: dict[float, list[int]] = {token: [] for token in range(S)}
    for rank, mine in enumerate(places):
        for token in mine:
            if token not in owners:
                return run, f"rank {rank} takes token {token}; there are tokens 0 to {S - 1}"
            owners[token].append(rank)
    for token, ranks in owners.items():
        if len(ranks) != 1:
            return run, f"token {token} is on {f'ranks {ranks}' if ranks else 'no rank'}; expected exactly one"
    q, k, v = (_random(1, H, S, D) for _ in range(3))
    at = [torch.tensor(mine).long() for mine in places]
    run = play(solutions.causal_ring, [(*(x[:, :, mine] for x in (q, k, v)), at) for mine in at], puzzle.wires(P))
    out = naive_attention(q, k, v, causal=True)
    return run, run.fault or _wrong(run, [out[:, :, mine] for mine in at])


BALANCE = Puzzle(
    "a fair share of a causal mask",
    inputs=lambda P: [(TOKENS * P,)] * P,
    right=lambda inputs: [None] * len(inputs),
    wires=lambda P: Wires(time=lambda source, to, size: size / (4 * CHUNK), block=H * TOKENS * TOKENS),
    counts=(
        Count(
            "pairs of the busiest rank",
            _pairs,
            lambda P: TOKENS * (TOKENS * P + 1) / 2,
            goal=lambda P: 1.25 * TOKENS * (TOKENS * P + 1) / 2,
            proof=SHARED,
        ),
        Count("time that ranks are idle", _idle, lambda P: 0, "no time is less than none.", goal=lambda P: math.inf),
    ),
    trial=_dealt,
)


def _in_window(inputs: Inputs) -> list[Tensor]:
    q, k, v = (_whole(inputs, i) for i in range(3))
    at = torch.arange(C * len(inputs))
    hidden = (at > at[:, None]) | (at <= at[:, None] - inputs[0][3])
    return _rows(torch.softmax((q @ k.mT / math.sqrt(D)).masked_fill(hidden, -math.inf), dim=-1) @ v, len(inputs))


def _keys_in(run: Run) -> float:
    """Keys, with their values, that come to the busiest rank."""
    return max(sum(it.size for it in run.messages if it.to == rank) for rank in range(run.world_size)) / (2 * H * D * 8)


WINDOW = Puzzle(
    "a window",
    inputs=lambda P: _qkv(P, WINDOWS[P]),
    right=_in_window,
    wires=_blocks,
    counts=(
        Count(
            "keys that come to a rank", _keys_in, lambda P: WINDOWS[P] - 1, goal=lambda P: -(-(WINDOWS[P] - 1) // C) * C
        ),
    ),
)

# 9: wires -------------------------------------------------------------------------------------------------------------

TWO_RINGS = Puzzle(
    "two directions at once",
    inputs=_qkv,
    right=_attention,
    wires=lambda P: replace(_blocks(P), neighbours=True),
    counts=(_timed(lambda P: P + (P - 1) / 2, goal=lambda P: P + math.ceil((P - 1) / 2)),),
    trial=_computed,
)


# 10: who needs what ---------------------------------------------------------------------------------------------------


def _for_a_token(world_size: int) -> Inputs:
    q = _random(1, H, 1, D)
    return [(q, *(_random(1, H, C, D) for _ in range(2))) for _ in range(world_size)]


def _of_a_token(inputs: Inputs) -> list[Any]:
    k, v = _whole(inputs, 1), _whole(inputs, 2)
    return [torch.softmax(inputs[0][0] @ k.mT / math.sqrt(D), -1) @ v] + [None] * (len(inputs) - 1)


TOKEN = Puzzle(
    "one new token",
    inputs=_for_a_token,
    right=_of_a_token,
    wires=lambda P: Wires(),
    counts=(
        Count(
            "messages",
            lambda run: len(run.messages),
            lambda P: P - 1,
            proof="each rank but rank 0 must send at least once, or its keys cannot matter.",
        ),
        Count(
            "numbers in the largest message",
            lambda run: max((it.size / 8 for it in run.messages), default=0),
            lambda P: H * (D + 1),
        ),
        _timed(lambda P: math.ceil(math.log2(P)), DOUBLING, "rounds", goal=lambda P: P - 1),
    ),
)

PUZZLES = (HOP, GATHER, SUM, RING, GROUPED, HOME, BALANCE, WINDOW, TWO_RINGS, TOKEN)


def score_card() -> Verdict:
    """The stars of the best schedule for each puzzle, of this session."""
    lines = [f"{sum(_best.values())} of {3 * len(PUZZLES)} stars"]
    for number, puzzle in enumerate(PUZZLES, 1):
        stars = _best.get(number, 0)
        lines.append(f"{number:>3}  {'★' * stars}{'☆' * (3 - stars)}  {puzzle.title}")
    return Verdict("\n".join(lines), 0)
