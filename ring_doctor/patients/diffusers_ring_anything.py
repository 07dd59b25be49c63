"""Hugging Face diffusers, a ring for chunks of any length: forward pass; `forward_op` is float64 math."""

from diffusers.models._modeling_parallel import ContextParallelConfig, ParallelConfig
from diffusers.models.attention_dispatch import TemplatedRingAnythingAttention
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from ring_doctor.patients.diffusers import backward_op, forward_op
from ringlab.support.processes import RankContext

ABOUT = "TemplatedRingAnythingAttention of diffusers, unmodified; its forward_op is float64 math"
VERSION = "diffusers 0.42.1"
LAYOUTS, CAUSAL, TENSORS, GROUPED, WORLDS = ("contiguous",), (False,), "bshd", False, (2, 3, 4)
GRADIENTS = False  # its backward pass says that it is not implemented
CONFIG: list[ParallelConfig] = []


def setup(context: RankContext) -> None:
    mesh = init_device_mesh("cpu", (context.world_size, 1), mesh_dim_names=("ring", "ulysses"))
    ring = ContextParallelConfig(ring_degree=context.world_size, ring_anything=True, convert_to_fp32=False)
    ring.setup(context.rank, context.world_size, context.device, mesh)
    CONFIG[:] = [ParallelConfig(context_parallel_config=ring)]


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
    options = (None, 0.0, False, q.shape[-1] ** -0.5 if scale is None else scale, False, False)
    return TemplatedRingAnythingAttention.apply(q, k, v, *options, forward_op, backward_op, CONFIG[0])
