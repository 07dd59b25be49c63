"""What a wrong result holds: the right numbers times a factor, in other places, of another result, or rounded.

    for pattern in CONTENTS: pattern.common(answers, "dk")    ->    what is true of dk in each of these wrong answers

Each fact says what the whole result would be, and is compared with it within rounding. Random numbers fit none.

    P times: a sum over ranks counts too much.    1/scale times: the scale is missing.    a row's own factor: l is wrong

Before: facts.py. After: inference.py, all that is told.
Source: Dao et al. 2022, algorithm 4, for δ.
"""

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from ring_doctor.facts import Fact, Pattern, pattern
from ring_doctor.wrong_answer import WrongAnswer, ratio, rows_with

FEW = 256  # tokens up to which every pair of a query and a key may be looked at by itself
QUERY_ROWS = ("out", "lse", "dq")  # the other results have a row for each key


@pattern("In {x} numbers are NaN or infinite {words}")
def not_finite(wrong: WrongAnswer, name: str) -> Iterator[Fact]:
    bad, visible = ~wrong.seen(name).isfinite() & wrong.exact(name).isfinite(), wrong.case.visible()
    if not bad.any():
        return
    yield Fact("in some places", order=2)
    if bad.all():
        yield Fact("everywhere", order=1)
    if wrong.case.inputs == "large":
        yield Fact(
            "where scores are large", "exp: e^s overflows unless the largest score of the row is subtracted first"
        )
    if name not in QUERY_ROWS or visible.all():
        return
    rows, sees_none = rows_with(bad), ~visible.any(dim=1)
    blocks = [visible[:, wrong.case.positions(block)].any(dim=1) for block in range(wrong.case.world_size)]
    lacks_one = ~torch.stack(blocks).all(dim=0)
    if sees_none.any() and (rows == sees_none).all():
        yield Fact("in the queries that see no key", "the division by l, which is 0 there")
    elif (rows == lacks_one).all() and lacks_one.sum() > 1:
        look = "the merge of a block of which a query sees no key: -inf - (-inf) is NaN"
        yield Fact("in the queries that see no key of some block", look)
    elif rows[:, :, 0].all() and not rows[:, :, 1:].any():
        yield Fact("in the first query of the sequence", "the mask: this query sees its own key, and no other key")


@pattern("In {x} all numbers are {words}")
def all_numbers(wrong: WrongAnswer, name: str) -> Iterator[Fact]:
    exact, P = wrong.exact(name), wrong.case.world_size
    look = "detach, no_grad, .data, and a buffer that is returned before it is filled"
    yield Fact("0", look, torch.zeros_like(exact))
    if name != "lse":
        return
    m = wrong.scores.amax(dim=-1)
    yield Fact("m, the largest score of the row: log l is not added", "lse = m + log l", m)
    yield Fact("l and not m + log l", "lse = m + log l", (exact - m).exp())
    for words, sign in (("log P too large", 1), ("log P too small", -1)) if P > 1 else ():
        look = "the sums l of the ranks: one is counted P times, or divided by P"
        yield Fact(words, look, exact + sign * math.log(P))


@pattern("The numbers of {x} are those of {words}")
def another_result(wrong: WrongAnswer, name: str) -> Iterator[Fact]:
    others = {f"the right {x}": wrong.exact(x) for x in wrong.right if x != name}
    others |= {f"the input {x}": value for x, value in wrong.inputs.items()}
    others |= {"dk + dv": wrong.exact("dk") + wrong.exact("dv")} if "dk" in wrong.right else {}
    look = "the order in which the results are returned or unpacked, and buffers that two of them share"
    return (Fact(words, look, x) for words, x in others.items())


# The right numbers times a factor -----------------------------------------------------------------------------------

COPIES = "a sum or a mean over ranks: it counts a rank's part P times, or divides where nothing was added"
SCALES = "the scale: it is forgotten in this result, or applied twice"
BASE = "e^x and log beside 2^x and log2: a factor of log 2 is missing or too many"
GROUP = "the sum over the query heads that share a K/V head"


def _factors(wrong: WrongAnswer) -> list[tuple[str, float, str]]:
    """Factors with a meaning: (words, value, where to look)."""
    P, n, scale = wrong.case.world_size, wrong.case.heads // wrong.case.kv_heads, wrong.scale
    return [
        ("-1", -1.0, "a sign"),
        ("P", P, COPIES),
        ("1/P", 1 / P, COPIES),
        ("√P", P**0.5, COPIES),
        ("1/√P", P**-0.5, COPIES),
        ("scale", scale, SCALES),
        ("1/scale", 1 / scale, SCALES),
        ("log 2", math.log(2), BASE),
        ("1/log 2", 1 / math.log(2), BASE),
        ("H/G", n, GROUP),
        ("G/H", 1 / n, GROUP),
        ("2", 2.0, "a sum that starts from a number that it also adds"),
        ("1/2", 0.5, "a mean of two"),
    ]


@pattern("In {x} all numbers are {words} times the right numbers")
def factor(wrong: WrongAnswer, name: str) -> Iterator[Fact]:
    """P times is 2 times where P = 2: all that fit are found, and other answers decide."""
    exact = wrong.exact(name)
    for words, c, look in _factors(wrong):
        if c != 1:
            yield Fact(words, look, c * exact)
    own = ratio(wrong.seen(name), exact)
    yield Fact("c", "what this result is multiplied by", own * exact, 1, _example(wrong, own.view(1), "c = "))


OF_ROWS = {  # what a factor of each row is, and where to look
    "out": (
        "the numerators are right, and what divides them is not",
        "l: how it is rescaled, summed over blocks, and where out is divided by it",
    ),
    "dq": ("dS is wrong by a factor of its row", "the lse that the backward pass gets: p = e^(s - lse)"),
}


@pattern(
    "In {x} each row is the right row times a number of its own: {words}",
    *OF_ROWS,
    shows=lambda wrong: wrong.case.head_dim > 2,
)
def factor_of_the_row(wrong: WrongAnswer, name: str) -> Iterator[Fact]:
    yield Fact(*OF_ROWS[name], ratio(wrong.seen(name), wrong.exact(name), (3,)) * wrong.exact(name))


@pattern(
    "The errors of {x} are those of a wrong δ, and of nothing else: {words}",
    *("dq", "dk"),
    shows=lambda wrong: (
        wrong.matrices is not None and wrong.case.head_dim > 2 and {"dq", "dk"} <= set(wrong.answer.wrong)
    ),
)
def wrong_delta(wrong: WrongAnswer, name: str) -> Iterator[Fact]:
    """Whether dS = p ∘ (dP - δ) has another δ for each query: then dQ is off by (δ - δ') Σ scale p k."""
    assert wrong.matrices, "shows says so"
    p, (q, k, _, d_out) = wrong.matrices[0], wrong.inputs.values()
    mean_key = wrong.scale * p @ wrong.of_query_heads(k)
    off = ratio(wrong.seen("dq") - wrong.exact("dq"), mean_key, (3,))
    in_dk = wrong.exact("dk") + wrong.of_kv_heads(wrong.scale * (off * p).mT @ q)
    if not wrong.near("dq", wrong.exact("dq") + off * mean_key) or not wrong.near("dk", in_dk):
        return
    delta, of_seen = ((d_out * out).sum(dim=-1, keepdim=True) for out in (wrong.exact("out"), wrong.seen("out")))
    sums = "δ = Σ dO ∘ out"
    for words, value, look in (
        ("it is 0", 0 * delta, f"{sums}, and at dS = p ∘ (dP - δ)"),
        ("it is that of the wrong out", of_seen, "out: this follows from it"),
        ("it has the wrong sign", -delta, "dS = p ∘ (dP - δ)"),
        ("it is δ of the query before", delta.roll(1, dims=2), "the order of the rows of δ"),
        ("it is the mean of dO ∘ out, not the sum", delta / wrong.case.head_dim, sums),
    ):
        if wrong.near("dq", wrong.exact("dq") + (delta - value) * mean_key):
            yield Fact(words, look)
    yield Fact("it is another number for a query", f"{sums}, with the out of the whole row", order=1)


def _example(wrong: WrongAnswer, factors: Sequence[float] | Tensor, what: str = "") -> str:
    return f"{wrong.case.words()}: {what}{', '.join(f'{float(c):.3g}' for c in factors)}"


# The right numbers in other places ----------------------------------------------------------------------------------


@pattern("In {x} rank r has the right numbers of {words}", shows=lambda wrong: wrong.case.equal_chunks)
def another_rank(wrong: WrongAnswer, name: str) -> Iterator[Fact]:
    P, chunks = wrong.case.world_size, wrong.chunks(wrong.exact(name))
    travel = "the hops of dK and dV: one too few or one too many on the way home"
    look = "the rank that this chunk is cut for, sent to or returned on" if name in QUERY_ROWS else travel
    for shift in range(1, P):
        moved = wrong.case.join(chunks[shift:] + chunks[:shift])
        yield Fact(f"rank r + {shift}", look, moved)
        yield Fact(f"rank r - {P - shift}", look, moved)
    yield Fact("rank P - 1 - r", look, wrong.case.join(chunks[::-1]))


@pattern("In {x} the right heads are {words}")
def another_head(wrong: WrongAnswer, name: str) -> Iterator[Fact]:
    seen, exact = wrong.seen(name), wrong.exact(name)
    n, look = exact.shape[1], "every view, reshape and all-to-all that splits or joins heads"
    yield Fact("in the reverse order", look, exact.flip(1))
    yield Fact("moved on by one", look, exact.roll(1, dims=1))
    if n > 2 and all(any(torch.allclose(seen[:, h], exact[:, i], 1e-3, 1e-4) for i in range(n)) for h in range(n)):
        yield Fact("in other places", look, order=1)


@pattern(
    "{x} is attention of the query heads to {words}",
    "out",
    shows=lambda wrong: wrong.case.kv_heads > 1 and wrong.case.seq_len <= FEW and not wrong.case.sinks,
)
def other_kv_heads(wrong: WrongAnswer, name: str) -> Iterator[Fact]:
    (q, k, v, _), H, G = wrong.inputs.values(), wrong.case.heads, wrong.case.kv_heads
    scores = (wrong.scale * q[:, :, None] @ k[:, None].mT).masked_fill(~wrong.case.visible(), -torch.inf)
    outs = scores.softmax(dim=-1).nan_to_num()[:, :, :, None] @ v[:, None, None]  # (B, H, G of K, G of V, S, D)
    off = (outs - wrong.seen(name)[:, :, None, None]).abs().amax(dim=(0, 4, 5))
    used = [divmod(int(of_head.argmin()), G) for of_head in off]
    expected = torch.stack([outs[:, h, a, b] for h, (a, b) in enumerate(used)], dim=1)
    own, look = [h // (H // G) for h in range(H)], "how a query head finds its K/V head: h // (H/G)"
    known = {
        "K/V head h mod G": [(h % G, h % G) for h in range(H)],
        "K/V head 0 alone": [(0, 0)] * H,
        "the right K and another head's V": [(a, pair[1]) for a, pair in zip(own, used, strict=True)],
        "the right V and another head's K": [(pair[0], b) for b, pair in zip(own, used, strict=True)],
    }
    for words in (words for words, pairs in known.items() if used == pairs):
        yield Fact(words, look, expected)
    example = f"{wrong.case.words()}: (K, V) {', '.join(map(str, used))}"
    yield Fact("other K/V heads than h // (H/G)", look, expected, 1, example)


def _read_as_bchd(x: Tensor) -> Tensor:
    B, H, C, *D = x.shape
    return x.reshape(B, C, H, *D).transpose(1, 2)


MOVES: dict[str, Callable[[Tensor], Tensor]] = {  # of a chunk: moved rows, or another order of its dimensions
    "one row too late in each chunk": lambda x: x.roll(1, dims=2),
    "one row too early in each chunk": lambda x: x.roll(-1, dims=2),
    "in the reverse order of rows in each chunk": lambda x: x.flip(2),
    "in the other half of each chunk": lambda x: torch.cat(x.tensor_split(2, dim=2)[::-1], dim=2),
    "laid out as (B, C, H, ...) and read as (B, H, C, ...)": lambda x: x.transpose(1, 2).reshape(x.shape),
    "laid out as (B, H, C, ...) and read as (B, C, H, ...)": _read_as_bchd,
    "laid out as (B, H, C, D) and read as (B, H, D, C)": lambda x: x.reshape(x.mT.shape).mT if x.dim() == 4 else x,
    "laid out as (B, H, D, C) and read as (B, H, C, D)": lambda x: x.mT.reshape(x.shape) if x.dim() == 4 else x,
}


@pattern("In {x} the right numbers are {words}")
def another_place(wrong: WrongAnswer, name: str) -> Iterator[Fact]:
    look = "roll, slices, view, reshape and the memory order of buffers for messages"
    exact, seen = wrong.chunks(wrong.exact(name)), wrong.chunks(wrong.seen(name))
    for words, move in MOVES.items():
        yield Fact(words, look, wrong.case.join([move(x) for x in exact]))
    if all(_same_numbers(x, y) for x, y in zip(seen, exact, strict=True)):
        yield Fact("in other places of their chunk", look, order=1)
    if _same_numbers(wrong.seen(name), wrong.exact(name)):
        yield Fact("in other places of the whole sequence", look, order=2)


def _same_numbers(x: Tensor, y: Tensor) -> bool:
    return torch.allclose(x.flatten().sort().values, y.flatten().sort().values, rtol=1e-4, atol=1e-5)


def rounded(wrong: WrongAnswer, name: str) -> Iterator[Fact]:
    """Errors as small as roundings, in a dtype that is wider. Roundings move most numbers, each by a little."""
    seen, exact = wrong.seen(name), wrong.exact(name)
    there = exact.isfinite() & wrong.bad(name).view(*seen.shape[:3], *[1] * (seen.dim() - 3))
    error, typical = (seen - exact)[there].abs(), float(exact[there].square().mean().sqrt())
    for order, dtype in enumerate((torch.bfloat16, torch.float16, torch.float32)):
        eps, named = torch.finfo(dtype).eps, str(dtype).removeprefix("torch.")
        if eps <= torch.finfo(wrong.case.dtype).eps or torch.finfo(wrong.case.dtype).bits <= 16:
            continue
        if torch.equal(seen, seen.to(dtype).double()):
            yield Fact(f"every number is one that {named} can hold", f"where the result becomes {named}", None, order)
        if bool((error <= 4 * eps * (exact[there].abs() + typical)).all()) and error.median() > eps / 100 * typical:
            size = "float32" if dtype == torch.float32 else "16 bits"
            look = f"casts to {size}: of messages, of buffers, and of sums over blocks"
            yield Fact(f"the errors are as small as roundings to {size}", look, None, 5 - order)


CONTENTS = (  # the first that holds says the most
    not_finite,
    all_numbers,
    another_result,
    factor,
    another_rank,
    another_head,
    other_kv_heads,
    another_place,
    factor_of_the_row,
    wrong_delta,
    Pattern("{x}: {words}", rounded),
)
