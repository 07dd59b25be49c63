"""What a wrong result holds: the right numbers times a factor, in other places, of another result, parts of a sum.

    for pattern in CONTENTS: pattern.common(answers, "dk")    ->    what is true of dk in each of these wrong answers

The patterns stand in their order: the first that holds says the most. Each compares a whole result with what it would
be, within rounding. Random numbers fit none.

Shapes: those of wrong_answer.py.

Before: wrong_answer.py. After: places.py, where a result is wrong; inference.py, all that is told.
Source: none.
"""

import math
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from ringlab.doctor.sums import other_rows, parts_of_a_sum, wrong_delta
from ringlab.doctor.wrong_answer import FEW, QUERY_ROWS, Found, Pattern, WrongAnswer

CONTENTS: list[Pattern] = []
Find = Callable[[WrongAnswer, str], Iterable[Found] | None]


def pattern(says: str) -> Callable[[Find], Find]:
    """Enter a function into CONTENTS. It is not called for an error that is little more than rounding."""

    def enter(find: Find) -> Find:
        CONTENTS.append(Pattern(says, lambda wrong, name: find(wrong, name) if wrong.clear(name) else None))
        return find

    return enter


@pattern("In {x} numbers are NaN or infinite {words}")
def not_finite(wrong: WrongAnswer, name: str) -> Iterator[Found]:
    seen, case = wrong.seen(name), wrong.case
    bad = ~seen.isfinite() & wrong.exact(name).isfinite()
    if not bad.any():
        return
    yield Found("in some places", order=2)
    if bad.all():
        yield Found("everywhere", order=1)
    if case.inputs == "large":
        look = "exp: e^s overflows unless the largest score of the row is subtracted first"
        yield Found("where scores are large", look)
    rows = bad.flatten(3).any(dim=3) if bad.dim() == 4 else bad
    if name in QUERY_ROWS and not case.visible().all():
        tiles = [case.visible()[:, case.positions(block)].any(dim=1) for block in range(case.world_size)]
        sees_none, lacks_one = ~case.visible().any(dim=1), ~torch.stack(tiles).all(dim=0)
        if sees_none.any() and (rows == sees_none).all():
            yield Found("in the queries that see no key", "the division by l, which is 0 there")
        elif (rows == lacks_one).all() and lacks_one.sum() > 1:
            look = "the merge of a block of which a query sees no key: -inf - (-inf) is NaN"
            yield Found("in the queries that see no key of some block", look)
        elif rows[:, :, 0].all() and not rows[:, :, 1:].any():
            yield Found("in the first query of the sequence", "the mask: this query sees its own key, and no other key")


@pattern("In {x} all numbers are {words}")
def zero(wrong: WrongAnswer, name: str) -> Iterator[Found]:
    if wrong.near(name, torch.zeros_like(wrong.exact(name))):
        yield Found("0", "detach, no_grad, .data, and a buffer that is returned before it is filled")


RETURNED = "the order in which the results are returned or unpacked, and buffers that two of them share"


@pattern("The numbers of {x} are those of {words}")
def another_result(wrong: WrongAnswer, name: str) -> Iterator[Found]:
    others = {f"the right {x}": wrong.exact(x) for x in wrong.right if x != name}
    others |= {f"the input {x}": value for x, value in wrong.inputs.items()}
    others |= {"dk + dv": wrong.exact("dk") + wrong.exact("dv")} if "dk" in wrong.right else {}
    for words, x in others.items():
        if wrong.near(name, x):
            yield Found(words, RETURNED)


def _factors(wrong: WrongAnswer) -> dict[str, tuple[float, str]]:
    """Factors with a meaning: (value, where to look)."""
    case = wrong.case
    P, n = case.world_size, case.heads // case.kv_heads
    scale = wrong.scale
    copies = "a sum or a mean over ranks: it counts a rank's part P times, or divides where nothing was added"
    scales = "the scale: it is forgotten in this result, or applied twice"
    base = "e^x and log beside 2^x and log2: a factor of log 2 is missing or too many"
    group = "the sum over the query heads that share a K/V head"
    return {
        "-1": (-1.0, "a sign"),
        "P": (float(P), copies),
        "1/P": (1 / P, copies),
        "√P": (P**0.5, copies),
        "1/√P": (P**-0.5, copies),
        "scale": (scale, scales),
        "1/scale": (1 / scale, scales),
        "log 2": (math.log(2), base),
        "1/log 2": (1 / math.log(2), base),
        "H/G": (float(n), group),
        "G/H": (1 / n, group),
        "2": (2.0, "a sum that starts from a number that it also adds"),
        "1/2": (0.5, "a mean of two"),
    }


def _ratio(x: Tensor, right: Tensor) -> float:
    """The c with the smallest squares of x - c right."""
    finite = x.isfinite() & right.isfinite()
    return float((x * right)[finite].sum() / right[finite].square().sum().clamp(1e-300))


@pattern("In {x} all numbers are {words} times the right numbers")
def factor(wrong: WrongAnswer, name: str) -> Iterator[Found]:
    """P times is 2 times where P = 2: all that fit are found, and other answers decide."""
    exact = wrong.exact(name)
    for words, (c, look) in _factors(wrong).items():
        if c != 1 and wrong.near(name, c * exact):
            yield Found(words, look)
    c = _ratio(wrong.seen(name), exact)
    if wrong.near(name, c * exact):
        yield Found("c", "what this result is multiplied by", 1, f"{wrong.case.words()}: c = {c:.3g}")


@pattern("In {x} all numbers are {words}")
def shifted_lse(wrong: WrongAnswer, name: str) -> Iterator[Found]:
    if name != "lse":
        return
    case, seen, exact = wrong.case, wrong.seen(name), wrong.exact(name)
    q, k, *_ = wrong.inputs.values()
    scores = wrong.scale * q @ k.repeat_interleave(case.heads // case.kv_heads, dim=1).mT
    largest = scores.masked_fill(~case.visible(), -torch.inf).amax(dim=-1)
    if wrong.near(name, largest):
        yield Found("m, the largest score of the row: log l is not added", "lse = m + log l")
    if wrong.near(name, (exact - largest).exp()):
        yield Found("l and not m + log l", "lse = m + log l")
    for words, c in {"log P too large": 1.0, "log P too small": -1.0}.items():
        if case.world_size > 1 and wrong.near(name, exact + c * math.log(case.world_size)):
            yield Found(words, "the sums l of the ranks: one is counted P times, or divided by P")
    finite = seen.isfinite() & exact.isfinite()
    off = float((seen - exact)[finite].mean()) if finite.any() else 0.0
    if wrong.near(name, exact + off):
        yield Found(
            "off by one number",
            "l = e^(lse - m), which is multiplied by something",
            1,
            f"{wrong.case.words()}: {off:.3g}",
        )


@pattern("In {x} rank r has the right numbers of {words}")
def another_rank(wrong: WrongAnswer, name: str) -> Iterator[Found]:
    P, chunks = wrong.case.world_size, wrong.chunks(wrong.exact(name))
    if P == 1 or not wrong.case.equal_chunks:
        return
    travel = "the hops of dK and dV: one too few or one too many on the way home"
    look = "the rank that this chunk is cut for, sent to or returned on" if name in QUERY_ROWS else travel
    for shift in range(1, P):
        if wrong.near(name, wrong.case.join(chunks[shift:] + chunks[:shift])):
            yield Found(f"rank r + {shift}", look)
            yield Found(f"rank r - {P - shift}", look)
    if wrong.near(name, wrong.case.join(chunks[::-1])):
        yield Found("rank P - 1 - r", look)


@pattern("In {x} the right heads are {words}")
def another_head(wrong: WrongAnswer, name: str) -> Iterator[Found]:
    seen, exact = wrong.seen(name), wrong.exact(name)
    n, look = exact.shape[1], "every view, reshape and all-to-all that splits or joins heads"
    if n == 1:
        return
    if wrong.near(name, exact.flip(1)):
        yield Found("in the reverse order", look)
    if wrong.near(name, exact.roll(1, dims=1)):
        yield Found("moved on by one", look)
    if n > 2 and all(any(torch.allclose(seen[:, h], exact[:, i], 1e-3, 1e-4) for i in range(n)) for h in range(n)):
        yield Found("in other places", look, order=1)


@pattern("{x} is attention of the query heads to {words}")
def other_kv_heads(wrong: WrongAnswer, name: str) -> Iterator[Found] | None:
    case, (q, k, v, _) = wrong.case, wrong.inputs.values()
    H, G = case.heads, case.kv_heads
    if name != "out" or case.sinks or G == 1 or case.seq_len > FEW:
        return None
    scores = (wrong.scale * q[:, :, None] @ k[:, None].mT).masked_fill(~case.visible(), -torch.inf)
    weights = scores.softmax(dim=-1).nan_to_num()  # (B, H, G, S, S)
    pairs = [(a, b) for a in range(G) for b in range(G)]
    outs = {(a, b): weights[:, :, a] @ v[:, b : b + 1] for a, b in pairs}
    seen = wrong.seen(name)
    near = {pair: (x - seen).abs().amax(dim=(0, 2, 3)) < 1e-3 for pair, x in outs.items()}
    used = [next((pair for pair in pairs if near[pair][h]), None) for h in range(H)]
    expected = [outs[pair][:, h] for h, pair in enumerate(used) if pair]
    if len(expected) < H or not wrong.near(name, torch.stack(expected, dim=1)):
        return iter(())
    look = "how a query head finds its K/V head: h // (H/G)"
    own = [h // (H // G) for h in range(H)]
    known = {
        "K/V head h mod G": [(h % G, h % G) for h in range(H)],
        "K/V head 0 alone": [(0, 0)] * H,
        "the right K and another head's V": [(a, pair[1]) for a, pair in zip(own, used, strict=True) if pair],
        "the right V and another head's K": [(pair[0], b) for b, pair in zip(own, used, strict=True) if pair],
    }
    found = [Found(words, look) for words, pairs in known.items() if used == pairs]
    example = f"{case.words()}: (K, V) {', '.join(map(str, used))}"
    return iter([*found, Found("other K/V heads than h // (H/G)", look, order=1, example=example)])


@pattern("In {x} the right numbers are {words}")
def another_place(wrong: WrongAnswer, name: str) -> Iterator[Found]:
    """Moved rows, and a chunk that is read in another order of its dimensions."""
    moves: dict[str, Callable[[Tensor], Tensor]] = {
        "one row too late in each chunk": lambda x: x.roll(1, dims=2),
        "one row too early in each chunk": lambda x: x.roll(-1, dims=2),
        "in the reverse order of rows in each chunk": lambda x: x.flip(2),
        "in the other half of each chunk": lambda x: torch.cat(x.tensor_split(2, dim=2)[::-1], dim=2),
        "laid out as (B, C, H, ...) and read as (B, H, C, ...)": lambda x: x.transpose(1, 2).reshape(x.shape),
        "laid out as (B, H, C, ...) and read as (B, C, H, ...)": _read_as_bchd,
    }
    if wrong.exact(name).dim() == 4:
        moves["laid out as (B, H, C, D) and read as (B, H, D, C)"] = lambda x: x.reshape(x.mT.shape).mT
        moves["laid out as (B, H, D, C) and read as (B, H, C, D)"] = lambda x: x.mT.reshape(x.shape)
    look = "roll, slices, view, reshape and the memory order of buffers for messages"
    chunks = wrong.chunks(wrong.exact(name))
    for words, move in moves.items():
        if wrong.near(name, wrong.case.join([move(x) for x in chunks])):
            yield Found(words, look)
    of_seen = wrong.chunks(wrong.seen(name))
    if all(_same_numbers(x, y) for x, y in zip(of_seen, chunks, strict=True)):
        yield Found("in other places of their chunk", look, order=1)
    if _same_numbers(wrong.seen(name), wrong.exact(name)):
        yield Found("in other places of the whole sequence", look, order=2)


def _read_as_bchd(x: Tensor) -> Tensor:
    B, H, C, *D = x.shape
    return x.reshape(B, C, H, *D).transpose(1, 2)


def _same_numbers(x: Tensor, y: Tensor) -> bool:
    return torch.allclose(x.flatten().sort().values, y.flatten().sort().values, rtol=1e-4, atol=1e-5)


@pattern("In {x} the right numbers of rank r are multiplied by {words}")
def factor_of_the_rank(wrong: WrongAnswer, name: str) -> Iterator[Found]:
    case, exact = wrong.case, wrong.chunks(wrong.exact(name))
    P = case.world_size
    if P == 1:
        return
    known = {
        "0 on rank 0, and 1 elsewhere": lambda r: float(r > 0),
        "0 on the last rank, and 1 elsewhere": lambda r: float(r < P - 1),
        "1 on rank 0, and 0 elsewhere": lambda r: float(r == 0),
        "1 on the last rank, and 0 elsewhere": lambda r: float(r == P - 1),
        "r + 1": lambda r: r + 1.0,
        "1 / (r + 1)": lambda r: 1 / (r + 1.0),
        "P - r": lambda r: float(P - r),
        "1 / (P - r)": lambda r: 1 / (P - r),
    }
    look = "what is counted by the number of rounds that a rank computes, or returned by some ranks only"
    for words, c in known.items():
        if wrong.near(name, case.join([c(r) * x for r, x in enumerate(exact)])):
            yield Found(words, look)
    own = [_ratio(x, y) for x, y in zip(wrong.chunks(wrong.seen(name)), exact, strict=True)]
    if wrong.near(name, case.join([c * x for c, x in zip(own, exact, strict=True)])):
        example = f"{case.words()}: {', '.join(f'{c:.3g}' for c in own)}"
        yield Found("a number of its own for each rank", look, order=1, example=example)


@pattern("In {x} the right numbers of each head are multiplied by {words}")
def factor_of_the_head(wrong: WrongAnswer, name: str) -> Iterator[Found]:
    seen, exact = wrong.seen(name), wrong.exact(name)
    own = [_ratio(seen[:, h], exact[:, h]) for h in range(exact.shape[1])]
    c = torch.tensor(own, dtype=torch.float64).view(1, -1, *[1] * (exact.dim() - 2))
    if len(own) > 1 and wrong.near(name, c * exact):
        example = f"{wrong.case.words()}: {', '.join(f'{c:.3g}' for c in own)}"
        yield Found("a number of its own", "what is kept for each head: l, the scale, the sum over a group", 0, example)


@pattern("In {x} each row is the right row times a number of its own: {words}")
def factor_of_the_row(wrong: WrongAnswer, name: str) -> Iterator[Found] | None:
    if name not in ("out", "dq") or wrong.case.head_dim < 3:
        return None
    seen, exact = wrong.seen(name), wrong.exact(name)
    c = (seen * exact).sum(dim=-1, keepdim=True) / exact.square().sum(dim=-1, keepdim=True).clamp(1e-300)
    if not wrong.near(name, c * exact):
        return iter(())
    if name == "out":
        look = "l: how it is rescaled, summed over blocks, and where out is divided by it"
        return iter([Found("the numerators are right, and what divides them is not", look)])
    return iter([Found("dS is wrong by a factor of its row", "the lse that the backward pass gets: p = e^(s - lse)")])


CONTENTS.append(Pattern("In {x} the right parts of ranks and blocks are summed, but {words}", parts_of_a_sum))
CONTENTS.append(Pattern("The errors of {x} are those of a wrong δ, and of nothing else: {words}", wrong_delta))
CONTENTS.append(Pattern("{x}: {words}", other_rows))


def rounded(wrong: WrongAnswer, name: str) -> Iterator[Found] | None:
    """Errors as small as roundings, in a dtype that is wider. Roundings move most numbers, each by a little."""
    seen, exact = wrong.seen(name), wrong.exact(name)
    if torch.finfo(wrong.case.dtype).bits <= 16:
        return None
    finite = exact.isfinite() & wrong.bad(name).view(*seen.shape[:3], *[1] * (seen.dim() - 3))
    error, typical = (seen - exact)[finite].abs(), float(exact[finite].square().mean().sqrt())
    found = []
    for order, dtype in enumerate((torch.bfloat16, torch.float16, torch.float32)):
        eps, named = torch.finfo(dtype).eps, str(dtype).removeprefix("torch.")
        if eps <= torch.finfo(wrong.case.dtype).eps:
            continue
        if torch.equal(seen, seen.to(dtype).double()):
            words = f"every number is one that {named} can hold"
            found.append(Found(words, f"where the result becomes {named}", order))
        if bool((error <= 4 * eps * (exact[finite].abs() + typical)).all()) and error.median() > eps / 100 * typical:
            look = f"casts to {named}: of messages, of buffers, and of sums over blocks"
            found.append(Found(f"the errors are as small as roundings to {named}", look, 5 - order))
    return iter(found)


CONTENTS.append(Pattern("{x}: {words}", rounded))
