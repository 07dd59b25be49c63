"""Each entry of the catalogue computes what its sentence says: beside the ring on paper stands one dense softmax.

A row of a table is an entry, and the mistake in a line that knows nothing of rounds, tiles or merges. An entry with
variants has a line for each of them, in their order. What has no line here has a ring in sick/ that knows nothing of
the catalogue.
"""

import itertools
import math
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from ring_doctor.asking.case import Case
from ring_doctor.catalogue import CATALOGUE
from ring_doctor.mistakes.paper_ring import RIGHT, compute
from ringlab.ring.layouts import LAYOUTS, positions
from tests.wrong.sick_rings import BY_HAND

FULL, CAUSAL = Case(4, 24, heads=4), Case(4, 24, True, heads=4)
ALL_LAYOUTS = [replace(CAUSAL, layout=layout) for layout in LAYOUTS]
ZIGZAG, STRIPED = ALL_LAYOUTS[1:]
EVERY = [FULL, replace(FULL, world_size=3), *ALL_LAYOUTS]
KV, SIXTEEN = ("dk", "dv"), (torch.bfloat16, torch.float16)


def dense(case, counts, k=None, v=None, scale=None):
    """All results of one softmax in which query p has key c counts[p, c] times, for K and V, or for these."""
    q, own_k, own_v, d_out = (x.double() for x in case.whole())
    k, v = own_k if k is None else k, own_v if v is None else v
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    q, k, v = leaves[0], *(x.repeat_interleave(case.heads // x.shape[1], dim=1) for x in leaves[1:])
    s = q @ k.mT * (scale or case.scale or case.head_dim**-0.5)
    weights = counts * (s - s.amax(dim=-1, keepdim=True).detach()).exp()
    l = weights.sum(dim=-1, keepdim=True)
    out = weights / l.masked_fill(l == 0, 1.0) @ v
    gradients = torch.autograd.grad(out, leaves, d_out)
    lse = (l.log() + s.amax(dim=-1, keepdim=True))[..., 0].detach()
    return {"out": out.detach(), "lse": lse, **dict(zip(("dq", *KV), gradients, strict=True))}


def narrow(x, dtype):
    return x.to(dtype).double()


def assert_same(found, expected, names=None):
    for name in names or expected:
        assert torch.allclose(found[name], expected[name], atol=1e-9, rtol=1e-9, equal_nan=True), name


def on_paper(case, name, variant=0):
    return compute(case, CATALOGUE[name].variants[variant](RIGHT))


# Who sees what -----------------------------------------------------------------------------------------------------


@dataclass
class Pairs:
    """Of each pair of a query (S, 1) and a key (1, S): their ranks, their places in their chunks, their positions."""

    case: Case

    def __post_init__(self):
        P, S = self.case.world_size, self.case.seq_len
        self.P, self.S, self.C, self.w, self.seen = P, S, S // P, self.case.window, self.case.visible()
        rank, place = torch.empty(S, dtype=torch.int64), torch.empty(S, dtype=torch.int64)
        for r in range(P):
            rank[self.case.positions(r)] = r
            place[self.case.positions(r)] = torch.arange(len(self.case.positions(r)))
        self.r, self.j = rank[:, None], rank[None]  # the rank of the query, and the block of the key
        self.i, self.n = place[:, None], place[None]
        self.p, self.c = torch.arange(S)[:, None], torch.arange(S)[None]
        self.far, self.own, self.striped = self.r != self.j, self.r == self.j, self.case.layout == "striped"
        self.past, self.last = self.c <= self.p, self.j == (self.r + 1) % P  # the block of the last round
        every, W = replace(self.case, causal=False, window=None), self.w or S
        self.document = every.visible()
        self.beside = self.document & (self.c > self.p - W)  # what windows and documents show besides
        self.round = (self.r - self.j) % P

    def at(self, rank, place):
        """The positions of these places on these ranks."""
        return torch.stack([self.case.positions(r) for r in range(self.P)])[rank % self.P, place]

    def believed(self, at):
        """The pairs that a causal mask shows if the tokens of a rank stand at at(rank): (C,)."""
        where = torch.empty(self.S, dtype=torch.int64)
        for rank in range(self.P):
            where[self.case.positions(rank)] = at(rank)
        return where[None] <= where[:, None]

    def met(self, pairs):
        """All pairs of a rank and a block of which `pairs` has one."""
        tiles = torch.zeros(self.P, self.P, dtype=torch.bool)
        tiles[self.r.expand_as(pairs)[pairs], self.j.expand_as(pairs)[pairs]] = True
        return tiles[self.r, self.j]

    def last_met(self, dim):
        """The pairs of the last round in which a query (dim 1) or a key (dim 0) is in a tile that is not hidden."""
        rounds = torch.where(self.met(self.seen), self.round, -1)
        return self.round == rounds.amax(dim=dim, keepdim=True)

    def whole_parts(self):
        """All pairs of a query that sees a key of the block and a key that a query of the rank sees."""
        seen, own = self.seen.double(), self.own.double()
        return (seen @ own > 0) & (own @ seen > 0)

    def of_layout(self, layout):
        return self.believed(lambda rank: positions(layout, self.S, rank, self.P))


WINDOWED = [replace(case, window=w) for case in ALL_LAYOUTS for w in (3, 8)]
PACKED = [replace(case, documents=(7, 17)) for case in ALL_LAYOUTS]
ALL_MASKS = [*ALL_LAYOUTS, *(replace(case, window=5) for case in ALL_LAYOUTS), *PACKED]
COUNTS = {  # the entry: its cases, and for each variant how often a query has a key
    "own_block_twice": (EVERY, lambda x: x.seen * (1 + x.own.int())),
    "own_block_skipped": ([FULL], lambda x: x.far),
    "never_called": (EVERY, lambda x: x.seen & x.own),
    "chunk_index_under_zigzag": (ALL_LAYOUTS, lambda x: torch.where(x.own, x.n <= x.i, x.j < x.r)),
    "striped_diagonal_kept": ([STRIPED], lambda x: torch.where(x.j > x.r, x.n <= x.i, x.past)),
    "other_half_of_the_keys": ([ZIGZAG], lambda x: torch.where(x.j < x.r, x.n >= x.C // 2, x.past)),
    "opposite_block_twice": (EVERY, lambda x: x.seen * (1 + (2 * x.round == x.P).int())),
    "opposite_block_missed": (EVERY, lambda x: x.seen & (2 * x.round != x.P)),
    "next_host_missing": (EVERY, lambda x: x.seen & ((x.r // 2 == x.j // 2) | (x.P != 4))),
    "key_lost_at_a_border": (
        EVERY,
        lambda x: x.seen & (x.own | (x.n != x.C - 1)),
        lambda x: x.seen & (x.own | (x.n != 0)),
        lambda x: x.seen & (x.n != x.C - 1),
        lambda x: x.seen & (x.n != 0),
        lambda x: x.seen & ((x.j != x.r - 1) | (x.n != x.C - 1) | (not x.case.causal)),
    ),
    "causal_unasked": ([FULL, replace(FULL, world_size=3)], lambda x: x.past),
    "mask_forgotten": (ALL_MASKS, lambda x: x.document, lambda x: x.beside),
    "causal_per_block": (
        ALL_MASKS,
        lambda x: x.n <= x.i,
        lambda x: (x.n <= x.i) & x.beside,
        lambda x: (x.n <= x.i) & x.met(x.seen),
        lambda x: (x.n <= x.i) & x.beside & x.met(x.seen),
    ),
    "halves_swapped": ([ZIGZAG], lambda x: x.believed(lambda r: x.case.positions(r).roll(3))),
    "only_own_masked": (ALL_MASKS, lambda x: x.far | x.seen, lambda x: (x.far | x.seen) & x.beside),
    "own_block_unmasked": (ALL_MASKS, lambda x: (x.past | x.own) & x.beside),
    "diagonal_hidden": (
        ALL_LAYOUTS,
        lambda x: x.c < x.p,
        lambda x: torch.where(x.own | (x.striped & (x.j < x.r)), x.n < x.i, x.past),
        lambda x: torch.where(x.own | x.striped, x.n < x.i - (x.j > x.r).int(), x.past),
    ),
    "next_token_seen": (
        ALL_LAYOUTS,
        lambda x: x.c <= x.p + 1,
        lambda x: torch.where(x.own, x.c <= x.p + 1, x.past),
    ),
    "last_tile_lost": (
        [Case(2, 258), Case(2, 258, True, "striped")],
        *(lambda x, kept=kept: x.seen & (x.n < kept) for kept in (128, 128, 129)),
    ),
    "mask_inverted": (ALL_MASKS, lambda x: (x.c >= x.p) & x.beside, lambda x: ~x.seen & x.beside),
    "strict_in_far_blocks": (
        ALL_MASKS,
        lambda x: torch.where(x.own, x.past, x.n < x.i) & x.beside,
        lambda x: torch.where(x.own, x.past, (x.n < x.i) & (x.j < x.r)) & x.beside,
        lambda x: torch.where(x.own, x.past, (x.n < x.i) & x.past) & x.beside,
    ),
    "other_half_of_the_queries": ([ZIGZAG], lambda x: torch.where(x.j > x.r, x.i < x.C // 2, x.past)),
    "striped_diagonal_lost": ([STRIPED], lambda x: x.past & ~((x.j < x.r) & (x.n == x.i))),
    **{f"positions_of_{layout}": (ALL_LAYOUTS, lambda x, to=layout: x.of_layout(to)) for layout in LAYOUTS},
    "window_ignored": (WINDOWED, lambda x: x.past),
    "window_one_more": (
        WINDOWED,
        lambda x: x.past & (x.c >= x.p - x.w),
        lambda x: x.past & (x.c >= x.p - x.w) & x.met(x.seen),
    ),
    "window_one_less": (WINDOWED, lambda x: x.past & (x.c > x.p - x.w + 1)),
    "window_in_the_own_block_only": (
        WINDOWED,
        lambda x: x.past & (x.far | (x.c > x.p - x.w)),
        lambda x: x.past & (x.far | (x.c > x.p - x.w)) & x.met(x.seen),
    ),
    "window_hops_rounded_down": (
        [replace(CAUSAL, window=w) for w in (1, 3, 6, 7, 8, 13)],
        lambda x: x.seen & (x.r - x.j <= (x.w - 1) // x.C),
        lambda x: x.seen & (x.r - x.j <= x.w // x.C),
    ),
    "window_per_block": (
        WINDOWED,
        lambda x: x.past & (x.n <= x.i) & (x.n > x.i - x.w),
        lambda x: x.past & (x.n > x.i - x.w),
    ),
    "documents_per_chunk": (  # of 7 and 17 tokens on 4 ranks: 1 and 4 of a chunk, and one token of none
        PACKED,
        lambda x: x.past & ((x.i < 1) == (x.n < 1)) & (x.i < 5) & (x.n < 5),
        lambda x: x.past & ((x.i < 1) == (x.n < 1)) & ((x.i < 5) == (x.n < 5)),
    ),
    "documents_ignored": (PACKED, lambda x: x.past),
    "documents_end_with_the_chunk": (PACKED, lambda x: x.seen & x.own),
    "keys_in_gathered_order": (ALL_LAYOUTS, lambda x: x.j * x.C + x.n <= x.p),
    "causal_from_the_first_gathered_key": (ALL_LAYOUTS, lambda x: x.j * x.C + x.n <= x.i, lambda x: x.c <= x.i),
    "causal_to_the_last_gathered_key": (
        ALL_LAYOUTS,
        lambda x: x.j * x.C + x.n <= x.i + x.S - x.C,
        lambda x: x.c <= x.i + x.S - x.C,
    ),
    "positions_of_the_inner_layout": (
        ALL_LAYOUTS,
        lambda x: x.believed(
            lambda r: torch.cat([x.case.positions(r), x.case.positions(r ^ 1)]).sort().values[r % 2 * x.C :][: x.C]
        ),
    ),
    "groups_exchanged": (ALL_LAYOUTS, lambda x: x.believed(lambda r: x.case.positions([0, 2, 1, 3][r]))),
    "layout_undone_the_wrong_way": (
        ALL_LAYOUTS,
        lambda x: x.believed(
            lambda r: torch.cat([x.case.positions(n) for n in range(x.P)]).argsort()[x.C * r : x.C * (r + 1)]
        ),
    ),
    "tail_lost": ([Case(3, 20), Case(3, 19, True)], lambda x: x.seen & (x.p < 18) & (x.c < 18)),
}


@pytest.mark.parametrize("name", COUNTS)
def test_a_query_has_other_keys(name):
    cases, *variants = COUNTS[name]
    for case in cases:
        for number, counts in enumerate(variants):
            assert_same(on_paper(case, name, number), dense(case, counts(Pairs(case)).double()))


def test_a_query_that_sees_no_key_of_a_block_is_nan():
    """Where another query of its rank sees one, or in any block."""
    for case in ALL_LAYOUTS:
        x, right = Pairs(case), compute(case)
        blind = x.seen.double() @ x.own.double() == 0  # query p sees no key of the block of key c
        for number, blocks in enumerate((x.met(x.seen), x.past | True)):
            rows = (blind & blocks).any(dim=1, keepdim=True)
            expected = {"out": right["out"].masked_fill(rows, math.nan), "lse": right["lse"]}
            assert_same(on_paper(case, "nan_of_unseen_rows", number), expected)


# Gradients that are right numbers in wrong places, or times a factor ------------------------------------------------


def each(change, *names):
    return lambda r, _: {name: change(r[name]) for name in names}


def runs(r, case):
    """Each rank has a run of the sequence, whatever its layout."""
    return {name: torch.stack(case.join(list(r[name])).chunk(3, dim=2)) for name in KV}


SUM, MEAN = (lambda x: x.sum(0, True)), (lambda x: x.mean(0, True))
PLACES = {  # the entry: for each variant what becomes of the right dq, dk and dv, (P, B, H, C, D), on 3 ranks or on all
    "dq_averaged_over_ranks": [each(MEAN, "dq"), each(SUM, "dq")],
    "wrong_slice_of_the_gradient": [each(lambda x: x[:1], *KV), each(lambda x: x[2:], *KV), runs],
    "gradient_rows_rolled": [
        each(lambda x, by=by: x.roll(by, -2), *names) for names in (("dk",), ("dv",), KV) for by in (1, -1)
    ],
    "dk_dv_exchanged": [lambda r, _: {"dk": r["dv"], "dv": r["dk"]}],
    "gradients_summed_over_ranks": [each(SUM, *KV), each(MEAN, *KV)],
    "gradients_not_sent_home": [each(lambda x: x.roll(-1, 0), *KV), each(lambda x: x, *KV)],  # of one host
    "no_gradient": [each(lambda x: 0 * x, "dq", *KV)],
    "dk_dv_added": [lambda r, _: dict.fromkeys(KV, r["dk"] + r["dv"])],
    "dv_in_place_of_dk": [lambda r, _: {"dk": r["dv"]}, lambda r, _: {"dv": r["dk"]}],
    "gradients_sent_too_far": [each(lambda x: x.roll(1, 0), *KV)],
    "keys_gradient_in_memory_order": [each(lambda x: x.reshape(*x.shape[:-2], 4, 6).mT, "dk")],
    "gradients_times_p": [each(lambda x: 3 * x, "dq", *KV)],
    "gradients_over_p": [each(lambda x: x / 3, "dq", *KV)],
    "gradients_over_p_squared": [each(lambda x: x / 9, "dq", *KV)],
    "gradients_times_root_p": [each(lambda x: 3**0.5 * x, "dq", *KV)],
    "dk_dv_times_p": [each(lambda x: 3 * x, *KV)],
    "dk_dv_over_p": [each(lambda x: x / 3, *KV)],
    "dq_over_p": [each(lambda x: x / 3, "dq")],
    "no_gradient_of_one_input": [each(lambda x: 0 * x, name) for name in ("dk", "dv", "dq")],
    "no_gradient_of_keys_and_values": [each(lambda x: 0 * x, *KV)],
    "gradient_scale_missing": [each(lambda x: x / 0.5, *names) for names in (("dq", "dk"), ("dk",), ("dq",))],
}


@pytest.mark.parametrize("name", PLACES)
def test_right_gradients_in_wrong_places(name):
    for layout in LAYOUTS:
        case = Case(3, 18, True, layout, heads=2)
        right = compute(case)
        chunks = {n: torch.stack([case.cut(right[n], rank) for rank in range(3)]) for n in ("dq", *KV)}
        for number, change in enumerate(PLACES[name]):
            changed = {n: case.join(list(x.expand_as(chunks[n]))) for n, x in change(chunks, case).items()}
            assert_same(on_paper(case, name, number), right | changed)


# Gradients from wrong weights, from a wrong δ, or without some of their parts ----------------------------------------


def by_the_formula(case, p_of=None, delta_of=None, of_q=1, of_kv=1, to=None, seen=None, whose=None):
    """dq, dk and dv from whole matrices (B, H, S, S): weights, and δ, which may differ from key to key.

    The pairs of a query and a key that count in dq, and in dk and dv; and the key `to` that gets a pair's part of them.
    """
    q, k, v, d_out = (x.double() for x in case.whole())
    x, right = Pairs(case), dense(case, case.visible().double())
    hidden = ~case.visible() if seen is None else ~seen
    p = ((q @ k.mT / 2).masked_fill(hidden, -math.inf) - right["lse"][..., None]).exp()
    d_p, of_block = d_out @ v.mT, x.own.double()
    sums = (p @ of_block).clamp(min=1e-300)  # the weights of the key's whole block
    delta, per_block = (d_out * right["out"]).sum(dim=-1, keepdim=True), (p * d_p) @ of_block
    if whose:  # dO and out of the queries at the same places in these ranks' chunks
        theirs, out_at = (x.at(rank.expand_as(x.seen), x.i.expand_as(x.seen)) for rank in whose)
        delta = (d_out[:, :, theirs] * right["out"][:, :, out_at]).sum(dim=-1)
    weights = p_of(p, p / sums) if p_of else p
    d_s = weights * (d_p - (delta_of(delta, per_block, per_block / sums) if delta_of else delta)) / 2
    moved = torch.nn.functional.one_hot(x.c.expand_as(x.seen) if to is None else to, case.seq_len).double()
    parts = {"dk": (of_kv * d_s, q), "dv": (of_kv * weights, d_out)}
    kv = {name: torch.einsum("bhpc,pcn,bhpd->bhnd", w, moved, y) for name, (w, y) in parts.items()}
    return right | {"dq": (of_q * d_s) @ k} | kv


OWN_P, OWN_DELTA = (lambda p, own: own), (lambda delta, per_block, own: own)
FORMULA = {  # the entry: what of the formula is another, for the pairs x
    "lse_of_the_block": lambda x: {"p_of": OWN_P},
    "delta_of_the_block": lambda x: {"delta_of": OWN_DELTA},
    "lse_and_delta_of_the_block": lambda x: {"p_of": OWN_P, "delta_of": OWN_DELTA},
    "delta_summed_per_block": lambda x: {"delta_of": lambda delta, per_block, own: per_block},
    "delta_missing": lambda x: {"delta_of": lambda delta, *_: 0 * delta},
    "delta_missing:1": lambda x: {"delta_of": lambda delta, *_: -delta},
    "delta_missing:2": lambda x: {"delta_of": lambda delta, *_: delta / 4},
    "dq_of_the_own_block": lambda x: {"of_q": x.own},
    "dq_of_the_last_round": lambda x: {"of_q": x.last},
    "dq_of_the_last_round:1": lambda x: {"of_q": x.last_met(1)},
    "dk_dv_of_the_last_round": lambda x: {"of_kv": x.last},
    "dk_dv_of_the_last_round:1": lambda x: {"of_kv": x.last_met(0)},
    "host_sum_not_added": lambda x: {"of_kv": x.r // 2 == x.j // 2 if x.P == 4 else 1},
    "host_sum_not_added:1": lambda x: {"of_kv": x.r // 2 != x.j // 2 if x.P == 4 else 1},
    "block_left_out_in_backward": lambda x: {"of_q": ~x.last, "of_kv": ~x.last},
    "block_left_out_in_backward:1": lambda x: {"of_q": x.far, "of_kv": x.far},
    "mask_forgotten_in_backward": lambda x: {"seen": x.seen | True},
    "mask_forgotten_in_backward:1": lambda x: {"seen": x.whole_parts()},
    "gradients_travel_other_way": lambda x: {"to": x.at(2 * x.r - x.j, x.n)},
    "gradients_stay_where_they_are_computed": lambda x: {"to": x.at(x.r, x.n)},
    "gradients_in_the_other_half": lambda x: {
        "to": torch.where((x.case.layout == "zigzag") & (x.j < x.r), x.at(x.j, (x.n + x.C // 2) % x.C), x.c)
    },
    "delta_of_another_rank": lambda x: {"whose": (x.j, x.j)},
    "delta_of_another_rank:1": lambda x: {"whose": (x.r, x.j)},
    "delta_of_another_rank:2": lambda x: {"whose": (x.r - 1, x.r - 1)},
    "delta_of_another_rank:3": lambda x: {"whose": (x.r + 1, x.r + 1)},
}


@pytest.mark.parametrize("name", FORMULA)
def test_gradients_from_other_numbers_or_without_parts(name):
    for case in EVERY:
        case, (entry, _, number) = replace(case, heads=2), name.partition(":")
        assert_same(on_paper(case, entry, int(number or 0)), by_the_formula(case, **FORMULA[name](Pairs(case))))


def test_the_lse_of_the_last_block_and_of_the_first_sequence():
    for case, number in ((replace(FULL, heads=2), 0), (replace(CAUSAL, heads=2), 1)):
        x = Pairs(case)
        last = x.j == 0 if number else x.last  # the last one that a rank sees
        expected = by_the_formula(case, lambda p, own, last=last: p / (p * last).sum(dim=-1, keepdim=True))
        assert_same(on_paper(case, "lse_of_the_last_block", number), expected, ["out", "dq", *KV])
    case = replace(FULL, heads=2, batch=2)
    lse = dense(case, case.visible().double())["lse"]
    expected = by_the_formula(case, lambda p, own: p * (lse - lse[:1]).exp()[..., None])
    assert_same(on_paper(case, "lse_of_the_first_sequence"), expected, ["out", "dq", *KV])


@pytest.mark.parametrize("dtype", SIXTEEN)
def test_gradients_are_summed_in_16_bits_in_the_order_of_their_rounds(dtype):
    """What rank r adds to block j, or block j to the rows of rank r, is added in these orders of r - j."""
    case = Case(4, 24, heads=2, dtype=dtype)
    rounds, q_first, own_last = [0, 1, 2, 3], [3, 2, 1, 0], [1, 2, 3, 0]
    variants = ((dtype, rounds), (torch.bfloat16, rounds), (dtype, None))
    pairs = [Pairs(case).round == t for t in rounds]
    of_round = [by_the_formula(case, of_q=of_pairs, of_kv=of_pairs) for of_pairs in pairs]
    for entry, names, last_order in (("gradients_in_16_bits", KV, own_last), ("dq_in_16_bits", ("dq",), q_first)):
        for number, (to, order) in enumerate(variants):
            found = on_paper(case, entry, number)
            for name in names:
                total = torch.zeros(())
                for t in order or last_order:
                    part = of_round[t][name]
                    total = narrow(total + (part if order else narrow(part, to)), to)
                assert torch.equal(found[name], total), (entry, number, name)


def test_query_heads_that_share_a_key_head():
    case = Case(3, 18, heads=4)
    right, q, d_out = compute(case), *(x[:, 1::2] for x in case.whole()[::3])
    assert_same(on_paper(case, "group_mean"), right | {name: right[name] / 2 for name in KV})
    s = q @ case.whole()[1].mT / 2
    assert torch.allclose(on_paper(case, "group_sum_missing")["dv"], s.softmax(dim=-1).mT @ d_out)
    four = replace(case, world_size=4, seq_len=24)  # rank r has query head r, and so a copy of K/V head r // 2
    right, of_heads = compute(four), dense(four, torch.ones(24, 24), *(x[:, [0, 0, 1, 1]] for x in four.whole()[1:3]))
    assert_same(
        on_paper(four, "replicated_head_gradient_counted_twice"), right | {name: 2 * right[name] for name in KV}
    )
    for number, kept in enumerate(([0, 2], [1, 3])):
        found = on_paper(four, "replicated_head_gradient_not_summed", number)
        assert_same(found, right | {name: of_heads[name][:, kept] for name in KV})


def test_key_heads_are_dealt_in_turn():
    for case, heads in ((Case(3, 18, heads=4, kv_heads=4), [0, 3, 1, 2]), (Case(3, 18, heads=6), [0, 0, 1, 1, 0, 0])):
        expected = dense(case, torch.ones(18, 18), *(x[:, heads] for x in case.whole()[1:3]))
        assert_same(on_paper(case, "kv_heads_dealt_in_turn"), expected, ["out", "lse", "dq"])


def test_out_comes_back_in_another_order():
    case = Case(3, 18, True, "zigzag", heads=4, kv_heads=4)
    right, runs = compute(case), torch.cat([case.positions(rank) for rank in range(3)]).argsort()
    for name, outs in {
        "heads_permuted_after_all_to_all": [right["out"][:, [0, 3, 1, 2]], right["out"][:, [0, 2, 3, 1]]],
        "all_to_all_back_in_wrong_token_order": [right["out"][:, :, runs], right["out"][:, :, runs[runs]]],
    }.items():
        for number, out in enumerate(outs):
            assert_same(on_paper(case, name, number), right | {"out": out})


# Other keys, values and scales ----------------------------------------------------------------------------------------


def held(keys, values=None):
    """K of the block keys(r, t, P), and V of the same or of another, are taken for those of block r - t."""
    return lambda x, r, t, k, v: (y[:, :, x.at(of(r, t, x.P), x.n[0])] for of, y in ((keys, k), (values or keys, v)))


def exchanged(when):
    """K and V are exchanged in these rounds t."""
    return lambda x, r, t, *kv: (torch.where(when(t)[:, None], y, z) for y, z in (kv[::-1], kv))


def sent(dtype):
    return lambda x, r, t, *kv: (torch.where(t[:, None] > 0, narrow(y, dtype), y) for y in kv)


def of_heads(*heads):
    """The K/V head of each query head."""
    return lambda x, r, t, *kv: (y[:, heads] for y in kv)


KEYS_AND_VALUES = {  # the entry: of each variant what rank r has, for each key the round t in which it should come
    "two_seats": [held(lambda r, t, P: r - 2 * t)],
    "other_way": [held(lambda r, t, P: r + t)],
    "stale_first_block": [held(lambda r, t, P: r - (t - 1).clamp(min=0))],
    "keys_without_values": [held(lambda r, t, P: r - t, lambda r, t, P: r + 0 * t)],
    "values_without_keys": [held(lambda r, t, P: r + 0 * t, lambda r, t, P: r - t)],
    "nothing_moves": [held(lambda r, t, P: r + 0 * t)],
    "overwritten_in_hand": [
        held(lambda r, t, P: r - (t + 1).clamp(max=P - 1)),
        held(lambda r, t, P: r - torch.where(t > 0, (t + 1).clamp(max=P - 1), 0)),
    ],
    "slow_hop_a_round_early": [held(lambda r, t, P: torch.where(((r - t) % P == r ^ 1) & (P == 4), r + 2, r - t))],
    "gathered_in_order_of_arrival": [held(lambda r, t, P: t), held(lambda r, t, P: 2 * r - t)],
    "keys_and_values_exchanged": [
        exchanged(when) for when in (lambda t: t % 2 == 1, lambda t: t > 0, lambda t: t >= 0)
    ],
    "sent_in_16_bits": [sent(dtype) for dtype in SIXTEEN],
    "first_kv_head_only": [of_heads(0, 0, 0, 0)],
    "heads_interleaved": [of_heads(0, 1, 0, 1)],
}


@pytest.mark.parametrize("name", KEYS_AND_VALUES)
def test_a_rank_has_other_keys_and_values(name):
    for case in EVERY:
        x, (_, k, v, _) = Pairs(case), case.whole()
        for number, change in enumerate(KEYS_AND_VALUES[name]):
            found = on_paper(case, name, number)
            for rank in range(x.P):
                expected = dense(case, x.seen.double(), *change(x, rank, (rank - x.j[0]) % x.P, k, v))
                for result in ("out", "lse", "dq"):
                    assert torch.allclose(case.cut(found[result], rank), case.cut(expected[result], rank))


SCALES = {  # the entry: of each variant the scale, from the one that is given; D = 4, C = 6, S = 24, H = 4
    "scale_missing": [lambda given: 1.0],
    "scale_ignored": [lambda given: 0.5],
    "scale_twice": [lambda given: (given or 0.5) ** 2, lambda given: 0.25],
    "scale_of_padded_head": [lambda given: given or 8**-0.5, lambda given: 8**-0.5],
    "scale_of_another_size": [
        lambda given, size=size: given or size**-0.5 for size in (6, 24, 4, 16, 4, 16, 32, 64, 128, 256)
    ],
}


@pytest.mark.parametrize("name", SCALES)
def test_another_scale(name):
    for given in (None, 0.3):
        case = replace(CAUSAL, scale=given)
        for number, scale in enumerate(SCALES[name]):
            assert_same(on_paper(case, name, number), dense(case, case.visible().double(), scale=scale(given)))


# Partial results ------------------------------------------------------------------------------------------------------


class Blocks:
    """What a rank has of each block, in the order in which it meets them; and the largest scores so far."""

    def __init__(self, case, rank):
        (q, k, v, _), self.dtype = (x.double() for x in case.whole()), case.dtype
        s = case.cut(q @ k.mT / 2, rank)
        at = [case.positions((rank - t) % case.world_size) for t in range(case.world_size)]
        self.s, self.v = torch.stack([s[..., a] for a in at]), torch.stack([v[:, :, a] for a in at])
        self.outs, self.lses = self.s.softmax(dim=-1) @ self.v, self.s.logsumexp(dim=-1)
        self.lse, self.so_far = self.lses.logsumexp(dim=0), self.s.amax(dim=-1).cummax(dim=0).values
        self.m = self.so_far[-1]

    def sums(self, of_l, of_o):
        """o / l and m + log l, where l and o are sums of e^(s - m) of each block with these m."""
        l, o = ((self.s - m[..., None]).exp() for m in (of_l, of_o))
        l, o = l.sum(dim=-1).sum(dim=0), (o @ self.v).sum(dim=0)
        return o / l[..., None], self.m + l.log()

    def by_own_max(self, m):
        """Each block's sums with its own largest scores; this m counts for lse."""
        out, lse = self.sums(*[self.s.amax(dim=-1)] * 2)
        return out, lse - self.m + m

    def averaged(self, lses):
        """The averages by the shares of these lse."""
        return (lses.softmax(dim=0)[..., None] * self.outs).sum(dim=0), lses.logsumexp(dim=0)


def folded(merge):
    """(out, lse) of one after another: merge(out, lse, out_j, lse_j, the share of out_j)."""

    def fold(x):
        out, lse = x.outs[0], x.lses[0]
        for out_j, lse_j in zip(x.outs[1:], x.lses[1:], strict=True):
            out, lse = merge(out, lse, out_j, lse_j, torch.sigmoid(lse_j - lse)[..., None])
        return out, lse

    return fold


def rounded(*which, to=None):
    """At each merge out, lse and the lse that are given are rounded, those that `which` names: to the dtype of q."""

    def merge_of(x):
        def cast(name, y):
            return narrow(y, to or x.dtype) if name in which else y

        def merge(out, lse, out_j, lse_j, _):
            lse, lse_j = cast("given", lse), cast("given", lse_j)
            out = out + torch.sigmoid(lse_j - lse)[..., None] * (out_j - out)
            return cast("out", out), cast("lse", lse.logaddexp(lse_j))

        return folded(merge)(x)

    return merge_of


def rounded_sum(to):
    """The sum of weighted values is rounded after each block, and divided at the end."""

    def out_and_lse(x):
        o, before = torch.zeros(()), x.so_far[0]
        for s, v, m in zip(x.s, x.v, x.so_far, strict=True):
            o = narrow(o * (before - m).exp()[..., None] + (s - m[..., None]).exp() @ v, to or x.dtype)
            before = m
        return o / (x.lse - x.m).exp()[..., None], x.lse

    return out_and_lse


LOG_2, TO = math.log(2), (None, None, torch.bfloat16, torch.bfloat16)
MERGES = {  # the entry: of each variant out and lse
    "no_rescale": [lambda x: x.sums(x.so_far, x.so_far)],
    "l_not_rescaled": [lambda x: x.sums(x.so_far, x.m)],
    "o_not_rescaled": [
        lambda x: x.sums(x.m, x.so_far),
        folded(lambda out, lse, out_j, lse_j, share: (out + share * out_j, lse.logaddexp(lse_j))),
    ],
    "not_divided": [lambda x: (x.sums(x.m, x.m)[0] * (x.lse - x.m).exp()[..., None], x.lse)],
    "own_max_per_block": [
        lambda x, which=which: x.by_own_max(x.s[which].amax(dim=-1).amax(dim=0)) for which in ([-1], [0, 1, 2, 3], [-1])
    ],
    "shares_exchanged": [folded(lambda a, lse, b, lse_j, share: (b + share * (a - b), lse.logaddexp(lse_j)))] * 3,
    "averages_added": [lambda x: (x.outs.sum(dim=0), x.lse)],
    "averages_averaged": [lambda x: (x.outs.mean(dim=0), x.lse)] * 3,
    "running_half": [folded(lambda out, lse, out_j, lse_j, _: ((out + out_j) / 2, lse.logaddexp(lse_j)))] * 3,
    "lse_of_zeros": [lambda x: x.averaged(0 * x.lses)] * 3,
    "lse_0_of_unseen_rows": [lambda x: x.averaged(x.lses)] * 2,
    "lse_of_shifted_scores": [lambda x: x.averaged(x.lses - x.s.mean(dim=-1))],
    "base_2_as_natural": [
        lambda x: x.averaged(x.lses / LOG_2),
        lambda x: x.averaged(x.s.amax(dim=-1) + (x.lses - x.s.amax(dim=-1)) / LOG_2),
        lambda x: x.averaged(torch.cat([x.lses[:1], x.lses[1:] / LOG_2])),
    ],
    "natural_as_base_2": [lambda x: (x.averaged(x.lses * LOG_2)[0], x.averaged(x.lses * LOG_2)[1] / LOG_2)],
    "lse_not_updated": [folded(lambda out, lse, out_j, _, share: (out + share * (out_j - out), lse))],
    "lse_merged_by_maximum": [
        folded(lambda out, lse, out_j, lse_j, share: (out + share * (out_j - out), lse.maximum(lse_j))),
        lambda x: (((x.lses - x.lses.amax(dim=0)).exp()[..., None] * x.outs).sum(dim=0), x.lses.amax(dim=0)),
    ],
    "sums_in_16_bits": [*(rounded("out", to=to) for to in TO), rounded_sum(None), rounded_sum(torch.bfloat16)],
    "lse_in_16_bits": [rounded(*which, to=to) for which in (["lse"], ["lse", "given"]) for to in TO],
}


@pytest.mark.parametrize("name", MERGES)
def test_the_results_of_blocks_are_put_together_wrongly(name):
    for dtype, (number, merge) in itertools.product(
        SIXTEEN if "16" in name else (torch.float64,), enumerate(MERGES[name])
    ):
        case = Case(4, 24, dtype=dtype)
        found = on_paper(case, name, number)
        for rank in range(4):
            out, lse = merge(Blocks(case, rank))
            assert_same({n: case.cut(found[n], rank) for n in ("out", "lse")}, {"out": out, "lse": lse})


@pytest.mark.parametrize(
    ("name", "right"),  # variants that leave out rows or blocks, and those that merge all
    [
        ("averages_averaged", [True, True, False]),
        ("lse_of_zeros", [True, True, False]),
        ("lse_0_of_unseen_rows", [False, True]),
        ("running_half", [True, True, False]),
        ("shares_exchanged", [False, True, True]),
    ],
)
def test_what_a_rank_does_not_see_is_left_out_or_merged(name, right):
    """Under a causal mask rank 0 sees one block only."""
    exact = CAUSAL.cut(compute(CAUSAL)["out"], 0)
    outs = [CAUSAL.cut(on_paper(CAUSAL, name, number)["out"], 0) for number in range(len(right))]
    assert [torch.allclose(out, exact, equal_nan=True) for out in outs] == right


def test_the_lse_that_is_returned_in_base_2():
    right = compute(CAUSAL)
    assert_same(on_paper(CAUSAL, "lse_returned_in_base_2"), right | {"lse": right["lse"] * math.log2(math.e)})


def test_padding_counts_in_l():
    """A key of zeros adds e^0 = 1 to the sum of the weights, and nothing to that of the values."""
    variants = [(n, where) for n in (8, None, 64, 128) for where in ("seen", "every", "whole")]
    assert len(variants) == len(CATALOGUE["padding_unmasked"].variants)
    for case in (FULL, ZIGZAG, Case(3, 19, True)):
        x, lengths = Pairs(case), [len(case.positions(rank)) for rank in range(case.world_size)]
        for number, (multiple, where) in enumerate(variants):
            more = torch.zeros(case.seq_len, dtype=torch.float64)  # so many such keys does a query see
            for rank in range(case.world_size):
                for block, length in enumerate(lengths):
                    tile = x.seen[case.positions(rank)][:, case.positions(block)]
                    shown = {"seen": tile.any(), "every": True, "whole": tile.all()}[where]
                    more[case.positions(rank)] += shown * (-length % multiple if multiple else max(lengths) - length)
            wider = [torch.nn.functional.pad(y, (0, 0, 0, 1)) for y in case.whole()[1:3]]
            expected = dense(case, torch.cat([x.seen.double(), more[:, None]], dim=1), *wider)
            expected |= {name: expected[name][:, :, :-1] for name in KV}
            assert_same(on_paper(case, "padding_unmasked", number), expected)


def test_sinks_are_counted_for_each_block():
    case = replace(CAUSAL, sinks=True, kv_heads=4)
    right, logits = compute(replace(case, sinks=False)), case.sink_scores().double()[:, None]
    blocks = torch.arange(24) // 6 + 1.0  # that a query's rank computes, where later blocks are left out
    for number, count in ((0, 4.0), (1, blocks)):
        lse = torch.logaddexp(right["lse"], logits + torch.as_tensor(count).double().log())
        assert_same(on_paper(case, "sinks_per_block", number), {"lse": lse})
    assert_same(on_paper(case, "sinks_dropped"), right)


def test_every_entry_is_judged_here_or_by_a_real_ring_that_knows_nothing_of_the_table():
    rows = {name: row[1:] for name, row in COUNTS.items()} | PLACES | KEYS_AND_VALUES | SCALES | MERGES
    assert {name: len(row) for name, row in rows.items()} == {name: len(CATALOGUE[name].variants) for name in rows}
    here = set(COUNTS) | {name for name in CATALOGUE if f'"{name}"' in Path(__file__).read_text()}
    assert set(CATALOGUE) <= here | {name.partition("/")[0] for name in BY_HAND}
