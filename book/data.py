"""The numbers that the explorers show, computed by the tested files of ringlab: site/data/*.js, scripts for the pages.

    ring-P-S.js      P ranks, S tokens: every layout and mask, what each token has after each round, what it costs
    planner-*.js     what ring-plan answers of a model; scoreboard.js: how far off it was
    xray-*.js        reports as `ring-doctor --json` writes them, with the X-ray of a ring on paper

Q, K, V and dO of a token are the token itself, as in the worked example. The pages compute nothing but the places of
what they draw; book/test_explorers.py compares these numbers with full attention, and the pages with them.
The planner's answers are those of ring-plan, for every model, GPU, number of hosts and length that the page offers.
"""

import json
import math
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.scoreboard import grades, questions, summary, times
from figures.draw_all import NARROW, save
from figures.timelines import duration, simulate_timeline
from ring_doctor.asking.case import Case
from ring_doctor.catalogue import CATALOGUE
from ring_doctor.explaining.xray import on_paper
from ring_doctor.mistakes.paper_ring import RIGHT, NotOnPaper, compute
from ring_planner.hidden_communication import min_overlap_chunk
from ring_planner.plan import Wish, best
from ring_planner.presets import GIB, GPU, GPUS, MODELS, Model
from ring_planner.step import Step
from ringlab.basics.naive_attention import TOKENS
from ringlab.basics.online_softmax import finish, start, update
from ringlab.ring.backward import tile_backward
from ringlab.ring.layouts import LAYOUTS, positions
from ringlab.ring.masks import Mask
from ringlab.ring.partition import Partition
from ringlab.support.colours import BLOCK_COLOURS, ink_on

RANKS = range(1, 9)
SCALE = 1 / math.sqrt(2)  # D = 2
WRONG_OUT = ("averages_added", "no_rescale", "last_block_skipped", "causal_per_block")  # switches, forward
WRONG_GRADIENTS = ("keys_of_hop_0", "lse_of_the_block", "gradients_not_sent_home")  # and backward
MASKS = ("none", "causal", "documents", "causal documents", "causal window", "causal documents window")
SPEEDS = {"fast": 0.5, "slow": 2.0}  # a hop, in times of computing a whole block


def halves(S: int) -> tuple[int, int]:
    """Two documents: 3 and 5 of 8 tokens."""
    return 3 * S // 8, S - 3 * S // 8


def mask_of(name: str, S: int) -> Mask:
    """One of MASKS for S tokens: a window is a fourth of them, and a token."""
    documents, window = halves(S) if "documents" in name else None, S // 4 + 1 if "window" in name else None
    return Mask(causal="causal" in name, documents=documents, window=window)


def seq_lens(P: int) -> list[int]:
    """How many tokens the explorer offers for P ranks."""
    return sorted({8, 16, 4 * P})


def tokens(S: int) -> Tensor:
    """(1, 1, S, 2), float64: the tokens of the worked example, and again with their numbers exchanged."""
    rows = torch.cat([TOKENS if i % 2 == 0 else TOKENS.flip(1) for i in range(-(-S // 8))])
    return rows[None, None, :S]


def numbers(x: Tensor) -> list[Any]:
    """A tensor as nested lists, to four digits after the point; None for what is not finite."""
    if x.dim():
        return [numbers(row) for row in x]
    return round(x.item(), 4) + 0.0 if math.isfinite(x.item()) else None  # type: ignore[return-value]


def ring(P: int, S: int, layout: str, mask: Mask) -> dict[str, Any]:
    """What every rank has and does in every round, of a ring with this layout and mask."""
    x = tokens(S)
    places = [positions(layout, S, rank, P) for rank in range(P)]
    lengths = tuple(len(at) for at in places)
    partition = Partition(mask, layout, lengths)
    chunk = [x[:, :, at] for at in places]
    sees = torch.zeros(S, S, dtype=torch.bool)
    for query, (first, end) in enumerate(zip(*mask.visible_keys(torch.arange(S), S)[0], strict=True)):
        sees[query, first:end] = True
    visible = [[sees[q][:, k] for k in places] for q in places]
    rounds = partition.hops + 1

    states, after = [start(q) for q in chunk], []
    for t in range(rounds):
        for r in range(P):
            j = (r - t) % P
            scores = (SCALE * chunk[r] @ chunk[j].mT).masked_fill(~visible[r][j], -math.inf)
            states[r] = update(states[r], scores, chunk[j])
        rows = [torch.cat([s[0][..., None], s[1][..., None], s[2], finish(s)[0]], dim=-1) for s in states]
        after.append(_of_tokens(rows, places))
    results = [finish(state) for state in states]
    out = _of_tokens([of_rank[0] for of_rank in results], places)

    lse = [of_rank[1] for of_rank in results]
    delta = [(chunk[r] * results[r][0]).sum(dim=-1) for r in range(P)]  # dO is the token itself
    sums = {name: [torch.zeros_like(c) for c in chunk] for name in ("dq", "dk", "dv")}
    backward = []
    for t in range(rounds):
        for r in range(P):
            j = (r - t) % P
            parts = tile_backward(chunk[r], chunk[j], chunk[j], chunk[r], lse[r], delta[r], SCALE, ~visible[r][j])
            for name, at, part in zip(("dq", "dk", "dv"), (r, j, j), parts, strict=True):
                sums[name][at] = sums[name][at] + part
        backward.append(torch.cat([_of_tokens(sums[name], places) for name in ("dq", "dk", "dv")], dim=-1))

    pairs = [[int(visible[r][(r - t) % P].sum()) for r in range(P)] for t in range(rounds)]
    return {
        "hops": partition.hops,
        "pairs": pairs,
        "states": [numbers(x) for x in after],  # [round][token]: m, l, o and o / l, two numbers each
        "out": numbers(out),
        "backward": [numbers(x) for x in backward],  # [round][token]: dq, dk, dv, two numbers each
        "time": {speed: timeline(pairs, lengths, factor) for speed, factor in SPEEDS.items()},
        "wrong": wrong(P, S, layout, mask, torch.cat([out, backward[-1]], dim=-1)),
    }


def _of_tokens(chunks: list[Tensor], places: list[Tensor]) -> Tensor:
    """(S, n): the rows (1, 1, C, n) of all ranks in the order of the sequence."""
    return torch.cat([chunk[0, 0] for chunk in chunks])[torch.cat(places).argsort()]


def timeline(pairs: list[list[int]], lengths: tuple[int, ...], factor: float) -> dict[str, Any]:
    """What each rank does when, in times of a pair, in a ring whose messages travel while it computes."""
    P, hop = len(lengths), factor * max(lengths) ** 2
    events = simulate_timeline([[float(n) for n in row] for row in pairs], [hop] * P)
    end = duration(events)
    busy = [sum(row[r] for row in pairs) for r in range(P)]
    return {
        "end": round(end, 4),
        "idle": [round(1 - b / end, 4) if end else 0.0 for b in busy],
        "events": [[e.rank, e.what, e.round, e.block, round(e.start, 4), round(e.end, 4)] for e in events],
    }


def wrong(P: int, S: int, layout: str, mask: Mask, right: Tensor) -> dict[str, Any]:
    """What the rows become with each mistake, and how far the worst number is off."""
    x = tokens(S)
    documents = None if mask.documents is None else tuple(int(n) for n in mask.documents)
    case = Case(P, S, mask.causal, layout, documents, mask.window, heads=1, kv_heads=1, head_dim=2)
    found = {}
    for name in (*WRONG_OUT, *WRONG_GRADIENTS):
        gradients = name in WRONG_GRADIENTS
        if name == "causal_per_block" and not mask.causal:
            continue
        try:
            results = compute(case, CATALOGUE[name].variants[0](RIGHT), (x, x, x, x), gradients=gradients)
        except NotOnPaper:  # it needs chunks of one length
            continue
        names = ("dq", "dk", "dv") if gradients else ("out",)
        rows = torch.cat([results[each][0, 0] for each in names], dim=-1)
        off = (rows - (right[:, 2:] if gradients else right[:, :2])).abs()
        worst = off.max().item()
        found[name] = {
            "rows": numbers(rows),
            "off": round(worst, 4) if math.isfinite(worst) else None,
            "tokens": int((~(off <= 1e-9)).any(dim=-1).sum()),
        }
    return found


def ring_file(P: int, S: int) -> dict[str, Any]:
    """Everything about rings of P ranks and S tokens; a layout that cannot deal them out says why."""
    layouts: dict[str, Any] = {}
    cases: dict[str, Any] = {}
    for layout in LAYOUTS:
        try:
            layouts[layout] = {"positions": [positions(layout, S, rank, P).tolist() for rank in range(P)]}
        except ValueError as refused:
            layouts[layout] = {"refused": str(refused).split(":")[0]}
            continue
        cases |= {f"{layout}, {name}": ring(P, S, layout, mask_of(name, S)) for name in MASKS}
    return {
        "P": P,
        "S": S,
        "tokens": numbers(tokens(S)[0, 0]),
        "documents": halves(S),
        "window": S // 4 + 1,
        "bytes": tokens(S).float().element_size() * 2 * 2,  # K and V of a token, D = 2, float32
        "layouts": layouts,
        "cases": cases,
    }


def xrays() -> Iterator[tuple[str, dict[str, Any]]]:
    """Reports of rings on paper, with the fields of `ring-doctor --json` that the page reads."""
    case = Case(4, 16, True)
    for name in ("last_block_skipped", "keys_of_hop_0", "causal_per_block"):
        known = CATALOGUE[name]
        report: dict[str, Any] = {"name": f"a ring on paper: {name}", "healthy": False, "verdict": f"SICK: {name}"}
        report |= {"mistakes": [[name]], "remarks": [known.what, f"Where to look: {known.look}."]}
        yield name, report | {"grids": on_paper(case, known.variants[0](RIGHT)).grids()}


HOSTS, LENGTHS = (1, 2, 8), (32_768, 131_072, 1_048_576)  # that the planner's page offers; hosts of 8


def answer(model: Model, gpu: GPU, hosts: int, seq_len: int) -> dict[str, Any] | None:
    """What `ring-plan` answers first; None where nothing fits."""
    ranked = best(Step(model, gpu, hosts, 8, seq_len, kernels=gpu.kernel), Wish())
    if not ranked:
        return None
    first = ranked[0]
    numbers = {"speed": first.speed, "seconds": first.seconds, "gib": first.held / GIB}
    return {"way": first.name, **numbers, "interval": first.interval}


def thresholds(model: Model, gpu: GPU) -> dict[str, float]:
    """The chunks from which on a hop of a ring is hidden in training, inside a host and between hosts."""
    flops, wires = gpu.rates(gpu.kernel, model.head_dim)[1], {"inside": gpu.bandwidth, "between": gpu.host_bandwidth}
    layer = model.attention()
    return {name: min_overlap_chunk(flops, rate, layer, visible=1 / 2, backward=True) for name, rate in wires.items()}


def planner() -> dict[str, Any]:
    """What the planner's page offers; GPUs without second names."""
    gpus = [name for name, gpu in GPUS.items() if name == gpu.name]
    return {"models": list(MODELS), "gpus": gpus, "hosts": HOSTS, "lengths": LENGTHS}


def planned(model: str) -> dict[str, Any]:
    """The planner's answers for a model, by GPU, hosts and length; its indexer and its thresholds."""
    planned_for, gpus = MODELS[model], planner()["gpus"]
    its = planned_for.latents
    indexer = its.index_keys if its and its.index_heads else None  # keys that it chooses
    answers = {gpu: [[answer(planned_for, GPUS[gpu], hosts, S) for S in LENGTHS] for hosts in HOSTS] for gpu in gpus}
    return {
        "answers": answers,
        "indexer": indexer,
        "thresholds": {gpu: thresholds(planned_for, GPUS[gpu]) for gpu in gpus},
    }


def scoreboard() -> dict[str, Any]:
    """What `python -m bench.scoreboard` says of all its rows: contents.py makes a table of them."""
    marked = grades()
    answers = questions(marked)
    right = sum(right for _, _, right in answers)
    errors = summary([each.error for each in times(marked)])
    return {"errors": errors, "times": len(times(marked)), "right": right, "questions": len(answers)}


def shared() -> dict[str, Any]:
    """What every explorer needs: the colour of each block and of what is written on it, the lengths, which mistakes."""
    colours = [[colour, ink_on(colour)] for colour in BLOCK_COLOURS]
    return {"colours": colours, "backward": list(WRONG_GRADIENTS), "seq_lens": {P: seq_lens(P) for P in RANKS}}


def write(folder: Path) -> None:
    """Write every file of numbers into `folder`, and pictures for phones below it; processes share the work."""
    (folder / "narrow").mkdir(parents=True, exist_ok=True)
    calls: dict[str, tuple[Any, ...]] = {f"planner-{model}": (planned, model) for model in MODELS}
    calls |= {"planner": (planner,), "scoreboard": (scoreboard,), "book": (shared,)}
    calls |= {f"ring-{P}-{S}": (ring_file, P, S) for P in RANKS for S in seq_lens(P)}
    calls |= {f"xray-{name}": (dict, report) for name, report in xrays()}
    (context := get_context("forkserver")).set_forkserver_preload([__name__])  # imported once, and not by each process
    with ProcessPoolExecutor(mp_context=context) as pool:
        drawn = [pool.submit(save, name, folder / "narrow", narrow=True) for name in NARROW]
        for name, made in [(name, pool.submit(*call)) for name, call in calls.items()]:
            numbers = json.dumps(made.result(), separators=(",", ":"))
            (folder / f"{name}.js").write_text(f'explorer.take("{name}",{numbers})')
        for picture in drawn:
            picture.result()
