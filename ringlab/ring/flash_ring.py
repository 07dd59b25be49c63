"""The full ring: exact, differentiable, balanced under a causal mask, grouped, overlapped, on fused kernels.

    forward     for every K_j, V_j that arrives:    (out, lse) = merge((out, lse), kernel(Q, K_j, V_j))
    backward    for every K_j, V_j that arrives:    dQ += dQ_j; wait for this block's dK, dV; add to them; send them on

Shapes: B sequences, H query heads, G key/value heads, P ranks, C = S/P tokens on each, D numbers in a head. On each
rank q and out are (B, H, C, D), k and v (B, G, C, D), of the tokens that `ringlab.ring.layouts.shard` gives to the
rank. out, lse (B, H, C) and the gradients are summed in float32 at least. In the forward pass a rank sends (P-1) ·
2·B·G·C·D numbers. In the backward pass it sends the same again, and as many numbers of gradients, in float32 at least.
Some models have a v of another head dimension Dv, (B, G, C, Dv). Then out is (B, H, C, Dv), and D + Dv stands in place
of 2·D.

    $ python -m ringlab.ring.flash_ring
    4 ranks, S = 256, 8 query heads on 2, float32, against full attention in float64
    contiguous
    ok    out: largest error 4.5e-07, rounding allows 1.0e-05 (float32 sums)
    ...

docs/your_model.md shows it as the attention of a model. Targets are shifted by one before the tokens are dealt out, and
positions are those of the layout: others are wrong without an error.

Each rank's loss is its part of the whole loss, so the gradient of a weight is the sum over the ranks. all_reduce sums.
DistributedDataParallel and fully_shard average instead, so with them multiply the loss by the number of ranks that they
average over.

Before: schedule.py. After: ../../ring_planner/hidden_communication.py, how long its chunks must be.
Source: Liu et al. 2024, algorithm 1 and appendix A; Brandon et al. 2023, section 3; Dao et al. 2022, algorithm 4.
"""

import sys
import warnings
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from ringlab.basics.chunks import as_autocast
from ringlab.basics.naive_attention import accumulation_dtype
from ringlab.ring.backward import differentiable_once, left_as_it_is
from ringlab.ring.chosen_keys import facts_of_chosen, with_chosen
from ringlab.ring.fused_block import fused_backward, fused_forward
from ringlab.ring.gpu_kernels import in_one_order, without_cudnn
from ringlab.ring.layouts import Layout
from ringlab.ring.partition import BlockSlice
from ringlab.ring.schedule import Group, Ring, Schedule, agree_on_schedule
from ringlab.support.agreement import agree, one_pass
from ringlab.support.timeline import span

MANY_HEADS = 128  # no model has more


@left_as_it_is
def ring_flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    layout: str | Layout = "contiguous",
    documents: Sequence[int] | Tensor | None = None,
    window: int | None = None,
    global_tokens: int = 0,
    chosen: Tensor | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    group: Group = None,
    schedule: type[Schedule] = Ring,
) -> Tensor:
    """This rank's rows of full attention over the whole sequence, differentiable once.

    q (B, H, C, D), k (B, G, C, D) and v (B, G, C, Dv), H a multiple of G: this rank's chunks, as `ringlab.shard` cuts
    them in `layout`: "contiguous", "zigzag", "striped", or a `Layout` of your own. `scale` is 1/sqrt(D) unless given.
    `documents` are the lengths of documents that are packed into the sequence: a query sees its own document only. Give
    a list, or a tensor on the CPU: for one on a GPU each layer waits until the GPU has computed it.
    `ringlab.ring.documents.document_lengths(cu_seqlens)` gives the lengths for FlashAttention's cu_seqlens.
    With `window` and `causal` a query sees that many keys at most: its own token and those just before it. Besides, it
    sees the first `global_tokens` tokens of its document. Without a mask a rank may have another number of queries, q
    (B, H, Cq, D): cross-attention.
    With `chosen` (B, C, n), from `ringlab.choose_keys`, a query sees only the keys at these positions of the sequence,
    in all heads; -1 stands for none. The mask must show it all of them, and the schedule is the ring.
    `sinks` (H,) are learned attention sinks: for each query head one more logit in every softmax, without a value. They
    must be the same on every rank. Each rank gets its part of their gradient: the sum over the ranks is the whole, as
    of every other weight. Their dtype may be another than q's.
    With `softcap` c the scores are c·tanh(score/c), before the mask: Gemma 2's. No fused kernel knows them, so they are
    computed by plain tiles, which are slower.
    `schedule` is the way to share the sequence: the ring, or a class of `ringlab/ways`. Every way takes
    the same chunks, layouts and masks, and gives the same result. `group` is a process group or a mesh of one dimension
    (None: the whole job), or for DoubleRing and Hybrid a mesh of two: its rank host · g + i holds the chunk of this
    rank of P.
    Under autocast q, k and v are cast to its dtype, as torch's own attention casts them.
    Returns out (B, H, C, Dv), in q's dtype; sums over ranks are float32 at least. Every rank of the group must
    call it, with the same schedule and group, and run its backward pass. When the input of a rank is wrong, the
    ranks disagree, or layout or mask do not fit, every rank raises the same ValueError before any block travels.
    Liu et al. 2024, algorithm 1.
    """
    q, k, v = as_autocast(q, k, v)
    mask = {"causal": causal, "documents": documents, "window": window, "global_tokens": global_tokens}
    options: dict[str, Any] = {"sinks": sinks, "softcap": softcap, "layout": layout, "schedule": schedule, **mask}
    name = "ring_flash_attention"
    same = partial(facts_of_chosen, chosen, q, schedule)
    agreed = with_chosen(agree_on_schedule(q, k, v, scale, group, name, same=same, **options), chosen, name)
    if q.shape[1] > max(MANY_HEADS, 8 * q.shape[2]):
        given = f"q has shape {tuple(q.shape)}, taken for (B, H, S, D): {q.shape[1]} heads of {q.shape[2]} tokens"
        warnings.warn(f"{given}. Is it (B, S, H, D)? Then give x.transpose(1, 2)", stacklevel=3)
    return FlashRing.apply(q, k, v, agreed, sinks)


@left_as_it_is
def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    layout: str | Layout = "contiguous",
    group: Group = None,
    schedule: type[Schedule] = Ring,
) -> Tensor:
    """`ring_flash_attention` with the signature of `torch.nn.functional.scaled_dot_product_attention`.

    It has the same shapes, ways and errors. It raises ValueError on every rank also for a mask, for dropout, and for
    fewer heads of K and V without enable_gqa. Liu et al. 2024, algorithm 1.
    """

    def check(q: Tensor, k: Tensor, v: Tensor) -> None:
        if attn_mask is not None:
            raise ValueError("attn_mask was given; expected None: a ring knows full attention and is_causal=True only")
        if dropout_p != 0.0:
            raise ValueError(f"dropout_p is {dropout_p}; expected 0.0: this ring has no dropout")
        if not enable_gqa and q.dim() == k.dim() == 4 and q.shape[1] != k.shape[1]:
            raise ValueError(f"query has {q.shape[1]} heads and key {k.shape[1]}; expected enable_gqa=True for that")

    query, key, value = as_autocast(query, key, value)
    options: dict[str, Any] = {"layout": layout, "schedule": schedule, "check": check, "causal": is_causal}
    agreed = agree_on_schedule(query, key, value, scale, group, "scaled_dot_product_attention", **options)
    return FlashRing.apply(query, key, value, agreed)


class FlashRing(torch.autograd.Function):
    """Attention by a schedule, as one operation of autograd. It saves the q, k, v, out and lse of a rank's work."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, schedule: Schedule, sinks: Tensor | None = None) -> Tensor:
        with one_pass(schedule.group), without_cudnn(schedule.partition.mask.documents is not None):
            q, k, v = schedule.to_heads(q, k, v)
            out, lse = flash_forward(q, k, v, schedule, None if sinks is None else sinks[schedule.own_heads])
            ctx.schedule = schedule
            ctx.save_for_backward(q, k, v, out, lse, sinks)
            return schedule.to_tokens(out)[0]

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        schedule, (q, k, v, out, lse, sinks) = ctx.schedule, ctx.saved_tensors
        agree(lambda: None, schedule.group, function=f"the backward pass of call {schedule.call}")
        with one_pass(schedule.group), without_cudnn(schedule.partition.mask.documents is not None):
            (d_out,) = schedule.to_heads(d_out)
            d_sinks = None
            if sinks is not None:
                d_sinks = torch.zeros_like(sinks)
                d_sinks[schedule.own_heads] = sinks_backward(sinks[schedule.own_heads], out, lse, d_out).to(sinks.dtype)
            gradients = flash_backward(q, k, v, out, lse, d_out, schedule)
            return *schedule.to_tokens(*(gradient.to(d_out.dtype) for gradient in gradients)), None, d_sinks


def flash_forward(
    q: Tensor, k: Tensor, v: Tensor, schedule: Schedule, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Checked chunks -> out (B, H, C, Dv) in q's dtype and lse (B, H, C). Liu et al. 2024, algorithm 1."""
    state: Sequence[Tensor] | None = None if sinks is None else nothing_seen(q, v, sinks)  # out and lse
    for t, k_j, v_j, pieces in schedule.rounds(k, v):
        for piece in pieces:
            with span("compute", t, k_j, v_j):
                if state is not None:  # the first block's out has q's dtype: with one block nothing is summed
                    state = state[0].to(accumulation_dtype(q.dtype)), state[1]
                block = *queries_of(piece, q), *keys_of(piece, k_j, v_j)
                out_j, lse_j = fused_forward(*reversed_rows(piece, *block), **options_of(piece, schedule))
                if state is None and lse_j.shape == q.shape[:3]:  # a piece with all queries needs no merge
                    state = reversed_rows(piece, out_j, lse_j)
                    continue
                state = state or nothing_seen(q, v_j)
                merge_into(*queries_of(piece, *state), *reversed_rows(piece, out_j, lse_j))
    out, lse = state or nothing_seen(q, v_j)
    return out.to(q.dtype), lse


def nothing_seen(q: Tensor, v: Tensor, sinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """out (B, H, C, Dv) and lse (B, H, C) of queries that have seen no key: 0 and -inf, or with sinks (H,) their logit.

    A sink is the score of one more key, whose value is 0.
    """
    shape, dtype = (*q.shape[:3], v.shape[-1]), accumulation_dtype(q.dtype)
    out = torch.zeros_like(q, dtype=dtype) if q.shape == shape else q.new_zeros(shape, dtype=dtype)  # in q's order
    lse = torch.full(q.shape[:3], -torch.inf, dtype=out.dtype, device=q.device)
    return out, lse if sinks is None else lse.copy_(sinks[:, None])


def queries_of(piece: BlockSlice, *tensors: Tensor) -> list[Tensor]:
    """The piece's query heads and queries of tensors (B, H, C, ...)."""
    return [x[:, piece.heads, piece.queries] for x in tensors]


def keys_of(piece: BlockSlice, *tensors: Tensor) -> list[Tensor]:
    """The piece's K/V heads and keys of tensors (B, G, C_j, D)."""
    return [x[:, piece.kv_heads, piece.keys] for x in tensors]


def options_of(piece: BlockSlice, schedule: Schedule) -> dict[str, Any]:
    """What `fused_forward` and `fused_backward` are told of a piece."""
    mask = {"causal": piece.triangle, "hidden": piece.hidden}
    return {"scale": schedule.scale, "softcap": schedule.softcap, **mask}


def reversed_rows(piece: BlockSlice, *tensors: Tensor) -> Sequence[Tensor]:
    """(B, H, C, ...) as they are; in reverse order for an upper triangle, which then is the kernel's own."""
    return [x.flip(2) for x in tensors] if piece.upper else tensors


def merge_into(out: Tensor, lse: Tensor, out_j: Tensor, lse_j: Tensor) -> None:
    """`merge` of online_softmax.py, in place: out (B, H, Sq, D) and lse (B, H, Sq) become those of all keys."""
    if out.is_cuda and out.dtype == torch.float32 and (merge_rows := one_pass_merge()) is not None:
        merge_rows(out, lse, out_j, lse_j)
        return
    share = torch.sigmoid(lse_j - lse)  # e^lse_j / (e^lse + e^lse_j)
    share.masked_fill_(lse_j == -torch.inf, 0.0)  # sigmoid(-inf + inf), of a row that saw no key so far, is NaN
    out.lerp_(out_j.to(out.dtype), share[..., None])
    torch.logaddexp(lse, lse_j, out=lse)


@cache
def one_pass_merge() -> Callable[[Tensor, Tensor, Tensor, Tensor], None] | None:
    """`merge_rows` of fused_merge.py, or None where there is no Triton, or no C compiler, which Triton needs."""
    try:
        from ringlab.ring.fused_merge import merge_rows

        x = torch.zeros(1, 1, 1, 1, device="cuda")
        merge_rows(x, x[..., 0], x, x[..., 0])
    except ModuleNotFoundError:
        return None
    except Exception as error:
        warnings.warn(f"the ring merges in five passes: Triton does not work here, {error!r}", stacklevel=3)
        return None
    return merge_rows


def flash_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, d_out: Tensor, schedule: Schedule
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv of this rank's chunks, shaped as q, k and v, in lse's dtype. Liu et al. 2024, appendix A."""
    if out.shape == q.shape:
        q, out, d_out = in_one_order(q, out, d_out)  # once a pass; else the kernels would copy them for each block
    d_q = torch.zeros_like(q, dtype=lse.dtype)
    sums = schedule.sums(k, v, lse.dtype)
    for t, k_j, v_j, pieces in schedule.rounds_back(k, v):
        for piece in pieces:
            with span("compute", t, k_j, v_j):
                parts = piece_backward(piece, q, k_j, v_j, out, lse, d_out, schedule)
            for total, part in zip(queries_of(piece, d_q) + keys_of(piece, *sums.of_round(t)), parts, strict=True):
                total += part
            del parts, part, total  # else these would lie beside those of the next piece
        sums.send_on(t)
    d_k, d_v = sums.home()
    return d_q, d_k, d_v


def piece_backward(
    piece: BlockSlice,
    q: Tensor,
    k_j: Tensor,
    v_j: Tensor,
    out: Tensor,
    lse: Tensor,
    d_out: Tensor,
    schedule: Schedule,
) -> Sequence[Tensor]:
    """What a piece adds to dq (B, H, Cq, D) of its queries, and to dk and dv (B, G, Ck, ...) of its keys."""
    rows, *of_rows = queries_of(piece, q, out, lse, d_out)
    block = reversed_rows(piece, rows, *keys_of(piece, k_j, v_j), *of_rows)
    return reversed_rows(piece, *fused_backward(*block, **options_of(piece, schedule)))


def sinks_backward(sinks: Tensor, out: Tensor, lse: Tensor, d_out: Tensor) -> Tensor:
    """What this rank's queries add to the gradient of the sinks (H,), in lse's dtype.

    The softmax weight of a sink is p = e^(sink - lse), with the lse of all keys and the sink. Its value is 0, so the
    gradient of its score is p · (0 - δ), where δ = Σ_D dO ∘ O.
    """
    delta = (d_out.to(lse.dtype) * out.to(lse.dtype)).sum(dim=-1)  # (B, H, C)
    p = torch.exp(sinks.to(lse.dtype)[:, None] - lse.masked_fill(lse == -torch.inf, torch.inf))
    return -(p * delta).sum(dim=(0, 2))


def main() -> int:
    from ringlab.ring.cases import random_inputs, report_cases

    whole = random_inputs(1, 8, 2, 256, 64)
    return 0 if report_cases(4, whole, ring_flash_attention) else 1


if __name__ == "__main__":
    sys.exit(main())
