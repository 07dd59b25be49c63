"""What the benches measure beside our ring, and both passes of any of it.

PyTorch's own context-parallel loop is private. And our ring in one process: rank after rank computes both passes of
flash_ring.py, on K and V that are there already.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx

from ringlab.basics.naive_attention import accumulation_dtype
from ringlab.ring.flash_ring import flash_backward, flash_forward
from ringlab.ring.fused_block import choose_kernel
from ringlab.ring.layouts import shard
from ringlab.ring.masks import Mask
from ringlab.ring.partition import Partition
from ringlab.ring.schedule import Round, Schedule


@contextmanager
def torch_loops(layout: str) -> Iterator[ModuleType]:
    """The module of PyTorch's own loops, set to this layout: contiguous, or zigzag under a causal mask. K and V go from
    rank to rank, by all-to-all.

    Raises ImportError or AttributeError in a version of PyTorch that keeps them elsewhere.
    """
    from torch.distributed.tensor.experimental._context_parallel import _attention as loop

    switches = {"rotate_method": loop._RotateMethod.ALL_TO_ALL, "enable_load_balance": layout == "zigzag"}
    with mock.patch.multiple(loop._cp_options, **switches):
        yield loop


KERNELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {  # by our name: torch's; what each pass takes besides
    "cpu flash": ("flash_attention_for_cpu", {}, {}),
    "cuda flash": ("flash_attention", {}, {}),
    "cuda cudnn": ("cudnn_attention", {"attn_bias": None, "compute_log_sumexp": True}, {"attn_bias": None}),
}
FOR_BACKWARD = (
    "cum_seq_q",
    "cum_seq_k",
    "max_q",
    "max_k",
    "philox_seed",
    "philox_offset",
)  # a GPU's kernels return them


class TorchLoop(torch.autograd.Function):
    """PyTorch's own loop as an operation of autograd, on the kernel that our ring takes."""

    @staticmethod
    def forward(ctx: FunctionCtx, q: Tensor, k: Tensor, v: Tensor, causal: bool, layout: str) -> Tensor:
        name, besides, ctx.besides = KERNELS[choose_kernel(q, k, q.shape[-1] ** -0.5, causal=causal)[0]]
        kernel, ctx.kernel = (getattr(torch.ops.aten, f"_scaled_dot_product_{name}{end}") for end in ("", "_backward"))
        ctx.options = causal, layout
        with torch_loops(layout) as loop:
            forwards = loop._templated_ring_attention
            out, lse, *rest = forwards(dist.group.WORLD, 2, kernel, q, k, v, is_causal=causal, dropout_p=0.0, **besides)
        ctx.besides = {**ctx.besides, **dict(zip(FOR_BACKWARD, rest, strict=False))}
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: FunctionCtx, d_out: Tensor) -> tuple[Tensor | None, ...]:
        causal, layout = ctx.options
        q, k, v, out, lse = ctx.saved_tensors
        options = {"is_causal": causal, "dropout_p": 0.0, **ctx.besides}
        options |= {"grad_out": d_out, "grad_out_name": "grad_out", "out": out, "logsumexp": lse}
        with torch_loops(layout) as loop:
            backwards = loop._templated_ring_attention_backward
            return *backwards(dist.group.WORLD, 2, ctx.kernel, query=q, key=k, value=v, **options)[:3], None, None


def torch_loop(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, layout: str) -> Tensor:
    """PyTorch's own loop on local chunks. Errors as `torch_loops`."""
    return TorchLoop.apply(q, k, v, causal, layout)


def with_gradients(attention: Callable[..., Tensor], *inputs: Tensor) -> tuple[Tensor, ...]:
    """out of a differentiable attention, and the gradients of all inputs but the last, which is the gradient of out."""
    *inputs, d_out = inputs
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = attention(*leaves)
    return out.detach(), *torch.autograd.grad(out, leaves, d_out)


# Our ring in one process: it sends nothing, so it times the computing of P ranks on one device ------------------------


@dataclass(frozen=True)
class InTurn(Schedule):
    """The schedule of one rank. All ranks' K and V are there, and the sums of their gradients."""

    rank: int = 0
    blocks: Sequence[Sequence[Tensor]] = ()
    totals: Sequence[Sequence[Tensor]] = ()

    def block(self, t: int) -> int:
        return (self.rank - t) % len(self.blocks)

    def rounds(self, k: Tensor, v: Tensor) -> Iterator[Round]:
        for t in range(len(self.blocks)):
            if pieces := self.partition.pieces(self.rank, self.block(t)):
                yield t, *self.blocks[self.block(t)], pieces

    def sums(self, k: Tensor, v: Tensor, dtype: torch.dtype) -> "InTurn":
        return self

    def of_round(self, t: int) -> Sequence[Tensor]:
        return self.totals[self.block(t)]

    def send_on(self, t: int) -> None:
        pass

    def home(self) -> Sequence[Tensor]:
        return self.totals[self.rank]


def dealt(whole: Sequence[Tensor], layout: str, world_size: int) -> list[list[Tensor]]:
    """q, k, v and d_out of each rank."""
    return [[shard(x, layout, rank, world_size).contiguous() for x in whole] for rank in range(world_size)]


def ring_in_turn(chunks: Sequence[Sequence[Tensor]], layout: str, causal: bool) -> list[list[Tensor]]:
    """out, dq, dk and dv of each rank, from its q, k, v and d_out."""
    partition = Partition(Mask(causal), layout, tuple(q.shape[2] for q, *_ in chunks))
    blocks, found = [each[1:3] for each in chunks], []
    totals = [[torch.zeros_like(x, dtype=accumulation_dtype(x.dtype)) for x in each] for each in blocks]
    for rank, (q, k, v, d_out) in enumerate(chunks):
        turn = InTurn(partition, q.shape[-1] ** -0.5, rank=rank, blocks=blocks, totals=totals)
        out, lse = flash_forward(q, k, v, turn)
        found.append((out, flash_backward(q, k, v, out, lse, d_out, turn)[0].to(q.dtype)))
    return [[*each, *(x.to(each[0].dtype) for x in sums)] for each, sums in zip(found, totals, strict=True)]
