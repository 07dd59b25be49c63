"""Public libraries, adapted to the doctor in some lines each: a function, and its line in CLAIMS.

    $ ring-doctor ring_doctor.patients.libraries:ringmaster

A library is imported when its ring is called. Where it calls flash_attn's kernels, which need a GPU, it gets those of
flash_attn_by_hand.py. Nothing else of a library is replaced, but where its line says so.

Before: flash_attn_by_hand.py. After: __main__.py, which examines them; README.md, what is not here and why.
Source: the packages of requirements.txt.
"""

from functools import partial
from importlib import import_module, metadata

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from ring_doctor.asking.case import positions
from ring_doctor.patients.flash_attn_by_hand import flash_attn_backward, flash_attn_forward, module_of

UNEQUAL, LAYOUTS = False, ("contiguous",)  # of all, where their lines say nothing else

# zhuzilin/ring-flash-attention, in bfloat16: the input that flash_attn's kernels take ---------------------------------


def ring_flash_attn(q, k, v, causal=False, scale=None, group=None, module="ring_flash_attn"):
    function = getattr(module_of("ring_flash_attn", module), f"{module}_func")
    return function(q, k, v, causal=causal, softmax_scale=scale, group=group)


ring_flash_attn_in_float16 = ring_flash_attn_in_float32 = ring_flash_attn
ring_flash_attn_zigzag = partial(ring_flash_attn, causal=True, module="zigzag_ring_flash_attn")
ring_flash_attn_stripe = partial(ring_flash_attn, causal=True, module="stripe_flash_attn")


# axolotl-ai-cloud/ringmaster, which brings plain math for CPUs in float32 ---------------------------------------------


def ringmaster(q, k, v, causal=False, scale=None, group=None, rotation="ALLTOALL"):
    from ringmaster.config import RotateMethod
    from ringmaster.ring.loop import ring_attention

    options = {"provider": "math", "attn_implementation": "math", "rotate_method": RotateMethod[rotation]}
    group = group or dist.group.WORLD
    return ring_attention(q, k, v, group=group, causal=causal, scaling=scale, dropout=0.0, **options).transpose(1, 2)


ringmaster_all_gather = partial(ringmaster, rotation="ALLGATHER")


# lucidrains/ring-attention-pytorch: query head h uses K/V head h mod G, an order of its own ---------------------------


def ring_attention_pytorch(q, k, v, causal=False, layout="contiguous"):
    from ring_attention_pytorch.ring_flash_attention import ring_flash_attn

    return ring_flash_attn(q, k, v, causal=causal, ring_reduce_col=True, striped_ring_attn=layout == "striped")


def ring_attention_pytorch_zigzag(q, k, v, causal=True):
    from ring_attention_pytorch.zig_zag_attention import zig_zag_attn

    P, C = dist.get_world_size(), q.shape[2]
    of_ranks = [positions("zigzag", C * P, rank, P) for rank in range(P)]
    return zig_zag_attn(q, k, v, attn_mask=of_ranks[dist.get_rank()].unsqueeze(-1) >= torch.cat(of_ranks))


def ring_attention_pytorch_tree(q, k, v):
    from ring_attention_pytorch.tree_attn_decoding import tree_attn_decode

    P, r = dist.get_world_size(), dist.get_rank()
    qs = [torch.empty_like(q, memory_format=torch.contiguous_format) for _ in range(P)]
    dist.all_gather(qs, q.contiguous())
    return tree_attn_decode(torch.cat(qs, dim=2), k, v, shard_kv_seq=False).chunk(P, dim=2)[r]


# Hugging Face diffusers: its rings take their kernels as arguments ----------------------------------------------------

CONFIG = []  # of this rank


def configure(context, **options):
    from diffusers.models._modeling_parallel import ContextParallelConfig, ParallelConfig

    P = context.world_size
    config = ContextParallelConfig(ring_degree=P, **options)
    mesh = init_device_mesh("cpu", (P, 1), mesh_dim_names=("ring", "ulysses"))
    config.setup(context.rank, P, context.device, mesh)
    CONFIG[:] = [ParallelConfig(context_parallel_config=config)]


def forward_op(ctx, q, k, v, *options, _save_ctx, **more):
    _mask, _dropout, causal, ctx.scale, *_rest = options
    out, lse, *_ = flash_attn_forward(q, k, v, softmax_scale=ctx.scale, causal=causal)
    if _save_ctx:
        ctx.save_for_backward(q, k, v)
    return out, lse.mT


def backward_op(ctx, d_out, query, key, value, out, lse):
    gradients = [torch.empty_like(x) for x in (query, key, value)]
    flash_attn_backward(d_out, query, key, value, out, lse.mT, *gradients, softmax_scale=ctx.scale, causal=False)
    return gradients


def diffusers(q, k, v, scale=None, ring="TemplatedRingAttention"):
    CONFIG[0].context_parallel_config.convert_to_fp32 = q.dtype != torch.float64 and ring == "TemplatedRingAttention"
    options = (None, 0.0, False, q.shape[-1] ** -0.5 if scale is None else scale, False, False)
    function = getattr(import_module("diffusers.models.attention_dispatch"), ring)
    return function.apply(q, k, v, *options, forward_op, backward_op, CONFIG[0])


diffusers_ring_anything = partial(diffusers, ring="TemplatedRingAnythingAttention")


# yunchang (feifeibear/long-context-attention) -------------------------------------------------------------------------


def yunchang(q, k, v, causal=False, scale=None, group=None):
    from yunchang import ring_flash_attn_func
    from yunchang.kernels import AttnType

    options = {"causal": causal, "softmax_scale": scale, "group": group}
    return ring_flash_attn_func(q, k, v, attn_type=AttnType.TORCH_MATH, **options)


# What each can do ----------------------------------------------------------------------------------------------------


def version_of(library):
    """The installed version, or "" if there is none."""
    found = [each.version for each in metadata.distributions(name=library)]
    return f"{library} {found[0]}" if found else ""


FROM_2 = {"worlds": (2, 3, 4)}  # on one rank it sends to itself, which gloo refuses
BSHD, FULL, CAUSAL_ZIGZAG = {"tensors": "bshd"}, {"causal": (False,)}, {"causal": (True,), "layouts": ("zigzag",)}
FORWARD, ONE_TO_ONE = {"gradients": False}, {"grouped": False}
LIBRARIES = {  # what all functions of a library claim
    "ring-flash-attn": BSHD | FROM_2 | {"dtypes": ("bfloat16",)},
    "axolotl-ringmaster": {"dtypes": ("float32", "bfloat16")},
    "ring-attention-pytorch": ONE_TO_ONE,
    "diffusers": BSHD | FULL | ONE_TO_ONE | FROM_2,
    "yunchang": BSHD | FORWARD | ONE_TO_ONE | {"dtypes": ("float32",)},
}
ANYTHING = {"setup": partial(configure, ring_anything=True), "unequal": True}
OF_STRIPES = BSHD | FROM_2 | {"layouts": ("contiguous", "striped"), "dtypes": ("float32",)}
FUNCTIONS = {  # the library of each, and what it claims itself
    "ring_flash_attn": ("ring-flash-attn", {}),
    "ring_flash_attn_in_float16": ("ring-flash-attn", {"dtypes": ("float16",)}),
    "ring_flash_attn_in_float32": ("ring-flash-attn", {"dtypes": ("float32",)}),
    "ring_flash_attn_zigzag": ("ring-flash-attn", CAUSAL_ZIGZAG),
    "ring_flash_attn_stripe": ("ring-flash-attn", CAUSAL_ZIGZAG | {"layouts": ("striped",)}),
    "ringmaster": ("axolotl-ringmaster", {}),
    "ringmaster_all_gather": ("axolotl-ringmaster", {}),
    "ring_attention_pytorch": ("ring-attention-pytorch", OF_STRIPES),
    "ring_attention_pytorch_zigzag": ("ring-attention-pytorch", CAUSAL_ZIGZAG),
    "ring_attention_pytorch_tree": ("ring-attention-pytorch", FULL | FORWARD),  # it decodes
    "diffusers": ("diffusers", {"setup": configure}),
    "diffusers_ring_anything": ("diffusers", FORWARD | ANYTHING),  # its backward pass says: not implemented
    "yunchang": ("yunchang", {}),
}
CLAIMS = {
    name: {"version": version_of(library)} | LIBRARIES[library] | own for name, (library, own) in FUNCTIONS.items()
}
