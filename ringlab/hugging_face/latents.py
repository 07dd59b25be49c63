"""Latent attention of transformers with way=LatentRing: latents travel in place of K and V of all heads.

    a layer    key, value = self.expand_kv(c, rope)      then AttentionInterface
    here       c, rope = self.expand_kv(c, rope)         and the ring makes K and V from the weight of kv_b_proj

Latents are faster where messages of K and V would not be hidden: on slow wires, in short chunks. `ring-plan` says where
on a cluster. Elsewhere way=Ring is faster: it makes K and V once.

Shapes: c (B, 1, C, L), rope (B, 1, C, R), the weight (H·(D + Dv), L), of one head after the other.

A first reader may skip this file. Before: ../ring/latent_ring.py, the ring. After: attention.py, which calls it.
Source: transformers 5.23, DeepseekV3Attention; DeepSeek-AI 2024 (DeepSeek-V2), section 2.1, equations 9 to 19.
"""

from typing import Any

from torch import Tensor, nn

from ringlab.ring.latent_ring import expands, ring_latent_attention
from ringlab.support.expect import expect
from ringlab.support.extras import extra

with extra("hf", __name__):
    from ringlab.hugging_face.seam import EXPAND, latent_layers, passes_latents

KEYS = "way=Ring: keys and values travel"


def attend_to_latents(module: nn.Module, q: Tensor, c: Tensor, rope: Tensor, **options: Any) -> Tensor:
    """`ring_latent_attention` of what a layer passes, with the options of `ring_flash_attention`."""
    kind, asked = type(module).__name__, [x for x in ("window", "sinks", "softcap") if options.pop(x) is not None]
    small = passes_latents(module) and c.shape[1] == rope.shape[1] == 1  # of one head: else K and V came here
    expect(small, f"{kind} passes no latents", KEYS)
    expect(not asked, f"{kind} has {', '.join(asked)}, which the ring of latents does not know", KEYS)
    known = {name: x for name, x in options.items() if name != "schedule"}
    return ring_latent_attention(q, c[:, 0], rope[:, 0], *weights_of(module), **known)


def weights_of(module: Any) -> tuple[Tensor, ...]:
    """w_k (H, D, L) and w_v (H, Dv, L). Raises ValueError where more than a product makes K and V, as an adapter does.

    It is asked in each pass, since adapters and hooks may be added later.
    """
    linear, sizes = module.kv_b_proj, [module.qk_nope_head_dim, module.v_head_dim]
    plain = getattr(linear.forward, "__func__", None) is nn.Linear.forward and linear.bias is None
    hooks = linear._forward_hooks, linear._forward_pre_hooks, linear._backward_hooks, linear._backward_pre_hooks
    given = f"kv_b_proj of {type(module).__name__} is a {type(linear).__name__} of a {type(linear.weight).__name__}"
    own = f"a Linear of a Parameter, without adapter, hook, bias or slices, for latents; or {KEYS}"
    expect(plain and not any(hooks) and type(linear.weight) is nn.Parameter, given, own)
    return linear.weight.unflatten(0, (-1, sum(sizes))).split(sizes, dim=1)


def check_latents(model: nn.Module) -> None:
    """Raise ValueError unless layers make K and V of latents, and as the ring does."""
    layers: list[Any] = latent_layers(model)
    expect(layers, f"{type(model).__name__} has no layer with latents ({EXPAND})", KEYS)
    for layer in layers:
        expect(EXPAND not in vars(layer), f"{type(layer).__name__} has an {EXPAND} of its own", KEYS)
        same = expands(layer.expand_kv, weights_of(layer), layer.qk_rope_head_dim)
        expect(same, f"{type(layer).__name__} makes other keys and values from its latents than kv_b_proj", KEYS)
