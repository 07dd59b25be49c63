"""Linear layers of a Hugging Face model in the ring: their own code, in which two names mean functions of ours.

    causal_conv1d_fn                 the last k - 1 tokens cross the border       short_convolution.py
    torch_chunk_gated_delta_rule     the state does                               state_ring.py

transformers has no interface for linear layers, as it has for attention. But all that mixes tokens in a gated delta net
is in these two functions of the model's file, and the forward pass of a layer finds them by name. So a layer gets a
forward pass of the same code with other globals: the file and other models stay as they are. This serves Qwen3-Next,
Qwen3.5 and OLMo hybrid, and LFM2, which has the convolution only. A layer that mixes tokens in another way is found by
the proof, and refused: Mamba, Kimi's delta attention with a decay for each key, and whatever comes next.

Shapes: hidden_states (B, N, C), N channels; query, key (B, C, H, D), value (B, C, Hv, Dv), g and beta (B, C, Hv), as
transformers passes them.

`python examples/compare.py` trains a model in the ring: a first reader may skip this file.

Before: hugging_face_masks.py, what a layer of attention asks for. After: hugging_face_proof.py.
Source: transformers 5.23, models/qwen3_next; Yang et al. 2025 (Gated DeltaNet), section 3.
"""

import inspect
from collections.abc import Callable
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from ringlab.support.extras import extra
from ringlab.training.linear_attention import linear_attention
from ringlab.training.short_convolution import ring_short_convolution, short_convolution
from ringlab.training.state_ring import ring_linear_attention

with extra("hf", __name__):
    from transformers.activations import ACT2FN

from ringlab.models.hugging_face_batch import expect
from ringlab.models.hugging_face_masks import Attention

CONVOLUTION, RULE = "causal_conv1d_fn", "torch_chunk_gated_delta_rule"
Mixers = dict[str, Callable[..., Any]]  # what the two names mean


def own_forward(part: nn.Module) -> Any:
    """The forward pass of its class, without decorators."""
    return inspect.unwrap(type(part).forward)


def linear_layers(model: nn.Module) -> list[nn.Module]:
    """The parts of a model whose forward pass calls one of the two functions."""
    codes = [(part, getattr(own_forward(part), "__code__", None)) for part in model.modules()]
    return [part for part, code in codes if code and {CONVOLUTION, RULE} & {*code.co_names}]


def spread(model: nn.Module, mixers: Mixers | None) -> None:
    """Let the two names mean these functions in every linear layer; with None, those of transformers again."""
    for part in linear_layers(model):
        own = own_forward(part)
        if mixers is None:
            vars(part).pop("forward", None)
        else:
            names = {**own.__globals__, **mixers}
            forward = FunctionType(own.__code__, names, own.__name__, own.__defaults__, own.__closure__)
            forward.__kwdefaults__ = own.__kwdefaults__
            part.forward = MethodType(forward, part)  # a copy of the model gets one of its own


def convolution(compute: Callable[..., Tensor], x: Tensor, weight: Tensor, bias: Any = None, **passed: Any) -> Tensor:
    """`causal_conv1d_fn` of transformers, but for the sum over tokens: `compute`(x, weight, bias)."""
    out, activation = compute(x.to(weight.dtype), weight, bias), passed.get("activation")
    return (out if activation is None else ACT2FN[activation](out)).to(x.dtype)


def rule(
    compute: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, *, g: Tensor, beta: Tensor, **passed: Any
) -> tuple[Tensor, None]:
    """`torch_chunk_gated_delta_rule`, but for the recurrence: `compute`(q, k, v, g, beta), (B, H, C, ...) each."""
    state = "initial_state" if passed.get("initial_state") is not None else "output_final_state"
    expect(not passed.get(state), f"a linear layer was given {state}, as generate does", "no cache in a ring")
    dtype, wide = q.dtype, torch.promote_types(q.dtype, torch.float32)
    q, k, v, g, beta = (x.transpose(1, 2).to(wide) for x in (q, k, v, g, beta))
    if passed.get("use_qk_l2norm_in_kernel"):
        q, k = (x * torch.rsqrt(x.square().sum(dim=-1, keepdim=True) + 1e-6) for x in (q, k))
    return compute(q, k, v, g, beta).transpose(1, 2).contiguous().to(dtype), None


def in_ring(attention: Attention) -> Mixers:
    """The two functions over the ranks of a ring."""

    def where() -> dict[str, Any]:
        return {"documents": attention.documents, "layout": attention.layout, "group": attention.group}

    return {
        CONVOLUTION: partial(convolution, lambda *x: ring_short_convolution(*x, **where())),
        RULE: partial(rule, lambda *x: ring_linear_attention(*x, **where())[0]),
    }


def convolution_cut(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Each token sees itself only."""
    out = x * weight[:, -1:]
    return out if bias is None else out + bias[:, None]


def rule_cut(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """Each token sees itself only, and an error in any of the five changes the result."""
    q, k = (x.repeat_interleave(v.shape[1] // x.shape[1], dim=1) for x in (q, k))
    unequal = torch.arange(1, q.shape[3] + 1).to(q).cos()
    return v * beta[..., None] + ((q + 2 * k) * unequal).mean(dim=3, keepdim=True) + g[..., None]


ALONE: Mixers = {  # on one process: what the ring would compute
    CONVOLUTION: partial(convolution, short_convolution),
    RULE: partial(rule, lambda *x: linear_attention(*x)[0]),
}
CUT: Mixers = {CONVOLUTION: partial(convolution, convolution_cut), RULE: partial(rule, rule_cut)}
