"""How much memory does a training step of the whole model need? Count the tensors at its two worst moments.

    kept by a layer    inputs 2h                   x and h, with activation checkpointing nothing else
                       attention 4h + 2G·D + 2D    x/rms, n, q, out for W_o; k, v; cos and sin of q's and k's rotary
                           and h + H               fused: out and lse          naive: two S x S a head, and a mask
                       feedforward 2h + 4F         h/rms, n; the gate, silu of it, the other half, their product
    at the loss        3h + 3·vocab                last x, x/rms, n; log-softmax and two gradients
    at the attention   of the last layer, in its backward pass: q, k, v, out, d_out, dq, dk, dv and buffers

    peak = weights + what all layers keep + max(the loss, the attention of the last layer - its feedforward)

The feedforward of the last layer is done when its attention runs backwards. Its memory is free again, so a ring's
buffers fit in it. With activation checkpointing there is nothing to free, and the buffers add to the peak.

Shapes: a sequence of S tokens, C = S/P on a rank, h = H·D, F the feedforward's inner width. Numbers of a token,
4 bytes each. Weights: 12 bytes a parameter, over the P ranks (FSDP), and one layer's weights and gradients whole.

    $ python -m ringlab.planning.step_memory
    2 layers, h = 128, F = 384: bytes of a token that autograd keeps, counted
    all activations: 26,656
    checkpointing: 4,608
    64 MiB a rank, 4 layers: the longest sequence, counted
                             naive     blockwise     ring of 2     ring of 4
    all activations            464         1,008         2,240         4,672
    checkpointing              960         5,376         7,840        16,384
    ok    each fits in 64 MiB, and 16 tokens more on a rank do not

Before: ring_memory.py, of attention alone. After: memory.py, the same for a large model in bf16.
Source: Liu & Abbeel 2023, section 3; Liu et al. 2024, table 1. bench/longest_training.py measures it,
and tests/test_step_memory.py asks autograd what it keeps.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ringlab.planning.hidden_communication import AttentionLayer
from ringlab.planning.memory import kept_at_the_loss, kept_at_work
from ringlab.planning.ring_memory import peak_bytes_backward

Sizes = Any  # what Config of ringlab/models/transformer.py says of a model; a planner imports no model
W = 4  # bytes of a float32
METHODS = ("naive", "blockwise", "ring")


def kept_by_a_layer(method: str, config: Sizes, chunk: int) -> tuple[int, int, int]:
    """Numbers of a token that a layer keeps: its inputs, and what attention and feedforward keep, if not checkpointed.

    Raises ValueError for a method that is not in `METHODS`.
    """
    if method not in METHODS:
        raise ValueError(f"method is {method!r}; expected one of {', '.join(METHODS)}")
    h, H, D = config.hidden, config.heads, config.hidden // config.heads
    attention, feedforward = kept_at_work(AttentionLayer(H, config.kv_heads, D, W), h, config.feedforward)
    if method == "naive":
        attention += 2 * H * chunk + chunk // W - (h + H)  # the mask of all heads has a byte for each pair; no out, lse
    return 2 * h, attention, feedforward


def parameters(config: Sizes) -> tuple[int, int]:
    """The parameters of a layer, and those outside the layers."""
    h, F = config.hidden, config.feedforward
    kv = config.kv_heads * (h // config.heads)
    return 2 * h * h + 2 * h * kv + 3 * h * F + 2 * h, (1 if config.tied else 2) * config.vocab * h + h


def peak_bytes(method: str, config: Sizes, chunk: int, world_size: int) -> int:
    """Peak memory of a rank with `chunk` tokens in a step of `ringlab.models.train`, float32, batch 1, from the second
    step on.

    `method` is "naive" or "blockwise" (scaled_dot_product_attention) on one process, or "ring". Errors as
    `kept_by_a_layer`.
    """
    inputs, attention, feedforward = kept_by_a_layer(method, config, chunk)
    h, H, D = config.hidden, config.heads, config.hidden // config.heads
    kv = config.kv_heads * D
    at_work = {
        "naive": H * chunk + h,  # the gradient of the weights, dv
        "blockwise": 2 * h + 2 * kv,  # dq, dk, dv, the kernel's copy of d_out
        "ring": int(peak_bytes_backward(AttentionLayer(H, config.kv_heads, D, W), 1)) // W - (3 * h + 2 * kv) + kv + h,
    }[
        method
    ]  # the ring: all that peak_bytes_backward counts but q, k, v, out, d_out; a copy of v, the kernel's of d_out
    whole = inputs if config.checkpointing else inputs + attention + feedforward
    at_attention = attention + at_work if config.checkpointing else at_work - feedforward
    of_a_token = config.layers * whole + max(sum(kept_at_the_loss(h, config.vocab)), at_attention)
    layer, outside = parameters(config)
    state = 3 * (config.layers * layer + outside) // world_size + 2 * (layer + outside)  # weights and moments; gathered
    return W * (of_a_token * chunk + state)


def longest_chunk(method: str, config: Sizes, world_size: int, budget: int, grain: int = 1) -> int:
    """The largest multiple of `grain` tokens on a rank whose peak is at most `budget` bytes; 0 if none is."""
    low, high = 0, 1
    while peak_bytes(method, config, high * grain, world_size) <= budget:
        high *= 2
    while high - low > 1:
        middle = (low + high) // 2
        if peak_bytes(method, config, middle * grain, world_size) <= budget:
            low = middle
        else:
            high = middle
    return low * grain


def kept_bytes(module: nn.Module, work: Callable[[], Tensor]) -> int:
    """The bytes that autograd keeps for the backward pass of `work`, each memory once, without the module's weights."""
    kept = {}

    def keep(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        out = work()  # as long as it lives, all that was kept lives
    for weight in module.parameters():
        kept.pop(weight.untyped_storage().data_ptr(), None)
    del out
    return sum(kept.values())


@dataclass(frozen=True)
class Example:
    """The model of the run below."""

    layers: int
    checkpointing: bool
    hidden: int = 128
    heads: int = 4
    kv_heads: int = 4
    feedforward: int = 384
    vocab: int = 256
    tied: bool = False


def main() -> int:
    ways = {"all activations": False, "checkpointing": True}
    print("2 layers, h = 128, F = 384: bytes of a token that autograd keeps, counted")
    for name, checkpointing in ways.items():
        config = Example(2, checkpointing)
        inputs, attention, feedforward = kept_by_a_layer("blockwise", config, 1024)
        layer = inputs if checkpointing else inputs + attention + feedforward
        print(f"{name}: {W * (2 * layer + 3 * config.hidden + config.vocab):,}")  # and the loss, before its gradients
    print("64 MiB a rank, 4 layers: the longest sequence, counted")
    columns = (("naive", 1), ("blockwise", 1), ("ring", 2), ("ring", 4))
    print(" " * 16 + "".join(f"{m if P == 1 else f'{m} of {P}':>14}" for m, P in columns))
    budget, grain, ok = 64 * 2**20, 16, True
    for name, checkpointing in ways.items():
        config = Example(4, checkpointing)
        chunks = [longest_chunk(method, config, P, budget, grain) for method, P in columns]
        print(f"{name:<16}" + "".join(f"{P * C:>14,}" for C, (_, P) in zip(chunks, columns, strict=True)))
        for C, (method, P) in zip(chunks, columns, strict=True):
            ok &= peak_bytes(method, config, C, P) <= budget < peak_bytes(method, config, C + grain, P)
    print(f"{'ok   ' if ok else 'WRONG'} each fits in 64 MiB, and {grain} tokens more on a rank do not")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
