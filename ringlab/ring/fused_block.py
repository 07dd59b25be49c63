"""A fused kernel computes one block without storing its scores, and returns the lse that the merge of blocks needs.

    forward     out_j, lse_j     = kernel(Q, K_j, V_j)                   merge them: ringlab/basics/online_softmax.py
    backward    dQ_j, dK_j, dV_j = kernel'(Q, K_j, V_j, out, lse, dO)    with out and lse of the *whole* row

PyTorch's scaled_dot_product_attention does not return the lse, so this file calls the kernels behind it by their names.
They do not check their input, so this file does. On a GPU there are three kernels, and PyTorch chooses: gpu_kernels.py.
Where no kernel fits, this file takes the plain blocks of ringlab/basics/ and backward.py. So it does for a softcap c
(Gemma 2), which no kernel knows: scores that cannot leave -c ... c.

    scores  s = c tanh(scale Q Kᵀ / c), then the mask          dS = p ∘ (dp - δ) ∘ (1 - (s/c)²)

The mask comes last: a hidden key with the score -inf would get -c, and so a weight.

Shapes: q, out and dO, the gradient of out, are (B, H, Sq, D), k and v (B, G, Sk, D), H a multiple of G. lse (B, H, Sq)
is the natural logarithm of Σ e^score, float32 at least. v may have a D of its own; out and dO then have it too.

    $ python -m ringlab.ring.fused_block
    kernel: cpu flash (fused, any floating dtype, any head dim)
    ok    out of two blocks, merged: largest error 2.2e-15, rounding allows 1.0e-13 (float64 sums)
          dk with out and lse of the whole rows: off by 0.0000
          dk with out and lse of the block (wrong): off by 0.5019

The kernels themselves do not check that numbers of a row lie side by side in memory, nor that a scale is positive under
a causal mask; and for a row that sees no key the one of CPUs returns the lse 0, and those of GPUs +inf, not -inf.

The base-2 trap: some kernels return the lse in base 2, log2 Σ e^s, and a merge in the wrong base is silently wrong.
Multiply it by log 2 first.

Before: gpu_kernels.py. After: masks.py, what a query sees.
Source: Dao et al. 2022, algorithms 2 and 4; PyTorch's native_functions.yaml,
`_scaled_dot_product_flash_attention_for_cpu` and its `_backward`. "About log2 lse" in TheRainstorm's Interleaved Ring
Attention, on FlashInfer and FlashMLA; its merge formula has a misprint: exp(lse_i) twice, where it means
exp(lse_1) + exp(lse_2). Gemma Team 2024 (Gemma 2), section 2, "logit soft-capping".
"""

import math
import sys
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ringlab.basics.blockwise_attention import TILE, attend_tile, blockwise_attention
from ringlab.basics.naive_attention import TOKENS
from ringlab.basics.online_softmax import State, finish, merge, start, update
from ringlab.ring.backward import block_backward, tile_backward
from ringlab.ring.gpu_kernels import gpu_backward, gpu_forward, gpu_kernel, repeated, summed

aten = torch.ops.aten

QUERIES, SHORT = 64, 1024  # forward on a CPU: queries of a strip; the longest causal block that is cut into strips
KEYS, SHORT_BACKWARD = 128, 2048  # backward: keys of a strip; the longest block that is cut


def choose_kernel(
    q: Tensor, k: Tensor, scale: float, softcap: float | None = None, causal: bool = False
) -> tuple[str, str]:
    """(the kernel, the reason) for q (B, H, Sq, D): "cpu flash", "plain", or on a GPU one of gpu_kernels.py."""
    if softcap is not None:
        return "plain", "no fused kernel caps scores"
    if scale <= 0:
        return "plain", f"scale is {scale:g}; the kernel scales after masking, so a scale <= 0 destroys the mask"
    if q.device.type == "cpu":
        return "cpu flash", "fused, any floating dtype, any head dim"
    if q.device.type != "cuda":
        return "plain", f"no fused kernel for {q.device.type}"
    return gpu_kernel(q, k, scale, causal)


def fused_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    causal: bool = False,
    hidden: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """One block: q (B, H, Sq, D), k (B, G, Sk, D), v (B, G, Sk, Dv) -> out (B, H, Sq, Dv) and lse (B, H, Sq).

    out has q's dtype. `causal` hides key j from query i when j > i, and needs Sq = Sk. A row that sees no key gives
    out = 0, lse = -inf. `hidden` (B, 1, Sq, Sk), of one tile, is True where a query did not choose a key: no fused
    kernel knows it. The input must have passed `chunks.check_grouped_chunks`. Dao et al. 2022, algorithm 2.
    """
    D_v = v.shape[-1]
    q, k, v = _dense_rows(q, k, v)
    kernel = "plain" if hidden is not None else choose_kernel(q, k, scale, softcap, causal)[0]
    if kernel == "cpu flash":
        out, lse = _cpu_forward(q, k, v, scale, causal)
    elif kernel == "plain":
        out, lse = _plain_forward(q, k, v, scale, softcap, causal, hidden)
    else:
        out, lse = gpu_forward(kernel, q, k, v, scale, causal)
    return out[..., :D_v], lse


def _plain_forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float | None, causal: bool, hidden: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    k, v = (repeated(x, q) for x in (k, v))
    with torch.autocast(q.device.type, enabled=False):  # autocast would compute the scores in 16 bits
        tile = attend_tile if softcap is None else partial(capped_attend, softcap=softcap)
        if hidden is not None:
            out, lse = finish(tile(start(q), q, k, v, scale=scale, future=hidden))
            return out.to(q.dtype), lse
        return blockwise_attention(q, k, v, block_size=TILE, causal=causal, scale=scale, tile=tile)


def _cpu_forward(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """The kernel computes 512 keys at a time, visible or not. Of a triangle, strips of queries save most of that."""
    flash, (B, H, C, _) = aten._scaled_dot_product_flash_attention_for_cpu, q.shape
    busy = torch.get_num_threads() <= B * H  # else some threads would have nothing to do
    if causal and busy and QUERIES < C <= SHORT:
        future, strips = q.new_full((QUERIES, C), -torch.inf).triu(1 + C - QUERIES), []  # of the last strip
        for i in range(0, C, QUERIES):
            end = min(i + QUERIES, C)
            hidden = future[None, None, i - end :, C - end :]
            strips.append(flash(q[:, :, i:end], k[:, :, :end], v[:, :, :end], attn_mask=hidden, scale=scale))
        out, lse = (torch.cat(parts, dim=2) for parts in zip(*strips, strict=True))
    else:
        out, lse = flash(q, k, v, 0.0, causal, scale=scale)
    nothing = lse == 0  # Σ e^score is 1; or all scores are -inf, and out is 0 too: the plain block knows which
    if nothing.any() and (out[nothing] == 0).all(dim=-1).any():
        return _plain_forward(q, k, v, scale, None, causal)
    return out, lse


def fused_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    d_out: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    causal: bool = False,
    hidden: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """What one block adds to dq, dk and dv, shaped as q, k and v. out and lse are those of the *whole* rows.

    The other arguments are those of `fused_forward`. The results have q's dtype, or lse's where the block is plain.
    Dao et al. 2022, algorithm 4.
    """
    D, D_v, G = q.shape[-1], v.shape[-1], k.shape[1]
    q, k, v, out, d_out = _dense_rows(q, k, v, out, d_out)
    kernel = "plain" if hidden is not None else choose_kernel(q, k, scale, softcap, causal)[0]
    lse = lse.nan_to_num(nan=math.nan, posinf=math.inf, neginf=math.inf)  # a row that saw no key: e^(score - inf) is 0
    if kernel == "cpu flash":
        d_q, d_k, d_v = _cpu_backward(q, k, v, out, lse, d_out, scale=scale, causal=causal)
    elif kernel == "plain":
        k, v = (repeated(x, q) for x in (k, v))
        delta = (d_out.to(lse.dtype) * out.to(lse.dtype)).sum(dim=-1)  # (B, H, Sq)
        with torch.autocast(q.device.type, enabled=False):
            tile = tile_backward if softcap is None else partial(capped_backward, softcap=softcap)
            if hidden is None:
                d_q, d_k, d_v = block_backward(q, k, v, d_out, lse, delta, scale, causal=causal, tile=tile)
            else:
                d_q, d_k, d_v = tile(q, k, v, d_out, lse, delta, scale, hidden)
        d_k, d_v = summed(d_k, d_v, kv_heads=G)
    else:
        d_q, d_k, d_v = gpu_backward(kernel, q, k, v, out, lse, d_out, scale, causal)
    return d_q[..., :D], d_k[..., :D], d_v[..., :D_v]


def _cpu_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, d_out: Tensor, *, scale: float, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Strips of keys, as `_cpu_forward` has strips of queries. In 16 bits they would be slower, and rounded."""
    flash, C = aten._scaled_dot_product_flash_attention_for_cpu_backward, q.shape[2]
    if not (causal and KEYS < C <= SHORT_BACKWARD and q.dtype in (torch.float32, torch.float64)):
        return flash(d_out, q, k, v, out, lse, 0.0, causal, scale=scale)
    d_q, d_k, d_v = torch.zeros_like(q), torch.empty_like(k), torch.empty_like(v)
    for j in range(0, C, KEYS):
        keys = slice(j, j + KEYS)
        d_out_j, q_j, out_j, lse_j = (x[:, :, j:] for x in (d_out, q, out, lse))  # (B, H, C - j, ...)
        block = d_out_j, q_j, k[:, :, keys], v[:, :, keys], out_j, lse_j
        part, d_k[:, :, keys], d_v[:, :, keys] = flash(*block, 0.0, causal, scale=scale)
        d_q[:, :, j:] += part
    return d_q, d_k, d_v


def _dense_rows(*tensors: Tensor) -> list[Tensor]:
    """Tensors with the numbers of each row side by side in memory, and with rows of one length: the kernels want both.

    Shorter rows get zeros. These change no score, and only numbers of out and dv that nobody asked for.
    """
    longest = max(x.shape[-1] for x in tensors)
    same = [x if x.shape[-1] == longest else F.pad(x, (0, longest - x.shape[-1])) for x in tensors]
    return [x if x.stride(-1) == 1 else x.contiguous() for x in same]


def capped_scores(
    q: Tensor, k: Tensor, *, scale: float, softcap: float, future: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The scores of a tile (B, H, Sq, Sk), and their slope: how much they change where scale q kᵀ changes by 1.

    `future` (Sq, Sk) is True where a query may not look: -inf.
    """
    t = torch.tanh((q * (scale / softcap)) @ k.mT)
    scores = softcap * t
    return scores if future is None else scores.masked_fill(future, -torch.inf), 1 - t * t


def capped_attend(
    state: State, q: Tensor, k: Tensor, v: Tensor, *, scale: float, future: Tensor | None = None, softcap: float
) -> State:
    """`attend_tile` of blockwise_attention.py, with capped scores. Only a tile of them exists at a time."""
    wide = q.to(state[0].dtype), k.to(state[0].dtype)
    return update(state, capped_scores(*wide, scale=scale, softcap=softcap, future=future)[0], v)


def capped_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    d_out: Tensor,
    lse: Tensor,
    delta: Tensor,
    scale: float,
    future: Tensor | None = None,
    *,
    softcap: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """`tile_backward` of backward.py, with capped scores. lse is inf where no key is seen."""
    q, k, v, d_out = (x.to(lse.dtype) for x in (q, k, v, d_out))
    scores, slope = capped_scores(q, k, scale=scale, softcap=softcap, future=future)  # (B, H, Sq, Sk)
    p = torch.exp(scores - lse[..., None])  # the softmax weights
    d_scores = p * (d_out @ v.mT - delta[..., None]) * slope
    return scale * d_scores @ k, scale * d_scores.mT @ q, p.mT @ d_out


def main() -> int:
    from ringlab.support.rounding import exact_attention, report

    x = TOKENS[None, None]  # (B, H, S, D) = (1, 1, 8, 2)
    scale = 2**-0.5
    kernel, why = choose_kernel(x, x, scale)
    print(f"kernel: {kernel} ({why})")

    d_out = torch.randn(x.shape, generator=torch.Generator().manual_seed(0), dtype=x.dtype)
    right = exact_attention(x, x, x, d_out, fused_blocks=2)

    halves = [x[:, :, :4], x[:, :, 4:]]
    parts = [fused_forward(x, half, half, scale=scale) for half in halves]
    out, lse = merge(*parts[0], *parts[1])
    ok = report("out of two blocks, merged", out, right["out"])
    for name, right_lse in (("the whole rows", True), ("the block (wrong)", False)):
        of_halves = [
            fused_backward(x, half, half, *((out, lse) if right_lse else part), d_out, scale=scale)[1]
            for half, part in zip(halves, parts, strict=True)
        ]
        d_k = torch.cat(of_halves, dim=2)
        print(f"      dk with out and lse of {name}: off by {right['dk'].error(d_k).max():.4f}")
        ok &= right["dk"].accepts(d_k) == right_lse

    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
