"""zhuzilin/ring-flash-attention, zigzag layout, in bfloat16: the input that flash_attn's kernels take."""

from torch import Tensor
from torch.distributed import ProcessGroup

from ring_doctor.patients.flash_attn_by_hand import module_of

LIBRARY = module_of("ring_flash_attn", "zigzag_ring_flash_attn")

ABOUT = "zigzag_ring_flash_attn_func of ring-flash-attn; flash_attn's kernels replaced by float64 math"
VERSION = "ring-flash-attn 0.1.8"
UNEQUAL = False
LAYOUTS, CAUSAL, TENSORS, DTYPES = ("zigzag",), (True,), "bshd", ("bfloat16",)
WORLDS = (2, 3, 4)  # on one rank it sends to itself, which gloo refuses


def attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = True, scale: float | None = None, group: ProcessGroup | None = None
) -> Tensor:
    return LIBRARY.zigzag_ring_flash_attn_func(q, k, v, causal=causal, softmax_scale=scale, group=group)
