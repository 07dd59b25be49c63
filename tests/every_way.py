"""What the tests of the five ways share: the ways, masks, layouts, many problems in one call on the ranks, the check.

A problem is whole q, k, v and d_out, the options of the attention, and chunk lengths where they are not those of shard.
"""

import functools
import math
from dataclasses import dataclass, field, replace
from random import Random

import pytest
import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ringlab.ring.flash_ring import ring_flash_attention
from ringlab.ring.layouts import LAYOUTS, Layout, shard, unshard
from ringlab.ring.masks import Mask
from ringlab.ring.schedule import Ring
from ringlab.support.processes import LostRank
from ringlab.ways.all_gather import AllGather
from ringlab.ways.all_to_all import AllToAll
from ringlab.ways.double_ring import DoubleRing
from ringlab.ways.hybrid import Hybrid
from tests.attention import DTYPES, SEED, assert_four, assert_right, dense, expected, gradients, grouped_inputs, masks
from tests.rings import chunks

FLAT = {"ring": Ring, "all-gather": AllGather, "all-to-all": AllToAll}
ON_MESH = {"hybrid": Hybrid, "double ring": DoubleRing}
WAYS = {way: functools.partial(ring_flash_attention, schedule=schedule) for way, schedule in (FLAT | ON_MESH).items()}


def shapes(way, P):
    """The meshes of P ranks (rows, ranks of a row) on which a way is tried; of flat ways, the number of ranks."""
    return [(P // g, g) for g in range(1, P + 1) if P % g == 0] if way in ON_MESH else [P]


def ranks_of(shape):
    return math.prod(shape) if isinstance(shape, tuple) else shape


TRIED = {  # the ranks of a way: one, odd, even; rows and ranks of a row, alone and together
    "ring": [1, 2, 5],
    "all-gather": [1, 3],
    "all-to-all": [1, 3, 5],
    "hybrid": [(1, 3), (3, 1), (2, 3)],
    "double ring": [(1, 3), (3, 2)],
}
SOME = [("ring", 3), ("all-gather", 3), ("all-to-all", 3), ("hybrid", (2, 2)), ("double ring", (3, 2))]
EVERY = [(way, shape) for way, shapes_of_way in TRIED.items() for shape in shapes_of_way]


def name_of(it):
    return "{}x{}".format(*it) if isinstance(it, tuple) else str(it)


def scattered(seq_len, rank, world_size):
    """Tokens here and there, not as many on each rank: a layout that nobody wants, and every way must take."""
    deck = torch.randperm(seq_len, generator=torch.Generator().manual_seed(seq_len))
    return (deck % (world_size + 1) % world_size == rank).nonzero().flatten()


OWN = Layout("scattered", scattered)
ALL_LAYOUTS = (*LAYOUTS, OWN)


def masks_of(S):
    """Options for S tokens, S >= 6."""
    third = S // 3
    documents = [1, third, S - third - 1]
    return {
        "none": {},
        "causal": {"causal": True},
        "documents": {"causal": True, "documents": documents},
        "documents, both ways": {"documents": documents},
        "window": {"causal": True, "window": third},
        "window, documents, global tokens": {
            "causal": True,
            "documents": documents,
            "window": third // 2,
            "global_tokens": 2,
        },
    }


RIGHT = {}  # by the words of a problem


@dataclass(frozen=True)
class Problem:
    """H query heads on G, S tokens, options of the attention, and contiguous chunks of some lengths, if given."""

    heads: int
    kv_heads: int
    tokens: int
    options: dict = field(default_factory=dict)
    lengths: tuple | None = None
    dtype: torch.dtype = torch.float32
    batch: int = 1
    head_dim: int = 4
    seed: int = 0
    times_q: float = 1.0  # large scores: all weight on one key
    value_dim: int | None = None  # the head dimension of v, where it is not that of q and k
    sinks: torch.dtype | None = None  # of learned attention sinks, where there are any

    @property
    def layout(self):
        return self.options.get("layout", "contiguous")

    def inputs(self):
        sizes = self.batch, self.heads, self.kv_heads, self.tokens
        q, k, _, _ = grouped_inputs(*sizes, self.head_dim, self.dtype, seed=self.seed)
        _, _, v, d_out = grouped_inputs(*sizes, self.value_dim or self.head_dim, self.dtype, seed=self.seed)
        return q * self.times_q, k, v, d_out

    def logits(self):
        """The learned sinks (H,), if any: some of them larger than most scores. 16 bits hold them as they are."""
        generator = torch.Generator().manual_seed(self.seed)
        return self.sinks and (24 * torch.randn(self.heads, generator=generator)).round().to(self.sinks) / 8

    def right(self):
        """`computed`, once for all layouts."""
        options = {name: x for name, x in self.options.items() if name != "layout"}
        same = replace(self, options=options, lengths=None)
        if repr(same) not in RIGHT:
            RIGHT[repr(same)] = same.computed()
        return RIGHT[repr(same)]

    def computed(self):
        """What out, dq, dk, dv, and with sinks dsinks, must be, with a few pieces of each of up to 8 blocks to merge.

        Zeros at the end of the rows of q and k, or of v and d_out, give all of them one length. A sink is the score of
        one more key, whose value is 0: this key is 1 in one more dimension, in which the other keys are 0.
        """
        options = {name: x for name, x in self.options.items() if name not in ("scale", "softcap")}
        at, (q, k, v, d_out), D = torch.arange(self.tokens), self.inputs(), self.head_dim
        visible = dense(Mask(**options), at, at) if options else None
        scale = D**-0.5 if self.options.get("scale") is None else self.options["scale"]
        D_v, more, softcap = self.value_dim or D, int(self.sinks is not None), self.options.get("softcap")
        if self.sinks is not None:
            score = self.logits().double()  # before the cap
            score = score if softcap is None else softcap * torch.atanh(score / softcap)
            column = (score / scale).to(q.dtype)[:, None, None].expand(*q.shape[:3], 1)
            off = (scale * column[0, :, 0, 0].double() - score).abs()
            assert (off <= torch.finfo(torch.promote_types(q.dtype, torch.float32)).eps * score.abs()).all(), "rounded"
            q = torch.cat([q, column], dim=-1)
            k, v = F.pad(k, (0, 1, 0, 1)), F.pad(v, (0, 0, 0, 1))
            k[:, :, -1, -1] = 1
            visible = None if visible is None else F.pad(visible, (0, 1), value=True)
        padded = (F.pad(x, (0, max(D + more, D_v) - x.shape[-1])) for x in (q, k, v, d_out))
        right = expected(*padded, visible=visible, scale=scale, softcap=softcap, fused_blocks=3 * 8)
        four = [
            replace(x, exact=x.exact[:, :, : self.tokens, :n], sums=x.sums[:, :, : self.tokens, :n])
            for x, n in zip(right, (D_v, D, D, D_v), strict=True)
        ]
        return four + ([] if self.sinks is None else [self.right_sinks(right[1], D, scale, softcap)])

    def right_sinks(self, d_q, at, scale, softcap):
        """The gradient of the sinks, from that of one more dimension of q; each rank stores its part in their dtype."""
        slope = 1.0 if softcap is None else 1 - (self.logits().double()[:, None] / softcap) ** 2
        exact, sums = (x[..., at] / abs(scale) / slope for x in (d_q.exact, d_q.sums))  # (B, H, S)
        n, terms = exact.shape[0] * exact.shape[2], exact.abs().sum(dim=(0, 2))
        wide = torch.finfo(torch.promote_types(self.dtype, torch.float32)).eps / 2
        allowed = sums.sum(dim=(0, 2)) + ((1 + n**0.5) * wide + torch.finfo(self.sinks).eps / 2) * terms
        total = exact.sum(dim=(0, 2)) * (1 if scale > 0 else -1)
        return replace(d_q, exact=total, sums=allowed, dtype=torch.float64)


@st.composite
def problems(draw, world_size, split=1):
    """Any problem for P ranks, with `split` query heads or more for each K/V head."""
    partition = draw(masks(world_size))
    G = draw(st.integers(1, 4))
    H = G * draw(st.integers(-(-split // G), 2 + split))
    options = {**vars(partition.mask), "layout": partition.layout}
    options["scale"] = draw(st.sampled_from([None, 1.0, -0.5, 0.0]))
    sizes = {"dtype": draw(st.sampled_from(DTYPES)), "seed": draw(st.integers(0, 99)) + SEED}
    lengths = partition.lengths if partition.layout == "contiguous" else None
    sizes |= {"batch": draw(st.integers(1, 2)), "head_dim": draw(st.integers(1, 5))}
    sizes["value_dim"] = draw(st.none() | st.integers(1, 5))
    options["softcap"] = draw(st.sampled_from([None, None, 0.5, 30]))
    if options["scale"] != 0 and sizes["dtype"] in (torch.float32, torch.float64) and options["softcap"] != 0.5:
        sizes["sinks"] = draw(st.sampled_from([None, torch.float32, torch.float64]))
    sizes["times_q"] = draw(st.sampled_from([1, 100]))
    return Problem(H, G, partition.seq_len, options, lengths, **sizes)


def cut(context, layout, lengths, *tensors):
    """This rank's chunks in this layout; or, if `lengths` are given, contiguous ones of these lengths."""
    if lengths:
        return chunks(context, lengths, *tensors)
    return [shard(x, layout, context.rank, context.world_size) for x in tensors]


def whole(per_rank, layout, lengths=None):
    """out, dq, dk, dv of the whole sequence from those of the ranks."""
    return [
        torch.cat(list(parts), dim=2) if lengths else unshard(list(parts), layout)
        for parts in zip(*per_rank, strict=True)
    ]


def mesh_of(shape, kind="cpu"):
    """The mesh of these ranks, or of this shape; None for a number of ranks."""
    if isinstance(shape, list):
        return DeviceMesh(kind, shape)
    return init_device_mesh(kind, shape) if isinstance(shape, tuple) else None


def attention_of(context, way, shape):
    """The attention of a way, for ways on a mesh with that mesh as its group."""
    mesh = mesh_of(shape, context.device.type)
    return functools.partial(WAYS[way], group=mesh) if mesh is not None else WAYS[way]  # which may have a group


def checked_gradients(attention, mine, options):
    """out, dq, dk and dv; the input must stay as it was, and the dtype too."""
    before = [x.clone() for x in mine]
    results = gradients(functools.partial(attention, **options), *mine)
    assert all(torch.equal(x, y) or x.isnan().any() for x, y in zip(mine, before, strict=True)), "the input changed"
    assert all(x.dtype == mine[0].dtype for x in results)
    assert all(x.shape == y.shape for x, y in zip(results[1:], mine, strict=False)), "a gradient of another shape"
    return results


def results_on_rank(context, way, shape, problems):
    """This rank's chunks of out, dq, dk, dv of each problem."""
    attention, results = attention_of(context, way, shape), []
    for problem in problems:
        mine = [x.to(context.device) for x in cut(context, problem.layout, problem.lengths, *problem.inputs())]
        options, sinks = dict(problem.options), problem.logits()
        if sinks is not None:
            options["sinks"] = sinks = sinks.to(context.device).requires_grad_()
        four = checked_gradients(attention, mine, options)
        results.append([x.cpu() for x in four])
        if sinks is not None:
            assert (sinks.grad.dtype, sinks.grad.shape) == (problem.sinks, (problem.heads,))
            results[-1].append(sinks.grad.cpu())
    return results


def assert_right_results(ranks, way, shape, problems):
    """out, dq, dk and dv of each problem are as near to float64 as rounding allows."""
    of_ranks = ranks(ranks_of(shape), results_on_rank, way, shape, problems)
    for problem, per_rank in zip(problems, zip(*of_ranks, strict=True), strict=True):
        four, right = [results[:4] for results in per_rank], problem.right()
        try:
            assert_four(whole(four, problem.layout, problem.lengths), right[:4])
            if problem.sinks:
                assert_right(sum(results[4].double() for results in per_rank), right[4], "dsinks")
        except AssertionError as error:
            raise AssertionError(f"{problem}: {error}") from None


def ring_gradients(context, q, k, v, d_out, options, lengths=None):
    """This rank's chunks of out, dq, dk, dv by the ring, for any whole q, k, v and d_out."""
    mine = cut(context, options.get("layout", "contiguous"), lengths, q, k, v, d_out)
    return checked_gradients(ring_flash_attention, mine, options)


# Sequences of calls ---------------------------------------------------------------------------------------------------


class Program:
    """Steps, each drawn by its own seed. Ranks get all of them at once, for a message costs more than a call."""

    def __init__(self, draw, seeds):
        self.steps, self.graphs, self.last = [], [], None
        for seed in seeds:
            draw(self, Random(seed))

    def add(self, step, graph=False):
        """Note a step, and if its backward pass may be asked for."""
        self.graphs += [len(self.steps)] if graph else []
        self.steps.append(step)

    def chosen(self, random, **choices):
        """One of each of these. Half of the time only one of them is another than before."""
        names = [random.choice([*choices])] if self.last and random.random() < 0.5 else choices
        self.last = {**(self.last or {}), **{name: random.choice(choices[name]) for name in names}}
        return self.last

    def wrong(self, run):
        """What `run`(steps) raises, if anything."""
        try:
            run(self.steps)
        except (Exception, LostRank) as error:
            return error
        return None


def few_or_many(few, many):
    """Parametrize a test by how many programs it draws."""
    return pytest.mark.parametrize("programs", [few, pytest.param(many, marks=pytest.mark.exhaustive)])


def assert_programs(draw, programs, run, steps=12):
    """So many programs, whose steps `draw`(program, random) adds, are right. `run`(steps) compares.

    Of one that is wrong, each step is left out without which it is still wrong; but a hang is told as it is.
    """
    for number in range(programs):
        seeds = [f"{number}.{step}" for step in range(steps)]
        program = Program(draw, seeds)
        if error := program.wrong(run):
            for seed in list(seeds) if isinstance(error, Exception) else []:
                shorter = Program(draw, [each for each in seeds if each != seed])
                if isinstance(another := shorter.wrong(run), Exception):
                    seeds.remove(seed)
                    program, error = shorter, another
            words = [f"a program is wrong, number {number}:", *map(repr, program.steps)]
            raise AssertionError("\n".join(words)) from error
