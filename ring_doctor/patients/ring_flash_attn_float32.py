"""zhuzilin/ring-flash-attention in float32, which flash_attn's own kernels refuse: for other kernels only."""

from ring_doctor.patients.ring_flash_attn import LAYOUTS, TENSORS, UNEQUAL, VERSION, WORLDS, attention

__all__ = ["LAYOUTS", "TENSORS", "UNEQUAL", "VERSION", "WORLDS", "attention"]
ABOUT = "ring_flash_attn_func of ring-flash-attn in float32; flash_attn's kernels replaced by float64 math"
DTYPES = ("float32",)
