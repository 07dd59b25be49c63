"""A real ring from a row of the catalogue: its steps on paper, but each rank computes by itself, and all else is sent.

    from_table(CATALOGUE["two_seats"].variants[0])        a ring with this mistake, as tests/sick/ring.py describes it

Sent from rank to rank: each block of K and V, in the round in which it is in hand; dO and out for δ; each part of dK
and dV, to where it ends; and the whole results, for a mistake that is made in the end. Attention sinks are not here.
"""

from functools import lru_cache

import torch
import torch.distributed as dist

from ring_doctor.case import Case
from ring_doctor.paper_ring import RIGHT, BlockGradients, NotOnPaper, compute
from ringlab.basics.naive_attention import accumulation_dtype
from ringlab.support.agreement import agree
from tests.sick.plain_ring import PlainRing
from tests.sick.ring import MASKED, SickRing, always


def delivered(x, sources, shape, group):
    """Every rank r gets the tensor of rank sources[r], which has this shape here."""
    me, mine = dist.get_rank(group), x.contiguous()
    at = [dist.get_global_rank(group or dist.group.WORLD, r) for r in range(len(sources))]
    sending = [dist.isend(mine, at[r], group) for r, source in enumerate(sources) if source == me != r]
    received = mine.clone() if sources[me] == me else x.new_empty(shape)
    if sources[me] != me:
        dist.recv(received, at[sources[me]], group)
    for work in sending:
        work.wait()
    return received


def summed(x, homes, shape, group):
    """Every rank gets the tensors of the ranks r with homes[r] == its own, one by one; None: they go nowhere."""
    me = dist.get_rank(group)
    for r, home in enumerate(homes):
        if home is not None:
            came = delivered(x, [r if rank == home else rank for rank in range(len(homes))], shape, group)
            if me == home:
                yield came


class Delivered(torch.autograd.Function):
    """`delivered`; the gradients go back and are added up."""

    @staticmethod
    def forward(ctx, x, sources, shape, group):
        ctx.shape, ctx.sources, ctx.group = x.shape, sources, group
        return delivered(x, sources, shape, group)

    @staticmethod
    def backward(ctx, d_x):
        return sum(summed(d_x, ctx.sources, ctx.shape, ctx.group), torch.zeros(ctx.shape, dtype=d_x.dtype)), *3 * [None]


@lru_cache(maxsize=256)
def is_on_paper(case, steps):
    try:
        return bool(compute(case, steps))
    except NotOnPaper:
        return False


class TableRing(PlainRing):
    """The steps of `its` on this rank. All is in float64, as on paper."""

    its = RIGHT

    def __init__(self, q, k, **options):
        super().__init__(q, k, **options)
        B, H, _, D = q.shape
        documents = None if self.documents is None else tuple(self.documents)
        sizes = {"batch": B, "heads": H, "kv_heads": k.shape[1], "head_dim": D, "dtype": q.dtype}
        mask = {"causal": self.causal, "layout": self.layout, "documents": documents, "window": self.window}
        self.case = Case(self.P, self.S, **mask, **sizes, scale=options.get("scale"))
        if not is_on_paper(self.case, self.its):
            raise ValueError("the tokens do not fit: such a ring would crash or hang")

    def taken(self, x, sources):
        shape = (*x.shape[:2], self.lengths[sources[self.rank]], *x.shape[3:])
        return Delivered.apply(x, list(sources), shape, self.group)

    def whole(self, x):
        return self.case.join([self.taken(x, [r] * self.P) for r in range(self.P)])

    def tiles(self, its, q, k, v):
        heads, scale = its.kv_heads(self.case), its.scale(self.case)
        for t in range(its.rounds(self.case, self.rank)):
            of_ranks = [its.in_hand(self.case, r, t) for r in range(self.P)]
            k_j, v_j = (self.taken(x, sources) for x, sources in zip((k, v), zip(*of_ranks, strict=True), strict=True))
            k_j, v_j = (x[:, heads] for x in its.keys_and_values(t, k_j, v_j))
            block = its.believed(self.case, self.rank, t)
            seen = its.sees(self.case, self.rank, block)
            s = (scale * q @ k_j.mT).masked_fill(~seen, -torch.inf)
            yield block, of_ranks[self.rank][0], not seen.any(), s, k_j, v_j

    def forward(self, q, k, v):
        q, k, v = (x.double() for x in (q, k, v))
        self.rows = 0 * q, q.new_full(q.shape[:3], -torch.inf)
        if tiles := list(self.tiles(self.its, q, k, v)):
            self.rows = self.its.combine(self.its, self.case, *([tile[i] for tile in tiles] for i in (3, 5)))
        out, lse = self.rows
        if self.its.returned is not RIGHT.returned:
            out = self.case.cut(self.its.returned(self.case, self.whole(out)), self.rank)
        if self.its.at_the_end is not RIGHT.at_the_end:
            whole = self.its.at_the_end(self.case, {"out": self.whole(out), "lse": self.whole(lse)})
            out, lse = (self.case.cut(whole[name], self.rank) for name in ("out", "lse"))
        return out, lse.to(accumulation_dtype(self.dtype))

    def backward(self, q, k, v, _out, _lse, d_out):
        q, k, v, d_out = (x.double() for x in (q, k, v, d_out))
        case, its, (out, lse), scale = self.case, self.its.backward or self.its, self.rows, self.its.scale(self.case)
        sums = {"dq": None, "dk": None, "dv": None}
        for t, (block, held, hidden, s, k_j, v_j) in enumerate(self.tiles(its, q, k, v)):
            p = its.weights(s, lse)
            of_ranks = [its.delta_from(case, r, its.believed(case, r, t)) for r in range(self.P)]
            rows = [self.taken(x, of) for x, of in zip((d_out, out), zip(*of_ranks, strict=True), strict=True)]
            d_s = p * (d_out @ v_j.mT - its.delta(s, p, v_j, *rows))
            d_q, *d_kv = its.parts(scale * d_s @ k_j, scale * d_s.mT @ q, p.mT @ d_out, scale)
            d_kv = torch.stack([its.group_sum(case, x, its.kv_heads(case)) for x in d_kv])
            part = BlockGradients(self.rank, t, self.P, block, held, hidden, d_q, *d_kv)
            if its.gives_q(part):
                sums["dq"] = its.add_q(case, sums["dq"], d_q)
            homes = agree(lambda part=part: its.home(part), self.group)
            for came in summed(d_kv, homes, (2, *k.shape), self.group):
                for name, x in zip(("dk", "dv"), came, strict=True):
                    sums[name] = its.add_kv(case, sums[name], x)
        for name, x in (("dq", q), ("dk", k), ("dv", v)):
            sums[name] = torch.zeros_like(x) if sums[name] is None else sums[name]
        if self.its.at_the_end is not RIGHT.at_the_end:
            whole = {name: self.whole(x) for name, x in {"out": out, "lse": lse, **sums}.items()}
            sums = {name: case.cut(self.its.at_the_end(case, whole)[name], self.rank) for name in sums}
        return tuple(sums.values())


class TableByAutograd(TableRing):
    """The gradients are those of the forward pass."""

    autograd = True


def from_table(change, **facts):
    """A real ring with this change of the steps."""

    class Ring(TableRing):
        its = change(RIGHT)

    return SickRing(Ring.attention, shows=always, takes=MASKED, **facts)
