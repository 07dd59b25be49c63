"""A gradient is a sum of parts: which of them are missing, counted twice, or added to another block's sum?

    dQ of rank r  = Σ_j a(r, j) dQ(r, j)        dK of block j = Σ_r a(r, j) dK(r, j)        a = 1 in a right ring

The right parts are known, so the whole numbers a follow from a wrong sum by least squares. The sum of the parts with
these numbers must be the wrong result, else nothing is said.

Shapes: those of wrong_answer.py. The part (r, j) is computed in round t = (r - j) mod P.

Before: facts.py. After: inference.py, all that is told.
Source: Dao et al. 2022, algorithm 4, for the parts.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ring_doctor.contents import FEW
from ring_doctor.facts import Fact, pattern
from ring_doctor.wrong_answer import WrongAnswer, ratio

Counts = dict[tuple[int, int], int]  # by (rank, block): how often this part is in the sum that it belongs to
ROUNDS = {  # of a round, in words: how often its parts count, and those of other rounds; where to look
    "the part of {} is missing": (0, 1, "the rounds of the backward pass: the first, the last, the hop"),
    "the part of {} counts twice": (2, 1, "the start of the sum, and the hop after the last round"),
    "only the part of {} is there": (1, 0, "+= and not = where a round adds to the sum"),
}
HOME = "the round in which a rank has this block, and the way home of its sums"
MISSING: dict[str, tuple[str, Callable[[int, int, int], bool]]] = {  # is the part (rank, block) missing, for rank {}?
    "what the queries of rank {} add is missing": (
        "what this rank does in the backward pass",
        lambda rank, block, s: rank == s,
    ),
    "what rank {} adds for blocks of other ranks is missing": (
        "what this rank does in the backward pass",
        lambda rank, block, s: rank == s != block,
    ),
    "the parts of block {} are missing": (HOME, lambda rank, block, s: block == s),
    "what other ranks add for block {} is missing": (HOME, lambda rank, block, s: block == s != rank),
}


@pattern("In {x} the right parts of ranks and blocks are summed, but {words}", "dq", "dk", "dv")
def parts_of_a_sum(wrong: WrongAnswer, name: str) -> Iterator[Fact] | None:
    """Which parts are missing or too many; None where the parts are unknown."""
    if wrong.case.world_size == 1 or wrong.parts is None:
        return None
    return _told(wrong, *_count(wrong, name, wrong.parts[name]))


def _count(wrong: WrongAnswer, name: str, of: list[list[Tensor]]) -> tuple[Counts, list[str]]:
    """How often each part is in its own sum, and in words those in other sums; ({}, []) if the result is no such sum.

    A part that is 0, because the mask hides it, is left out.
    """
    case, P, seen = wrong.case, wrong.case.world_size, wrong.chunks(wrong.seen(name))
    spots = [(rank, block) for rank in range(P) for block in range(P) if of[rank][block].any()]
    home = 0 if name == "dq" else 1  # the parts of a rank, or those of a block, belong into one sum
    enough = case.seq_len * case.head_dim // P * case.kv_heads >= 2 * len(spots)  # numbers to tell all parts apart
    found: Counts = {}
    foreign, sums = [], []
    for place in range(P):
        used = [spot for spot in spots if enough or spot[home] == place]
        total = torch.zeros_like(seen[place])
        if used and bool(seen[place].isfinite().all()):
            columns = torch.stack([of[rank][block].flatten() for rank, block in used], dim=1)
            shares = torch.linalg.lstsq(columns, seen[place].reshape(-1, 1)).solution[:, 0].round()
            total = (columns @ shares).view_as(total)
            for spot, share in zip(used, shares.int().tolist(), strict=True):
                if spot[home] == place:
                    found[spot] = share
                elif share:
                    whose = f"{'rank' if home == 0 else 'block'} {place}"
                    foreign.append(f"{whose} has rank {spot[0]}'s for block {spot[1]}")
        sums.append(total)
    return (found, foreign) if wrong.near(name, case.join(sums)) else ({}, [])


def _told(wrong: WrongAnswer, found: Counts, foreign: list[str]) -> Iterator[Fact]:
    words, off = wrong.case.words(), {spot: times for spot, times in found.items() if times != 1}
    if foreign:
        look = "the direction of the hops, and the index of the sum to which a part is added"
        yield Fact("parts are in the sum of another rank or block", look, None, 1, f"{words}: {foreign[0]}")
    elif off:
        for says, look, times in _hypotheses(wrong.case.world_size):
            if all(seen == times(*spot) for spot, seen in found.items()):
                yield Fact(says, look)
        rank, block = min(off)
        example = f"{words}: rank {rank}'s part for block {block} counts {off[rank, block]} times"
        look = "the rounds and the hops of the backward pass"
        yield Fact("some parts are missing or count more than once", look, None, 1, example)


def _hypotheses(P: int) -> Iterator[tuple[str, str, Callable[[int, int], int]]]:
    """(what is wrong with the sums, where to look, how often the part (rank, block) would count)."""
    for s in range(P):
        names = [f"round {s}" if s else "round 0, the own block"] + ["the last round"] * (s == P - 1)
        for says, (here, elsewhere, look) in ROUNDS.items():
            for name in names:
                yield says.format(name), look, lambda r, j, s=s, a=here, b=elsewhere: a if (r - j) % P == s else b
        for says, (look, is_missing) in MISSING.items():
            for name in [f"{s}"] + ["P - 1"] * (s == P - 1):
                yield says.format(name), look, lambda r, j, s=s, missing=is_missing: 0 if missing(r, j, s) else 1


@pattern("The errors of {x} are those of a wrong δ, and of nothing else: {words}", "dq", "dk")
def wrong_delta(wrong: WrongAnswer, name: str) -> Iterator[Fact] | None:
    """Whether dS = p ∘ (dP - δ) has another δ for each query: then dQ is off by (δ - δ') Σ scale p k."""
    if not {"dq", "dk"} <= set(wrong.answer.wrong) or wrong.matrices is None or wrong.case.head_dim < 3:
        return None
    if not wrong.clear("dq") or not bool(wrong.seen("dq").isfinite().all()):
        return None
    p, (q, k, _, d_out) = wrong.matrices[0], wrong.inputs.values()
    mean_key = wrong.scale * p @ wrong.of_query_heads(k)
    off = ratio(wrong.seen("dq") - wrong.exact("dq"), mean_key, (3,))
    in_dk = wrong.exact("dk") + wrong.of_kv_heads(wrong.scale * (off * p).mT @ q)
    if not wrong.near("dq", wrong.exact("dq") + off * mean_key) or not wrong.near("dk", in_dk):
        return iter(())
    delta, of_seen = ((d_out * out).sum(dim=-1, keepdim=True) for out in (wrong.exact("out"), wrong.seen("out")))
    sums = "δ = Σ dO ∘ out"
    values = {
        "it is 0": (0 * delta, f"{sums}, and at dS = p ∘ (dP - δ)"),
        "it is that of the wrong out": (of_seen, "out: this follows from it"),
        "it has the wrong sign": (-delta, "dS = p ∘ (dP - δ)"),
        "it is twice δ": (2 * delta, "where δ is subtracted: once"),
        "it is P times δ": (wrong.case.world_size * delta, "sums of δ over ranks or rounds"),
        "it is δ of the query before": (delta.roll(1, dims=2), "the order of the rows of δ"),
        "it is δ of another head": (delta.flip(1), "the order of the heads of δ"),
        "it is the mean of dO ∘ out, not the sum": (delta / wrong.case.head_dim, sums),
        "it is the sum of dO": (d_out.sum(dim=-1, keepdim=True), sums),
    }
    facts = [
        Fact(words, look)
        for words, (value, look) in values.items()
        if wrong.near("dq", wrong.exact("dq") + (delta - value) * mean_key)
    ]
    return iter([*facts, Fact("it is another number for a query", f"{sums}, with the out of the whole row", order=1)])


@pattern("In {x} the place of dO is taken by {words}", "dv")
def wrong_d_out(wrong: WrongAnswer, name: str) -> Iterator[Fact] | None:
    """Whether dV = pᵀ dO was computed with another dO."""
    if wrong.matrices is None:
        return None
    case, d_out, p = wrong.case, wrong.inputs["d_out"], wrong.matrices[0]
    chunks = wrong.chunks(d_out)
    others = {"1 everywhere": torch.ones_like(d_out), "dO of the query before": d_out.roll(1, dims=2)}
    others["dO of another head"] = d_out.flip(1)
    for shift in range(1, case.world_size if case.equal_chunks else 1):
        moved = case.join(chunks[shift:] + chunks[:shift])
        others |= {f"dO of rank r + {shift}": moved, f"dO of rank r - {case.world_size - shift}": moved}
    look = "the dO that the backward pass gets, and sends"
    return (Fact(words, look, wrong.of_kv_heads(p.mT @ x)) for words, x in others.items())


@pattern("{x}: {words}", "dq", "dk", "dv")
def other_rows(wrong: WrongAnswer, name: str) -> Iterator[Fact] | None:
    """Whether a gradient is the right sum over queries (dK, dV) or over keys (dQ) with other shares of each of them.

    dV_j = Σ_i f_i p_ij dO_i. The f_i are those of the whole head, by least squares.
    """
    case = wrong.case
    if wrong.matrices is None or case.seq_len > FEW or case.head_dim < 3 or case.heads != case.kv_heads:
        return None
    if not bool(wrong.seen(name).isfinite().all()):
        return None
    (p, d_s), (q, k, _, d_out) = wrong.matrices, wrong.inputs.values()
    matrix, x = {"dq": (d_s, k), "dk": (d_s.mT, q), "dv": (p.mT, d_out)}[name]
    terms = (matrix[..., None] * x[:, :, None]).transpose(2, 3).flatten(3)  # (B, H, S summed over, S D)
    size = terms.norm(dim=-1, keepdim=True)
    there = size > 1e-6 * size.max()
    seen = wrong.seen(name).flatten(2)[..., None]
    shares = torch.linalg.lstsq((terms * there).mT, seen, driver="gelsd").solution
    shares = torch.where(there, shares, 1.0)
    if not wrong.near(name, (terms.mT @ shares).view_as(wrong.exact(name))):
        return iter(())
    return _of_rows(wrong, name, shares[..., 0].flatten(0, 1))


def _of_rows(wrong: WrongAnswer, name: str, shares: Tensor) -> Iterator[Fact]:
    """`shares` (B H, S): how often each query or key counts."""
    case, whole = wrong.case, shares.round()
    what, several = ("key", "keys") if name == "dq" else ("query", "queries")
    if bool(((shares - whole).abs() >= 0.01).any()) or not bool((whole == whole[0]).all()):
        if name != "dq":
            look = "the lse that the backward pass gets: p = e^(s - lse)"
            yield Fact("the weights p of each query are multiplied by a number of its own", look, order=2)
        return
    for times, one, many in ((0, "is missing", "are missing"), (2, "counts twice", "count twice")):
        rows = whole[0] == times
        if not rows.any() or not bool(((whole[0] == 1) | rows).all()):
            continue
        in_chunks = [rows[case.positions(rank)] for rank in range(case.world_size)]
        for index, which in ((0, "first"), (-1, "last")):
            if all(chunk[index] and chunk.sum() == 1 for chunk in in_chunks):
                yield Fact(f"the {which} {what} of each chunk {one}", "slices, and the borders of chunks")
            elif rows[index] and rows.sum() == 1:
                look = "the mask, and the borders of the sequence"
                yield Fact(f"the {which} {what} of the sequence {one}", look)
        example = f"{case.words()}: {', '.join(map(str, rows.nonzero().flatten().tolist()))}"
        yield Fact(f"some {several} {many}", "slices, borders and masks of the backward pass", None, 1, example)


SUMS = (parts_of_a_sum, wrong_delta, wrong_d_out, other_rows)
