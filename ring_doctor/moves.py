"""Wrong results whose numbers are right, in other places: of another rank, head or row, or read in another order.

Shapes: those of wrong_answer.py.

Before: patterns.py. After: contents.py, all that a wrong result may hold.
Source: none.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ring_doctor.patterns import Found, pattern
from ring_doctor.wrong_answer import FEW, QUERY_ROWS, WrongAnswer


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
