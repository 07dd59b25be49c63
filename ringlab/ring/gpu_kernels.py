"""On a GPU PyTorch has three fused kernels. Which one is fastest depends on the GPU, so PyTorch is asked.

    flash        FlashAttention: 16 bits, any GPU since 2020
    efficient    xFormers' kernel: float32 too, older GPUs too
    cudnn        NVIDIA's own: on an H100 nearly twice as fast as flash

What its own attention would take for these tensors, the ring takes too, for its blocks to be as fast as the attention
that they replace; how fast they are was not timed since (docs/cluster.md). A kernel that is silently wrong for some
sizes is not taken for them, nor one that was never tried.

cuDNN makes a plan for each new shape: about 0.4 s for a forward pass and 0.55 s for a backward pass, in each process,
and keeps it for ever. So it gets only shapes that come back: multiples of 128 tokens, and no documents. For the other
blocks PyTorch is asked again, without cuDNN. In PyTorch 2.11 to 2.13 a plan of a backward pass is found by the shapes
and strides of q, k and v alone, and reads out, d_out and lse by the strides of the tensors that it was made for. So
out and d_out must have q's strides, always.

Shapes: q, out and d_out (B, H, Sq, D), k and v (B, G, Sk, D), H a multiple of G; lse (B, H, Sq), natural logarithm, of
the *whole* rows in a backward pass. Rows have one length D: fused_block.py pads shorter ones.

A reader of the ring may skip this file. Before: causal.py. After: fused_block.py, which calls these.
Source: PyTorch's native_functions.yaml, `_scaled_dot_product_flash_attention`, `..._efficient_attention`,
`..._cudnn_attention`, their `_backward`, and `_fused_sdp_choice`.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends.cuda import cudnn_sdp_enabled, enable_cudnn_sdp

aten = torch.ops.aten

CHOICES = {1: "cuda flash", 2: "cuda efficient", 3: "cuda cudnn"}  # the numbers of torch.nn.attention.SDPBackend
# Measured once, by hand, on an H100: cuDNN was right at D = 64, 72, 128, 192 and 256, and flash in rings of many
# shapes. The gradients of "efficient" were wrong in 16 bits at D = 264, and over 128 it was hardly tried.
HEAD_DIMS = {"cuda flash": (8, 256), "cuda efficient": (8, 128), "cuda cudnn": (64, 256)}  # multiples of 8
# cuDNN gets multiples of so many tokens. Others have faults besides: Sk = 64 mod 128 gives NaN on sm90 where an lse is
# below -88.7 (PyTorch's issue 196678); one query comes out wrong on a B200 (193893), its gradients NaN on an H200
# (cudnn-frontend's issue 1072).
PLANNED = 128
LONGEST = 2**16  # tokens: beyond them "efficient" is silently wrong (PyTorch's issue 162588)
GRID = 2**16 - 1  # CUDA's limit for two of the three sizes of a launch; more heads were never tried


def gpu_kernel(q: Tensor, k: Tensor, scale: float, causal: bool) -> tuple[str, str]:
    """(the kernel, the reason) for q (B, H, Sq, D) on a GPU: one of `CHOICES`, or "plain"."""
    B, H, Sq, D = q.shape
    choice, why = torch_choice(q, k, scale, causal), "fused, PyTorch's choice for this GPU"
    if CHOICES.get(choice) == "cuda cudnn" and (Sq % PLANNED or k.shape[2] % PLANNED or HEAD_DIMS["cuda cudnn"][0] > D):
        why = f"fused, PyTorch's choice without cuDNN, which gets multiples of {PLANNED} tokens and a head dim of 64 on"
        with without_cudnn():
            choice = torch_choice(q, k, scale, causal)
    if choice not in CHOICES:
        return "plain", "PyTorch takes no fused CUDA kernel for these tensors, or they are switched off"
    if CHOICES[choice] == "cuda efficient" and max(Sq, k.shape[2]) > LONGEST:
        return "plain", f"PyTorch's fused kernel for these tensors is silently wrong beyond {LONGEST:,} tokens"
    least, most = HEAD_DIMS[CHOICES[choice]]
    if least <= D <= most and D % 8 == 0 and B * H <= GRID:
        return CHOICES[choice], why
    return "plain", f"no fused CUDA kernel was tried for {q.dtype}, head dim {D} and {B} times {H} heads"


@contextmanager
def without_cudnn(when: bool = True) -> Iterator[None]:
    """PyTorch's own switch, for what is computed meanwhile: cuDNN is not taken. It is one for the whole process."""
    before = cudnn_sdp_enabled()
    enable_cudnn_sdp(before and not when)
    try:
        yield
    finally:
        enable_cudnn_sdp(before)


def torch_choice(q: Tensor, k: Tensor, scale: float, causal: bool) -> int:
    """Which kernel PyTorch's attention would take, by its number.

    The forward and the backward pass must take the same one, so it is asked as if gradients were needed. It is asked
    about G query heads: flash and cuDNN take any multiple of them, and for "efficient" K and V are copied. It is asked
    about what the kernel will get: aligned. 0 is no kernel.
    """
    heads, k = aligned(q[:, : k.shape[1]].detach(), k)
    with torch.enable_grad():
        if not heads.is_inference():  # such a tensor has no backward pass, and cannot ask for one
            heads.requires_grad_()
        try:
            return torch._fused_sdp_choice(heads, k, k, None, 0.0, causal, scale=scale)
        except RuntimeError:  # of all kernels that are switched on none takes it
            return 0


def gpu_forward(kernel: str, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """out (B, H, Sq, D) in q's dtype and lse (B, H, Sq) of one block."""
    q, k, v = aligned(q, k, v)
    if kernel == "cuda flash":
        out, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)
    elif kernel == "cuda cudnn":
        out, lse, *_ = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, scale=scale)
        lse = lse.reshape(q.shape[:3])  # it comes with one more dimension
    else:
        k, v = (repeated(x, q) for x in (k, v))
        out, lse, *_ = aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal, scale=scale)
        lse = lse[..., : q.shape[2]]  # this kernel rounds the length up to a multiple of 32
    return out, lse.nan_to_num_(nan=math.nan, posinf=-math.inf, neginf=-math.inf)  # +inf: a row that saw no key


def gpu_backward(
    kernel: str, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, d_out: Tensor, scale: float, causal: bool
) -> Sequence[Tensor]:
    """What one block adds to dq, dk and dv, shaped as q, k and v. lse is +inf for a row that saw no key.

    The strides of out, d_out and lse follow from those of q, for the plans of cuDNN.
    """
    q, k, v, out, d_out = aligned(q, k, v, out, d_out)
    lse, lengths = lse.contiguous(), (q.shape[2], k.shape[2])
    random = unused_random_state(kernel, q.device)
    rest: Sequence[Any]
    if kernel == "cuda flash":
        rest = lse, None, None, *lengths, 0.0, causal, *random
        return aten._scaled_dot_product_flash_attention_backward(d_out, q, k, v, out, *rest, scale=scale)
    if kernel == "cuda cudnn":
        q, out, d_out = in_one_order(q, out, d_out)
        rest = lse[..., None], *random, None, None, None, *lengths, 0.0, causal  # no bias; no padded sequences
        return aten._scaled_dot_product_cudnn_attention_backward(d_out, q, k, v, out, *rest, scale=scale)
    copies = repeated(k, q), repeated(v, q)
    padded = F.pad(lse, (0, -lse.shape[2] % 32), value=torch.inf)
    rest = None, out, padded, *random, 0.0, [True, True, True, False], causal  # no bias, and no gradient of one
    d_q, *of_copies, _ = aten._scaled_dot_product_efficient_attention_backward(d_out, q, *copies, *rest, scale=scale)
    return d_q, *summed(*of_copies, kv_heads=k.shape[1])


@cache
def unused_random_state(kernel: str, device: torch.device) -> Sequence[Tensor]:
    """The seed and the offset of random numbers, which each kernel wants. Without dropout none uses them."""
    if kernel == "cuda cudnn":
        return [torch.zeros((), dtype=torch.int64, device=device)] * 2
    token = torch.zeros(1, 1, 1, 8, dtype=torch.float16, device=device)
    if kernel == "cuda flash":
        return aten._scaled_dot_product_flash_attention(token, token, token, scale=1.0)[6:8]
    return aten._scaled_dot_product_efficient_attention(token, token, token, None, True, scale=1.0)[2:]


def in_one_order(q: Tensor, *tensors: Tensor) -> list[Tensor]:
    """q and tensors of its shape, all with the same strides: copied, densely and in q's order, where they differ."""
    if all(x.stride() == q.stride() for x in tensors):
        return [q, *tensors]
    order = torch.empty_like(q).stride()
    return [x if x.stride() == order else torch.empty_like(q).copy_(x) for x in (q, *tensors)]


def aligned(*tensors: Tensor) -> list[Tensor]:
    """Tensors whose memory and rows begin at multiples of 16 bytes. At others these kernels end the process."""
    return [
        x
        if x.data_ptr() % 16 == 0 and all(step and step * x.element_size() % 16 == 0 for step in x.stride()[:-1])
        else x.clone(memory_format=torch.contiguous_format)
        for x in tensors
    ]


def repeated(x: Tensor, q: Tensor) -> Tensor:
    """K or V (B, G, Sk, D) -> (B, H, Sk, D): a copy of each head for each of its query heads."""
    return x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)


def summed(*tensors: Tensor, kv_heads: int) -> list[Tensor]:
    """dK or dV (B, H, Sk, D) of such copies -> (B, G, Sk, D)."""
    return [x.unflatten(1, (kv_heads, -1)).sum(dim=2) for x in tensors]
