"""all_gather.py with torch.distributed.nn.functional.all_gather, which torch 2.13 calls deprecated and still has."""

from torch import Tensor
from torch.distributed.nn.functional import all_gather

from ring_doctor.patients.all_gather import UNEQUAL, VERSION, in_float32, softmax_attention

__all__ = ["UNEQUAL", "VERSION", "attention"]
ABOUT = "K and V by torch.distributed.nn.functional.all_gather, then softmax: written here"


def attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = False, scale: float | None = None, layout: str = "contiguous"
) -> Tensor:
    return softmax_attention(q, all_gather(in_float32(k)), all_gather(in_float32(v)), causal, scale, layout)
