"""Ring Attention, step by step: the names that most people come for. Each is loaded when it is first used.

from ringlab import ring_flash_attention        the trainable ring
from ringlab import positions, shard, unshard   which tokens a rank has

Is your ring right? `from ring_doctor import assert_ring`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ring_attn import ring_attention
    from ringlab.models.hugging_face import stop_ring, use_ring
    from ringlab.models.hugging_face_batch import shard_batch
    from ringlab.models.hugging_face_generate import spread_generation
    from ringlab.training.flash_ring import ring_flash_attention, scaled_dot_product_attention
    from ringlab.training.layouts import Layout, positions, shard, unshard

__version__ = "0.2.0"
__all__ = [
    "Layout",
    "positions",
    "ring_attention",
    "ring_flash_attention",
    "scaled_dot_product_attention",
    "shard",
    "shard_batch",
    "spread_generation",
    "stop_ring",
    "unshard",
    "use_ring",
]

_HOMES = {
    "Layout": "ringlab.training.layouts",
    "positions": "ringlab.training.layouts",
    "ring_attention": "ring_attn",
    "ring_flash_attention": "ringlab.training.flash_ring",
    "scaled_dot_product_attention": "ringlab.training.flash_ring",
    "shard": "ringlab.training.layouts",
    "shard_batch": "ringlab.models.hugging_face_batch",  # with the extra [hf]
    "spread_generation": "ringlab.models.hugging_face_generate",  # with the extra [hf]
    "stop_ring": "ringlab.models.hugging_face",  # with the extra [hf]
    "unshard": "ringlab.training.layouts",
    "use_ring": "ringlab.models.hugging_face",  # with the extra [hf]
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'ringlab' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
