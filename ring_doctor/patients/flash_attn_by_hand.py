"""flash_attn's kernels in plain math, so that a library that imports flash_attn runs on a CPU.

    module_of("ring_flash_attn", "zigzag_ring_flash_attn")    the library's module, which calls these functions

The kernels write their results where flash_attn 2.8 writes them: the forward pass returns (out, lse, None, None), the
backward pass fills the buffers dq, dk and dv. Sums are in float64, results in q's dtype, lse in float32 or more.
A mask is aligned at the lower right corner, as flash_attn does since its version 2.1. Other options than the scale and
the causal mask are not looked at.

Shapes: q (B, Sq, H, D), k and v (B, Sk, G, D), H a multiple of G, lse (B, H, Sq).

Before: nothing. After: libraries.py.
Source: flash_attn/flash_attn_interface.py, version 2.8.3, for the signatures.
"""

import math
import sys
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from unittest import mock

import torch


def _scores(q, k, scale, causal):
    """Scaled and masked, (B, H, Sq, Sk) in float64."""
    k = k.repeat_interleave(q.shape[2] // k.shape[2], dim=2)
    scores = scale * torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double())
    hidden = torch.ones(scores.shape[2:], dtype=torch.bool).triu(1 + scores.shape[3] - scores.shape[2])
    return scores.masked_fill(hidden, -math.inf) if causal else scores


def flash_attn_forward(q, k, v, *, softmax_scale, causal, **others):
    scores = _scores(q, k, softmax_scale, causal)
    lse = scores.logsumexp(dim=-1)
    v = v.repeat_interleave(q.shape[2] // v.shape[2], dim=2)
    out = torch.einsum("bhqk,bkhd->bqhd", torch.exp(scores - lse.unsqueeze(-1)), v.double())
    return out.to(q.dtype), lse.to(torch.promote_types(q.dtype, torch.float32)), None, None


def flash_attn_backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, *, softmax_scale, causal, **others):
    group = q.shape[2] // k.shape[2]
    v_all = v.repeat_interleave(group, dim=2).double()
    p = torch.exp(_scores(q, k, softmax_scale, causal) - softmax_lse.double().unsqueeze(-1))
    d_p = torch.einsum("bqhd,bkhd->bhqk", dout.double(), v_all)
    delta = (dout.double() * out.double()).sum(dim=-1).transpose(1, 2).unsqueeze(-1)
    d_s = softmax_scale * p * (d_p - delta)
    k_all = k.repeat_interleave(group, dim=2).double()
    dq.copy_(torch.einsum("bhqk,bkhd->bqhd", d_s, k_all))
    dk.copy_(torch.einsum("bhqk,bqhd->bkhd", d_s, q.double()).unflatten(2, (-1, group)).sum(dim=3))
    dv.copy_(torch.einsum("bhqk,bqhd->bkhd", p, dout.double()).unflatten(2, (-1, group)).sum(dim=3))


@cache
def module_of(package, name):
    """The module package.name of an installed package that imports flash_attn, with these kernels in place of it.

    The package's own __init__ is not run, because it may import more than this module needs (Triton, transformers).
    Raises ModuleNotFoundError when the package is not installed.
    """
    if (found := find_spec(package)) is None:
        raise ModuleNotFoundError(f"no package named {package}", name=package)
    shell, flash_attn, interface = map(ModuleType, (package, "flash_attn", "flash_attn.flash_attn_interface"))
    shell.__path__ = list(found.submodule_search_locations or ())
    kernels = (flash_attn_forward, flash_attn_backward)
    vars(interface).update({f"_{kernel.__name__}": kernel for kernel in kernels})
    modules = {module.__name__: module for module in (shell, flash_attn, interface)}
    with mock.patch.dict(sys.modules, modules):
        return import_module(f"{package}.{name}")
