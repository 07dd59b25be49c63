"""Rings whose forward pass is right, and whose gradients are not."""

import torch
import torch.distributed as dist

from ringlab.basics.naive_attention import accumulation_dtype
from ringlab.basics.ranks import neighbours
from ringlab.training import backward, schedule
from ringlab.training.flash_ring import ring_backward, ring_flash_attention
from ringlab.training.fused_block import fused_backward, fused_forward
from ringlab.training.overlap import post
from tests import wrong_backward_passes
from tests.planted import patch
from tests.sick.masks import EQUAL, IN_ZIGZAG, zigzag
from tests.sick.merge import flash, narrow
from tests.sick.plain_ring import HIDDEN, ByAutograd, PlainRing, moved
from tests.sick.ring import CAUSAL, MASKED, SickRing, always, from_2, from_3
from tests.sick.travel import times_distance
from tests.wrong_flash_rings import WRONG

IN_BLOCKING = wrong_backward_passes.WRONG


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


def dk_dv_times(power):
    def change(d_q, d_k, d_v, group):
        factor = neighbours(group)[1] ** power
        return d_q, d_k * factor, d_v * factor

    return in_the_end(change)


def dq_over_p(d_q, d_k, d_v, group):
    return d_q / neighbours(group)[1], d_k, d_v


def averaged_over_ranks(d_q, d_k, d_v, group):
    d_q, *both = summed_over_ranks(d_q, d_k, d_v, group)
    return d_q, *(x / neighbours(group)[1] for x in both)


def dq_summed_over_ranks(d_q, d_k, d_v, group):
    d_q = d_q.contiguous()
    dist.all_reduce(d_q, group=group)
    return d_q, d_k, d_v


def dq_averaged_over_ranks(d_q, d_k, d_v, group):
    d_q, *both = dq_summed_over_ranks(d_q, d_k, d_v, group)
    return d_q / neighbours(group)[1], *both


def rolled(by, *, dv_too):
    return in_the_end(lambda d_q, d_k, d_v, _: (d_q, d_k.roll(by, 2), d_v.roll(by, 2) if dv_too else d_v))


def zeros_for_kv(d_q, d_k, d_v, group):
    return d_q, 0 * d_k, 0 * d_v


def zeros(d_q, d_k, d_v, group):
    return 0 * d_q, 0 * d_k, 0 * d_v


def group_sum_missing(q, k, v, out, lse, d_out, **options):
    d_q, _, _ = fused_backward(q, k, v, out, lse, d_out, **options)
    n = q.shape[1] // k.shape[1]
    last = slice(n - 1, None, n)
    _, d_k, d_v = fused_backward(q[:, last], k, v, out[:, last], lse[:, last], d_out[:, last], **options)
    return d_q, d_k, d_v


def group_mean(q, k, *others, **options):
    d_q, d_k, d_v = fused_backward(q, k, *others, **options)
    n = q.shape[1] // k.shape[1]
    return d_q, d_k / n, d_v / n


def scale_missing_in_dk(*block, scale, **options):
    d_q, d_k, d_v = fused_backward(*block, scale=scale, **options)
    return d_q, d_k / scale, d_v


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


def delta_summed_per_block(q, k, v, out, lse, d_out, **options):
    out_j, lse_j = fused_forward(q, k, v, **options)
    return fused_backward(q, k, v, (out_j * (lse_j - lse).exp()[..., None]).to(out.dtype), lse, d_out, **options)


def delta_missing(q, k, v, out, lse, d_out, **options):
    return fused_backward(q, k, v, torch.zeros_like(out), lse, d_out, **options)


def scale_missing(*block, scale, **options):
    d_q, d_k, d_v = fused_backward(*block, scale=scale, **options)
    return d_q / scale, d_k / scale, d_v


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


class DqOfTheOwnBlock:
    own = True

    def __call__(self, *block, **options):
        d_q, d_k, d_v = fused_backward(*block, **options)
        d_q, self.own = d_q * self.own, False
        return d_q, d_k, d_v


class SumsOverwritten(PlainRing):
    def add(self, sums, parts):
        return parts


class NoMaskInBackward(PlainRing):
    def seen_in_backward(self, block):
        return torch.ones(self.lengths[self.rank], self.lengths[block], dtype=torch.bool)


class QueriesTravel(PlainRing):
    """In the backward pass q, dO, lse and dq travel, and K and V stay. δ stays too, which is the mistake."""

    def delta_in_hand(self, out, d_out, d_out_j):
        return self.delta(out, d_out)

    def backward(self, q, k, v, out, lse, d_out):
        q, k, v, out, d_out = (x.to(lse.dtype) for x in (q, k, v, out, d_out))
        hand, d_kv = [q, d_out, lse[..., None], torch.zeros_like(q)], torch.zeros(2, *k.shape, dtype=lse.dtype)
        for t in range(self.P):
            q_j, d_out_j, lse_j, d_q_j = hand
            seen = self.visible(self.place((self.rank - t) % self.P)[:, None], self.place(self.rank)[None])
            delta = self.delta_in_hand(out, d_out, d_out_j)
            d_q, *parts = self.parts(q_j, k, v, d_out_j, lse_j[..., 0], delta, seen)
            d_kv = d_kv + torch.stack(parts)
            hand = [moved(x, x.shape, self.group) for x in (q_j, d_out_j, lse_j, d_q_j + d_q)]
        return hand[3], *d_kv


class OutputStays(QueriesTravel):
    """δ is made of the dO in hand and of this rank's own output."""

    def delta_in_hand(self, out, d_out, d_out_j):
        return self.delta(out, d_out_j)


class DeltaOfTheRankBefore(PlainRing):
    def delta(self, out, d_out):
        delta = super().delta(out, d_out)
        return moved(delta, delta.shape, self.group)


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


class GradientsStayByFormula(PlainRing):
    def send_on(self, sums, t):
        return sums


class LastBlockLeftOut(PlainRing):
    def seen_in_backward(self, block):
        return self.seen(block) & (block != (self.rank + 1) % self.P or self.P == 1)


class LastSeenBlockLeftOut(PlainRing):
    """In contiguous chunks the last block that a rank sees under a causal mask is block 0."""

    def seen_in_backward(self, block):
        last = 0 if self.causal else (self.rank + 1) % self.P
        return self.seen(block) & (block != last or block == self.rank)


class OwnBlockLeftOut(PlainRing):
    def seen_in_backward(self, block):
        return self.seen(block) & (block != self.rank or self.P == 1)


class LseOfTheLastBlock(PlainRing):
    def merge(self, out, lse, out_j, lse_j, t):
        self.last = lse_j
        return super().merge(out, lse, out_j, lse_j, t)

    def parts(self, q, k, v, d_out, lse, *others):
        last = getattr(self, "last", lse)
        return super().parts(q, k, v, d_out, last.masked_fill(last <= HIDDEN / 2, -torch.inf), *others)


class LseOfTheLastBlockSeen(LseOfTheLastBlock):
    skips = True


class LseOfTheFirstSequence(PlainRing):
    def parts(self, q, k, v, d_out, lse, *others):
        return super().parts(q, k, v, d_out, lse[:1].expand_as(lse), *others)


class GradientsInTheOtherHalf(PlainRing):
    def parts(self, *block):
        seen, (d_q, *d_kv) = block[-1], super().parts(*block)
        half = seen.shape[1] // 2
        only_earlier = seen.any() and not seen[:, half:].any()
        return d_q, *(x.roll(half, dims=2) if only_earlier else x for x in d_kv)


class QueriesCopiedInEachRound(ByAutograd):
    """The gradients of the wide copies of q are added in the dtype of q."""

    def forward(self, q, k, v):
        self.q, wide = q, accumulation_dtype(q.dtype)
        return super().forward(q, k.to(wide), v.to(wide))

    def scores(self, q, k, seen):
        return super().scores(self.q.to(q.dtype), k, seen)


def several_tokens(case):
    return case.seq_len > case.world_size


def without_lse(ring):
    """The ring, which keeps its lse to itself: what it saves is wrong, and what it would return is right."""
    return lambda *qkv, **options: (ring.attention(*qkv, **options)[0], None)


def zigzag_of_pairs(case):
    return zigzag(case) and not case.one_token_each


def some_grouped(case):
    return case.kv_heads < case.heads


def in_kernel(mistake, shows=from_2, **facts):
    return SickRing(ring_flash_attention, flash("fused_backward", mistake), shows, **{"takes": CAUSAL, **facts})


def blocking(name, shows=from_2):
    return SickRing(backward.ring_attention, IN_BLOCKING[name], shows, grouped=False)


FLASH = ring_flash_attention
SICK = {
    "dk_dv_exchanged": SickRing(FLASH, WRONG["swapped"], always, MASKED),
    "dk_dv_exchanged/blocking": blocking("swapped", always),
    "dk_dv_added": SickRing(FLASH, WRONG["summed"], always, MASKED),
    "gradients_summed_over_ranks": SickRing(FLASH, in_the_end(summed_over_ranks), takes=CAUSAL, equal_chunks=True),
    "gradients_summed_over_ranks/mean": SickRing(
        FLASH, in_the_end(averaged_over_ranks), takes=CAUSAL, equal_chunks=True
    ),
    "dq_averaged_over_ranks": SickRing(FLASH, in_the_end(dq_averaged_over_ranks), takes=CAUSAL, equal_chunks=True),
    "dq_averaged_over_ranks/sum": SickRing(FLASH, in_the_end(dq_summed_over_ranks), takes=CAUSAL, equal_chunks=True),
    "gradient_rows_rolled": SickRing(FLASH, rolled(1, dv_too=False), several_tokens, MASKED),
    "gradient_rows_rolled/both": SickRing(FLASH, rolled(-1, dv_too=True), several_tokens, MASKED),
    "gradients_not_sent_home": SickRing(FLASH, WRONG["OneHopShort"], takes=CAUSAL, equal_chunks=True),
    "gradients_not_sent_home/blocking": SickRing(
        backward.ring_attention, IN_BLOCKING["one_hop_short"], grouped=False, equal_chunks=True
    ),
    "gradients_travel_other_way": SickRing(FLASH, times_distance(-1, schedule), from_3, CAUSAL, equal_chunks=True),
    "own_queries_only": SickRing(FLASH, WRONG["OwnQueriesOnly"], takes=CAUSAL),
    "own_queries_only/blocking": blocking("OwnQueriesOnly"),
    "own_queries_only/autograd": SickRing(MessagesWithoutGradients.attention, takes=CAUSAL),
    "gradients_stay_where_they_are_computed": SickRing(GradientsStay.attention, takes=CAUSAL, equal_chunks=True),
    "gradients_stay_where_they_are_computed/formula": SickRing(
        GradientsStayByFormula.attention, takes=CAUSAL, equal_chunks=True
    ),
    "gradients_in_the_other_half": SickRing(
        GradientsInTheOtherHalf.attention, shows=zigzag_of_pairs, takes=CAUSAL, **IN_ZIGZAG, **EQUAL
    ),
    "block_left_out_in_backward": SickRing(LastBlockLeftOut.attention),
    "block_left_out_in_backward/own": SickRing(OwnBlockLeftOut.attention, takes=CAUSAL),
    "block_left_out_in_backward/seen": SickRing(LastSeenBlockLeftOut.attention, takes=CAUSAL, layouts=("contiguous",)),
    "lse_of_the_last_block": SickRing(without_lse(LseOfTheLastBlock), takes=CAUSAL),
    "lse_of_the_last_block/seen": SickRing(
        without_lse(LseOfTheLastBlockSeen),
        takes=CAUSAL,
        layouts=("contiguous",),
    ),
    "lse_of_the_first_sequence": SickRing(
        LseOfTheFirstSequence.attention, shows=lambda case: case.batch > 1, takes=CAUSAL, in_xray=False
    ),
    "group_sum_missing": in_kernel(group_sum_missing, some_grouped, takes=MASKED, in_xray=False),
    "group_mean": in_kernel(group_mean, some_grouped, takes=MASKED, in_xray=False),
    "keys_gradient_in_memory_order": SickRing(
        FLASH,
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
    "lse_of_the_block/blocking": blocking("lse_of_the_block"),
    "delta_of_the_block": in_kernel(delta_of_the_block),
    "lse_and_delta_of_the_block": SickRing(FLASH, WRONG["lse_of_the_block"], takes=CAUSAL),
    "delta_summed_per_block": in_kernel(delta_summed_per_block),
    "delta_of_another_rank": SickRing(QueriesTravel.attention, takes=CAUSAL, equal_chunks=True),
    "delta_of_another_rank/output": SickRing(OutputStays.attention, takes=CAUSAL, equal_chunks=True),
    "delta_of_another_rank/before": SickRing(DeltaOfTheRankBefore.attention, takes=CAUSAL, equal_chunks=True),
    "delta_missing": in_kernel(delta_missing, always, takes=MASKED),
    "delta_missing/blocking": blocking("without_delta", always),
    "gradient_scale_missing": in_kernel(scale_missing, always, takes=MASKED),
    "gradient_scale_missing/blocking": blocking("scale_forgotten", always),
    "gradient_scale_missing/dk_only": in_kernel(scale_missing_in_dk, always, takes=MASKED),
    "dv_in_place_of_dk": in_kernel(dv_in_place_of_dk, always, takes=MASKED),
    "dv_in_place_of_dk/on_arrival": SickRing(FLASH, WRONG["aliased_gradients"], takes=CAUSAL),
    "dv_in_place_of_dk/blocking": blocking("aliased"),
    "dq_of_the_last_round": in_kernel(DqOfTheLastRound, takes=()),
    "dq_of_the_own_block": in_kernel(DqOfTheOwnBlock),
    "dk_dv_of_the_last_round": SickRing(SumsOverwritten.attention),
    "mask_forgotten_in_backward": SickRing(NoMaskInBackward.attention, shows=lambda case: case.causal, takes=CAUSAL),
    "mask_forgotten_in_backward/triangles_only": SickRing(
        FLASH, WRONG["backward_without_a_mask"], lambda case: case.causal, CAUSAL
    ),
    "gradients_times_p": SickRing(FLASH, times(1), takes=MASKED),
    "gradients_over_p": SickRing(FLASH, times(-1), takes=MASKED),
    "dk_dv_times_p": SickRing(FLASH, dk_dv_times(1), takes=MASKED),
    "dk_dv_over_p": SickRing(FLASH, dk_dv_times(-1), takes=MASKED),
    "dq_over_p": SickRing(FLASH, in_the_end(dq_over_p), takes=MASKED),
    "no_gradient_of_one_input": SickRing(
        FLASH, in_the_end(lambda d_q, d_k, d_v, _: (d_q, 0 * d_k, d_v)), always, MASKED
    ),
    "no_gradient_of_keys_and_values": SickRing(FLASH, in_the_end(zeros_for_kv), always, MASKED),
    "gradients_over_p_squared": SickRing(FLASH, times(-2), takes=MASKED),
    "gradients_times_root_p": SickRing(FLASH, times(0.5), takes=MASKED),
    "dq_in_16_bits/by_autograd": SickRing(
        QueriesCopiedInEachRound.attention, shows=narrow, takes=CAUSAL, plain=True, in_xray=False
    ),
    "no_gradient": SickRing(FLASH, in_the_end(zeros), always, MASKED),
    "no_gradient/detached": SickRing(FLASH, shows=always, takes=MASKED, detached=True),
}
