"""Ring Attention, step by step: the names that most people come for. Each is loaded when it is first used.

from ringlab import ring_flash_attention        the full ring
from ringlab import ring_latent_attention       a ring of latents (MLA); choose_keys, for sparse attention (DSA)
from ringlab import ring_linear_attention       linear attention in a ring of states; its ring_short_convolution
from ringlab import positions, shard, unshard   which tokens a rank has
from ringlab import join_ring                   this process as a rank, in a script that torchrun starts; share_gpus
from ringlab import use_ring, shard_batch       a Hugging Face model, and its batches; ContextParallel: which ranks
from ringlab import RingTrainer                 transformers' Trainer in a ring; RingSFTTrainer: TRL's

Is your ring right? `from ring_doctor import assert_ring`.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ring_attn import ring_attention
    from ringlab.hugging_face.batch import backward, loss_part, shard_batch
    from ringlab.hugging_face.forward import extra_loss
    from ringlab.hugging_face.generate import spread_generation
    from ringlab.hugging_face.trainer import RingSFTTrainer, RingTrainer
    from ringlab.hugging_face.use import stop_ring, use_ring
    from ringlab.models.mesh import ContextParallel
    from ringlab.ring.chosen_keys import choose_keys
    from ringlab.ring.flash_ring import ring_flash_attention, scaled_dot_product_attention
    from ringlab.ring.latent_ring import ring_latent_attention
    from ringlab.ring.layouts import Layout, positions, shard, unshard
    from ringlab.states.short_convolution import ring_short_convolution
    from ringlab.states.state_ring import ring_linear_attention
    from ringlab.support.devices import share_gpus
    from ringlab.support.processes import join_ring

__version__ = "0.2.0"
__all__ = [
    "ContextParallel",
    "Layout",
    "RingSFTTrainer",
    "RingTrainer",
    "backward",
    "choose_keys",
    "extra_loss",
    "join_ring",
    "loss_part",
    "positions",
    "ring_attention",
    "ring_flash_attention",
    "ring_latent_attention",
    "ring_linear_attention",
    "ring_short_convolution",
    "scaled_dot_product_attention",
    "shard",
    "shard_batch",
    "share_gpus",
    "spread_generation",
    "stop_ring",
    "unshard",
    "use_ring",
]
_HOMES = {  # of each name, and the package that it needs
    "ContextParallel": ("ringlab.models.mesh", "torch"),
    "Layout": ("ringlab.ring.layouts", "torch"),
    "RingSFTTrainer": ("ringlab.hugging_face.trainer", "trl"),
    "RingTrainer": ("ringlab.hugging_face.trainer", "accelerate"),
    "backward": ("ringlab.hugging_face.batch", "transformers"),
    "choose_keys": ("ringlab.ring.chosen_keys", "torch"),
    "extra_loss": ("ringlab.hugging_face.forward", "transformers"),
    "join_ring": ("ringlab.support.processes", "torch"),
    "loss_part": ("ringlab.hugging_face.batch", "transformers"),
    "positions": ("ringlab.ring.layouts", "torch"),
    "ring_attention": ("ring_attn", "torch"),
    "ring_flash_attention": ("ringlab.ring.flash_ring", "torch"),
    "ring_latent_attention": ("ringlab.ring.latent_ring", "torch"),
    "ring_linear_attention": ("ringlab.states.state_ring", "torch"),
    "ring_short_convolution": ("ringlab.states.short_convolution", "torch"),
    "scaled_dot_product_attention": ("ringlab.ring.flash_ring", "torch"),
    "shard": ("ringlab.ring.layouts", "torch"),
    "shard_batch": ("ringlab.hugging_face.batch", "transformers"),
    "share_gpus": ("ringlab.support.devices", "torch"),
    "spread_generation": ("ringlab.hugging_face.generate", "transformers"),
    "stop_ring": ("ringlab.hugging_face.use", "transformers"),
    "unshard": ("ringlab.ring.layouts", "torch"),
    "use_ring": ("ringlab.hugging_face.use", "transformers"),
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'ringlab' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name][0]), name)


def __dir__() -> list[str]:
    """The public names whose packages are installed, for help() and completion; and what Python asks of a module."""
    ours = [name for name, (_, package) in _HOMES.items() if find_spec(package)]
    return [*ours, *(name for name in globals() if name.startswith("__"))]
