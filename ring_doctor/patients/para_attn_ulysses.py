"""ParaAttention's all-to-all (chengzeyi/ParaAttention) around torch's scaled_dot_product_attention."""

from para_attn.para_attn_interface import ulysses_attn_func
from torch import Tensor
from torch.distributed import ProcessGroup

ABOUT = "ulysses_attn_func of para_attn, unmodified"
VERSION = "para_attn 0.3.38"
UNEQUAL, GROUPED = False, False
LAYOUTS = ("contiguous",)
HEADS, WORLDS = 12, (1, 2, 3, 4)  # a head count that every number of ranks divides


def attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = False, scale: float | None = None, group: ProcessGroup | None = None
) -> Tensor:
    return ulysses_attn_func(q, k, v, is_causal=causal, scale=scale, mesh=group)
