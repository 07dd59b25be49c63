"""A right ring, and patients that do more than compute wrongly: they hang, crash, refuse, change their input."""

import functools
import itertools
import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F

from ring_doctor.patients.all_gather import all_gather_single
from ringlab.ring.flash_ring import ring_flash_attention
from ringlab.ring.layouts import Layout, pairs

CALLS = itertools.count()


def right(q, k, v, causal=False, layout="contiguous", group=None):
    return ring_flash_attention(q, k, v, causal=causal, layout=layout, group=group)


def contiguous(q, k, v, causal=False, layout="contiguous"):
    """Takes a layout and does not obey."""
    return ring_flash_attention(q, k, v, causal=causal)


def shares(seq_len, rank, world_size):
    """A layout that loses the tokens that are left over."""
    C = seq_len // world_size
    return [*range(rank * C, (rank + 1) * C)]


def own_chunk(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def receives():
    dist.recv(torch.empty(1), 0)  # nobody sends


def hangs(q, k, v):
    if dist.get_rank() == 1:
        receives()
    return own_chunk(q, k, v)


def raises_on_the_last_rank(q, k, v):
    """A ValueError of one rank is no refusal; the others lose their connection to it, and raise that."""
    if dist.get_rank() == 2:
        raise ValueError("too much")
    if dist.get_rank() == 0:
        raise RuntimeError("[1] Connection closed by peer [127.0.0.1]:1")
    return q


def crashes(q, k, v):
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGSEGV)
    return ring_flash_attention(q, k, v)


def refuses(q, k, v):
    raise NotImplementedError("not today")


@torch.no_grad()
def gives_no_gradients(q, k, v):
    return ring_flash_attention(q, k, v)


def changes_its_input(q, k, v):
    out = ring_flash_attention(q, k, v)
    with torch.no_grad():
        k += 1
    return out


def other_numbers_each_time(q, k, v):
    return ring_flash_attention(q, k, v) * (1 + 1e-3 * (next(CALLS) % 2))


def other_digits(q, k, v):
    """Right within rounding, as a ring is that adds blocks in the order in which they arrive."""
    return ring_flash_attention(q, k, v) * (1 + 3e-16 * (next(CALLS) % 2))


def draws(q, k, v):
    return ring_flash_attention(q, k, v) + 0 * torch.rand(())


def computes_on(q, k, v):
    """From the second call on."""
    rank, again = dist.get_rank(), next(CALLS)
    while rank == 1 and again:
        q = q.clone()
    return ring_flash_attention(q, k, v)


class Lse(torch.autograd.Function):
    """An lse that autograd takes for differentiable, and a backward pass that forgets its gradient, as many have."""

    @staticmethod
    def forward(ctx, lse):
        return lse.clone()

    @staticmethod
    def backward(ctx, d_lse):
        return torch.zeros_like(d_lse)


def lse_with_gradient(q, k, v):
    """Every rank gathers all keys and values."""
    k, v = (torch.cat(gathered(x), dim=2) for x in (k, v))
    scores = q @ k.mT * q.shape[-1] ** -0.5
    return scores.softmax(dim=-1) @ v, scores.logsumexp(dim=-1)


def lse_without_gradient(q, k, v):
    out, lse = lse_with_gradient(q, k, v)
    return out, Lse.apply(lse)


def another_shape(q, k, v):
    return ring_flash_attention(q, k, v)[:, :, :1]


def another_dtype(q, k, v):
    return ring_flash_attention(q, k, v).double()


def made(**fixed):
    """A closure, which pickle cannot send."""

    def attention(q, k, v, is_causal=False, softmax_scale=None, process_group=None):
        return ring_flash_attention(q, k, v, causal=is_causal, scale=softmax_scale, group=process_group, **fixed)

    return attention


made_of_zigzag = functools.partial(made(layout="zigzag"), is_causal=True)


def leaves_its_number(q, k, v):
    Path(os.environ["NUMBERS"], str(os.getpid())).touch()
    time.sleep(600)


def sequence_first(q, k, v, causal=False):
    """(C, B, H, D), and needs contiguous tensors of one sequence, as it gets them but in a batch of views."""
    if not q.is_contiguous() and q.shape[1] == 1:
        raise BufferError("contiguous tensors, please")
    out = ring_flash_attention(*(x.permute(1, 2, 0, 3) for x in (q, k, v)), causal=causal)
    return out.permute(2, 0, 1, 3)


def backward_once(q, k, v):
    """Each backward pass leaves its result in the buffer that the next one starts from."""
    return Accumulates.apply(ring_flash_attention(q, k, v))


class Accumulates(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.total = torch.zeros_like(x)
        return x.clone()

    @staticmethod
    def backward(ctx, d_x):
        ctx.total += d_x
        return ctx.total


def gathered(x):
    """The chunks of all ranks, with a backward pass that adds up their gradients."""
    return all_gather_single(x.contiguous(), 0, dist.group.WORLD).chunk(dist.get_world_size())


def with_sinks(q, k, v, sinks=None, causal=False, times=1):
    """Every rank gathers all keys and values; the sinks enter once, or `times`."""
    world_size, rank, size = dist.get_world_size(), dist.get_rank(), q.shape[2]
    k, v = (torch.cat(gathered(x), dim=2) for x in (k, v))
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if causal:
        future = torch.arange(size * world_size) > torch.arange(rank * size, (rank + 1) * size)[:, None]
        scores = scores.masked_fill(future, -torch.inf)
    if sinks is not None:
        more = sinks[:, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, *[more] * times], dim=-1)
        v = F.pad(v, (0, 0, 0, times))
    return scores.softmax(dim=-1) @ v


def sinks_per_block(q, k, v, sinks=None, causal=False):
    return with_sinks(q, k, v, sinks, causal, times=dist.get_world_size())


def sinks_detached(q, k, v, sinks=None, causal=False):
    return with_sinks(q, k, v, None if sinks is None else sinks.detach(), causal)


class Reduced(torch.autograd.Function):
    """x, whose gradient is summed over the ranks."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, d_x):
        dist.all_reduce(d_x := d_x.clone())
        return d_x


def sinks_reduced(q, k, v, sinks=None, causal=False):
    """The whole gradient on every rank."""
    return with_sinks(q, k, v, None if sinks is None else Reduced.apply(sinks), causal)


def sinks_times_p(q, k, v, sinks=None, causal=False):
    """Each rank's part of their gradient is multiplied by the number of ranks."""
    P = dist.get_world_size()
    return with_sinks(q, k, v, None if sinks is None else P * sinks - (P - 1) * sinks.detach(), causal)


def reversed_positions(seq_len, rank, world_size):
    """A layout of the user's own: the first rank has the last tokens."""
    return torch.arange(seq_len).tensor_split(world_size)[world_size - 1 - rank]


PAIRS = Layout("pairs", pairs, multiple=2)


def reversed_ring(q, k, v):
    """Causal attention for `reversed_positions`: every rank turns its tokens, and the ranks are counted backwards."""
    world_size = dist.get_world_size()
    whole = [torch.cat(gathered(x)[::-1], dim=2) for x in (q, k, v)]
    rank, size = world_size - 1 - dist.get_rank(), q.shape[2]
    out = F.scaled_dot_product_attention(*whole, is_causal=True, enable_gqa=True)
    return out[:, :, rank * size : (rank + 1) * size]
