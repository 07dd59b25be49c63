"""What a person who rents GPUs wants to know: the fastest way, its time, what fits, what binds, what to change first.

    search      every cp, tp, recomputation and way of ways.py that fits the memory, by tokens/s of a GPU
    binds       the term of whole_step.py that takes most of the step
    change      the planner is asked again with that change; nothing here is a rule of thumb

A reader may skip this file: whole_step.py predicts a step, and this file asks it many times.

Shapes: numbers only. Before: whole_step.py. After: cost_model.py, the command.
Source: none; the numbers are those of whole_step.py.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ringlab.planning.presets import GIB
from ringlab.planning.ranking import digits
from ringlab.planning.scoreboard import interval
from ringlab.planning.ways import WAYS, splits
from ringlab.planning.whole_step import RECOMPUTE, Step, step_bytes, step_seconds

CONTEXT = 1.5 * GIB  # bytes that CUDA and NCCL take for themselves: assumed
SHOWN = 5  # rows of the table
NEAR = 1.02  # times as long is nearly as fast: the simulation is no finer
SIMULATED = 1024  # GPUs, at most: a plan of so many takes a minute
GRAIN = 1024  # tokens: the longest context is a multiple
LONGEST = 2**30 - GRAIN  # tokens: longer ones are not sought


@dataclass(frozen=True)
class Answer:
    """A step, and what whole_step.py says of it."""

    step: Step

    @cached_property
    def terms(self) -> dict[str, float]:
        return step_seconds(self.step)

    @cached_property
    def memory(self) -> dict[str, float]:
        return step_bytes(self.step)

    @property
    def seconds(self) -> float:
        return sum(self.terms.values())

    @property
    def speed(self) -> float:
        """Tokens/s of a GPU."""
        return self.step.tokens / self.seconds

    @property
    def held(self) -> float:
        """Bytes of a GPU at the peak, with those of CUDA and NCCL."""
        return sum(self.memory.values()) + CONTEXT

    @property
    def fits(self) -> bool:
        return self.held <= self.step.gpu.memory

    @property
    def utilisation(self) -> float:
        """The share of the bf16 peak that the model's own FLOPs take: nothing is counted that is computed again."""
        model, step = self.step.model, self.step
        products = 6 * (model.matrices + model.hidden * model.vocab)
        attention = 3 * 4 * (step.seq_len / 2) * model.heads * model.head_dim * model.layers
        return self.speed * (products + attention) / step.gpu.peak["bf16"]

    @property
    def name(self) -> str:
        """The way among cp GPUs, and how the step is shared."""
        step = self.step
        way = "no ring" if step.cp == 1 else step.way + (f" of {step.split}" if step.split else "")
        return f"{way}, cp {step.cp}, tp {step.tp}, recompute {step.recompute}"


def ways_of(step: Step) -> Iterator[Step]:
    """The step with each way that can be, among its cp GPUs."""
    if step.cp == 1:
        yield step
        return
    ring = step.ring
    for way in WAYS:
        if way == "double ring" and min(ring.hosts, ring.per_host) == 1:
            continue  # it is the ring
        meshes = [g for g in splits(step.share, ring) if 1 < g < step.cp] if way == "hybrid" else [None]
        for split in meshes:
            if split is None or ring.per_host % split == 0 or split % ring.per_host == 0:
                yield replace(step, way=way, split=split)


def divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


@dataclass(frozen=True)
class Wish:
    """What is fixed: None leaves it to the search."""

    cp: int | None = None
    tp: int | None = None
    recompute: str | None = None


def candidates(step: Step, wish: Wish) -> Iterator[Answer]:
    """Every way to share the step that is possible, whether it fits or not."""
    for tp in [wish.tp] if wish.tp else divisors(step.per_host):
        if step.model.heads % tp:
            continue
        for cp in [wish.cp] if wish.cp else divisors(step.gpus // tp):
            if step.seq_len < cp * tp:
                continue
            for recompute in [wish.recompute] if wish.recompute else RECOMPUTE:
                for each in ways_of(replace(step, cp=cp, tp=tp, recompute=recompute)):
                    answer = Answer(each)
                    try:
                        answer.memory  # noqa: B018
                    except ValueError:
                        continue  # more GPUs than heads
                    yield answer


def best(step: Step, wish: Wish) -> list[Answer]:
    """All that fit, the fastest first: by tokens/s of a GPU."""
    return sorted((each for each in candidates(step, wish) if each.fits), key=lambda each: -each.speed)


def longest(step: Step, wish: Wish) -> int:
    """The longest sequence that fits, in tokens: a multiple of `GRAIN`, 0 if none does."""

    def fits(seq_len: int) -> bool:
        return any(each.fits for each in candidates(replace(step, seq_len=seq_len), tightest))

    tightest = replace(wish, recompute=wish.recompute or "full")
    low, high = 0, 1
    while high * GRAIN <= LONGEST and fits(high * GRAIN):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle * GRAIN) else (low, middle)
    return low * GRAIN


def changes(step: Step) -> dict[str, Step]:
    """What could be changed, and the step with the change."""
    gpu = step.gpu

    def twice(of_gpu: str, of_machine: str) -> Step:
        """The step with a rate that is twice as high, of the GPU and of a measured machine."""
        own = step.machine and replace(step.machine, **{of_machine: 2 * getattr(step.machine, of_machine)})
        return replace(step, gpu=replace(gpu, **{of_gpu: 2 * getattr(gpu, of_gpu)}), machine=own)

    found = {
        "links inside a host twice as fast": twice("link", "bandwidth"),
        "memory twice as fast": twice("memory_bandwidth", "memory_bandwidth"),
        "twice the memory": replace(step, gpu=replace(gpu, memory=2 * gpu.memory)),
        "twice the batch": replace(step, batch=2 * step.batch),
    }
    if step.hosts > 1:
        found["NICs twice as fast"] = twice("card", "host_bandwidth")
    if step.linear_dtype != "fp8" and "fp8" in gpu.peak:
        found["FP8 products"] = replace(step, linear_dtype="fp8")
    return found


def gains(step: Step, wish: Wish) -> list[tuple[float, str, Answer]]:
    """For each change, how many times as many tokens/s the best way then has; the largest gain first."""
    now = best(step, wish)[0]
    found = []
    for name, changed in changes(step).items():
        ranked = best(changed, wish)
        if ranked:
            found.append((ranked[0].speed / now.speed, name, ranked[0]))
    return sorted(found, key=lambda each: -each[0])


def show_answers(step: Step, wish: Wish) -> None:
    """Print the answers, the advice last."""
    gpu, model = step.gpu, step.model
    active = f" ({digits(model.parameters(active=True) / 1e9)} active)" if model.experts else ""
    print(f"{model.name}: {digits(model.parameters() / 1e9)} billion parameters{active}; modelled, not measured")
    print(f"{step.hosts} x {step.per_host} {gpu.name} of {digits(gpu.memory / GIB)} GiB; {gpu.source}")
    most = longest(step, wish)
    print(f"longest context       {most:,} tokens{' or more' if most == LONGEST else ''}")
    print(f"a step at S = {step.seq_len:,}, batch {step.batch} of each replica, {step.linear_dtype} products")
    ranked = best(step, wish)
    if not ranked:
        show_what_is_missing(step, wish)
        return
    print("    tokens/s a GPU        s     GiB  way")
    for each in ranked[:SHOWN]:
        print(f"    {digits(each.speed):>14} {digits(each.seconds):>8} {digits(each.held / GIB):>7}  {each.name}")
    first = ranked[0]
    show_terms(first)
    low, high = map(digits, interval(first.seconds))
    print(f"interval              {low} to {high} s, if the step is as far off as attention on the scoreboard")
    for gain, name, answer in gains(step, wish)[:3]:
        print(f"with {name:<34} {gain - 1:+.0%} tokens/s: {answer.name}")
    print(f"advice                {advice(ranked)}")


def show_terms(answer: Answer) -> None:
    """Print what the time and the memory of a step are made of, and what takes most of the time."""
    name, seconds = max(answer.terms.items(), key=lambda each: each[1])
    shares = ", ".join(f"{each} {digits(s)}" for each, s in answer.terms.items() if s > 0.005 * answer.seconds)
    print(f"seconds               {shares}: {answer.utilisation:.0%} of the bf16 peak")
    print(f"binds                 {name}, {seconds / answer.seconds:.0%} of the step")
    show_memory(answer)


def show_memory(answer: Answer) -> None:
    """Print what the memory of a GPU holds at the peak."""
    parts = ", ".join(f"{each} {digits(size / GIB)}" for each, size in answer.memory.items())
    print(f"GiB of a GPU          {parts}, CUDA and NCCL {digits(CONTEXT / GIB)}")


def show_what_is_missing(step: Step, wish: Wish) -> None:
    """Print how much memory the nearest candidate takes, and how many hosts would hold the step."""
    nearest = min(candidates(step, wish), key=lambda each: each.held)
    print(f"nearest               {nearest.name}: {digits(nearest.held / GIB)} GiB")
    show_memory(nearest)
    hosts = step.hosts
    while not (fits := any(each.fits for each in candidates(replace(step, hosts=hosts), wish))):
        if 2 * hosts * step.per_host > SIMULATED:
            break
        hosts *= 2
    fixed = [f"{name} {getattr(wish, name)}" for name in ("cp", "tp", "recompute") if getattr(wish, name)]
    asked = f" with {', '.join(fixed)}" if fixed else ""
    more = f"it fits on {hosts} hosts of {step.per_host}" if fits else f"nor on {hosts * step.per_host:,} GPUs{asked}"
    print(f"advice                does not fit; {more}")


def advice(ranked: Sequence[Answer]) -> str:
    """One line: the fastest for many sequences, and the fastest for a single sequence on all GPUs."""
    first = ranked[0]
    one = [each for each in ranked if each.step.cp * each.step.tp == each.step.gpus]
    said = f"{first.name}: {digits(first.speed)} tokens/s a GPU, {digits(first.held / GIB)} GiB"
    if near := sum(NEAR * each.speed >= first.speed for each in ranked[1:]):
        said += f" ({near} more nearly as fast: within {NEAR - 1:.0%})"
    if one and one[0] is not first:
        said += f"; one sequence on all: {one[0].name}, {digits(one[0].seconds)} s a step"
    return said
