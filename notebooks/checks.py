"""The judges of the "your turn" cells: each takes your answer, tries it, and says "right" or what is wrong and why.

An answer still left as `...` is not wrong, only open: the notebooks run to their end with their exercises unsolved.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from basics.blocking_messages import Recv, Send, simulate_messages
from basics.naive_attention import TOKENS, naive_attention
from training.causal import positions

OPEN = "not answered yet: replace the ..."


def judge(check: Callable[[Any], str]) -> Callable[[Any], str]:
    """An answer that breaks is a wrong answer, not a traceback."""

    @wraps(check)
    def careful(answer: Any) -> str:
        try:
            return check(answer)
        except Exception as error:
            return f"not yet: your answer ends in {type(error).__name__}: {error}"

    return careful


def _wrong(answer: Any, expected: Tensor) -> str | None:
    """Why `answer` is not `expected`, in words for everyone; None when it is."""
    if not isinstance(answer, Tensor):
        return f"not yet: expected a tensor of shape {tuple(expected.shape)}, got {type(answer).__name__}"
    if answer.shape != expected.shape:
        return f"not yet: expected shape {tuple(expected.shape)}, got {tuple(answer.shape)}"
    if answer.isnan().any():
        return "not yet: there are NaNs in it; look for inf - inf, inf/inf or 0/0"
    if not torch.allclose(answer.double(), expected.double(), rtol=1e-5, atol=1e-6):
        return f"not yet: off by up to {(answer.double() - expected.double()).abs().max():.3g}"
    return None


# 01 ------------------------------------------------------------------------------------------------------------------


@judge
def safe_softmax(answer: Callable[[Tensor], Tensor]) -> str:
    """01: softmax of scores (n,) of any size."""
    small = torch.tensor([0.0, 1.0, 2.0])
    if (out := answer(small)) is ...:
        return OPEN
    if problem := _wrong(out, torch.softmax(small, 0)):
        return problem + ", already for the small scores 0, 1, 2: each weight is e^score over the sum of all"
    big = torch.tensor([1000.0, 1001.0, 1002.0])
    if _wrong(answer(big), torch.softmax(big, 0)):
        return "not yet: scores near 1000 overflow; subtract the largest score before exp"
    low = torch.tensor([-1000.0, -1001.0, -1002.0])
    if _wrong(answer(low), torch.softmax(low, 0)):
        return (
            "not yet: scores near -1000 all become 0; subtract the largest score itself, not its absolute value or 1000"
        )
    return "right"


@judge
def running_update(answer: Callable[..., tuple[Tensor, Tensor, Tensor]]) -> str:
    """01: (m, l, o), scores (n,), v (n, D) -> (m, l, o), for one query."""
    m, l, o = torch.tensor(1.0), torch.tensor(2.0), torch.tensor([3.0, 4.0])
    v = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    for scores in (torch.tensor([0.0, 0.5]), torch.tensor([3.0, 2.0])):  # the max stays; the max grows
        if (out := answer(m, l, o, scores, v)) is ...:
            return OPEN
        m_new = torch.maximum(m, scores.max())
        p, f = torch.exp(scores - m_new), torch.exp(m - m_new)
        for name, given, expected in zip("mlo", out, (m_new, f * l + p.sum(), f * o + p @ v), strict=True):
            if problem := _wrong(given, expected):
                grows = "grows to 3" if m_new > m else "stays at 1"
                hint = " (is the old part rescaled by e^(m - m_new)?)" if m_new > m and name != "m" else ""
                return f"{problem}: {name} is wrong when the max {grows}{hint}"
    return "right"


@judge
def merge_two(answer: Callable[..., tuple[Tensor, Tensor]]) -> str:
    """01: merge (out (n, D), lse (n,)) of two sets of keys."""
    generator = torch.Generator().manual_seed(0)
    scores, v = torch.randn(3, 5, generator=generator), torch.randn(5, 2, generator=generator)
    parts = [(torch.softmax(scores[:, k], 1) @ v[k], scores[:, k].logsumexp(1)) for k in (slice(0, 1), slice(1, 5))]
    if (given := answer(*parts[0], *parts[1])) is ...:
        return OPEN
    out, lse = given
    if problem := _wrong(lse, scores.logsumexp(1)):
        return problem + " in lse: it is log(e^lse_a + e^lse_b)"
    if _wrong(out, (parts[0][0] + parts[1][0]) / 2) is None:
        return "not yet: that is the plain average; 1 key and 4 keys do not weigh the same"
    if problem := _wrong(out, torch.softmax(scores, 1) @ v):
        return problem + " in out: weigh out_a by e^(lse_a - lse) and out_b by e^(lse_b - lse)"
    return "right"


# 02 ------------------------------------------------------------------------------------------------------------------


@judge
def blockwise(answer: Callable[..., Tensor]) -> str:
    """02: attention of q, k, v (S, D) with blocks of `block_size` keys."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(7, 4, generator=generator) for _ in "qkv")
    exact = naive_attention(q[None, None], k[None, None], v[None, None])[0, 0]
    for block_size in (7, 1, 3):
        if (out := answer(q, k, v, block_size)) is ...:
            return OPEN
        if problem := _wrong(out, exact):
            return f"{problem}, with 7 keys in blocks of {block_size}"
    return "right"


@judge
def visible_tiles(answer: Callable[[int], int]) -> str:
    """02: how many of n x n square tiles a causal mask leaves something of."""
    for n in (1, 2, 4, 32):
        if (given := answer(n)) is ...:
            return OPEN
        if given != n * (n + 1) // 2:
            hint = {n * n: "that is all of them", n * (n - 1) // 2: "the n tiles on the diagonal count too"}
            return f"not yet: {n} x {n} tiles, you say {given}: {hint.get(given, 'row i sees tiles 0 to i')}"
    return "right"


@judge
def largest_tensor(answer: Any) -> str:
    """02: bytes of the largest tensor of blockwise attention, S = 1,000,000, H = 8, D = 64, block 256, float32."""
    if answer is ...:
        return OPEN
    tile, whole = 8 * 256 * 256 * 4, 8 * 1_000_000 * 64 * 4
    if answer == whole:
        return "right: q, k, v and out are what is large now; one tile of scores has only 2 MiB"
    if answer == tile:
        return "not yet: that is the tile of scores, 2 MiB; one of q, k, v and out is larger"
    return f"not yet: out is (B, H, S, D) of 4 bytes each; you say {answer:,}"


# 03 ------------------------------------------------------------------------------------------------------------------


@judge
def blocks_of_gpu(answer: Any) -> str:
    """03: the blocks that GPU 2 computes on in rounds 0, 1, 2, 3."""
    if answer is ...:
        return OPEN
    if list(answer) == [2, 3, 0, 1]:
        return "not yet: that is a ring turning the other way; GPU 2 receives from GPU 1"
    if list(answer) != [2, 1, 0, 3]:
        return f"not yet: GPU 2 starts with its own block and then takes what GPU 1 had; you say {list(answer)}"
    return "right"


@judge
def token_two_after_round_two(answer: Any) -> str:
    """03: (f, m, l) of token 2 in round 2, three decimals."""
    if answer is ...:
        return OPEN
    for name, given, expected in zip("fml", answer, (0.120, 4.243, 1.480), strict=True):
        if abs(given - expected) > 0.001:
            hint = {
                "f": "the old max is 2.121, the new one 4.243: f = e^(2.121 - 4.243)",
                "m": "the scores are [1 1].[3 1]/sqrt(2) and [1 1].[3 3]/sqrt(2)",
                "l": "rescale the old l = 1.979 by f, then add e^(2.828 - m) and e^(4.243 - m)",
            }
            return f"not yet: {name} is not {given:.3f}: {hint[name]}"
    return "right"


@judge
def mended_sum(answer: Callable[..., Tensor]) -> str:
    """03: outs (P, D) and lses (P,) of the blocks of one query -> its attention (D,)."""
    scores = TOKENS[0] @ TOKENS.T / 2**0.5
    outs = torch.stack([torch.softmax(scores[i : i + 2], 0) @ TOKENS[i : i + 2] for i in range(0, 8, 2)])
    lses = torch.stack([scores[i : i + 2].logsumexp(0) for i in range(0, 8, 2)])
    if (given := answer(outs, lses)) is ...:
        return OPEN
    for wrong, name in ((outs.sum(0), "the published sum of averages"), (outs.mean(0), "the average of averages")):
        if _wrong(given, wrong) is None:
            return f"not yet: that is {name}; each block counts by its share e^lse of the whole"
    if problem := _wrong(given, torch.softmax(scores, 0) @ TOKENS):
        return f"{problem}; the shares are softmax(lses)"
    return "right"


# 04 ------------------------------------------------------------------------------------------------------------------


@judge
def block_in_hand(answer: Callable[[int, int, int], int]) -> str:
    """04: (rank, round, P) -> the block that the rank computes on."""
    for world_size in (4, 5):
        for t in range(world_size):
            for rank in range(world_size):
                if (given := answer(rank, t, world_size)) is ...:
                    return OPEN
                expected = (rank - t) % world_size
                if given != expected:
                    other_way = " (your ring turns the other way)" if given == (rank + t) % world_size else ""
                    where = f"P = {world_size}, round {t}, rank {rank}"
                    return f"not yet: {where} does not hold KV{given}{other_way}"
    return "right"


@judge
def ring_order(answer: Callable[[int, int], list[Send | Recv]]) -> str:
    """04: (rank, P) -> the rank's [Send, Recv] of one hop, in an order that does not deadlock."""
    for world_size in (2, 3, 4, 5, 8):
        programs = [answer(rank, world_size) for rank in range(world_size)]
        if programs[0] is ...:
            return OPEN
        for rank, program in enumerate(programs):
            expected = {Send((rank + 1) % world_size), Recv((rank - 1) % world_size)}
            if len(program) != 2 or set(program) != expected:
                return f"not yet: rank {rank} of {world_size} must send to its next and receive from its previous rank"
        outcome = simulate_messages(programs)
        if outcome.waits_for:
            return f"not yet: {world_size} ranks deadlock; these wait for each other in a circle: {outcome.cycle}"
    return "right"


@judge
def bytes_sent(answer: Any) -> str:
    """04: bytes one rank sends: P = 8, S = 1,048,576, B = 1, H = 32, D = 128, bfloat16."""
    if answer is ...:
        return OPEN
    hop = 2 * 32 * (1_048_576 // 8) * 128 * 2
    hints = {
        8 * hop: "that is 8 hops; after the last round nobody sends",
        7 * hop // 2: "K and V travel, not one of them (or did you count 1 byte a number?)",
        hop: "that is one hop",
        14 * hop: "a bfloat16 has 2 bytes, not 4",
    }
    if answer == 7 * hop:
        return f"right: {7 * hop / 2**30:g} GiB"
    return f"not yet: {hints.get(answer, 'hops x (K and V) x H x C x D x bytes of a number')}"


# 05 ------------------------------------------------------------------------------------------------------------------


@judge
def softmax_backward(answer: Callable[..., Tensor]) -> str:
    """05: weights and d_weights (n, c) of one block, out and d_out (n, D) of the whole rows -> d_scores (n, c)."""
    generator = torch.Generator().manual_seed(0)
    scores, v, d_out = (torch.randn(3, 6, generator=generator), *torch.randn(2, 6, 4, generator=generator))
    d_out = d_out[:3]
    weights, d_weights = torch.softmax(scores, 1), d_out @ v.T
    out, block = weights @ v, slice(2, 4)  # 2 of 6 keys
    of_block = weights[:, block], d_weights[:, block]
    if (given := answer(of_block[0], of_block[1], out, d_out)) is ...:
        return OPEN
    delta = (d_out * out).sum(1, keepdim=True)
    hints = [
        (of_block[0] * of_block[1], "delta is missing; softmax pulls the other scores down when one goes up"),
        (of_block[1] - delta, "multiply by the weights"),
        (of_block[0] * (of_block[1] + delta), "delta is subtracted"),
        (
            of_block[0] * (of_block[1] - (of_block[0] * of_block[1]).sum(1, keepdim=True)),
            "your delta has only the keys of this block; the sum over all keys is the row sum of d_out * out",
        ),
        (
            of_block[0] * (of_block[1] - (d_out * out).sum()),
            "you took one delta for all rows; sum over D only, each row for itself",
        ),
    ]
    for wrong, hint in hints:
        if isinstance(given, Tensor) and _wrong(given, wrong) is None:
            return f"not yet: {hint}"
    return _wrong(given, of_block[0] * (of_block[1] - delta)) or "right"


@judge
def added_so_far(answer: Callable[[int, int, int], set[int]]) -> str:
    """05: (rank, round, P) -> the ranks that have added to the gradients in hand, this one included."""
    for world_size in (4, 5):
        for t in range(world_size):
            for rank in range(world_size):
                if (given := answer(rank, t, world_size)) is ...:
                    return OPEN
                given, expected = set(given), {(rank - i) % world_size for i in range(t + 1)}
                if given == expected:
                    continue
                hint = f"the block came from rank {(rank - 1) % world_size}, and before that from the one before it"
                if given == {(rank + i) % world_size for i in range(t + 1)}:
                    hint = f"your ring turns the other way: {hint}"
                elif given == expected - {rank}:
                    hint = "this rank has just computed, so it has added its part too"
                elif any(not 0 <= other < world_size for other in given):
                    hint = f"ranks go from 0 to {world_size - 1}: take the remainder by P"
                where = f"P = {world_size}, round {t}, rank {rank}"
                return f"not yet: {where}, you say {sorted(given)}: {hint}"
    return "right"


@judge
def bytes_sent_back(answer: Any) -> str:
    """05: bytes one rank sends in the backward pass: P = 8, S = 1,048,576, B = 1, H = 32, D = 128, bfloat16."""
    if answer is ...:
        return OPEN
    pair = 2 * 32 * (1_048_576 // 8) * 128  # numbers in the K and the V of a block
    right = 7 * pair * 2 + 8 * pair * 4
    hints = {
        7 * pair * 2: "that is the forward pass; dK and dV travel too",
        8 * pair * 4: "that is dK and dV; K and V travel too",
        7 * pair * (2 + 4): "dK and dV have one hop more: home",
        8 * pair * (2 + 4): "K and V need not come home: 7 hops for them",
        7 * pair * 2 + 8 * pair * 2: "dK and dV are sums, kept in float32: 4 bytes",
        7 * pair * 4 + 8 * pair * 4: "K and V are bfloat16: 2 bytes",
        right // 2: "K and V travel, and dK and dV: count both of each",
    }
    if answer == right:
        return f"right: {right / 2**30:g} GiB, where the forward pass sends {7 * pair * 2 / 2**30:g}"
    return f"not yet: {hints.get(answer, '7 hops of K and V in 2 bytes a number, 8 hops of dK and dV in 4')}"


# 06 ------------------------------------------------------------------------------------------------------------------


@judge
def overlap_order(answer: Callable[[int], list[tuple[str, int]]]) -> str:
    """06: P -> the ("post", t), ("compute", t), ("wait", t) of one rank of the overlapped ring, with two buffers."""
    idle = None  # told last: what is wrong comes first
    for world_size in (1, 2, 4):
        if (given := answer(world_size)) is ...:
            return OPEN
        given, where = list(given), f"not yet: P = {world_size}: "
        place = {step: i for i, step in enumerate(given)}
        for t in range(world_size):
            needed = ("post", "compute", "wait") if t < world_size - 1 else ("compute",)
            for what in ("post", "compute", "wait"):
                if given.count((what, t)) != (what in needed):
                    hint = "after the last round nobody sends" if what not in needed else "each step once"
                    return f"{where}{(what, t)} is there {given.count((what, t))} times; {hint}"
        if unknown := set(given) - {(what, t) for what in ("post", "compute", "wait") for t in range(world_size)}:
            return f"{where}there is no step {min(unknown)}"
        for t in range(world_size - 1):
            post, compute, wait = (place[what, t] for what in ("post", "compute", "wait"))
            if wait < post:
                return f"{where}('wait', {t}) comes before ('post', {t}): it would wait for nothing"
            if place["compute", t + 1] < wait:
                return f"{where}('compute', {t + 1}) comes before ('wait', {t}): block {t + 1} may not have arrived"
            if t < world_size - 2 and place["post", t + 1] < wait:
                return f"{where}('post', {t + 1}) comes before ('wait', {t}): block {t + 1} cannot be sent yet"
            if t < world_size - 2 and place["post", t + 1] < compute:
                return f"{where}('post', {t + 1}) fills the buffer of block {t}, which is not computed on yet"
            if not post < compute < wait:
                idle = f"{where}this is exact and hides nothing: compute on block {t} between its post and its wait"
    return idle or "right"


@judge
def hidden_by_overlap(answer: Callable[[float, float], float]) -> str:
    """06: (seconds of computing, seconds of messages) of a round -> the share of the messages' time that is hidden."""
    for computing, messages in ((0.5, 2.0), (2.0, 2.0), (3.0, 2.0)):
        if (given := answer(computing, messages)) is ...:
            return OPEN
        if abs(given - min(1.0, computing / messages)) < 1e-9:
            continue
        hints = [
            (computing / messages, "no more than all of it can be hidden"),
            (messages / computing, "turned over: of the messages, as long as there is computing"),
            (max(0.0, 1 - computing / messages), "that is the share that is not hidden"),
            (min(computing, messages), "that is the time that is hidden; divide it by the messages' time"),
            (min(computing, messages) / (computing + messages), "divide by the messages' time, not by all of it"),
        ]
        hint = next((hint for wrong, hint in hints if abs(given - wrong) < 1e-9), "the rest is messages - computing")
        return f"not yet: computing {computing:g} s, messages {messages:g} s, you say {given:g}: {hint}"
    return "right"


@judge
def smallest_chunk(answer: Any) -> str:
    """06: tokens of a chunk from which on messages are hidden: F = 312e12, B = 25e9, bfloat16, H = 32, G = 8."""
    if answer is ...:
        return OPEN
    hints = {
        12480: "that is F/B; only 8 of 32 heads travel",
        49920: "fewer heads travel than compute, so a shorter chunk is enough",
        6240: "a bfloat16 has 2 bytes",
        1560: "K and V travel, not one of them",
    }
    if abs(answer - 3120) < 1:
        return "right: a quarter of F/B, because 4 heads for queries share one that travels"
    for wrong, hint in hints.items():
        if abs(answer - wrong) < 1:
            return f"not yet: {hint}"
    return f"not yet: 4 C C D H / F seconds of computing, 2 C D G times 2 bytes / B of messages; you say {answer:g}"


# 07 ------------------------------------------------------------------------------------------------------------------


@judge
def zigzag_positions(answer: Callable[[int, int, int], list[int]]) -> str:
    """07: (rank, S, P) -> where the tokens of this rank stand in the sequence, in the zigzag layout."""
    for seq_len, world_size in ((16, 4), (24, 3), (4, 1)):
        for rank in range(world_size):
            if (given := answer(rank, seq_len, world_size)) is ...:
                return OPEN
            given = [int(position) for position in given]
            expected = positions("zigzag", seq_len, rank, world_size).tolist()
            if given == expected:
                continue
            half = seq_len // (2 * world_size)
            other = [*range(rank * half, (rank + 1) * half)]
            other += [place + world_size * half for place in other]
            hint = f"it holds {half} early and {half} late token(s): halves {rank} and {2 * world_size - 1 - rank}"
            if given == other:
                hint = f"the late half is counted from the end: half {2 * world_size - 1 - rank}"
            elif sorted(given) == expected:
                hint = "these are the right tokens; give them in rising order"
            else:
                for layout in ("contiguous", "striped"):
                    if given == positions(layout, seq_len, rank, world_size).tolist():
                        hint = f"that is the {layout} layout"
            return f"not yet: S = {seq_len}, P = {world_size}, rank {rank}, you say {given}: {hint}"
    return "right"


@judge
def striped_mask(answer: Callable[[int, int, int], Tensor]) -> str:
    """07: (rank, block, C) -> (C, C) bool, which pairs the causal mask leaves in the striped layout."""
    world_size, C = 3, 4
    at = [positions("striped", C * world_size, rank, world_size) for rank in range(world_size)]
    for rank in range(world_size):
        for block in range(world_size):
            if (given := answer(rank, block, C)) is ...:
                return OPEN
            expected = at[block] <= at[rank][:, None]
            problem = _wrong(given, expected)
            if problem is None:
                continue
            where = f"rank {rank} and block {block}"
            if not isinstance(given, Tensor) or given.shape != expected.shape:
                return f"{problem}, for {where}"
            hint = "query i stands at rank + i P and key i at block + i P; a key must not be later"
            if torch.equal(given.bool(), ~expected):
                hint = "True means computed here; yours is True for the hidden pairs"
            elif torch.equal(given.bool(), expected.T):
                hint = "rows are queries and columns are keys; yours is turned over"
            elif block > rank and torch.equal(given.bool(), torch.ones(C, C).tril().bool()):
                hint = f"key i of block {block} comes after query i of rank {rank}: the diagonal is hidden"
            elif block < rank and torch.equal(given.bool(), torch.ones(C, C).tril(-1).bool()):
                hint = f"key i of block {block} comes before query i of rank {rank}: the diagonal is visible"
            elif bool(given.all()) or not bool(given.any()):
                hint = "all or nothing is the contiguous layout; here every tile is a triangle"
            return f"not yet: {where}: {hint}"
    return "right"


@judge
def idle_limit(answer: Any) -> str:
    """07: the idle share of 8 ranks with long contiguous chunks."""
    if answer is ...:
        return OPEN
    hints = {
        1 - 1 / 8: "that is rank 0 in rounds 1 to 7; rank 7 never waits",
        (1 - 1 / 8)
        / 2: "that is the share of blocks that nobody computes; but round 0 is only half as long as the others",
        1 / 2: "that is the limit of many ranks",
        8 / 15: "that is the share of the time in which they work",
    }
    if abs(answer - 7 / 15) < 0.0006:
        return "right: 7/15 of the time; zigzag makes this ring 15/8 times as fast"
    for wrong, hint in hints.items():
        if abs(answer - wrong) < 0.0006:
            return f"not yet: {hint}"
    return f"not yet: count in full blocks: 8 ranks for 7 1/2 rounds, and 32 blocks of work; you say {answer:g}"


# 08 ------------------------------------------------------------------------------------------------------------------


@judge
def merging_share(answer: Callable[[Tensor, Tensor], Tensor]) -> str:
    """08: (lse, lse_j), both (Sq,) -> the share that the second has of the merged result."""
    lse, lse_j = torch.tensor([0.0, 1.0, -2.0]), torch.tensor([0.0, 3.0, -2.5])
    if (given := answer(lse, lse_j)) is ...:
        return OPEN
    expected = torch.sigmoid(lse_j - lse)
    if _wrong(given, 1 - expected) is None:
        return "not yet: that is the share of what was merged before; lerp wants that of the new block"
    if _wrong(given, lse_j.exp()) is None:
        return "not yet: divide by the sum of both, e^lse + e^lse_j"
    if problem := _wrong(given, expected):
        return f"{problem}: it is e^lse_j / (e^lse + e^lse_j)"
    if _wrong(answer(1000 + lse, 1000 + lse_j), expected):
        return "not yet: e^1000 overflows; only the difference of the two counts"
    return "right"


@judge
def attention_on_a_kernel(answer: Callable[..., Tensor]) -> str:
    """08: (kernel, q, k, v, blocks) -> attention of q, k, v (S, D), with a kernel that returns (out, lse)."""
    q, k, v = torch.randn(3, 12, 4, generator=torch.Generator().manual_seed(0)).unbind()
    seen = []

    def kernel(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        seen.append(len(k))
        scores = q @ k.T / 2
        return torch.softmax(scores, dim=1) @ v, scores.logsumexp(dim=1)

    averages = torch.stack([kernel(q, k_j, v_j)[0] for k_j, v_j in zip(k.chunk(3), v.chunk(3), strict=True)])
    seen.clear()
    if (given := answer(kernel, q, k, v, 3)) is ...:
        return OPEN
    for wrong, name in ((averages.mean(0), "the average of the blocks"), (averages.sum(0), "the sum of the blocks")):
        if _wrong(given, wrong) is None:
            return f"not yet: that is {name}; each has the share e^lse_j of the whole"
    if problem := _wrong(given, kernel(q, k, v)[0]):
        return f"{problem}; after each merge lse becomes log(e^lse + e^lse_j)"
    if seen[:-1] != [4, 4, 4]:
        return f"not yet: right numbers, but the kernel saw {seen[:-1]} keys at a time; expected 3 blocks of 4"
    return "right"


@judge
def bytes_of_training(answer: Any) -> str:
    """08: bytes a rank sends forwards and backwards: P = 8, C = 16,384, H = 32, G = 8, D = 128, bfloat16."""
    if answer is ...:
        return OPEN
    numbers = 2 * 8 * 16_384 * 128
    right = (7 * 2 + 7 * 2 + 8 * 4) * numbers
    hints = {
        4 * right: "K and V travel with their 8 heads, not with 32",
        (7 * 2 + 7 * 2 + 8 * 2) * numbers: "the gradients travel in float32, 4 bytes",
        (7 * 2 + 7 * 2 + 7 * 4) * numbers: "the gradients need 8 hops, the last one brings them home",
        (7 * 2 + 8 * 4) * numbers: "K and V go round twice: once forwards, once backwards",
        right // 2: "both K and V travel, and both gradients",
    }
    if answer == right:
        return f"right: {right / 2**30:.3g} GiB, of which more than half are gradients"
    return f"not yet: {hints.get(answer, '7 hops of K and V, twice, and 8 hops of their gradients')}"


# 09 ------------------------------------------------------------------------------------------------------------------


@judge
def training_chunk(answer: Any) -> str:
    """09: tokens from which on hops are free: F/B = 24,960, bfloat16, H = 32, G = 8, causal zigzag, both ways."""
    if answer is ...:
        return OPEN
    hints = {
        24_960: "that is F/B, without a mask, with G = H, and forwards",
        29_952: "that is the backward pass of G = H without a mask",
        49_920: "a mask doubles it; but only 8 of 32 heads travel, and backwards gradients do too",
        12_480: "that is enough forwards; backwards dK and dV travel as well, in float32",
        7_488: "half of each block is hidden by the mask; its bytes are not",
        6_240: "that is one pass without a mask; under it half is computed and all is sent, and backwards more is sent",
        59_904: "only 8 of 32 heads travel",
        9_984: "backwards in bfloat16? The gradients travel in float32: 2 + 4 bytes",
        37_440: "backwards there are five products, 10 C C H D FLOPs, not 4",
        27_456: "the chunk must do for each pass, not for both together: the larger one",
    }
    if abs(answer - 14_976) < 1:
        return "right: the backward pass asks for 6/5 of what the forward pass does"
    for wrong, hint in hints.items():
        if abs(answer - wrong) < 1:
            return f"not yet: {hint}"
    return f"not yet: 2 for the mask, G/H, and (w + 4)/5 backwards, times F/B; you say {answer:,g}"


@judge
def fewer_bytes(answer: Callable[[int, int, int], str]) -> str:
    """09: (P, H, G) -> "ring" or "all-to-all", whichever sends fewer bytes; "ring" where they are equal or it must."""
    for P, H, G in ((8, 32, 32), (3, 32, 32), (4, 32, 8), (2, 8, 8), (8, 32, 8), (16, 32, 8), (1, 8, 8)):
        if (given := answer(P, H, G)) is ...:
            return OPEN
        possible, ring, swapped = G % P == 0, P * G, H + G
        if given == ("all-to-all" if possible and ring > swapped else "ring"):
            continue
        hint = f"the ring sends P G/(H + G) = {ring / swapped:.2g} times the bytes of all-to-all"
        if given not in ("ring", "all-to-all"):
            hint = 'expected "ring" or "all-to-all"'
        elif not possible:
            hint = f"{G} heads of K and V cannot be dealt to {P} ranks"
        elif ring == swapped:
            hint = 'both send as many bytes: "ring", whose bytes hide'
        return f"not yet: P = {P}, {H} heads on {G}, you say {given!r}: {hint}"
    return "right: and remember that the ring's bytes hide behind computing"


@judge
def unlike_links(answer: Callable[[float, list[float]], float]) -> str:
    """09: (seconds of computing on a block, seconds of each hop) -> seconds of the overlapped ring."""
    for computing, hops in ((2.0, [1.0, 1.0, 1.0, 1.0]), (2.0, [1.0, 7.0, 1.0, 1.0]), (2.0, [1.0])):
        if (given := answer(computing, list(hops))) is ...:
            return OPEN
        P, slowest, average = len(hops), max(hops), sum(hops) / len(hops)
        right = computing + (P - 1) * max(computing, slowest)
        if abs(given - right) < 1e-9:
            continue
        hints = [
            (P * max(computing, slowest), "P rounds, but P - 1 hops: the last round only computes"),
            (computing + (P - 1) * (computing + slowest), "it overlaps: the longer of the two, not their sum"),
            (computing + (P - 1) * max(computing, average), "not the average: everyone waits for the slowest hop"),
            (computing + sum(max(computing, hop) for hop in hops[1:]), "the slow link is used in every round"),
            (P * computing, "that is computing alone; here a hop takes longer than that"),
        ]
        hint = next((hint for wrong, hint in hints if abs(given - wrong) < 1e-9), f"it is {right:g} s: draw the rounds")
        return f"not yet: computing {computing:g} s, hops {hops}, you say {given:g}: {hint}"
    return "right: one slow hop, and all rounds but the last take as long as it"


# 10 ------------------------------------------------------------------------------------------------------------------


@judge
def peak_memory_of_a_ring(answer: Callable[..., float]) -> str:
    """10: (H, G, D, C, w) -> bytes that a device of a ring holds in the forward pass of a layer."""
    for heads, kv_heads in ((32, 4), (6, 3)):
        if (given := answer(heads, kv_heads, 64, 1000, 2)) is ...:
            return OPEN
        head = 64 * 1000 * 2
        if given == (2 * heads + 4 * kv_heads) * head:
            continue
        hints = {
            6 * heads * head: "K and V have G heads, not H",
            6 * heads * head // 2: "the paper's 6bch: numbers, not bytes, and with G = H",
            (2 * heads + 4 * kv_heads) * head // 2: "these are numbers; each has `itemsize` bytes",
            (2 * heads + 2 * kv_heads) * head: "the next K and V arrive while those in hand are used",
            (heads + 4 * kv_heads) * head: "both q and out stay: two of H heads",
            (2 * heads + 3 * kv_heads) * head: "a K and a V in hand, and a K and a V that arrive: four of G heads",
        }
        hint = hints.get(given, "q and out of H heads; K and V of G heads, in hand and arriving; C tokens of each")
        return f"not yet: H = {heads}, G = {kv_heads}, D = 64, C = 1000, 2 bytes, you say {given:,}: {hint}"
    return "right"


@judge
def longest_sequence(answer: Callable[..., int]) -> str:
    """10: (memory, state, token, P) -> the most tokens that P devices hold beside their share of the state."""
    cases = ((100, 40, 7, 4), (100, 0, 7, 2), (100, 500, 7, 4))
    for memory, state, token, world_size in cases:
        if (given := answer(memory, state, token, world_size)) is ...:
            return OPEN
        expected = world_size * max(0, int((memory - state / world_size) / token))
        if given == expected:
            continue
        hint = "on each device: memory - state / P bytes are left for tokens"
        if given < 0:
            hint = "where the state does not fit there is no room for tokens: 0, not less"
        elif given == world_size * max(0, int((memory - state) / token)):
            hint = "the state is shared out: a device holds state / P"
        elif given == world_size * int(memory / token):
            hint = "weights, gradients and moments take room too"
        elif given == expected / world_size:
            hint = "that is what one device holds; there are P"
        elif given == expected + world_size:
            hint = "a device cannot hold a part of a token: round down"
        elif given != int(given) or given == int((world_size * memory - state) / token):
            hint = "every device holds whole tokens, as many as the others: round down on each, then multiply"
        where = f"memory {memory}, state {state}, token {token}, P = {world_size}"
        return f"not yet: {where}, you say {given:g}: {hint}"
    return "right"


@judge
def devices_needed(answer: Any) -> str:
    """10: devices of 80e9 bytes for 4,000,000 tokens of 344,064 bytes and a state of 90.2e9 bytes."""
    if answer is ...:
        return OPEN
    if answer == 19:
        return "right: 18.3 of them, so 19"
    hints = [
        (17.2, "the state takes room too: add its 90.2e9 bytes"),
        (18, "17.2 for the tokens and 1.1 for the state are 18.3: 18 are too few"),
        (18.3, "there is no third of a device: round up"),
        (20, "round up once, after adding: tokens and state share the devices"),
    ]
    hint = next((hint for wrong, hint in hints if abs(answer - wrong) < 0.05), "(state + tokens · token) / memory")
    return f"not yet: {hint}"


# 11 ------------------------------------------------------------------------------------------------------------------


@judge
def pairs_of_a_hop(answer: Callable[[int], list[tuple[int, int]]]) -> str:
    """11: P -> the pairs (from, to) with which ppermute is a hop."""
    for world_size in (4, 3, 1):
        if (given := answer(world_size)) is ...:
            return OPEN
        given, everyone = sorted(tuple(pair) for pair in given), list(range(world_size))
        if given == sorted((i, (i + 1) % world_size) for i in everyone):
            continue
        hint = f"each of {world_size} devices must send once and receive once"
        if any(to not in everyone for _, to in given):
            hint = f"there are devices 0 to {world_size - 1}: after the last comes the first"
        elif given == sorted((i, (i - 1) % world_size) for i in everyone):
            hint = "your ring turns the other way; device i sends to i + 1"
        elif given == [(i, i) for i in everyone]:
            hint = "nobody moves: each device sends to itself"
        elif len(given) == world_size - 1:
            hint = "the circle is open: who gets nothing from ppermute gets zeros"
        return f"not yet: P = {world_size}, you say {given}: {hint}"
    return "right"


@judge
def scan_in_python(answer: Callable[..., tuple[Any, list]]) -> str:
    """11: lax.scan, (body, carry, xs) -> (carry, ys)."""
    if (given := answer(lambda total, x: (total + x, total), 10, [1, 2, 3])) is ...:
        return OPEN
    carry, ys = given
    if carry != 16:
        hint = "the body must get the carry of the round before" if carry == 13 else "return the last carry first"
        return f"not yet: 10 and then + 1, + 2, + 3 ends with the carry 16, you say {carry}: {hint}"
    if list(ys) != [10, 11, 13]:
        return f"not yet: before each sum there were 10, 11, 13; you kept {list(ys)}: keep the body's second result"
    carry, ys = answer(lambda total, x: (total + x, total), 10, [])
    if (carry, list(ys)) != (10, []):
        return "not yet: with no rounds the carry stays as it is, and nothing is kept"
    return "right"


@judge
def arrays_passed_on(answer: Callable[[int], int]) -> str:
    """11: P -> arrays that a device passes on in one forward and one backward pass."""
    for world_size in (4, 8):
        if (given := answer(world_size)) is ...:
            return OPEN
        hops = world_size - 1
        hints = {
            2 * hops: "that is the forward pass; K and V go round again in the backward pass, with dK and dV",
            6 * hops: "dK and dV have one hop more: home",
            6 * world_size: "K and V need not come home",
            2 * hops + 2 * world_size: "the backward pass needs K and V too, and they must come again",
            3 * world_size - 2: "K and V are two arrays, dK and dV are two",
        }
        if given != 6 * world_size - 4:
            hint = hints.get(given, "K and V: P - 1 hops, forwards and again backwards; dK and dV: P hops")
            return f"not yet: P = {world_size}, you say {given}: {hint}"
    return "right"
