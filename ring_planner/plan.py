"""What a person who rents GPUs wants to know: the ways that fit, the fastest first, and what to change first.

    candidates  every cp, tp, recomputation and way of ways.py
    best        those that fit: a training step by tokens/s of a GPU, a prefill by its seconds
    changes     the planner is asked again with each change; nothing here is a rule of thumb
    evidence    what the seconds rest on: your own steps, or the measured rows of the same kind in errors.json
    padded      each of cp GPUs has two chunks of the same length (zigzag): S is padded to a multiple of 2 · cp

A reader may skip this file: step.py predicts a step, and this file asks it many times. After: command.py.
"""

import json
import math
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ring_planner.memory import CONTEXT, RESERVE, step_bytes
from ring_planner.step import RECOMPUTE, Step, can_share, step_seconds
from ring_planner.ways import WAYS, splits

GRAIN = 1024  # tokens: the longest context is a multiple
LONGEST = 2**30 - GRAIN  # tokens: longer ones are not sought
MOST = 16_384  # GPUs of a plan
SIZES = 5e8, 5e11  # parameters: the models that were measured have 0.6 to 405 billion
HOST_CALLS = 40 * 82e-6  # seconds: a layer's operations on the host, 40 of 82 µs, measured by hand for a fused call
ERRORS = Path(__file__).with_name("errors.json")
NOUNS = {"train": "step", "prefill": "prefill"}  # of a task
# By bench/scoreboard.py.
HELD = "tested on 81 published times, their publisher left out: 70 (86%) fell into such an interval"


def digits(number: float, count: int = 3) -> str:
    """A number with so many digits: 0.0179, 5.89, 3,800."""
    rounded = float(f"{number:.{count}g}")
    return f"{rounded:,.0f}" if rounded >= 10 ** (count - 1) else f"{rounded:.{count}g}"


def kind_of(task: str, kernels: str, hosts: int) -> str:
    """The name of a kind of measured row: its errors count for a question like it."""
    return f"{task}, {'best kernels' if kernels == 'best' else 'framework'}, {'one host' if hosts == 1 else 'hosts'}"


@dataclass(frozen=True)
class Plan:
    """A step, and what step.py and memory.py say of it. `padded`: the tokens of its sequences that are padding."""

    step: Step
    padded: int = 0

    @cached_property
    def terms(self) -> dict[str, float]:
        return step_seconds(self.step)

    @cached_property
    def memory(self) -> dict[str, float]:
        """Bytes of a GPU at the peak, those of CUDA and NCCL, and a reserve as large as the error of the count."""
        counted = step_bytes(self.step)
        return {**counted, "CUDA and NCCL": CONTEXT, "reserve": RESERVE * sum(counted.values())}

    @property
    def parts(self) -> dict[str, float]:
        """The terms, and apart what the messages of cp add to attention: its seconds beyond those on free wires."""
        free = replace(self.step.gpu, bandwidth=math.inf, host_bandwidth=math.inf)
        attention = step_seconds(replace(self.step, gpu=free))["attention"]
        return {**self.terms, "attention": attention, "cp": self.terms["attention"] - attention}

    @property
    def seconds(self) -> float:
        return sum(self.terms.values())

    @property
    def speed(self) -> float:
        """Tokens/s of a GPU."""
        return self.step.tokens / self.seconds

    @property
    def merit(self) -> float:
        """What is compared: of a training step the tokens/s, of a prefill the prompts a second of one group."""
        return self.speed if self.step.task == "train" else 1 / self.seconds

    @property
    def at_once(self) -> int:
        """Sequences that the GPUs compute at the same time."""
        return self.step.batch * self.step.gpus // (self.step.cp * self.step.tp)

    @property
    def held(self) -> float:
        return sum(self.memory.values())

    @property
    def fits(self) -> bool:
        return self.held <= self.step.gpu.memory

    @property
    def utilisation(self) -> float:
        """The share of the bf16 peak that the model's own FLOPs take: nothing is counted that is computed again."""
        model, step = self.step.model, self.step
        mixing = 4 * (step.seq_len / 2) * model.heads * model.head_dim * model.softmax_layers
        if model.linear:
            mixing += model.linear.layers * model.linear.flops
        if step.task == "train":
            flops = 2 * (2 + step.trainable) * (model.matrices + model.hidden * model.vocab) + 3 * mixing
        else:
            flops = 2 * model.matrices + mixing
        return self.speed * flops / step.gpu.peak["bf16"]

    @property
    def way(self) -> str:
        """The way among cp GPUs."""
        of = f" of {self.step.split}" if self.step.split else ""
        return f"{self.step.way}{of}" if self.step.cp > 1 else "no ring"

    @property
    def name(self) -> str:
        """The way among cp GPUs, and how the step is shared."""
        step = self.step
        again = f", recompute {step.recompute}" if step.task == "train" else ""
        padded = f", {self.padded} token{'s' if self.padded > 1 else ''} padded" if self.padded else ""
        over = f" over {step.tp // step.per_host} hosts" if step.tp > step.per_host else ""
        return f"{self.way}, cp {step.cp}, tp {step.tp}{over}{again}{padded}"

    def measured(self, what: str, kernels: str) -> dict[str, Any] | None:
        """The row of errors.json for such steps: None if none is of this GPU, for larger hosts, for latents and states,
        since all its steps send keys and values, and for models smaller or larger than all that were measured."""
        step, model = self.step, self.step.model
        row = json.loads(ERRORS.read_text()).get(kind_of(what, kernels, step.hosts))
        if model.linear or model.latents or not SIZES[0] < model.parameters() < SIZES[1] or step.per_host > 8:
            return None
        return row if row and step.gpu.name in row["gpus"] else None

    @property
    def interval(self) -> tuple[float, float, int] | None:
        """The least and the most seconds by measured steps of this kind, and how many there are; None: not known."""
        if known := self.step.known:
            nine_in_ten = math.exp(1.645 * known.spread(self.terms))
            return self.seconds / nine_in_ten, self.seconds * nine_in_ten, known.steps
        row = self.measured(NOUNS[self.step.task], self.step.kernels)
        return (row["low"] * self.seconds, row["high"] * self.seconds, row["rows"]) if row else None

    @property
    def evidence(self) -> str:
        """What the seconds rest on, but for steps of your own."""
        if row := self.measured(noun := NOUNS[self.step.task], self.step.kernels):
            return f"{row['rows']} measured {noun}s of this kind, {row['gpus'][self.step.gpu.name]} on this GPU"
        return "kernel measured, step modelled" if self.measured("attention", "best") else "not graded"

    @property
    def waits_for_the_host(self) -> bool:
        """A layer's forward pass ends before a host has called its operations: GPUs wait, and no term says so."""
        passes = self.seconds if self.step.task == "prefill" else self.seconds / 4
        return passes / self.step.model.layers < HOST_CALLS and not self.step.gpu.ideal

    def latents(self) -> list[str]:
        """How long this ring takes if K and V travel, as in all plans, or latents; where latents are faster."""
        step, lengths = self.step, range(GRAIN, LONGEST // self.step.cp, GRAIN)

        def attention(tokens: int, latents: bool) -> float:
            return step_seconds(replace(step, seq_len=tokens * step.cp, latents=latents))["attention"]

        two = self, Plan(replace(step, latents=True))
        sent = [f"{it.step.share.sent:,} numbers a token, {digits(it.seconds)} s" for it in two]
        up_to = bisect_left(lengths, True, key=lambda tokens: attention(tokens, True) >= attention(tokens, False))
        at = {0: "at no length", len(lengths): "at any length"}.get(up_to, f"up to {GRAIN * up_to:,} tokens of a GPU")
        planned = f"table and advice send K and V of whole heads: {self.name}, {sent[0]}"
        return [planned, f"the same ring with latents: {sent[1]}; attention is faster {at}"]


def ways_of(step: Step) -> Iterator[Step]:
    """The step with each way that can be, among its cp GPUs."""
    if step.cp == 1:
        yield step
        return
    ring = step.ring
    for way in WAYS:
        if way == "double ring" and min(ring.hosts, ring.per_host) == 1:
            continue  # it is the ring
        if way == "all-to-all" and step.cp > step.share.heads:
            continue
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

    def words(self) -> str:
        fixed = [f"{name} {getattr(self, name)}" for name in ("cp", "tp", "recompute") if getattr(self, name)]
        return f" with {', '.join(fixed)}" if fixed else ""


def candidates(step: Step, wish: Wish) -> Iterator[Plan]:
    """Every way to share the step that is possible, whether it fits or not."""
    again = [wish.recompute] if wish.recompute else list(RECOMPUTE)
    for tp in [wish.tp] if wish.tp else divisors(step.gpus):
        if step.gpus % tp or not can_share(step.model, step.per_host, tp):
            continue
        for cp in [wish.cp] if wish.cp else divisors(step.gpus // tp):
            if step.seq_len < cp * tp or step.gpus % (cp * tp):
                continue
            padded = -step.seq_len % (2 * cp) if cp > 1 else 0
            for recompute in again if step.task == "train" else ["none"]:
                shared = replace(step, seq_len=step.seq_len + padded, cp=cp, tp=tp, recompute=recompute)
                yield from (Plan(way, padded) for way in ways_of(shared))


def best(step: Step, wish: Wish) -> list[Plan]:
    """All that fit, the best first."""
    return sorted((plan for plan in candidates(step, wish) if plan.fits), key=lambda plan: -plan.merit)


def fits(step: Step, wish: Wish) -> bool:
    """Does the step fit by any way?"""
    return any(plan.fits for plan in candidates(step, wish))


def longest(step: Step, wish: Wish) -> int:
    """The longest sequence that fits, in tokens: a multiple of `GRAIN`, 0 if none does."""
    one, tightest = replace(step, cp=1, tp=1), replace(wish, recompute=wish.recompute or "full")
    lengths = range(GRAIN, LONGEST + 1, GRAIN)
    return GRAIN * bisect_left(lengths, True, key=lambda seq_len: not fits(replace(one, seq_len=seq_len), tightest))


def largest_batch(step: Step, wish: Wish) -> int:
    """The largest batch that fits, of those below the step's: 0 if none does."""
    return bisect_left(range(1, step.batch), True, key=lambda batch: not fits(replace(step, batch=batch), wish))


def changes(step: Step) -> dict[str, Step]:
    """What could be changed, an option if there is one, and the step with the change."""
    gpu = step.gpu

    def twice(what: str) -> Step:
        return replace(step, gpu=replace(gpu, **{what: 2 * getattr(gpu, what)}))

    changed = {"links inside a host twice as fast": twice("bandwidth"), "twice the memory capacity": twice("memory")}
    if not gpu.ideal:
        changed["twice the memory bandwidth"] = twice("memory_bandwidth")
    if step.task == "train":
        changed[f"--batch {2 * step.batch}"] = replace(step, batch=2 * step.batch)
        if step.loss == "whole":
            changed["--loss pieces"] = replace(step, loss="pieces")
        if step.optimizer == "adam":
            changed["--optimizer adam8bit"] = replace(step, optimizer="adam8bit")
    if step.hosts > 1:
        changed["NICs twice as fast"] = twice("host_bandwidth")
    if step.linear_dtype != "fp8" and "fp8" in gpu.peak:
        changed["--linear-dtype fp8"] = replace(step, linear_dtype="fp8")
    return changed


def gains(step: Step, wish: Wish) -> list[tuple[float, str, Plan]]:
    """For each change, how many times as good the best way then is, or, if nothing fits now, its speed; the largest
    gain first. If nothing fits, the largest batch that does is a change too. None offers tp over hosts by itself."""
    now, changed = best(step, wish)[:1], changes(step)
    if not now and (batch := largest_batch(step, wish)):
        changed[f"--batch {batch}"] = replace(step, batch=batch)
    merit, most = now[0].merit if now else 1.0, max(step.per_host, wish.tp or 1)
    ranked = {name: [it for it in best(each, wish) if it.step.tp <= most] for name, each in changed.items()}
    gained = [(plans[0].merit / merit, name, plans[0]) for name, plans in ranked.items() if plans]
    return sorted(gained, key=lambda gain: -gain[0])


def hosts_that_hold(step: Step, wish: Wish) -> int | None:
    """The fewest hosts, this number times a power of two, on which the step fits; None: on none up to `MOST` GPUs."""
    tried = (step.hosts * 2**i for i in range(MOST.bit_length()))
    possible = (replace(step, hosts=hosts) for hosts in tried if hosts * step.per_host <= MOST)
    return next((it.hosts for it in possible if fits(it, wish)), None)
