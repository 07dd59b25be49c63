"""flash_attn's kernels in plain math, so that a library that imports flash_attn runs on a CPU.

    module_of("ring_flash_attn", "zigzag_ring_flash_attn")    the library's module, which calls these functions

The kernels write their results where flash_attn 2.8 writes them: the forward pass returns (out, lse, None, None), the
backward pass fills the buffers dq, dk and dv. Sums are in float64, results in q's dtype, lse in float32 or more.
A mask is aligned at the lower right corner, as flash_attn does since its version 2.1. Other options than the scale and
the causal mask are not looked at.

Shapes: q (B, Sq, H, D), k and v (B, Sk, G, D), H a multiple of G, lse (B, H, Sq). In products n counts the
H/G heads of a group.

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


def _grouped(x, k):
    """(B, Sq, H, D) as (B, Sq, G, H/G, D) in float64."""
    return x.double().unflatten(2, (k.shape[2], -1))


def _scores(q, k, scale, causal):
    """Scaled and masked, (B, G, H/G, Sq, Sk) in float64."""
    scores = scale * torch.einsum("bqgnd,bkgd->bgnqk", _grouped(q, k), k.double())
    hidden = torch.ones(scores.shape[3:], dtype=torch.bool).triu(1 + scores.shape[4] - scores.shape[3])
    return scores.masked_fill(hidden, -math.inf) if causal else scores


def flash_attn_forward(q, k, v, *, softmax_scale, causal, **others):
    scores = _scores(q, k, softmax_scale, causal)
    lse = scores.logsumexp(dim=-1)
    out = torch.einsum("bgnqk,bkgd->bqgnd", torch.exp(scores - lse.unsqueeze(-1)), v.double()).flatten(2, 3)
    return out.to(q.dtype), lse.flatten(1, 2).to(torch.promote_types(q.dtype, torch.float32)), None, None


def flash_attn_backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, *, softmax_scale, causal, **others):
    lse = softmax_lse.double().unflatten(1, (k.shape[2], -1)).unsqueeze(-1)
    p = torch.exp(_scores(q, k, softmax_scale, causal) - lse)
    d_out = _grouped(dout, k)
    delta = torch.einsum("bqgnd,bqgnd->bgnq", d_out, _grouped(out, k)).unsqueeze(-1)
    d_s = softmax_scale * p * (torch.einsum("bqgnd,bkgd->bgnqk", d_out, v.double()) - delta)
    dq.copy_(torch.einsum("bgnqk,bkgd->bqgnd", d_s, k.double()).flatten(2, 3))
    dk.copy_(torch.einsum("bgnqk,bqgnd->bkgd", d_s, _grouped(q, k)))
    dv.copy_(torch.einsum("bgnqk,bqgnd->bkgd", p, d_out))


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
