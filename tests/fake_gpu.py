"""The attention kernels of GPUs by plain code on a CPU, in place of torch.ops.aten: what they ask, keep and do wrong.

    with on_gpu("cuda cudnn") as kernels:       every block by this kernel
    with on_gpu() as kernels:                   as the ring chooses where PyTorch's own attention takes cuDNN

They compare every argument that they get with what the real ones ask: by the names of their schemas, and by where a
tensor lies in memory. cuDNN keeps the plans of its backward passes as PyTorch 2.11 to 2.13 does: by the dtype, the
shapes and strides of q, k and v, and the mask. A plan reads out, d_out and lse by the strides of the tensors that it
was made for, so from the wrong places where theirs are others: then `misread` counts, and what lies outside of a tensor
is NaN. Plans outlive a call, so one `on_gpu` may go round many calls, in each process of a ring too.
"""

from collections import Counter
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from unittest import mock

import torch
import torch.nn.functional as F
from torch.backends.cuda import cudnn_sdp_enabled

from ringlab.basics.blockwise_attention import blockwise_attention
from ringlab.ring import fused_block, gpu_kernels
from ringlab.ring.backward import block_backward

BEGINS = "_scaled_dot_product_"


def steps(x):
    """Its strides, where they matter: of a single row nobody takes a step."""
    return tuple(step if n > 1 else None for n, step in zip(x.shape, x.stride(), strict=True))


def read(x, strides):
    """x as a plan reads it that was made for other strides: from its first number on."""
    whole = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage())
    at = torch.tensor(x.storage_offset())
    for n, step in zip(x.shape, strides, strict=True):
        at = at[..., None] + torch.arange(n) * (step or 0)
    outside = at >= len(whole)
    return whole[at.clamp(max=len(whole) - 1)].masked_fill(outside, torch.nan)


class Kernels:
    """In place of torch.ops.aten. With a scale, no other one is expected. `faulty`: with cuDNN's faults for odd shapes,
    PyTorch's issues 196678 and 193893 and cudnn-frontend's 1072."""

    def __init__(self, scale=None, faulty=False):
        self.scale, self.faulty = scale, faulty
        self.random = [torch.tensor(7), torch.tensor(8)]  # the state of random numbers
        self.calls = []  # (backward?, causal?, Sq, Sk)
        self.taken = Counter()  # by kernel
        self.plans = {}  # of backward passes: what they were found by, and strides of out, d_out, lse
        self.misread = 0  # backward passes with a plan for other strides

    def __getattr__(self, name):
        kernel = name.removeprefix(BEGINS).removesuffix("_backward").removesuffix("_attention")
        assert name.startswith(BEGINS)
        assert kernel in ("flash", "efficient", "cudnn")
        return partial(self.call, kernel, name)

    def call(self, kernel, name, *args, **options):
        backward = name.endswith("_backward")
        schema = getattr(torch.ops.aten, name).default._schema.arguments
        given = {each.name: each.default_value for each in schema if each.has_default_value()} | options
        given |= zip([each.name for each in schema if not each.kwarg_only][: len(args)], args, strict=True)
        assert given.keys() == {each.name for each in schema}
        given["grad_out"] = given.pop("grad_out_", given.get("grad_out"))
        at = SimpleNamespace(**given)
        q, k, v = at.query, at.key, at.value
        for x in (q, k, v, *((at.out, at.grad_out) if backward else ())):
            assert x.stride(-1) == 1
            assert x.data_ptr() % 16 == 0
            assert all(step > 0 and step * x.element_size() % 16 == 0 for step in x.stride()[:-1])
        assert q.shape[-1] == k.shape[-1] == v.shape[-1]
        assert at.dropout_p == 0.0
        assert given.get("attn_bias") is given.get("cum_seq_q") is given.get("cum_seq_k") is None
        assert not given.get("return_debug_mask")
        if q.shape[2] > 1 or k.shape[2] > 1 or backward:  # else it may be asked for its random numbers only
            assert self.scale in (None, at.scale)
        self.calls.append((backward, at.is_causal, q.shape[2], k.shape[2]))
        self.taken[kernel] += 1
        return (self.backward if backward else self.forward)(kernel, at, q, k, v)

    @staticmethod
    def wide(kernel, q, *tensors):
        """K and V with a head for each query head. One kernel wants them like that."""
        if kernel == "efficient":
            assert all(x.shape[1] == q.shape[1] for x in tensors)
        return [x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in tensors]

    def forward(self, kernel, at, q, k, v):
        wide = self.wide(kernel, q, k, v)
        out, lse = blockwise_attention(q, *wide, block_size=64, causal=at.is_causal, scale=at.scale)
        out, lse = torch.empty_like(q).copy_(out), lse.masked_fill(lse == -torch.inf, torch.inf)  # in q's order
        assert getattr(at, "compute_log_sumexp", True)
        if kernel == "cudnn" and self.faulty and (q.shape[2] == 1 or (k.shape[2] % 128 == 64 and (lse < -88.7).any())):
            out.fill_(torch.nan)
        lengths = None, None, q.shape[2], k.shape[2]
        if kernel == "efficient":  # its lse is longer, with numbers that mean nothing
            return out, F.pad(lse, (0, -lse.shape[2] % 32), value=torch.nan), *self.random
        return out, lse if kernel == "flash" else lse[..., None], *lengths, *self.random, None

    def backward(self, kernel, at, q, k, v):
        out, d_out, lse, S = at.out, at.grad_out, at.logsumexp, q.shape[2]
        assert lse.is_contiguous()
        assert not (lse == -torch.inf).any()
        random = [at.philox_seed, at.philox_offset]
        if kernel == "cudnn":
            assert lse.shape == (*q.shape[:3], 1)
            assert all(each.dtype == torch.int64 and each.device == q.device and each == 0 for each in random)
            out, d_out, lse = self.by_plan(q, k, v, at.is_causal, out, d_out, lse)
        else:
            assert all(mine is right for mine, right in zip(random, self.random, strict=True))
        if kernel == "efficient":
            assert lse.shape[2] == S + -S % 32
            assert (lse[:, :, S:] == torch.inf).all()  # so that what stands there has no weight
            assert at.grad_input_mask == [True, True, True, False]
        else:
            assert (at.max_q, at.max_k) == (S, k.shape[2])
        lse = lse[:, :, :S].reshape(q.shape[:3])
        delta = (d_out.to(lse.dtype) * out.to(lse.dtype)).sum(dim=-1)
        d_q, *rest = block_backward(q, *self.wide(kernel, q, k, v), d_out, lse, delta, at.scale, causal=at.is_causal)
        d_k, d_v = (x.unflatten(1, (k.shape[1], -1)).sum(dim=2) for x in rest)
        results = [torch.empty_like(x).copy_(y) for x, y in zip((q, k, v), (d_q, d_k, d_v), strict=True)]
        return *results, *([None] if kernel == "efficient" else [])

    def by_plan(self, q, k, v, causal, *tensors):
        """out, d_out and lse as cuDNN reads them: a plan that is there already reads by the strides of its first."""
        key = q.dtype, causal, *((tuple(x.shape), steps(x)) for x in (q, k, v))
        mine = [steps(x) for x in tensors]
        plan = self.plans.setdefault(key, mine)
        if plan == mine:
            return tensors
        self.misread += 1
        return [read(x, strides) for x, strides in zip(tensors, plan, strict=True)]


@contextmanager
def on_gpu(kernel=None, scale=None, kernels=None):
    """The ring's blocks by a kernel of GPUs, on a CPU: this one, or the one that the ring chooses beside cuDNN.

    With `kernels`, the plans are those that they have kept."""
    kernels = kernels or Kernels(scale, faulty=kernel is None)

    def choose(q, k, scale, softcap=None, causal=False):
        if softcap is not None or scale <= 0:
            return "plain", ""
        return (kernel, "") if kernel else gpu_kernels.gpu_kernel(q, k, scale, causal)

    chosen = mock.patch.object(fused_block, "choose_kernel", side_effect=choose)
    first = mock.patch.object(gpu_kernels, "torch_choice", side_effect=lambda *_: 3 if cudnn_sdp_enabled() else 1)
    gpu_kernels.unused_random_state.cache_clear()
    with chosen as kernels.asked, first, mock.patch.object(gpu_kernels, "aten", kernels):
        yield kernels
    gpu_kernels.unused_random_state.cache_clear()
