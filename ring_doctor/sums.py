"""A gradient is a sum of parts: which of them are missing, counted twice, or added to another block's sum?

    dQ of rank r  = Σ_j a(r, j) dQ(r, j)        dK of block j = Σ_r a(r, j) dK(r, j)        a = 1 in a right ring

The right parts are known, so the whole numbers a follow from a wrong sum by least squares. The sum of the parts with
these numbers must be the wrong result, else nothing is said.

Shapes: those of wrong_answer.py. The part (r, j) is computed in round t = (r - j) mod P.

Before: patterns.py. After: contents.py, all that a wrong result may hold.
Source: Dao et al. 2022, algorithm 4, for the parts.
"""

from collections.abc import Iterator

import torch

from ring_doctor.patterns import Found, pattern
from ring_doctor.wrong_answer import FEW, WrongAnswer

Counts = dict[tuple[int, int], int]  # by (rank, block): how often this part is in the sum that it belongs to


@pattern("In {x} the right parts of ranks and blocks are summed, but {words}")
def parts_of_a_sum(wrong: WrongAnswer, name: str) -> Iterator[Found] | None:
    """Which parts are missing or too many; None where the parts are unknown."""
    if name not in ("dq", "dk", "dv") or wrong.case.world_size == 1:
        return None
    counts = count(wrong, name)
    if counts is None:
        return None
    return iter(()) if not counts[0] else _told(wrong, *counts)


def count(wrong: WrongAnswer, name: str) -> tuple[Counts, list[str]] | None:
    """How often each part is in its own sum, and in words those in other sums; ({}, []) if the result is no such sum.

    A part that is 0, because the mask hides it, is left out. None where the parts are unknown.
    """
    case, of = wrong.case, wrong.parts
    if of is None:
        return None
    P, seen = case.world_size, wrong.chunks(wrong.seen(name))
    spots = [(rank, block) for rank in range(P) for block in range(P) if of[name][rank][block].any()]
    parts = {spot: of[name][spot[0]][spot[1]] for spot in spots}
    home = 0 if name == "dq" else 1  # the parts of a rank, or those of a block, belong into one sum
    found: Counts = {}
    foreign, sums = [], []
    for place in range(P):
        used = [spot for spot in spots if spot[home] == place]
        if case.seq_len * case.head_dim // P * case.kv_heads >= 2 * len(spots):
            used = spots  # enough numbers to tell all parts from each other
        total = torch.zeros_like(seen[place])
        if used and bool(seen[place].isfinite().all()):
            columns = torch.stack([parts[spot].flatten() for spot in used], dim=1)
            shares = torch.linalg.lstsq(columns, seen[place].reshape(-1, 1)).solution[:, 0]
            for spot, share in zip(used, shares.round().int().tolist(), strict=True):
                total = total + share * parts[spot]
                if spot[home] == place:
                    found[spot] = share
                elif share:
                    foreign.append(
                        f"{'rank' if home == 0 else 'block'} {place} has rank {spot[0]}'s for block {spot[1]}"
                    )
        sums.append(total)
    return (found, foreign) if wrong.near(name, case.join(sums)) else ({}, [])


def _told(wrong: WrongAnswer, found: Counts, foreign: list[str]) -> Iterator[Found]:
    P = wrong.case.world_size
    if foreign:
        look = "the direction of the hops, and the index of the sum to which a part is added"
        yield Found("parts are in the sum of another rank or block", look, 1, f"{wrong.case.words()}: {foreign[0]}")
    off = {spot: times for spot, times in found.items() if times != 1}
    if foreign or not off:
        return
    for words, look, expected in _hypotheses(P):
        if all(times == expected[spot] for spot, times in found.items()):
            yield Found(words, look)
    rank, block = min(off)
    example = f"{wrong.case.words()}: rank {rank}'s part for block {block} counts {off[rank, block]} times"
    words = "some parts are missing or count more than once"
    yield Found(words, "the rounds and the hops of the backward pass", order=1, example=example)


def _hypotheses(P: int) -> Iterator[tuple[str, str, Counts]]:
    """(what is wrong with the sums, where to look, how often each part would count)."""
    spots = [(rank, block) for rank in range(P) for block in range(P)]
    for t in range(P):
        names = [f"round {t}" if t else "round 0, the own block"] + ["the last round"] * (t == P - 1)
        here = {(rank, block): (rank - block) % P == t for rank, block in spots}
        for name in names:
            look = "the rounds of the backward pass: the first, the last, the hop"
            yield f"the part of {name} is missing", look, {spot: 0 if here[spot] else 1 for spot in spots}
            look = "the start of the sum, and the hop after the last round"
            yield f"the part of {name} counts twice", look, {spot: 2 if here[spot] else 1 for spot in spots}
            look = "+= and not = where a round adds to the sum"
            yield f"only the part of {name} is there", look, {spot: 1 if here[spot] else 0 for spot in spots}
    for s in range(P):
        for name in [f"{s}"] + ["P - 1"] * (s == P - 1):
            of_rank, of_block = ({spot: spot[i] == s for spot in spots} for i in (0, 1))
            look = "what this rank does in the backward pass"
            words = f"what the queries of rank {name} add is missing"
            yield words, look, {spot: 0 if of_rank[spot] else 1 for spot in spots}
            words = f"what rank {name} adds for blocks of other ranks is missing"
            yield words, look, {spot: 0 if of_rank[spot] and not of_block[spot] else 1 for spot in spots}
            look = "the round in which a rank has this block, and the way home of its sums"
            words = f"the parts of block {name} are missing"
            yield words, look, {spot: 0 if of_block[spot] else 1 for spot in spots}
            words = f"what other ranks add for block {name} is missing"
            yield words, look, {spot: 0 if of_block[spot] and not of_rank[spot] else 1 for spot in spots}


@pattern("The errors of {x} are those of a wrong δ, and of nothing else: {words}")
def wrong_delta(wrong: WrongAnswer, name: str) -> Iterator[Found] | None:
    """Whether dS = p ∘ (dP - δ) has another δ for each query: then dQ is off by (δ - δ') Σ scale p k."""
    case = wrong.case
    if name not in ("dq", "dk") or not {"dq", "dk"} <= set(wrong.answer.wrong) or wrong.matrices is None:
        return None
    if case.head_dim < 3 or not wrong.clear("dq") or not bool(wrong.seen("dq").isfinite().all()):
        return None
    (p, _), (q, k, _, d_out) = wrong.matrices, wrong.inputs.values()
    error = wrong.seen("dq") - wrong.exact("dq")
    mean_key = wrong.scale * p @ k.repeat_interleave(case.heads // case.kv_heads, dim=1)
    off = (error * mean_key).sum(dim=-1, keepdim=True) / mean_key.square().sum(dim=-1, keepdim=True).clamp(1e-300)
    in_dk = wrong.exact("dk") + wrong.of_kv_heads(wrong.scale * (off * p).mT @ q)
    if not wrong.near("dq", wrong.exact("dq") + off * mean_key) or not wrong.near("dk", in_dk):
        return iter(())
    return _of_delta(wrong, (d_out * wrong.exact("out")).sum(dim=-1, keepdim=True), off, mean_key)


def _of_delta(wrong: WrongAnswer, delta: torch.Tensor, off: torch.Tensor, mean_key: torch.Tensor) -> Iterator[Found]:
    values = {
        "it is 0": (0 * delta, "δ = Σ dO ∘ out, and at dS = p ∘ (dP - δ)"),
        "it is that of the wrong out": (_delta_of(wrong, "out"), "out: this follows from it"),
        "it has the wrong sign": (-delta, "dS = p ∘ (dP - δ)"),
        "it is twice δ": (2 * delta, "where δ is subtracted: once"),
        "it is P times δ": (wrong.case.world_size * delta, "sums of δ over ranks or rounds"),
        "it is δ of the query before": (delta.roll(1, dims=2), "the order of the rows of δ"),
        "it is δ of another head": (delta.flip(1), "the order of the heads of δ"),
        "it is the mean of dO ∘ out, not the sum": (delta / wrong.case.head_dim, "δ = Σ dO ∘ out"),
        "it is the sum of dO": (wrong.inputs["d_out"].sum(dim=-1, keepdim=True), "δ = Σ dO ∘ out"),
    }
    for words, (value, look) in values.items():
        if wrong.near("dq", wrong.exact("dq") + (delta - value) * mean_key):
            yield Found(words, look)
    yield Found("it is another number for a query", "δ = Σ dO ∘ out, with the out of the whole row", order=1)


def _delta_of(wrong: WrongAnswer, name: str) -> torch.Tensor:
    return (wrong.inputs["d_out"] * wrong.seen(name)).sum(dim=-1, keepdim=True)


@pattern("In {x} the place of dO is taken by {words}")
def wrong_d_out(wrong: WrongAnswer, name: str) -> Iterator[Found] | None:
    """Whether dV = pᵀ dO was computed with another dO."""
    case, P = wrong.case, wrong.case.world_size
    if name != "dv" or wrong.matrices is None:
        return None
    d_out = wrong.inputs["d_out"]
    chunks = wrong.chunks(d_out)
    others = {"1 everywhere": torch.ones_like(d_out), "dO of the query before": d_out.roll(1, dims=2)}
    others["dO of another head"] = d_out.flip(1)
    for shift in range(1, P if case.equal_chunks else 1):
        moved = case.join(chunks[shift:] + chunks[:shift])
        others |= {f"dO of rank r + {shift}": moved, f"dO of rank r - {P - shift}": moved}
    found = [
        Found(words, "the dO that the backward pass gets, and sends")
        for words, x in others.items()
        if wrong.near(name, wrong.of_kv_heads(wrong.matrices[0].mT @ x))
    ]
    return iter(found)


@pattern("{x}: {words}")
def other_rows(wrong: WrongAnswer, name: str) -> Iterator[Found] | None:
    """Whether a gradient is the right sum over queries (dK, dV) or over keys (dQ) with other shares of each of them.

    dV_j = Σ_i f_i p_ij dO_i. The f_i are those of the whole head, by least squares.
    """
    case = wrong.case
    S = case.seq_len
    if name not in ("dq", "dk", "dv") or wrong.matrices is None:
        return None
    if S > FEW or case.head_dim < 3 or case.heads != case.kv_heads or not bool(wrong.seen(name).isfinite().all()):
        return None
    (p, d_s), (q, k, _, d_out) = wrong.matrices, wrong.inputs.values()
    matrix, x = {"dq": (d_s, k), "dk": (d_s.mT, q), "dv": (p.mT, d_out)}[name]
    terms = (matrix[..., None] * x[:, :, None]).transpose(2, 3).flatten(3)  # (B, H, S summed over, S D)
    size = terms.norm(dim=-1, keepdim=True)
    there = size > 1e-6 * size.max()
    seen = wrong.seen(name).flatten(2)[..., None]
    shares = torch.linalg.lstsq((terms * there).mT, seen, driver="gelsd").solution
    shares = torch.where(there, shares, 1.0)
    total = (terms.mT @ torch.where(there, shares, 1.0)).view_as(wrong.exact(name))
    if not wrong.near(name, total):
        return iter(())
    return _of_rows(wrong, name, shares[..., 0].flatten(0, 1))


def _of_rows(wrong: WrongAnswer, name: str, shares: torch.Tensor) -> Iterator[Found]:
    """`shares` (B H, S): how often each query or key counts."""
    case, what = wrong.case, "key" if name == "dq" else "query"
    whole = shares.round()
    if bool(((shares - whole).abs() < 0.01).all()) and bool((whole == whole[0]).all()):
        for times, words in ((0, "is missing"), (2, "counts twice")):
            rows = whole[0] == times
            if not rows.any() or not bool(((whole[0] == 1) | rows).all()):
                continue
            at = [rows[case.positions(rank)] for rank in range(case.world_size)]
            for index, which in ((0, "first"), (-1, "last")):
                if all(chunk[index] and chunk.sum() == 1 for chunk in at):
                    yield Found(f"the {which} {what} of each chunk {words}", "slices, and the borders of chunks")
                elif rows[index] and rows.sum() == 1:
                    yield Found(
                        f"the {which} {what} of the sequence {words}", "the mask, and the borders of the sequence"
                    )
            example = f"{case.words()}: {', '.join(map(str, rows.nonzero().flatten().tolist()))}"
            plural = {"key": "keys", "query": "queries"}[what]
            verb = words.replace("is", "are").replace("counts", "count")
            yield Found(f"some {plural} {verb}", "slices, borders and masks of the backward pass", 1, example)
    elif name != "dq":
        look = "the lse that the backward pass gets: p = e^(s - lse)"
        yield Found("the weights p of each query are multiplied by a number of its own", look, order=2)
