"""The catalogue, continued: blocks that do not arrive, and what is wrong with scale, heads, sinks and lost rows.

Before: mistakes_of_merging.py. After: mistakes_of_masks.py.
Source: each entry names who had it, where that is public.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ring_doctor.case import Case
from ring_doctor.mistakes import Change, but, entry
from ring_doctor.mistakes_of_masks import Pairs, sees
from ring_doctor.paper_ring import BlockGradients, NotOnPaper, Rows, Scores, Steps, Values

# Blocks do not arrive, or others do --------------------------------------------------------------------------------

Hand = Callable[[int, int, int], int]  # rank, round, ranks -> the block in hand, modulo the number of ranks


def in_hand(keys: Hand, values: Hand | None = None, **more: Callable[..., Any]) -> Change:
    """K of one block and V of the same, or of another."""

    def blocks(steps: Steps, case: Case, rank: int, t: int) -> tuple[int, int]:
        P = case.world_size
        return keys(rank, t, P) % P, (values or keys)(rank, t, P) % P

    return but(in_hand=blocks, **more)


def held(steps: Steps, part: BlockGradients) -> int:
    """The gradients are added to the block that is really in hand: they travel the same wrong way."""
    return part.held


def needed(steps: Steps, case: Case, rank: int) -> int:
    """A ring that ends when no rank sees more, as with a window: of its blocks the last is skipped."""
    P = case.world_size
    rounds = [t for t in range(P) if any(steps.sees(case, r, (r - t) % P).any() for r in range(P))]
    return max(1, max(rounds, default=0))


def two_ways(rounds: Callable[[int], int]) -> Change:
    """A ring whose blocks come from both sides: r, r - 1, r + 1, r - 2, ... in so many rounds."""

    def block(steps: Steps, case: Case, rank: int, t: int) -> int:
        distance = (t + 1) // 2
        return (rank - distance if t % 2 else rank + distance) % case.world_size

    return but(
        rounds=lambda steps, case, rank: rounds(case.world_size),
        believed=block,
        in_hand=lambda *at: (block(*at), block(*at)),
    )


def sent_as(dtype: torch.dtype, *, gradients_too: bool) -> Change:
    """The rank's own block is not sent, and so not rounded. Of 16-bit inputs nothing is: see gradients_in_16_bits."""

    def rounded(x: Tensor) -> Tensor:
        return x.to(dtype).double()

    def keys_and_values(steps: Steps, t: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        k, v = steps.keys_and_values(t, k, v)
        return (rounded(k), rounded(v)) if t else (k, v)

    def add_kv(steps: Steps, case: Case, total: Tensor | None, part: Tensor) -> Tensor:
        total = steps.add_kv(case, total, part)
        sent = gradients_too and case.world_size > 1 and case.dtype.itemsize > 2
        return rounded(total) if sent else total

    return but(keys_and_values=keys_and_values, add_kv=add_kv)


LOOP = "the loop over the rounds: P rounds, P - 1 hops"
NEIGHBOUR = "the ranks that a hop sends to and receives from: (r + 1) mod P and (r - 1) mod P"
OPPOSITE = "the hops of each direction: with an even P one direction makes P/2 hops and the other P/2 - 1"
WIRE = "the dtype of the buffers that are sent: K and V must travel in their own dtype"
TWO = "the messages of a hop: K and V of a block belong together"

# fmt: off
OF_BLOCKS = (
    entry("last_block_skipped", "The last block that arrives is never used.", LOOP, 4,
          but(rounds=lambda steps, case, rank: max(1, steps.rounds(case, rank) - 1)),
          but(rounds=lambda steps, case, rank: steps.rounds(case, rank) - 1),  # on one rank too
          but(rounds=needed)),
    entry("own_block_skipped",
          "A rank's own block is never used: the work begins with the first block that arrives.", LOOP, 4,
          sees(lambda x: x.seen & (not x.own))),
    entry("own_block_twice",
          "There is a round too many, and in it a rank meets its own block for the second time.", LOOP, 4,
          but(rounds=lambda steps, case, rank: steps.rounds(case, rank) + 1)),
    entry("two_seats", "Each hop moves the blocks by two ranks, so with an even P half of the blocks never come.",
          NEIGHBOUR, 4, in_hand(lambda r, t, P: r - 2 * t), in_hand(lambda r, t, P: r - 2 * t, home=held)),
    entry("other_way",
          "The blocks come from rank r + 1, and the mask and the gradients count on blocks from rank r - 1.",
          NEIGHBOUR, 4, in_hand(lambda r, t, P: r + t), in_hand(lambda r, t, P: r + t, home=held)),
    entry("stale_first_block",
          "The first block received is thrown away, and the block in hand is used again. The last block never comes.",
          "which of the two buffers is computed on after the first hop", 6, in_hand(lambda r, t, P: r - max(0, t - 1))),
    entry("overwritten_in_hand",
          "There is one buffer only: the next block overwrites the block in hand before the rank computes on it.",
          "the buffers: a block in use, and another buffer to receive into", 6,
          in_hand(lambda r, t, P: r - min(t + 1, P - 1)),
          in_hand(lambda r, t, P: r - (min(t + 1, P - 1) if t else 0))),  # the own block lies elsewhere
    entry("opposite_block_twice",
          "Blocks travel in both directions, half of the hops each. With an even P the block of the rank opposite "
          "arrives from both sides, and counts twice.", OPPOSITE, 4, two_ways(lambda P: P // 2 * 2 + 1)),
    entry("opposite_block_missed",
          "Blocks travel in both directions, half of the hops each. With an even P the block of the rank opposite "
          "never arrives.", OPPOSITE, 4, two_ways(lambda P: (P - 1) // 2 * 2 + 1)),
    entry("sent_in_16_bits",
          "K and V are sent in fewer bits than they have, with or without their gradients. A rank's own block is "
          "exact, and blocks that arrive are rounded to 16 bits.", WIRE, 8,
          *(sent_as(dtype, gradients_too=too) for dtype in (torch.bfloat16, torch.float16) for too in (False, True))),
    entry("keys_without_values", "Only the keys go round. They meet the values of the rank's own block.", TWO, 4,
          in_hand(lambda r, t, P: r - t, lambda r, t, P: r)),
    entry("values_without_keys", "Only the values go round. They meet the keys of the rank's own block.", TWO, 4,
          in_hand(lambda r, t, P: r, lambda r, t, P: r - t)),
    entry("keys_and_values_exchanged",
          "K and V are exchanged: at each hop, after the first hop, or by the caller.", TWO, 6,
          but(keys_and_values=lambda steps, t, k, v: (v, k) if t % 2 else (k, v)),
          but(keys_and_values=lambda steps, t, k, v: (v, k) if t else (k, v)),
          but(keys_and_values=lambda steps, t, k, v: (v, k),  # by the caller: dk is that of the first, which is V
              parts=lambda steps, q, k, v, scale: steps.parts(q, v, k, scale))),
    entry("never_called", "The ring is not called: each rank attends to its own chunk only.",
          "whether the model calls the ring in every layer; whether the ring sends anything at all", 12,
          but(rounds=lambda steps, case, rank: 1),
          wild=("axolotl PR #3928", "Automodel #3507")),
    entry("nothing_moves",
          "Nothing moves: a rank computes P times on its own block, as if each time another one had come.",
          "the messages, and whether what is received is what is computed on", 4, in_hand(lambda r, t, P: r)),
)
# fmt: on


# Scale, heads, sinks, and rows that are lost -----------------------------------------------------------------------


def scale_of(size: Callable[[Case], float]) -> Change:
    """1/√size where no scale is given."""
    return but(scale=lambda steps, case: size(case) ** -0.5 if case.scale is None else steps.scale(case))


def chunk(case: Case) -> int:
    if not case.equal_chunks:
        raise NotOnPaper
    return case.seq_len // case.world_size


def padded_head(case: Case) -> int:
    return case.head_dim + -case.head_dim % 8


def more_sinks(steps: Steps, case: Case, out: Tensor, lse: Tensor) -> Rows:
    for _ in range(case.world_size):
        out, lse = steps.sink(case, out, lse)
    return out, lse


def sinks_of_seen_blocks(right: Steps, steps: Steps, case: Case, scores: Scores, values: Values) -> Rows:
    """A block that no query sees is left out, and its sink too."""
    out, lse = right.combine(steps, case, scores, values)
    for _ in range(sum(bool((s > -math.inf).any()) for s in scores) - 1 if case.sinks else 0):
        out, lse = right.sink(case, out, lse)
    return out, lse


def tail_hidden(x: Pairs) -> Tensor:
    lengths = x.case.documents or (x.case.seq_len,)
    kept = torch.cat([torch.arange(n) < n // x.case.world_size * x.case.world_size for n in lengths])  # (S,)
    return x.seen & kept[x.p] & kept[x.c]


def nan_stays(steps: Steps, case: Case, out: Tensor, lse: Tensor, out_j: Tensor, lse_j: Tensor) -> Rows:
    merged, lse = steps.merge(case, out, lse, out_j, lse_j)
    return torch.where(out_j.isnan() | out.isnan(), math.nan, merged), lse


def nan_of_rows(steps: Steps, s: Tensor, v: Tensor) -> Tensor:
    return steps.block_out(s, v) if (s == -math.inf).all() else torch.softmax(s, dim=-1) @ v


SCALE = "the scale: 1/sqrt(D) once, for the D of one head"
HEADS = "which K/V head a query head h uses: h // (H/G)"
SINKS = "where the score of the sink enters: once for each row of the whole sequence"

# fmt: off
MISTAKES = (
    *OF_BLOCKS,
    entry("scale_missing", "The scores are not scaled.", SCALE, 1, but(scale=lambda steps, case: 1.0)),
    entry("scale_ignored", "A scale that is given is ignored: the scores are scaled by 1/√D.", SCALE, 8,
          but(scale=lambda steps, case: case.head_dim**-0.5)),
    entry("scale_twice", "The scores are scaled twice.", SCALE, 8,
          but(scale=lambda steps, case: steps.scale(case) ** 2),
          but(scale=lambda steps, case: 1 / case.head_dim)),  # not 1/√D, whatever scale was given
    entry("scale_of_padded_head", "The scale is computed from a head dimension that is padded to a multiple of 8.",
          SCALE, 8, scale_of(padded_head), but(scale=lambda steps, case: padded_head(case) ** -0.5)),
    entry("scale_of_another_size",
          "The scale is not 1/√D: it is 1/√ of the tokens of a chunk, of all tokens, of the heads, of heads times D, "
          "of 64 or of 128.", f"{SCALE}. Which axis is D where tensors are (B, S, H, D)?", 8,
          scale_of(chunk), scale_of(lambda case: case.seq_len), scale_of(lambda case: case.heads),
          scale_of(lambda case: case.heads * case.head_dim), scale_of(lambda case: 64), scale_of(lambda case: 128)),
    entry("heads_interleaved", "Query head h uses K/V head h mod G: groups are interleaved.", HEADS, 8,
          but(kv_heads=lambda steps, case: torch.arange(case.heads) % case.kv_heads),
          wild=("vllm-omni PR #5716, a like case: heads padded independently, 28/7 became 28/8",)),
    entry("first_kv_head_only", "All query heads use the first K/V head.", HEADS, 8,
          but(kv_heads=lambda steps, case: torch.zeros(case.heads, dtype=torch.int64))),
    entry("sinks_dropped", "The attention sinks are dropped: their gradient is exactly 0.", SINKS, 13,
          but(sink=lambda steps, case, out, lse: (out, lse)),
          wild=("TransformerEngine PR #3551",)),
    entry("sinks_per_block", "The attention sinks are counted for each block that is computed, so up to P times.",
          SINKS, 13, but(sink=more_sinks), but(combine=sinks_of_seen_blocks),
          wild=("lmdeploy PR #3951",)),
    entry("tail_lost",
          "A length that P does not divide is rounded down. The last tokens are no keys, and their rows are exactly 0.",
          "every `length // P`", 13, sees(tail_hidden),
          wild=("TransformerEngine #1930", "TransformerEngine #3331")),
    entry("nan_of_unseen_rows",
          "A query that sees nothing of a block makes NaN, which stays in the running result.",
          "the softmax of a row of -inf: its maximum is -inf, and -inf - (-inf) is NaN", 7,
          but(block_out=nan_of_rows, merge=nan_stays),
          but(block_out=lambda steps, s, v: torch.softmax(s, dim=-1) @ v, merge=nan_stays),  # of unseen blocks too
          wild=("axolotl #3026",)),
)
# fmt: on
