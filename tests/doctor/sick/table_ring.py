"""A real ring from a row of the catalogue, if the row changes steps of the forward pass only; gradients by autograd.

from_table(CATALOGUE["two_seats"].variants[0])        a ring with this mistake, as ring.py describes it
"""

from dataclasses import fields

import torch

from ring_doctor.asking.case import Case
from ring_doctor.mistakes.paper_ring import RIGHT
from ringlab.basics.naive_attention import accumulation_dtype
from tests.doctor.sick.plain_ring import ByAutograd
from tests.doctor.sick.ring import MASKED, SickRing, always

STEPS = {"rounds", "in_hand", "believed", "sees", "keys_and_values", "scale", "kv_heads"}
STEPS |= {"block_out", "block_lse", "merge", "combine"}


class TableRing(ByAutograd):
    """The steps of `its` on this rank. K and V are sent; all else, and all in float64, is as on paper."""

    its = RIGHT

    def scale_of(self, scale, head_dim):
        return scale  # None where none is given

    def forward(self, q, k, v):
        documents, (B, H, _, D) = self.documents and tuple(self.documents), q.shape
        mask = self.causal, self.layout, documents, self.window
        dtype, its = q.dtype, self.its
        case = Case(self.P, self.S, *mask, B, H, k.shape[1], D, dtype, self.scale)
        blocks = {(self.rank - t) % self.P: kv for t, kv in self.blocks(k.double(), v.double())}
        heads, scores, values, q = its.kv_heads(case), [], [], q.double()
        for t in range(its.rounds(case, self.rank)):
            of_k, of_v = its.in_hand(case, self.rank, t)
            k_j, v_j = (x[:, heads] for x in its.keys_and_values(t, blocks[of_k][0], blocks[of_v][1]))
            seen = its.sees(case, self.rank, its.believed(case, self.rank, t))
            scores.append((its.scale(case) * q @ k_j.mT).masked_fill(~seen, -torch.inf))
            values.append(v_j)
        out, lse = its.combine(its, case, scores, values)
        unused = 0 * sum(kv.sum() for kv in blocks.values())  # so that all ranks send back the gradients of all blocks
        return out + unused, lse.to(accumulation_dtype(dtype))


def from_table(change):
    """A real ring with this change of the steps; None if the change is not one of the forward pass alone."""
    steps = change(RIGHT)
    if not {field.name for field in fields(steps) if getattr(steps, field.name) != getattr(RIGHT, field.name)} <= STEPS:
        return None

    class Ring(TableRing):
        its = steps

    return SickRing(Ring.attention, shows=always, takes=MASKED)
