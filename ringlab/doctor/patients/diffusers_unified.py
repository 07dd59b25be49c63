"""Hugging Face diffusers, a ring of all-to-alls: 2 ranks for the heads, the others in rings; float64 math as in diffusers.py."""

from diffusers.models._modeling_parallel import ContextParallelConfig, ParallelConfig
from diffusers.models.attention_dispatch import _templated_unified_attention
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from ringlab.doctor.patients.diffusers import backward_op, forward_op
from ringlab.support.processes import RankContext

ABOUT = (
    "_templated_unified_attention of diffusers, 2 ranks for the heads; its forward_op and backward_op are float64 math"
)
VERSION = "diffusers 0.42.1"
UNEQUAL = False
LAYOUTS, CAUSAL, TENSORS, GROUPED, WORLDS = ("contiguous",), (False,), "bshd", False, (2, 4, 6)
DTYPES = ("float64",)
CONFIG: list[ParallelConfig] = []


def setup(context: RankContext) -> None:
    rings = context.world_size // 2
    mesh = init_device_mesh("cpu", (rings, 2), mesh_dim_names=("ring", "ulysses"))
    unified = ContextParallelConfig(ring_degree=rings, ulysses_degree=2, convert_to_fp32=False)
    unified.setup(context.rank, context.world_size, context.device, mesh)
    CONFIG[:] = [ParallelConfig(context_parallel_config=unified)]


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
    options = (None, 0.0, False, q.shape[-1] ** -0.5 if scale is None else scale, False, False)
    return _templated_unified_attention(q, k, v, *options, forward_op, backward_op, CONFIG[0])
