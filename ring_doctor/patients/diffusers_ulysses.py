"""Hugging Face diffusers, all-to-all: `dispatch_attention_fn` with its native backend, which a CPU runs as it is."""

from diffusers.models._modeling_parallel import ContextParallelConfig, ParallelConfig
from diffusers.models.attention_dispatch import dispatch_attention_fn
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from ringlab.support.processes import RankContext

ABOUT = "dispatch_attention_fn of diffusers with ulysses_degree, backend native, unmodified"
VERSION = "diffusers 0.42.1"
UNEQUAL = False
LAYOUTS, CAUSAL, TENSORS, GROUPED = ("contiguous",), (False,), "bshd", False  # it refuses the others
HEADS, WORLDS = 12, (2, 3, 4)  # a head count that every number of ranks divides
CONFIG: list[ParallelConfig] = []


def setup(context: RankContext) -> None:
    mesh = init_device_mesh("cpu", (1, context.world_size), mesh_dim_names=("ring", "ulysses"))
    ulysses = ContextParallelConfig(ulysses_degree=context.world_size)
    ulysses.setup(context.rank, context.world_size, context.device, mesh)
    CONFIG[:] = [ParallelConfig(context_parallel_config=ulysses)]


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
    return dispatch_attention_fn(q, k, v, scale=scale, backend="native", parallel_config=CONFIG[0])
