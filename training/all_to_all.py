"""All-to-all (Ulysses): ranks exchange tokens for heads, compute whole attention on a few heads, and exchange back.

    before   rank r has all H heads of its C tokens        a query head is attention by itself, so a rank can compute
    between  rank r has H/P heads of all S tokens          its heads alone: no blocks travel while it computes
    after    rank r has all H heads of its C tokens        the backward pass makes the same exchanges, in reverse

Three things can go wrong without an error. The tokens arrive in order of rank, so the layout must be undone before a
causal mask fits. Where P > G several ranks need the same K/V head: each gets a copy, and the gradients of the copies
must be added. And the heads may not divide: H = 40 on 16 ranks. `heads_of_ranks` then gives 3 heads to some ranks and
2 to others, and each rank gets the K/V heads that its query heads need. With more ranks than heads, see hybrid.py.

Shapes: q and out (B, H, C, D), k and v (B, G, C, D), chunks as in flash_ring.py. Between the exchanges rank r has n of
the H query heads and g of the G K/V heads: (B, n, S, D) and (B, g, S, D). In the forward pass it sends to each other
rank that rank's heads of C tokens, and of its own n heads of out the other rank's tokens. The backward pass sends as
many numbers. All travel in q's dtype; the gradients of copies are added in float32 at least.

    $ python -m training.all_to_all
    40 heads on 16 ranks: chunk leaves 2 ranks without a head; tensor_split gives 3 or 2 to each
    a rank's heads of C tokens                   busiest      sends      holds    computes
        16 ranks, 40 heads on 8: pad to 48        3 on 1        120        128       x 1.20

Before: all_gather.py. After: hybrid.py, for more ranks than heads.
Source: Jacobs et al. 2023 (DeepSpeed Ulysses), section 3; Fang & Zhao 2024 (USP), section 3, for copies of K/V heads.
"""

import math
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, groupby

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.distributed import ProcessGroup

from basics.naive_attention import accumulation_dtype
from support.agreement import agree_on_chunks, needs_gradients
from support.processes import RankContext, launch
from support.rounding import exact_attention, report
from training.causal import LAYOUTS, BlockSlice, positions, shard, unshard
from training.flash_ring import FlashRing, Ring
from training.grouped_query import check_grouped_chunks
from training.masks import Mask


def all_to_all_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    layout: str = "contiguous",
    scale: float | None = None,
    group: ProcessGroup | None = None,
) -> Tensor:
    """`flash_ring.ring_flash_attention` by two exchanges: the same chunks, layouts, dtypes and errors.

    q (B, H, C, D), k and v (B, G, C, D), H a multiple of G -> out as q, differentiable once. Neither H nor G need be a
    multiple of P. Raises ValueError on every rank also for more ranks than heads: it says which meshes hybrid.py can
    take. Jacobs et al. 2023, section 3.
    """
    settings = {"layout": layout, "causal": bool(causal), "gradients": needs_gradients(q, k, v)}
    scale, lengths = agree_on_chunks(q, k, v, scale, group, check=check_grouped_chunks, **settings)
    flat = Mask(layout, tuple(lengths), bool(causal))
    check_split(q.shape[1], len(lengths), len(lengths))
    heads = heads_of_ranks(q.shape[1], k.shape[1], len(lengths))
    exchange = Exchange(*heads, joined_places(flat, range(len(lengths)), q.device), group)
    in_order = Mask("contiguous", (sum(lengths),), bool(causal))
    return exchanged_attention(q, k, v, exchange, Alone(in_order, scale))


@dataclass(frozen=True)
class Alone:
    """The schedule of a rank that has all tokens: one block, its own, and nothing travels."""

    mask: Mask  # of one rank
    scale: float

    def rounds(self, k: Tensor, v: Tensor) -> Iterator[tuple[int, Tensor, Tensor, tuple[BlockSlice, ...]]]:
        """Yield 0, k, v (B, G, S, D), and what the rank computes of them."""
        yield 0, k, v, self.mask.pieces(0, 0)

    def sums(self, k: Tensor, dtype: torch.dtype) -> "OwnSums":
        """Where the gradients of k and v are added up."""
        return OwnSums(torch.zeros(2, *k.shape, dtype=dtype, device=k.device))


@dataclass(frozen=True)
class OwnSums:
    """dk and dv of the rank's own block, which no other rank adds to."""

    d_kv: Tensor  # (2, B, G, S, D)

    def of_round(self, t: int) -> Tensor:
        return self.d_kv

    def send_on(self, t: int) -> None:
        pass

    def home(self) -> Tensor:
        return self.d_kv


def exchanged_attention(q: Tensor, k: Tensor, v: Tensor, exchange: "Exchange", schedule: Alone | Ring) -> Tensor:
    """Tokens for heads, the attention of `schedule` on these heads, and heads for tokens: q (B, H, C, D) -> out."""
    q, k, v = TokensToHeads.apply(q, k, v, exchange)
    runs = zip(*(x.split(heads, dim=1) for x, heads in zip((q, k, v), exchange.runs(), strict=True)), strict=True)
    out = torch.cat([FlashRing.apply(*run, schedule) for run in runs], dim=1)
    return HeadsToTokens.apply(out, exchange)


def heads_of_ranks(heads: int, kv_heads: int, world_size: int) -> tuple[list[slice], list[slice]]:
    """The query heads of each rank, and the K/V heads that these use: query head h uses h // (H/G).

    No rank has more than ⌈H/P⌉ query heads, and for P <= H each has one. Where G divides P, a rank's query heads use
    one K/V head, ⌊r·G/P⌋.
    """
    parts = kv_heads if world_size % kv_heads == 0 else 1
    of_parts = torch.arange(heads).tensor_split(parts)
    shares = [share.tolist() for part in of_parts for share in part.tensor_split(world_size // parts)]
    served = heads // kv_heads
    keys = [slice(share[0] // served, share[-1] // served + 1) for share in shares]
    return [slice(share[0], share[-1] + 1) for share in shares], keys


@dataclass(frozen=True, eq=False)
class Exchange:
    """Who gets which heads, and where the tokens of each rank stand among those of all ranks of the group."""

    queries: list[slice]  # the query heads of each rank
    keys: list[slice]  # the K/V heads that they use
    places: tuple[Tensor, ...]  # of rank s: (C_s,), int64
    group: ProcessGroup | None

    def runs(self) -> tuple[list[int], list[int], list[int]]:
        """How this rank's heads of q, k and v are cut, so that in each run every K/V head serves as many query heads.

        Query heads 2 to 6, where three share a K/V head, are cut into 2, 3 to 5, and 6.
        """
        served = self.queries[-1].stop // self.keys[-1].stop
        mine = self.queries[dist.get_rank(self.group)]
        users = Counter(h // served for h in range(mine.start, mine.stop)).values()  # of each K/V head, in order
        runs = [(n, len(list(run))) for n, run in groupby(users)]
        keys = [heads for _, heads in runs]
        return [n * heads for n, heads in runs], keys, keys

    def to_heads(self, tensors: Sequence[Tensor], shares: Sequence[Sequence[slice]]) -> list[Tensor]:
        """x (B, N, C, D) for each share of its N heads -> (B, this rank's of them, S, D), in order of the sequence."""
        B, _, _, D = tensors[0].shape
        ranks, rank = range(len(self.places)), dist.get_rank(self.group)
        mine = [_length(share[rank]) for share in shares]
        parts = [[x[:, share[s]] for x, share in zip(tensors, shares, strict=True)] for s in ranks]
        shapes = [[(B, n, len(places), D) for n in mine] for places in self.places]
        wholes = [x.new_empty(B, n, sum(map(len, self.places)), D) for x, n in zip(tensors, mine, strict=True)]
        for places, arrived in zip(self.places, swap(parts, shapes, self.group), strict=True):
            for whole, part in zip(wholes, arrived, strict=True):
                whole[:, :, places] = part
        return wholes

    def to_tokens(self, wholes: Sequence[Tensor], shares: Sequence[Sequence[slice]]) -> list[Tensor]:
        """Undo `to_heads`: (B, this rank's heads, S, D) -> (B, N, C, D). Where ranks have copies of a head, their sum."""
        B, _, _, D = wholes[0].shape
        ranks, C = range(len(self.places)), len(self.places[dist.get_rank(self.group)])
        parts = [[whole[:, :, places] for whole in wholes] for places in self.places]
        shapes = [[(B, _length(share[s]), C, D) for share in shares] for s in ranks]
        sums = [
            whole.new_zeros(B, share[-1].stop, C, D, dtype=accumulation_dtype(whole.dtype))
            for whole, share in zip(wholes, shares, strict=True)
        ]
        for s, arrived in zip(ranks, swap(parts, shapes, self.group), strict=True):
            for x, share, part in zip(sums, shares, arrived, strict=True):
                x[:, share[s]] += part
        return [x.to(whole.dtype) for x, whole in zip(sums, wholes, strict=True)]


class TokensToHeads(torch.autograd.Function):
    """q (B, H, C, D), k and v (B, G, C, D) -> (B, n, S, D), (B, g, S, D); the gradients go the other way."""

    @staticmethod
    def forward(ctx: FunctionCtx, q: Tensor, k: Tensor, v: Tensor, exchange: Exchange) -> tuple[Tensor, ...]:
        ctx.exchange = exchange
        return tuple(exchange.to_heads((q, k, v), (exchange.queries, exchange.keys, exchange.keys)))

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        exchange = ctx.exchange
        return *exchange.to_tokens(gradients, (exchange.queries, exchange.keys, exchange.keys)), None


class HeadsToTokens(torch.autograd.Function):
    """out (B, n, S, D) -> (B, H, C, D); its gradient goes the other way."""

    @staticmethod
    def forward(ctx: FunctionCtx, out: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.to_tokens([out], [exchange.queries])[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, d_out: Tensor) -> tuple[Tensor | None, ...]:
        return *ctx.exchange.to_heads([d_out], [ctx.exchange.queries]), None


def swap(
    parts: Sequence[Sequence[Tensor]], shapes: Sequence[Sequence[Sequence[int]]], group: ProcessGroup | None
) -> list[list[Tensor]]:
    """Send the tensors parts[s] to rank s, in one message. Return those that came from rank s, of shapes[s]."""
    x = parts[0][0]
    sent, sent_sizes, there = _room([[x.shape for x in to_rank] for to_rank in parts], x)
    received, sizes, here = _room(shapes, x)
    for place, part in zip(chain(*there), chain(*parts), strict=True):
        place.copy_(part)
    dist.all_to_all_single(received, sent, sizes, sent_sizes, group=group)
    return here


def _room(shapes: Sequence[Sequence[Sequence[int]]], x: Tensor) -> tuple[Tensor, list[int], list[list[Tensor]]]:
    """A flat buffer for a message to or from each rank; the size of each message; and the tensors in it."""
    sizes = [[math.prod(shape) for shape in message] for message in shapes]
    buffer = x.new_empty(sum(map(sum, sizes)))
    tensors = iter(buffer.split(list(chain(*sizes))))
    return buffer, [sum(message) for message in sizes], [[next(tensors).view(it) for it in each] for each in shapes]


@lru_cache(maxsize=64)  # every layer of a model asks the same
def joined_places(mask: Mask, ranks: range, device: torch.device) -> tuple[Tensor, ...]:
    """Of each of these ranks: where its tokens stand among the tokens of all of them, (C,), int64."""
    at = [mask.place(rank) for rank in ranks]
    order = torch.cat(at).argsort().argsort().to(device)
    return order.split([len(it) for it in at])


def splits(heads: int, world_size: int) -> list[tuple[int, int]]:
    """The meshes (rows, ranks in a row) that P ranks can form so that no rank of a row is without a head."""
    return [(world_size // inside, inside) for inside in range(heads, 0, -1) if world_size % inside == 0]


def check_split(heads: int, inside: int, world_size: int) -> None:
    """Raise ValueError when heads are exchanged among more ranks than there are heads."""
    if inside > heads:
        possible = ", ".join(f"{rows} x {ranks}" for rows, ranks in splits(heads, world_size))
        raise ValueError(
            f"{heads} query heads for all-to-all among {inside} ranks; expected a head or more for each: use "
            f"hybrid.py's hybrid_attention with a mesh (rings across, all-to-all inside) of {possible}"
        )


def _length(part: slice) -> int:
    return part.stop - part.start
