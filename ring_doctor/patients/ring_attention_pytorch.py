"""lucidrains/ring-attention-pytorch, its ring for CPUs (`ring_flash_attn`; CUDA tensors take another file)."""

from ring_attention_pytorch.ring_flash_attention import ring_flash_attn
from torch import Tensor

ABOUT = "ring_flash_attn of ring-attention-pytorch, unmodified"
VERSION = "ring-attention-pytorch 0.5.20"
UNEQUAL = False
GROUPED = False  # its query head h uses K/V head h mod G, an order of its own
LAYOUTS, TENSORS, DTYPES = ("contiguous", "striped"), "bshd", ("float32",)
WORLDS = (2, 3, 4)  # on one rank its backward pass sends to itself, which gloo refuses


def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool = False, layout: str = "contiguous") -> Tensor:
    return ring_flash_attn(q, k, v, causal=causal, ring_reduce_col=True, striped_ring_attn=layout == "striped")
