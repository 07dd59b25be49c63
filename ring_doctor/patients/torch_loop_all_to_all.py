"""PyTorch's own context-parallel loop, blocks rotated by all-to-all."""

from functools import partial

from ring_doctor.patients import torch_loop
from ring_doctor.patients.torch_loop import GROUPED, LAYOUTS, UNEQUAL, VERSION

__all__ = ["GROUPED", "LAYOUTS", "UNEQUAL", "VERSION", "attention"]
ABOUT = "torch's _templated_ring_attention and its backward pass, unmodified, rotation by all-to-all"
attention = partial(torch_loop.attention, rotation="ALL_TO_ALL")
