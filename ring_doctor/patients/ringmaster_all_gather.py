"""axolotl-ai-cloud/ringmaster with rotate_method ALLGATHER, its default, and its own math kernel."""

from ringmaster.config import RotateMethod
from ringmaster.ring.loop import ring_attention
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed import group as groups

ABOUT = "ring_attention of ringmaster, rotation by all-gather, its own math kernel, unmodified"
VERSION = "axolotl-ringmaster 0.2.7"
UNEQUAL = False
LAYOUTS, DTYPES = ("contiguous",), ("float32", "bfloat16")


def attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = False, scale: float | None = None, group: ProcessGroup | None = None
) -> Tensor:
    options = {"provider": "math", "attn_implementation": "math", "rotate_method": RotateMethod.ALLGATHER}
    out = ring_attention(q, k, v, group=group or groups.WORLD, causal=causal, scaling=scale, dropout=0.0, **options)
    return out.transpose(1, 2)
