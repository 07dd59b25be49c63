"""What the notebooks run on other processes: a function defined in a notebook cell cannot be sent to one."""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from basics import timeline
from basics.processes import Place, gather, neighbours, scatter
from beyond import backward
from ring_attn import ring_attention


def everyone_sends_first(place: Place, seconds: float) -> str:
    """A real ring of blocking sends in the wrong order: what this rank has to say after `seconds`."""
    group = dist.new_group(timeout=timedelta(seconds=seconds))
    rank, _, next_rank, prev_rank = neighbours(group)
    block = torch.full((1 << 20,), float(rank))  # 4 MiB
    try:
        dist.send(block, group_dst=next_rank, group=group)
        dist.recv(block, group_src=prev_rank, group=group)
    except RuntimeError:
        return f"rank {rank}: after {seconds:g} s rank {next_rank} has still not taken my block"
    return f"rank {rank}: received the block of rank {int(block[0])}"


def whole_ring(place: Place, x: Tensor) -> Tensor | None:
    """Self-attention of x (B, H, S, D) on the ring; rank 0 returns the whole result."""
    chunk = scatter(x if place.rank == 0 else None, place)
    return gather(ring_attention(chunk, chunk, chunk), place)


def whole_ring_backward(place: Place, x: Tensor, d_out: Tensor) -> tuple[list[Tensor | None], list[int], list[int]]:
    """Self-attention of x (B, H, S, D) and back: dq, dk, dv, whole on rank 0, and the bytes that this rank sent.

    The bytes are listed by hop, those of the forward pass first, then those of the backward pass.
    """
    first = place.rank == 0
    q, k, v = (scatter(x if first else None, place).requires_grad_() for _ in "qkv")
    d_out = scatter(d_out if first else None, place)
    with timeline.record(k.detach()) as forth:
        out = backward.ring_attention(q, k, v)
    with timeline.record(k.detach()) as back:
        out.backward(d_out)
    gradients = [gather(x.grad, place) for x in (q, k, v)]
    sent = [[it.bytes for it in events if (it.what, it.rank) == ("send", place.rank)] for events in (forth, back)]
    return gradients, *sent
