"""Rings that put the results of the blocks together wrongly, or in too few bits."""

import math
from functools import partial
from unittest import mock

import torch

import ring_attn
from bench.gradients_home import Circle
from ring_attn import ring_attention
from ringlab.basics.blockwise_attention import attend
from ringlab.basics.naive_attention import accumulation_dtype
from ringlab.basics.online_softmax import start
from ringlab.training import backward, flash_ring, schedule
from ringlab.training.flash_ring import merge_into, ring_flash_attention
from ringlab.training.fused_block import fused_backward, fused_forward
from ringlab.training.overlap import post
from tests.planted import patch
from tests.sick.plain_ring import PlainRing
from tests.sick.ring import CAUSAL, MASKED, SickRing, always
from tests.wrong_rings import BLOCKING, NARROW
from tests.wrong_rings import FLASH as WRONG

BF16 = torch.bfloat16
FLASH = partial(ring_flash_attention, schedule=Circle)  # as other rings send sums: the catalogue tells their mistakes


def flash(name, mistake):
    """A function that patches the flash ring or its schedule; a class gives a new object to each pass."""
    module = flash_ring if hasattr(flash_ring, name) else schedule
    return patch(module, name, mistake)


def forward_only(name, **facts):
    """A mistake of ../wrong_rings.py in ring_attn.py."""
    return SickRing(ring_attention, BLOCKING[name], gradients=False, grouped=False, **facts)


def averages_added(out, lse, out_j, lse_j):
    out += out_j.to(out.dtype)
    torch.logaddexp(lse, lse_j, out=lse)


def shares_exchanged(out, lse, out_j, lse_j):
    merged = lse.logaddexp(lse_j)
    out.lerp_(out_j.to(out.dtype), torch.sigmoid(lse - lse_j)[..., None])
    lse.copy_(merged)


class AveragesAveraged:
    blocks = 1

    def __call__(self, out, lse, out_j, lse_j):
        self.blocks += 1
        out.lerp_(out_j.to(out.dtype), 1 / self.blocks)
        torch.logaddexp(lse, lse_j, out=lse)


def zeros_as_lse(*block, **options):
    out, lse = fused_forward(*block, **options)
    return out, torch.zeros_like(lse)


def base_2_forward(*block, **options):
    out, lse = fused_forward(*block, **options)
    return out, lse / math.log(2)


def base_2_backward(q, k, v, out, lse, d_out, **options):
    return fused_backward(q, k, v, out, lse * math.log(2), d_out, **options)


def base_2_in_both():
    return mock.patch.multiple(flash_ring, fused_forward=base_2_forward, fused_backward=base_2_backward)


def lse_by_maximum(out, lse, out_j, lse_j):
    out.lerp_(out_j.to(out.dtype), torch.sigmoid(lse_j - lse)[..., None])
    torch.maximum(lse, lse_j, out=lse)


def unstabilised(out, lse, out_j, lse_j):
    a, b = lse.exp(), lse_j.exp()
    out.copy_((a[..., None] * out + b[..., None] * out_j.to(out.dtype)) / (a + b)[..., None])
    lse.copy_((a + b).log())


def own_max(max_of):
    """m_j, l_j and o_j of the block, by themselves. What becomes of m counts for lse only, and so for the gradients."""

    def attend_by_itself(state, q, k, v, *, scale):
        m, l, o = state
        m_j, l_j, o_j = attend(start(q), q, k, v, scale=scale)
        return max_of(m, m_j), l + l_j, o + o_j

    return patch(ring_attn, "attend", attend_by_itself)


def out_always_in_16_bits(out, lse, out_j, lse_j):
    merge_into(out, lse, out_j, lse_j)
    out.copy_(out.to(BF16))


def lse_always_in_16_bits(out, lse, out_j, lse_j):
    merge_into(out, lse, out_j, lse_j)
    lse.copy_(lse.to(BF16))


def sent_in_16_bits(sent, received, group, **distance):
    return post([x.to(BF16).to(x.dtype) for x in sent], received, group, **distance)


class DqAlwaysIn16Bits:
    total = 0.0

    def __call__(self, *block, **options):
        d_q, d_k, d_v = fused_backward(*block, **options)
        before, self.total = self.total, (self.total + d_q).to(BF16).to(d_q.dtype)
        return self.total - before, d_k, d_v


class GradientsInTheDtypeOfK:
    """The first call of `hop` moves K and V; with their dtype the gradients travel."""

    dtype = None

    def __call__(self, block, length, group):
        self.dtype = self.dtype or block.dtype
        return ring_attn.hop(block.to(self.dtype), length, group).to(block.dtype)


def in_float32(q, k, v, **options):
    return ring_flash_attention(*(x.float() for x in (q, k, v)), **options).to(q.dtype)


class RunningSums(PlainRing):
    """m, l and o of all blocks so far. The old sums are multiplied by f = e^(old m - new m)."""

    l_rescaled = o_rescaled = False

    def forward(self, q, k, v):
        q, k, v = (x.to(accumulation_dtype(q.dtype)) for x in (q, k, v))
        m, l, o = q.new_full(q.shape[:3], -math.inf), 0.0, 0.0
        for t, (k_j, v_j) in self.blocks(k, v):
            s = self.scores(q, k_j, self.seen((self.rank - t) % self.P))
            old, m = m, torch.maximum(m, s.amax(dim=-1))
            f, p = torch.exp(old - m), torch.exp(s - m[..., None])
            l = (l * f if self.l_rescaled else l) + p.sum(dim=-1)
            o = (o * f[..., None] if self.o_rescaled else o) + p @ v_j.repeat_interleave(
                q.shape[1] // k.shape[1], dim=1
            )
        return o / l[..., None], m + l.log()


class NoRescale(RunningSums):
    autograd = True


class SharesExchangedOfSeenBlocks(PlainRing):
    skips = True

    def merge(self, out, lse, out_j, lse_j, t):
        share = torch.sigmoid(lse - lse_j)[..., None]
        return out + share * (out_j - out), torch.logaddexp(lse, lse_j)


class SumsInTheDtypeOfQ(PlainRing):
    def merge(self, out, lse, out_j, lse_j, t):
        out, lse = super().merge(out, lse, out_j, lse_j, t)
        return out.to(self.dtype).to(out.dtype), lse


class LseInTheDtypeOfQ(PlainRing):
    def merge(self, out, lse, out_j, lse_j, t):
        out, lse = super().merge(out, lse, out_j, lse_j, t)
        return out, lse.to(self.dtype).to(lse.dtype)


def narrow(case):
    return case.world_size > 1 and case.dtype.itemsize == 2


def narrow_from_3(case):
    """Of two blocks there is one merge, and what it gives is rounded anyway."""
    return case.world_size > 2 and case.dtype.itemsize == 2


def in_16_bits(name, mistake, *, worlds=2, **facts):
    """A sum in 16 bits whatever the input. With 16-bit input it hides behind what fused kernels may round."""

    def shows(case):
        return case.world_size >= worlds and case.dtype.itemsize > 2

    return SickRing(FLASH, flash(name, mistake), shows, **facts)


BACKWARD = {"base": backward.ring_attention, "grouped": False}
SICK = {
    "no_rescale/autograd": SickRing(NoRescale.attention),
    "averages_added": SickRing(ring_flash_attention, flash("merge_into", averages_added), takes=CAUSAL),
    "averages_averaged": SickRing(ring_flash_attention, flash("merge_into", AveragesAveraged)),
    "averages_averaged/ring_attn": forward_only("mean_of_averages", equals=("lse_of_zeros",)),
    "shares_exchanged": SickRing(ring_flash_attention, flash("merge_into", shares_exchanged)),
    "shares_exchanged/seen_blocks": SickRing(SharesExchangedOfSeenBlocks.attention, takes=CAUSAL),
    "running_half": SickRing(ring_flash_attention, WRONG["average"]),
    "lse_of_zeros": SickRing(ring_flash_attention, flash("fused_forward", zeros_as_lse), always),
    "base_2_as_natural": SickRing(ring_flash_attention, flash("fused_forward", base_2_forward), always, CAUSAL),
    "base_2_as_natural/kernel": SickRing(ring_flash_attention, base_2_in_both, takes=CAUSAL),
    "natural_as_base_2": SickRing(ring_flash_attention, WRONG["merge_in_base_2"], takes=CAUSAL),
    "lse_not_updated": SickRing(ring_flash_attention, WRONG["lse_left_behind"], takes=CAUSAL),
    "lse_merged_by_maximum": SickRing(ring_flash_attention, flash("merge_into", lse_by_maximum), takes=CAUSAL),
    "unstabilised": SickRing(
        ring_flash_attention,
        flash("merge_into", unstabilised),
        lambda case: case.world_size > 1 and case.inputs == "large",
        in_xray=False,
    ),
    "own_max_per_block": SickRing(**BACKWARD, patch=own_max(torch.maximum)),
    "own_max_per_block/last_max": SickRing(**BACKWARD, patch=own_max(lambda m, m_j: m_j)),
    "sums_in_16_bits": SickRing(
        SumsInTheDtypeOfQ.attention, shows=narrow_from_3, takes=MASKED, plain=True, in_xray=False
    ),
    "sums_in_16_bits/always": in_16_bits("merge_into", out_always_in_16_bits, takes=CAUSAL),
    "lse_in_16_bits": in_16_bits("merge_into", lse_always_in_16_bits, takes=CAUSAL, in_xray=False),
    "lse_in_16_bits/dtype_of_q": SickRing(LseInTheDtypeOfQ.attention, shows=narrow, takes=MASKED, plain=True),
    "gradients_in_16_bits": in_16_bits("post", sent_in_16_bits, takes=CAUSAL, in_xray=False),
    "gradients_in_16_bits/dtype_of_q": SickRing(
        **BACKWARD,
        patch=patch(backward, "hop", GradientsInTheDtypeOfK),
        shows=narrow,
        plain=True,
    ),
    "dq_in_16_bits": in_16_bits("fused_backward", DqAlwaysIn16Bits, worlds=1, in_xray=False),
    "dq_in_16_bits/dtype_of_q": SickRing(**BACKWARD, patch=NARROW["DqInTheDtypeOfQ"], shows=narrow, plain=True),
    "float32_inside": SickRing(in_float32, shows=lambda case: case.dtype == torch.float64, takes=MASKED),
}
