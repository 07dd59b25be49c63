"""What a wrong result holds: the right numbers times a factor, in other places, of another result, or rounded.

    for pattern in CONTENTS: pattern.common(answers, "dk")    ->    what is true of dk in each of these wrong answers

Each fact says what the whole result would be, and is compared with it within rounding. Random numbers fit none.

    P times: a sum over ranks counts too much.    1/scale times: the scale is missing.    a row's own factor: l is wrong

Shapes: those of wrong_answer.py.

Before: facts.py. After: parts_of_gradients.py, patterns of gradients; inference.py, all that is told.
Source: none.
"""

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ring_doctor.case import Case
from ring_doctor.facts import Fact, Pattern, pattern
from ring_doctor.wrong_answer import WrongAnswer, ratio, rows_with

FEW = 256  # tokens up to which every pair of a query and a key may be looked at by itself
QUERY_ROWS = ("out", "lse", "dq")  # the other results have a row for each key


@pattern("In {x} numbers are NaN or infinite {words}")
def not_finite(wrong: WrongAnswer, name: str) -> Iterator[Fact]:
    case, bad = wrong.case, ~wrong.seen(name).isfinite() & wrong.exact(name).isfinite()
    if not bad.any():
        return
    yield Fact("in some places", order=2)
    if bad.all():
        yield Fact("everywhere", order=1)
    if case.inputs == "large":
        yield Fact(
            "where scores are large", "exp: e^s overflows unless the largest score of the row is subtracted first"
        )
    if name not in QUERY_ROWS or case.visible().all():
        return
    rows, visible = rows_with(bad), case.visible()
    blocks = [visible[:, case.positions(block)].any(dim=1) for block in range(case.world_size)]
    sees_none, lacks_one = ~visible.any(dim=1), ~torch.stack(blocks).all(dim=0)
    if sees_none.any() and (rows == sees_none).all():
        yield Fact("in the queries that see no key", "the division by l, which is 0 there")
    elif (rows == lacks_one).all() and lacks_one.sum() > 1:
        look = "the merge of a block of which a query sees no key: -inf - (-inf) is NaN"
        yield Fact("in the queries that see no key of some block", look)
    elif rows[:, :, 0].all() and not rows[:, :, 1:].any():
        yield Fact("in the first query of the sequence", "the mask: this query sees its own key, and no other key")


@pattern("In {x} all numbers are {words}")
def all_numbers(wrong: WrongAnswer, name: str) -> Iterator[Fact]:
    case, exact = wrong.case, wrong.exact(name)
    look = "detach, no_grad, .data, and a buffer that is returned before it is filled"
    yield Fact("0", look, torch.zeros_like(exact))
    if name != "lse":
        return
    m = wrong.scores.amax(dim=-1)
    yield Fact("m, the largest score of the row: log l is not added", "lse = m + log l", m)
    yield Fact("l and not m + log l", "lse = m + log l", (exact - m).exp())
    if case.world_size > 1:
        look = "the sums l of the ranks: one is counted P times, or divided by P"
        yield Fact("log P too large", look, exact + math.log(case.world_size))
        yield Fact("log P too small", look, exact - math.log(case.world_size))
    off = (wrong.seen(name) - exact).nanmean().nan_to_num(0, 0, 0)
    example = f"{case.words()}: {off:.3g}"
    yield Fact("off by one number", "l = e^(lse - m), which is multiplied by something", exact + off, 1, example)


@pattern("The numbers of {x} are those of {words}")
def another_result(wrong: WrongAnswer, name: str) -> Iterator[Fact]:
    others = {f"the right {x}": wrong.exact(x) for x in wrong.right if x != name}
    others |= {f"the input {x}": value for x, value in wrong.inputs.items()}
    others |= {"dk + dv": wrong.exact("dk") + wrong.exact("dv")} if "dk" in wrong.right else {}
    look = "the order in which the results are returned or unpacked, and buffers that two of them share"
    for words, x in others.items():
        yield Fact(words, look, x)


# The right numbers times a factor -----------------------------------------------------------------------------------


def _factors(wrong: WrongAnswer) -> list[tuple[str, float, str]]:
    """Factors with a meaning: (words, value, where to look)."""
    P, n, scale = wrong.case.world_size, wrong.case.heads // wrong.case.kv_heads, wrong.scale
    copies = "a sum or a mean over ranks: it counts a rank's part P times, or divides where nothing was added"
    scales = "the scale: it is forgotten in this result, or applied twice"
    base = "e^x and log beside 2^x and log2: a factor of log 2 is missing or too many"
    group = "the sum over the query heads that share a K/V head"
    return [
        ("-1", -1.0, "a sign"),
        ("P", P, copies),
        ("1/P", 1 / P, copies),
        ("√P", P**0.5, copies),
        ("1/√P", P**-0.5, copies),
        ("scale", scale, scales),
        ("1/scale", 1 / scale, scales),
        ("log 2", math.log(2), base),
        ("1/log 2", 1 / math.log(2), base),
        ("H/G", n, group),
        ("G/H", 1 / n, group),
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
    example = f"{wrong.case.words()}: c = {own.item():.3g}"
    yield Fact("c", "what this result is multiplied by", own * exact, 1, example)


OF_RANKS: dict[str, Callable[[int, int], float]] = {
    "0 on rank 0, and 1 elsewhere": lambda r, P: r > 0,
    "0 on the last rank, and 1 elsewhere": lambda r, P: r < P - 1,
    "1 on rank 0, and 0 elsewhere": lambda r, P: r == 0,
    "1 on the last rank, and 0 elsewhere": lambda r, P: r == P - 1,
    "r + 1": lambda r, P: r + 1,
    "1 / (r + 1)": lambda r, P: 1 / (r + 1),
    "P - r": lambda r, P: P - r,
    "1 / (P - r)": lambda r, P: 1 / (P - r),
}


@pattern("In {x} the right numbers of rank r are multiplied by {words}")
def factor_of_the_rank(wrong: WrongAnswer, name: str) -> Iterator[Fact]:
    case, exact, seen = wrong.case, wrong.chunks(wrong.exact(name)), wrong.chunks(wrong.seen(name))
    if case.world_size == 1:
        return
    look = "what is counted by the number of rounds that a rank computes, or returned by some ranks only"
    for words, c in OF_RANKS.items():
        yield Fact(words, look, case.join([c(r, case.world_size) * x for r, x in enumerate(exact)]))
    own = [ratio(x, y) for x, y in zip(seen, exact, strict=True)]
    expected = case.join([c * x for c, x in zip(own, exact, strict=True)])
    yield Fact("a number of its own for each rank", look, expected, 1, _example(case, own))


@pattern("In {x} the right numbers of each head are multiplied by {words}")
def factor_of_the_head(wrong: WrongAnswer, name: str) -> Iterator[Fact]:
    exact = wrong.exact(name)
    own = ratio(wrong.seen(name), exact, tuple(dim for dim in range(exact.dim()) if dim != 1))
    if own.numel() > 1:
        look = "what is kept for each head: l, the scale, the sum over a group"
        yield Fact("a number of its own", look, own * exact, 0, _example(wrong.case, own.flatten()))


@pattern("In {x} each row is the right row times a number of its own: {words}", "out", "dq")
def factor_of_the_row(wrong: WrongAnswer, name: str) -> Iterator[Fact] | None:
    if wrong.case.head_dim < 3:
        return None
    expected = ratio(wrong.seen(name), wrong.exact(name), (3,)) * wrong.exact(name)
    of_out = "the numerators are right, and what divides them is not"
    if name == "out":
        look = "l: how it is rescaled, summed over blocks, and where out is divided by it"
        return iter([Fact(of_out, look, expected)])
    look = "the lse that the backward pass gets: p = e^(s - lse)"
    return iter([Fact("dS is wrong by a factor of its row", look, expected)])


def _example(case: Case, factors: list[Tensor] | Tensor) -> str:
    return f"{case.words()}: {', '.join(f'{c.item():.3g}' for c in factors)}"


# The right numbers in other places ----------------------------------------------------------------------------------


@pattern("In {x} rank r has the right numbers of {words}")
def another_rank(wrong: WrongAnswer, name: str) -> Iterator[Fact]:
    P, chunks = wrong.case.world_size, wrong.chunks(wrong.exact(name))
    if P == 1 or not wrong.case.equal_chunks:
        return
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
    if n > 1:
        yield Fact("in the reverse order", look, exact.flip(1))
        yield Fact("moved on by one", look, exact.roll(1, dims=1))
    if n > 2 and all(any(torch.allclose(seen[:, h], exact[:, i], 1e-3, 1e-4) for i in range(n)) for h in range(n)):
        yield Fact("in other places", look, order=1)


@pattern("{x} is attention of the query heads to {words}", "out")
def other_kv_heads(wrong: WrongAnswer, name: str) -> Iterator[Fact] | None:
    case, (q, k, v, _) = wrong.case, wrong.inputs.values()
    H, G = case.heads, case.kv_heads
    if case.sinks or G == 1 or case.seq_len > FEW:
        return None
    scores = (wrong.scale * q[:, :, None] @ k[:, None].mT).masked_fill(~case.visible(), -torch.inf)
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
    facts = [Fact(words, look, expected) for words, pairs in known.items() if used == pairs]
    example = f"{case.words()}: (K, V) {', '.join(map(str, used))}"
    return iter([*facts, Fact("other K/V heads than h // (H/G)", look, expected, 1, example)])


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


def rounded(wrong: WrongAnswer, name: str) -> Iterator[Fact] | None:
    """Errors as small as roundings, in a dtype that is wider. Roundings move most numbers, each by a little."""
    seen, exact, here = wrong.seen(name), wrong.exact(name), torch.finfo(wrong.case.dtype)
    if here.bits <= 16:
        return
    finite = exact.isfinite() & wrong.bad(name).view(*seen.shape[:3], *[1] * (seen.dim() - 3))
    error, typical = (seen - exact)[finite].abs(), float(exact[finite].square().mean().sqrt())
    for order, dtype in enumerate((torch.bfloat16, torch.float16, torch.float32)):
        eps, named = torch.finfo(dtype).eps, str(dtype).removeprefix("torch.")
        if eps <= here.eps:
            continue
        if torch.equal(seen, seen.to(dtype).double()):
            yield Fact(f"every number is one that {named} can hold", f"where the result becomes {named}", None, order)
        if bool((error <= 4 * eps * (exact[finite].abs() + typical)).all()) and error.median() > eps / 100 * typical:
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
    factor_of_the_rank,
    factor_of_the_head,
    factor_of_the_row,
)
ROUNDED = Pattern("{x}: {words}", rounded)
