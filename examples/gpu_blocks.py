"""The two functions of trainable_ring.py that compute a block, for CUDA GPUs: put them in the place of its own.

They call FlashAttention as PyTorch has it. It computes in 16 bits, here bfloat16, so a block's output is rounded before
it is merged. D is a multiple of 8, 256 at most. No GPU has run this file: the tests run it with an emulation of the
kernel, and `make test-gpu` runs it on your GPU.
"""

import torch

aten = torch.ops.aten


def block_forward(q, k, v, triangle):
    """q (B, G, N, Sq, D), k and v (B, G, Sk, D) -> out, shaped as q, and lse (B, G, N, Sq), in float32."""
    if q.shape[-2] == 0:  # no query sees this block
        return q, q[..., 0]
    rows, k, v = (x.bfloat16().contiguous() for x in (q.flatten(1, 2), k, v))
    out, lse, *_ = aten._scaled_dot_product_flash_attention(rows, k, v, 0.0, triangle, scale=q.shape[-1] ** -0.5)
    return out.reshape(q.shape).float(), lse.view(q.shape[:-1])


def block_backward(q, k, v, triangle, d_out, out, lse):
    """dq, dk and dv of one block, shaped as q, k and v, with out and lse of whole rows."""
    if q.shape[-2] == 0:
        return q, torch.zeros_like(k), torch.zeros_like(v)
    rows, d_rows, out = (x.flatten(1, 2).bfloat16().contiguous() for x in (q, d_out, out))
    keys, values = (x.bfloat16().contiguous() for x in (k, v))
    one = rows[:1, :1, :1].contiguous()  # the kernel asks for a state of random numbers, and another call makes one
    *_, seed, offset, _ = aten._scaled_dot_product_flash_attention(one, one, one)
    rest = out, lse.flatten(1, 2).contiguous(), None, None, q.shape[-2], k.shape[-2], 0.0, triangle, seed, offset
    kernel = aten._scaled_dot_product_flash_attention_backward
    dq, dk, dv = kernel(d_rows, rows, keys, values, *rest, scale=q.shape[-1] ** -0.5)
    return dq.reshape(q.shape).float(), dk.float(), dv.float()
