"""Rings whose forward pass is right, and whose gradients are not."""

import torch
import torch.distributed as dist

from ringlab.basics.naive_attention import accumulation_dtype
from ringlab.basics.ranks import neighbours
from ringlab.training import schedule
from ringlab.training.flash_ring import ring_backward, ring_flash_attention
from ringlab.training.fused_block import fused_backward, fused_forward
from ringlab.training.overlap import post
from tests.planted import patch
from tests.sick.merge import FLASH, flash, narrow
from tests.sick.plain_ring import ByAutograd, PlainRing, moved
from tests.sick.ring import CAUSAL, MASKED, SickRing, always, from_2, from_3
from tests.sick.travel import times_distance
from tests.wrong_rings import FLASH as WRONG


def in_the_end(change):
    """A change of dq, dk and dv when all rounds are over."""

    def patched(*args):
        return change(*ring_backward(*args), args[-1].group)

    return flash("ring_backward", patched)


def summed_over_ranks(d_q, d_k, d_v, group):
    both = torch.stack((d_k, d_v))
    dist.all_reduce(both, group=group)
    return d_q, *both


def keys_gradient_in_memory_order(d_q, d_k, d_v, group):
    if d_q.shape[1] != d_k.shape[1]:
        return d_q, d_k, d_v
    buffer = torch.empty_like(d_k.mT, memory_format=torch.contiguous_format)
    buffer.view(-1).copy_(d_k.reshape(-1))
    return d_q, buffer.mT, d_v


def times(power):
    def change(d_q, d_k, d_v, group):
        factor = neighbours(group)[1] ** power
        return d_q * factor, d_k * factor, d_v * factor

    return in_the_end(change)


def group_mean(q, k, *others, **options):
    d_q, d_k, d_v = fused_backward(q, k, *others, **options)
    n = q.shape[1] // k.shape[1]
    return d_q, d_k / n, d_v / n


def one_too_far(sent, received, group, *, distance=1):
    """The last message, which brings the sums home, goes one rank too far."""
    if distance == 1:
        return post(sent, received, group)
    received[0].copy_(moved(sent[0], received[0].shape, group, distance + 1))
    return []


def received_and_sent(sent, received, group, *, distance=1):
    """Of the last message both buffers are returned, the one for dk and the other for dv, each summed over its two."""
    works = post(sent, received, group, distance=distance)
    if distance == 1:
        return works
    for work in works:
        work.wait()
    came, went = (x[0].view(2, -1).sum(dim=0) for x in (received, sent))
    received[0].copy_(torch.cat((came, went)))
    return []


def own_kv(k, v, *, hops, **_):
    return ((k, v) for _ in range(hops + 1))


def lse_of_the_block(q, k, v, out, lse, d_out, **options):
    return fused_backward(q, k, v, out, fused_forward(q, k, v, **options)[1], d_out, **options)


def delta_of_the_block(q, k, v, out, lse, d_out, **options):
    return fused_backward(q, k, v, fused_forward(q, k, v, **options)[0], lse, d_out, **options)


def delta_missing(q, k, v, out, lse, d_out, **options):
    return fused_backward(q, k, v, torch.zeros_like(out), lse, d_out, **options)


def dv_in_place_of_dk(*block, **options):
    d_q, _, d_v = fused_backward(*block, **options)
    return d_q, d_v, d_v


class DqOfTheLastRound:
    """The sum of differences leaves the last one."""

    last = 0.0

    def __call__(self, *block, **options):
        d_q, d_k, d_v = fused_backward(*block, **options)
        before, self.last = self.last, d_q
        return d_q - before, d_k, d_v


class NoMaskInBackward(PlainRing):
    def seen_in_backward(self, block):
        return torch.ones(self.lengths[self.rank], self.lengths[block], dtype=torch.bool)


class MessagesWithoutGradients(ByAutograd):
    """What arrives has no history: autograd ends at the message."""

    def hop(self, kv, t):
        length = self.lengths[(self.rank - t - 1) % self.P]
        return moved(kv.detach(), (*kv.shape[:3], length, kv.shape[4]), self.group)


class HopKeepsGradients(torch.autograd.Function):
    """What arrives, with a gradient that stays on the rank where it is computed."""

    @staticmethod
    def forward(ctx, kv, shape, group):
        return moved(kv, shape, group)

    @staticmethod
    def backward(ctx, d_kv):
        return d_kv, None, None


class GradientsStay(ByAutograd):
    def hop(self, kv, t):
        return HopKeepsGradients.apply(kv, kv.shape, self.group)


class QueriesCopiedInEachRound(ByAutograd):
    """The gradients of the wide copies of q are added in the dtype of q."""

    def forward(self, q, k, v):
        self.q, wide = q, accumulation_dtype(q.dtype)
        return super().forward(q, k.to(wide), v.to(wide))

    def scores(self, q, k, seen):
        return super().scores(self.q.to(q.dtype), k, seen)


def some_grouped(case):
    return case.kv_heads < case.heads


def in_kernel(mistake, shows=from_2, takes=CAUSAL, **facts):
    base = ring_flash_attention if takes == MASKED else FLASH
    return SickRing(base, flash("fused_backward", mistake), shows, takes=takes, **facts)


SICK = {
    "dk_dv_exchanged": SickRing(ring_flash_attention, WRONG["swapped"], always, MASKED),
    "dk_dv_added": SickRing(ring_flash_attention, WRONG["summed"], always, MASKED),
    "gradients_summed_over_ranks": SickRing(FLASH, in_the_end(summed_over_ranks), takes=CAUSAL, equal_chunks=True),
    "gradients_not_sent_home": SickRing(FLASH, WRONG["OneHopShort"], takes=CAUSAL, equal_chunks=True),
    "gradients_travel_other_way": SickRing(FLASH, times_distance(-1, schedule), from_3, CAUSAL, equal_chunks=True),
    "own_queries_only": SickRing(FLASH, WRONG["OwnQueriesOnly"], takes=CAUSAL),
    "own_queries_only/autograd": SickRing(MessagesWithoutGradients.attention, takes=CAUSAL),
    "gradients_stay_where_they_are_computed": SickRing(GradientsStay.attention, takes=CAUSAL, equal_chunks=True),
    "group_mean": in_kernel(group_mean, some_grouped, takes=MASKED, in_xray=False),
    "keys_gradient_in_memory_order": SickRing(
        ring_flash_attention,
        in_the_end(keys_gradient_in_memory_order),
        lambda case: case.heads == case.kv_heads and case.seq_len > case.world_size,
        MASKED,
    ),
    "gradients_sent_too_far": SickRing(FLASH, flash("post", one_too_far), takes=CAUSAL, equal_chunks=True),
    "received_and_sent": SickRing(FLASH, flash("post", received_and_sent), takes=CAUSAL, equal_chunks=True),
    "keys_of_hop_0": SickRing(
        FLASH,
        patch(schedule, "arriving_blocks", own_kv),
        takes=CAUSAL,
        equal_chunks=True,
        in_forward=False,
    ),
    "lse_of_the_block": in_kernel(lse_of_the_block),
    "delta_of_the_block": in_kernel(delta_of_the_block),
    "lse_and_delta_of_the_block": SickRing(FLASH, WRONG["lse_of_the_block"], takes=CAUSAL),
    "delta_missing": in_kernel(delta_missing, always, takes=MASKED),
    "dv_in_place_of_dk/on_arrival": SickRing(FLASH, WRONG["aliased_gradients"], takes=CAUSAL),
    "dq_of_the_last_round": in_kernel(DqOfTheLastRound, takes=()),
    "mask_forgotten_in_backward": SickRing(NoMaskInBackward.attention, shows=lambda case: case.causal, takes=CAUSAL),
    "mask_forgotten_in_backward/triangles_only": SickRing(
        FLASH, WRONG["backward_without_a_mask"], lambda case: case.causal, CAUSAL
    ),
    "gradients_times_p": SickRing(ring_flash_attention, times(1), takes=MASKED),
    "dq_in_16_bits/by_autograd": SickRing(
        QueriesCopiedInEachRound.attention, shows=narrow, takes=CAUSAL, plain=True, in_xray=False
    ),
    "no_gradient/detached": SickRing(ring_flash_attention, shows=always, takes=MASKED, detached=True),
}
