"""yunchang (feifeibear/long-context-attention) with its attention type TORCH_MATH, which has a forward pass only."""

import yunchang
from torch import Tensor
from torch.distributed import ProcessGroup
from yunchang.kernels import AttnType

ABOUT = "ring_flash_attn_func of yunchang with AttnType.TORCH_MATH, unmodified"
VERSION = "yunchang 0.6.4"
UNEQUAL, GROUPED = False, False
LAYOUTS, TENSORS, DTYPES, GRADIENTS = ("contiguous",), "bshd", ("float32",), False


def attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = False, scale: float | None = None, group: ProcessGroup | None = None
) -> Tensor:
    options = {"causal": causal, "softmax_scale": scale, "group": group}
    return yunchang.ring_flash_attn_func(q, k, v, attn_type=AttnType.TORCH_MATH, **options)
