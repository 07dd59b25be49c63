"""ring-plan: what a cluster will do with a long sequence, before you rent it. One request, one answer.

    the ways that fit      the fastest first: tokens/s of a GPU, or seconds of a prefill, and GiB of a GPU
    advice                 the simplest of the ways that are as fast, within 7 %, and the fastest
    attention with cp      a published framework's factor, and the advice without it
    bottleneck             the largest term of the simplest
    evidence               what its seconds rest on, and their interval

--help names the unit of each option. All results are modelled, not measured.

    $ ring-plan --model llama-3.1-8b --gpu h100 --hosts 1 --seq-len 131072
    $ ring-plan --gpu ideal --flops 990e12 --bandwidth 450e9 --memory 80e9 --hosts 1 --layers 32 --hidden 4096 \\
          --heads 32 --kv-heads 8 --feedforward 14336 --vocab 128256 --seq-len 131072

A reader may skip this file: plan.py answers, and this file reads options and prints.
"""

import argparse
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace

from ring_planner.memory import RESERVE
from ring_planner.plan import HELD, LONGEST, MOST, Plan, Wish, best, candidates, digits, gains, hosts_that_hold, longest
from ring_planner.presets import GIB
from ring_planner.request import parser, request_of
from ring_planner.round_costs import FRAMEWORK
from ring_planner.step import Step

SHOWN = 5  # rows of the table
ROW = 4  # digits of its numbers, and of the advice: they tell most rows apart
AGREEMENT = 0.4e-3  # seconds: between two network namespaces, with gloo, of one rank each; on two GPU hosts unmeasured
NEAR = 1.07  # times as long is as fast: by so much does the planner err where two ways were measured, in the median
PUBLISHED = {2024: "NeMo in 2024", 2026: "TRL in 2026"}  # whose steps FRAMEWORK was fitted on
SIMPLE = ("ring", "all-gather", "all-to-all", "double ring", "hybrid")  # the simplest way first


def say(name: str, *lines: str) -> None:
    """Print lines below each other, behind their name."""
    for line in lines:
        print(f"{name:<22}{line}")
        name = ""


def show(step: Step, wish: Wish, *, sources: bool = False) -> bool:
    """Print the answers, the fastest way first. Does the step fit?"""
    gpu, model = step.gpu, step.model
    active = f" ({digits(model.parameters(active=True) / 1e9)} active)" if model.experts else ""
    print(f"{model.name}: {digits(model.parameters() / 1e9)} billion parameters{active}; modelled, not measured")
    hosts = f"{step.hosts} hosts" if step.hosts > 1 else "1 host"
    print(f"{hosts} of {step.per_host} {gpu.name}, {digits(gpu.memory / GIB)} GiB each")
    if sources:
        say("sources", *(f"{it.name}: {it.source}" for it in (model, gpu)))
    most = longest(step, wish)
    length = f"{most:,} tokens{' or more' if most == LONGEST else ''}" if most else "no sequence fits"
    say("longest context", f"{length}{wish.words()}")
    how = f"{step.linear_dtype} products, {step.kernels} kernels"
    if step.task == "train":
        trained = f"{step.trainable:.2%} trained, " if step.trainable < 1 else ""
        how = f"{how}, loss {step.loss}, {trained}optimizer {step.optimizer}"
    what = "a training step" if step.task == "train" else "a prefill"
    many = f"{step.batch} sequences" if step.batch > 1 else "1 sequence"
    print(f"{what} of {many} for each cp x tp GPUs, S = {step.seq_len:,} tokens: {how}")
    if (its := model.latents) and its.index_heads:
        say("attention", f"to all keys is planned; the indexer, which chooses {its.index_keys:,}, is not modelled")
    ranked = best(step, wish)
    if not ranked:
        show_what_is_missing(step, wish)
        return False
    order = -1 if step.task == "prefill" else 1  # the column comes first by which ways are sorted
    first, second = ("tokens/s a GPU", "seconds")[::order]
    about = f"way; --help explains the words; GiB with a reserve of {RESERVE:.1%}"
    print(f"    {first:>14} {second:>14}  sequences     GiB  {about}")
    rings, advised = [plan for plan in ranked if plan.way == "ring"], simplest_first(ranked)[0]
    for plan in ranked[:SHOWN] + [plan for plan in ranked[SHOWN:] if plan in (*rings[:1], advised)]:
        first, second = [digits(each, ROW) for each in (plan.speed, plan.seconds)][::order]
        print(f"    {first:>14} {second:>14} {plan.at_once:>10,} {digits(plan.held / GIB):>7}  {plan.name}")
    say("advice", *advice(ranked))
    name, seconds = max(advised.parts.items(), key=lambda term: term[1])
    terms = [(term, s) for term, s in advised.parts.items() if s > 0.005 * advised.seconds]
    shares = ", ".join(f"{term} {digits(s)}" for term, s in terms)
    say("seconds", f"{shares}; {advised.utilisation:.0%} of the bf16 peak (MFU)")
    say("attention with cp", *framework_of(step, wish, ranked))
    say("bottleneck", f"{name}, {seconds / advised.seconds:.0%} of the time")
    say("GiB of a GPU", memory_of(advised))
    say("evidence", *evidence_of(advised))
    say("not counted", *agreements_of(advised))
    if model.latents and rings:
        say("latents", *rings[0].latents())
    if model.experts:
        say("experts", f"FSDP gathers all {model.experts} of a layer; expert parallelism is not planned")
    for gain, name, answer in [better for better in gains(step, wish) if better[0] > 1.005][:3]:
        print(f"with {name:<34} {gain - 1:+.0%} {'tokens/s' if step.task == 'train' else 'speed'}: {answer.name}")
    on_all = [plan for plan in ranked if plan.at_once == step.batch]
    flat = [plan for plan in on_all if plan.step.way == "ring" and plan.step.cp > step.per_host]
    flat = sorted(flat, key=lambda plan: -plan.step.cp)[:1]  # the widest; of these the best
    say("one sequence on all", *(advice(on_all) if ranked[0] not in on_all else []))
    say("the flat ring", *(told(plan) for plan in flat if NEAR * plan.merit < on_all[0].merit))
    return True


def evidence_of(answer: Plan) -> list[str]:
    """What the seconds rest on, and their interval."""
    if answer.waits_for_the_host:
        return ["not graded: layers are so short that GPUs wait for their hosts; expect longer times"]
    if answer.interval is None:
        return [f"{answer.evidence}: no step of this kind was measured on such a GPU"]
    low, high, rows = answer.interval
    between = f"{digits(low)} to {digits(high)} s, a 90% interval"
    if not (known := answer.step.known):
        return [f"{answer.evidence}: {between}", HELD]
    alone = ["one step hardly tells messages from computing; give another --known"] if rows == 1 else []
    of = f"{'step' if answer.step.task == 'train' else 'prefill'}{'s' if rows > 1 else ''} of yours"
    return [f"{rows} {of}: {between}", f"the plan is corrected: {known.words()}", *alone]


def framework_of(step: Step, wish: Wish, ranked: Sequence[Plan]) -> list[str]:
    """Where a published framework's factor counts, or turns the advice: whose it is, and the advice without it."""
    free = best(replace(step, gpu=replace(step.gpu, own=True)), wish)
    (advised, *_), (without, *_) = simplest_first(ranked), simplest_first(free)
    took = "times the kernel's seconds, as the steps of {} took (published.json); with --flops, your kernel's seconds"
    years = sorted({plan.step.year or 0 for plan in ranked} - {0})
    if not years or all(plan.step.cp == 1 for plan in (advised, ranked[0], without)):
        return []
    name = "the same advice" if without.name == advised.name else without.name
    said = [] if step.known else [f"without this factor: {name}, {digits(without.seconds, ROW)} s"]
    return [f"{FRAMEWORK[year]} {took.format(PUBLISHED[year])}" for year in years] + said


def agreements_of(answer: Plan) -> list[str]:
    """What hosts wait for each other because the ranks agree before each pass of a layer; nothing on one host."""
    step = answer.step
    if step.cp == 1 or step.cp * step.tp <= step.per_host:
        return []
    passes = step.model.layers * (1 if step.task == "prefill" else 2 + (step.recompute == "full"))
    waits = f"hosts wait for each other {passes} times, {1000 * AGREEMENT:.1f} ms each: {digits(passes * AGREEMENT)} s"
    return [f"{waits}; their GPUs compute queued work meanwhile"]


def memory_of(answer: Plan) -> str:
    """What the memory of a GPU holds at the peak, in GiB."""
    return ", ".join(f"{name} {digits(size / GIB)}" for name, size in answer.memory.items() if size)


def show_what_is_missing(step: Step, wish: Wish) -> None:
    """Print how much memory the nearest candidate takes, what would make it fit, and how many hosts would."""
    nearest = min(candidates(step, wish), key=lambda plan: plan.held, default=None)
    if nearest is None:
        say("advice", f"no way to share it{wish.words()}: give another --cp or --tp, or leave them out")
        return
    say("nearest", f"{nearest.name}: {digits(nearest.held / GIB)} GiB")
    say("GiB of a GPU", memory_of(nearest))
    free = [(name, plan) for _, name, plan in gains(step, wish) if name.startswith("--")]
    for name, plan in free[:2]:
        print(f"with {name:<34} fits: {plan.name}, {digits(plan.held / GIB)} GiB")
    hosts = hosts_that_hold(step, wish)
    first = f"; change first: {free[0][0]}" if free else ""
    if hosts:
        say("advice", f"does not fit{first}; it fits on {hosts} hosts of {step.per_host}")
    else:
        say("advice", f"does not fit, nor on more hosts, up to {MOST:,} GPUs{wish.words()}{first}")


def simplest_first(ranked: Sequence[Plan]) -> list[Plan]:
    """The ways that are as fast as the first, as far as the planner can tell."""
    tied = [plan for plan in ranked if NEAR * plan.merit >= ranked[0].merit]
    return sorted(tied, key=lambda plan: (plan.step.cp > 1, SIMPLE.index(plan.step.way)))


def advice(ranked: Sequence[Plan]) -> list[str]:
    """The simplest of the ways that are as fast, and the fastest. They may be one."""
    tied = simplest_first(ranked)
    if len(tied) < 2:
        return [f"fastest: {told(plan)}" for plan in tied]
    first = f"simplest of {len(tied)} that tie within {NEAR - 1:.0%}: {told(tied[0])}"
    return [first] if tied[0] is ranked[0] else [first, f"fastest: {told(ranked[0])}"]


def told(plan: Plan) -> str:
    """The way in words, its speed and its memory."""
    many = f", {plan.at_once} sequences at once" if plan.at_once > 1 else ""
    speed = f"{digits(plan.speed, ROW)} tokens/s a GPU, {digits(plan.seconds, ROW)} s"
    return f"{plan.name}: {speed}, {digits(plan.held / GIB)} GiB{many}"


def main(arguments: Sequence[str] | None = None) -> int:
    if arguments is None:  # a command: where nobody reads on, as after `| head`, it ends
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    it = parser()
    options = it.parse_args(arguments)
    try:
        step, wish = request_of(options)
    except (ValueError, argparse.ArgumentTypeError) as reason:
        it.error(str(reason))
    return 0 if show(step, wish, sources=options.sources) else 1


if __name__ == "__main__":
    sys.exit(main())
