"""Linear layers of a Hugging Face model in the ring: their own code, in which a few names mean functions of ours.

    causal_conv1d_fn                 the last k - 1 tokens cross the border       short_convolution.py
    torch_chunk_gated_delta_rule     the state does: Qwen3-Next, Qwen3.5, OLMo    state_ring.py
    chunk_kimi_delta_attention       with a decay for each number of a key: Kimi linear
    mamba2_chunk_scan                without the delta rule: Bamba, Falcon-H1, Granite, Nemotron-H, Zamba2

The forward pass of a layer finds all that mixes tokens by these names, and seam.py lets them mean ours. A layer passes
on what it was given beside its input. So documents arrive as an argument, also when activation checkpointing computes
a layer again after other forward passes. LFM2 has the convolution only. A layer that mixes tokens in another way is
found by the proof, and refused: Mamba 1, lightning attention, and whatever comes next.

Shapes: hidden_states (B, N, C), N channels; query, key (B, C, H, D), value (B, C, Hv, Dv), g (B, C, Hv) or (B, C, Hv,
D), beta (B, C, Hv), as transformers passes them. In the scan C and B (B, C, G, D) are query and key.

`python examples/compare.py` trains a model in the ring: a first reader may skip this file.
Before: attention.py, what a layer of attention calls. After: proof.py.
Source: transformers 5.23, models/qwen3_next; Yang et al. 2025 (Gated DeltaNet), section 3; Dao & Gu 2024 (Mamba 2),
section 6, the scan as linear attention.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ringlab.models import transformer
from ringlab.models.transformer import Linear, ring_of_states
from ringlab.support.extras import extra

with extra("hf", __name__):
    from transformers.activations import ACT2FN

from ringlab.hugging_face import indexers
from ringlab.hugging_face.attention import LayerAttention, own_token
from ringlab.hugging_face.seam import ALL_IN_ONE, CONVOLUTION, INDEXER, KDA, RULE, SCAN, Mixers

LinearOf = Callable[[Any], Linear]  # how the tokens of packed documents mix; None: of one document


def convolution(linear_of: LinearOf, x: Tensor, weight: Tensor, bias: Any = None, **passed: Any) -> Tensor:
    """`causal_conv1d_fn` of transformers, but for the sum over tokens: that of the Linear."""
    out = linear_of(passed.get("documents")).convolution(x.to(weight.dtype), weight, bias)
    activation = passed.get("activation")
    return (out if activation is None else ACT2FN[activation](out)).to(x.dtype)


def rule(
    linear_of: LinearOf, q: Tensor, k: Tensor, v: Tensor, *, g: Tensor, beta: Tensor, **passed: Any
) -> tuple[Tensor, None]:
    """The gated delta rule and Kimi's, but for the recurrence: that of the Linear."""
    dtype, wide = q.dtype, torch.promote_types(q.dtype, torch.float32)
    q, k, v, g, beta = (x.transpose(1, 2).to(wide) for x in (q, k, v, g, beta))
    if passed.get("use_qk_l2norm_in_kernel"):
        q, k = (x * torch.rsqrt(x.square().sum(dim=-1, keepdim=True) + 1e-6) for x in (q, k))
    out, _ = linear_of(passed.get("documents")).rule(q, k, v, g, beta)
    return out.transpose(1, 2).contiguous().to(dtype), None


def scan(linear_of: LinearOf, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, **passed: Any) -> Tensor:
    """`mamba2_chunk_scan`, but for the recurrence: linear attention of C, B and Δ x, with the decay e^(A Δ)."""
    wide, (least, most) = torch.promote_types(x.dtype, torch.float32), passed.get("dt_limit", (0.0, torch.inf))
    dt = dt if passed.get("dt_bias") is None else dt + passed["dt_bias"].to(dt.dtype)
    dt = (F.softplus(dt) if passed.get("dt_softplus") else dt).clamp(least, most).to(wide)  # (B, C, H)
    x = x.to(wide)
    inputs = (y.transpose(1, 2).to(wide) for y in (C, B, x * dt[..., None], A.to(wide) * dt))
    out, _ = linear_of(passed.get("documents")).rule(*inputs, None, scale=1.0)
    out = out.transpose(1, 2).contiguous()
    return out if passed.get("D") is None else out + passed["D"][:, None] * x


def in_ring(attention: LayerAttention) -> Mixers:
    """These functions over the ranks of a ring."""
    where = attention.where
    linear_of = partial(ring_of_states, layout=where.layout, group=where.mesh_or_group)
    return mixers(lambda documents: linear_of(documents=documents), partial(indexers.in_ring, attention))


def mixers(linear_of: LinearOf, index: Callable[..., Tensor]) -> Mixers:
    """What the names mean, when tokens of these documents mix by `linear_of`(documents), and indexers by `index`."""
    return {
        CONVOLUTION: partial(convolution, linear_of),
        RULE: partial(rule, linear_of),
        KDA: partial(rule, linear_of),
        SCAN: partial(scan, linear_of),
        INDEXER: index,
        ALL_IN_ONE: lambda *inputs, **options: None,  # "there is no such kernel": else it would stay in its shard
    }


def convolution_cut(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Each token sees itself only."""
    out = x * weight[:, -1:]
    return out if bias is None else out + bias[:, None]


def attention_cut(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, scale: float | None = None
) -> tuple[Tensor, None]:
    """Each token sees itself only, and an error in any of the five changes the result."""
    q = q.repeat_interleave(v.shape[1] // q.shape[1], dim=1) + (g[..., None] if g.dim() == 3 else g)
    return own_token(q, k, v if beta is None else v * beta[..., None]), None


def cut(told: list[Any]) -> Mixers:
    """Each token sees itself only. The documents of each call are added to `told`."""

    def linear_of(documents: Any) -> Linear:
        told.append(documents)
        return Linear(convolution_cut, attention_cut)

    return mixers(linear_of, indexers.cut)


ALONE = mixers(lambda documents: transformer.ALONE, indexers.alone)  # on one process
