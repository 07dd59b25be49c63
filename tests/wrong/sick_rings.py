"""Real rings, over real messages, a mistake in each: what the doctor must recognise.

ESCAPED are rings that are wrong in one kind of question only: each shows that this kind is asked. IN_16_BITS add up so.
"""

from functools import partial
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F

from ringlab.ring import flash_ring
from ringlab.ring.flash_ring import ring_flash_attention
from ringlab.ring.schedule import Ring, TravellingSums
from ringlab.ways.all_gather import AllGather

# Wrong in one kind of question only -----------------------------------------------------------------------------------


class InBackward(torch.autograd.Function):
    """out as it is, and another gradient of out."""

    @staticmethod
    def forward(ctx, out, change):
        ctx.change = change
        return out.clone()

    @staticmethod
    def backward(ctx, d_out):
        return ctx.change(d_out), None


def first_of_the_batch(q, k, v):
    return InBackward.apply(ring_flash_attention(q, k, v), lambda d_out: d_out[:1].expand_as(d_out))


def normalised(q, k, v):
    """The gradient is divided by its norm and multiplied again: NaN where it is 0."""
    return InBackward.apply(ring_flash_attention(q, k, v), lambda d_out: d_out / d_out.norm() * d_out.norm())


def one_head_turned(q, k, v):
    return ring_flash_attention(q.flip(1) if k.shape[1] == 1 else q, k, v)


def two_tiles(q, k, v):
    """Two tiles of 128 queries; the queries behind them are lost."""
    out = ring_flash_attention(q, k, v)
    return torch.where(torch.arange(out.shape[2])[:, None] < 256, out, 0.0)


BUFFER = {}


class Recomputed(torch.autograd.Function):
    """The backward pass computes the forward pass again, with the keys or the scale that the last call left."""

    @staticmethod
    def forward(ctx, q, k, v, scale, shared):
        ctx.own, ctx.shared = {"q": q, "k": k, "v": v, "scale": scale}, shared
        BUFFER.update(ctx.own)
        return ring_flash_attention(q, k, v, scale=scale)

    @staticmethod
    def backward(ctx, d_out):
        *inputs, scale = (ctx.own | {ctx.shared: BUFFER[ctx.shared]}).values()
        leaves = [x.detach().requires_grad_() for x in inputs]
        with torch.enable_grad():
            return *torch.autograd.grad(ring_flash_attention(*leaves, scale=scale), leaves, d_out), None, None


def shared_buffer(q, k, v):
    return Recomputed.apply(q, k, v, None, "k")


def scale_of_the_last_call(q, k, v, scale=None):
    return Recomputed.apply(q, k, v, scale, "scale")


def shared_output(q, k, v):
    """What is returned is overwritten by the next call."""
    out = ring_flash_attention(q, k, v)
    if torch.is_grad_enabled():
        BUFFER.setdefault((out.shape, out.dtype), torch.empty_like(out.detach())).copy_(out.detach())
        out.data = BUFFER[out.shape, out.dtype]
    return out


def heads_of_the_first_call(q, k, v):
    heads = torch.arange(k.shape[1]).clamp(max=BUFFER.setdefault("heads", k.shape[1]) - 1)
    return ring_flash_attention(q, k[:, heads], v[:, heads])


LONGEST = {"tokens": 0}


def padded_to_the_longest(q, k, v, least=12):
    """K and V, if they are not short, lie in buffers as long as the longest so far; its empty places are keys too."""
    if k.shape[2] < least:
        return ring_flash_attention(q, k, v)
    LONGEST["tokens"] = max(LONGEST["tokens"], k.shape[2] % 128)
    more = max(0, LONGEST["tokens"] - k.shape[2])
    return ring_flash_attention(q, F.pad(k, (0, 0, 0, more)), F.pad(v, (0, 0, 0, more)))


def values_as_keys(q, k, v):
    torch.stack((k, v))
    return ring_flash_attention(q, k, v)


def all_need_gradients(q, k, v):
    if q.requires_grad and not (k.requires_grad and v.requires_grad):
        raise RuntimeError("element 1 of tensors does not require grad")
    return ring_flash_attention(q, k, v)


def no_keys_beside_what_is_frozen(q, k, v):
    return ring_flash_attention(q, k if q.requires_grad and v.requires_grad else k.detach(), v)


def no_keys_under_autocast(q, k, v):
    return ring_flash_attention(q, 0 * k if torch.is_autocast_enabled("cpu") else k, v)


def once(q, k, v):
    """Each backward pass empties what the forward pass saved."""
    saved = [None]

    def change(d_out):
        if not saved:
            raise RuntimeError("trying to backward a second time")
        saved.clear()
        return d_out

    return InBackward.apply(ring_flash_attention(q, k, v), change)


def other_kernel_without_gradients(q, k, v):
    return ring_flash_attention(q, k, v) * (1 if torch.is_grad_enabled() else 2)


def first_ranks(q, k, v, group=None):
    """The ranks of the group are counted from 0."""
    size = dist.get_world_size(group)
    part = dist.get_process_group_ranks(group or dist.group.WORLD) != list(range(size))
    return ring_flash_attention(q, k, v, group=group) * (2 if part else 1)


def scale_of_values(q, k, v):
    return ring_flash_attention(q, k, v, scale=v.shape[-1] ** -0.5)


def out_as_its_queries(q, k, v):
    """The output gets the head dim of the queries."""
    return ring_flash_attention(q, k, v).repeat(1, 1, 1, q.shape[-1] // v.shape[-1])


def scale_forgotten_in_16_bits(q, k, v, scale=None):
    return ring_flash_attention(q, k, v, scale=scale if q.dtype.itemsize > 2 else None)


class Receive(torch.autograd.Function):
    """A tensor that comes into a leaf: its gradient must be sent home, though it leads to no input."""

    @staticmethod
    def forward(ctx, x):
        if BUFFER.get("gradient is due"):
            raise RuntimeError("no gradient was sent home")
        BUFFER["gradient is due"] = x.requires_grad
        return x.clone()

    @staticmethod
    def backward(ctx, d_x):
        BUFFER["gradient is due"] = False
        return d_x


def receives_into_a_leaf(q, k, v):
    return ring_flash_attention(q, k, v) + Receive.apply(torch.zeros((), requires_grad=q.requires_grad))


OF_VALUES = {"V of D = 4 beside 8, C = 6", "4 query heads on 2, V of D = 8 beside 4, C = 6"}
ESCAPED = {  # by ring: what it is asked where its answer is wrong, or where it refuses
    first_of_the_batch: {"batch of 2, C = 6", "views, batch of 2, C = 6"},
    normalised: {"silent rank inputs, C = 6"},
    one_head_turned: {"4 query heads on 1, C = 6"},
    two_tiles: {"D = 64, C = 258"},
    shared_buffer: {"interleaved, C = 6"},
    shared_output: {"interleaved, C = 6"},
    padded_to_the_longest: {"after another length, C = 12"},
    scale_of_the_last_call: {"beside other scales, scale 0.3, D = 4, C = 6"},
    heads_of_the_first_call: {"beside other heads, C = 6"},
    no_keys_under_autocast: {"autocast, C = 6"},
    other_kernel_without_gradients: {"without gradients, C = 6"},
    first_ranks: {"C = 6, part of a larger job"},
    scale_of_values: OF_VALUES,
    scale_forgotten_in_16_bits: {"scale 0.3, D = 4, C = 6"},
    receives_into_a_leaf: set(),  # it is right
    out_as_its_queries: OF_VALUES,  # it fails
    all_need_gradients: {f"frozen {names}, C = 6" for names in ("keys", "values", "keys and values")},
    no_keys_beside_what_is_frozen: {"frozen queries, C = 6", "frozen values, C = 6"},
    once: {"two backward passes, C = 6"},
    values_as_keys: OF_VALUES,
}
REFUSED = (all_need_gradients, once, values_as_keys)


# In 16 bits --------------------------------------------------------------------------------------------------------


class SumsSentIn16Bits(TravellingSums):
    def send_on(self, t):
        self.wait()
        if t:
            self.buffer(t).copy_(self.buffer(t).bfloat16())
        super().send_on(t)


class SendsSumsIn16Bits(Ring):
    def sums(self, k, v, dtype):
        options = {"lengths": self.partition.lengths, "group": self.group, "hops": self.partition.hops}
        return SumsSentIn16Bits(k, v, dtype, **options)


def merged_in_16_bits(out, lse, out_j, lse_j, right=flash_ring.merge_into):
    right(out, lse, out_j, lse_j)
    out.copy_(out.bfloat16())


def sums_in_16_bits(*qkv, causal=False, layout="contiguous"):
    with mock.patch.object(flash_ring, "merge_into", merged_in_16_bits):
        return ring_flash_attention(*qkv, causal=causal, layout=layout)


IN_16_BITS = {  # by ring: the inputs that show its mistake, and the results that are wrong
    ring_flash_attention: ("", set()),
    partial(ring_flash_attention, schedule=AllGather): ("", set()),
    sums_in_16_bits: ("16-bit sums", {"out"}),
    partial(ring_flash_attention, schedule=SendsSumsIn16Bits): ("16-bit gradients", {"dk", "dv"}),
}
