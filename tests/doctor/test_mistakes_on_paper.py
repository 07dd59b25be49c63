"""Each entry of the catalogue computes what its sentence says: beside the ring on paper stands one dense softmax.

A row of a table is an entry, and the mistake in a line that knows nothing of rounds, tiles or merges. An entry with
variants has a line for each of them, in their order; None leaves a variant out.
"""

import math
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from ring_doctor.case import Case
from ring_doctor.catalogue import CATALOGUE
from ring_doctor.paper_ring import RIGHT, NotOnPaper, compute
from ringlab.training.layouts import LAYOUTS, positions
from tests.sick_rings import BY_HAND

FULL, CAUSAL = Case(4, 24, heads=4), Case(4, 24, True, heads=4)
ALL_LAYOUTS = [replace(CAUSAL, layout=layout) for layout in LAYOUTS]
ZIGZAG, STRIPED = ALL_LAYOUTS[1:]
EVERY = [FULL, replace(FULL, world_size=3), *ALL_LAYOUTS]


def dense(case, counts, k=None, v=None, scale=None):
    """All results of one softmax in which query p has key c counts[p, c] times, for K and V, or for these."""
    q, own_k, own_v, d_out = case.whole()
    k, v = own_k if k is None else k, own_v if v is None else v
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    q, k, v = leaves[0], *(x.repeat_interleave(case.heads // x.shape[1], dim=1) for x in leaves[1:])
    s = q @ k.mT * (scale or case.scale or case.head_dim**-0.5)
    weights = counts * (s - s.amax(dim=-1, keepdim=True).detach()).exp()
    l = weights.sum(dim=-1, keepdim=True)
    out = weights / l.masked_fill(l == 0, 1.0) @ v
    gradients = torch.autograd.grad(out, leaves, d_out)
    lse = (l.log() + s.amax(dim=-1, keepdim=True))[..., 0].detach()
    return {"out": out.detach(), "lse": lse, **dict(zip(("dq", "dk", "dv"), gradients, strict=True))}


def assert_same(found, expected, names=None):
    for name in names or expected:
        assert torch.allclose(found[name], expected[name], atol=1e-9, rtol=1e-9), name


def on_paper(case, name, variant=0, **steps):
    return compute(case, CATALOGUE[name].variants[variant](replace(RIGHT, **steps)))


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
        self.far, self.own = self.r != self.j, self.r == self.j
        self.past = self.c <= self.p

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

    def of_layout(self, layout):
        return self.believed(lambda rank: positions(layout, self.S, rank, self.P))


WINDOWED = [replace(case, window=w) for case in ALL_LAYOUTS for w in (3, 8)]
PACKED = [replace(case, documents=(7, 17)) for case in ALL_LAYOUTS]
COUNTS = {  # the entry: its cases, and for each variant how often a query has a key
    "opposite_block_twice": (EVERY, lambda x: x.seen * (1 + (2 * ((x.r - x.j) % x.P) == x.P).int())),
    "opposite_block_missed": (EVERY, lambda x: x.seen & (2 * ((x.r - x.j) % x.P) != x.P)),
    "next_host_missing": ([FULL, *ALL_LAYOUTS], lambda x: x.seen & (x.r // 2 == x.j // 2)),
    "key_lost_at_a_border": (
        EVERY,
        lambda x: x.seen & (x.own | (x.n != x.C - 1)),
        lambda x: x.seen & (x.own | (x.n != 0)),
        lambda x: x.seen & (x.n != x.C - 1),
        lambda x: x.seen & (x.n != 0),
        lambda x: x.seen & ((x.j != x.r - 1) | (x.n != x.C - 1) | (not x.case.causal)),
    ),
    "causal_unasked": ([FULL, replace(FULL, world_size=3)], lambda x: x.past),
    "mask_forgotten": (ALL_LAYOUTS, lambda x: x.past | True),
    "only_own_masked": (ALL_LAYOUTS, lambda x: x.far | x.past),
    "own_block_unmasked": (ALL_LAYOUTS, lambda x: x.past | x.own),
    "last_tile_lost": (
        [Case(2, 258), Case(2, 258, True, "striped")],
        *(lambda x, kept=kept: x.seen & (x.n < kept) for kept in (128, 128, 129)),
    ),
    "mask_inverted": (ALL_LAYOUTS, lambda x: x.c >= x.p, lambda x: x.c > x.p),
    "strict_in_far_blocks": (
        ALL_LAYOUTS,
        lambda x: torch.where(x.own, x.past, x.n < x.i),
        lambda x: torch.where(x.own, x.past, (x.n < x.i) & (x.j < x.r)),
        lambda x: torch.where(x.own, x.past, (x.n < x.i) & x.past),
    ),
    "striped_diagonal_lost": ([STRIPED], lambda x: x.past & ~((x.j < x.r) & (x.n == x.i))),
    **{f"positions_of_{layout}": (ALL_LAYOUTS, lambda x, to=layout: x.of_layout(to)) for layout in LAYOUTS},
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
    "documents_end_with_the_chunk": (PACKED, lambda x: x.seen & x.own),
    "keys_in_gathered_order": (ALL_LAYOUTS, lambda x: x.j * x.C + x.n <= x.p),
    "causal_from_the_first_gathered_key": (ALL_LAYOUTS, lambda x: x.j * x.C + x.n <= x.i, lambda x: x.c <= x.i),
    "causal_to_the_last_gathered_key": (
        ALL_LAYOUTS,
        lambda x: x.j * x.C + x.n <= x.i + x.S - x.C,
        lambda x: x.c <= x.i + x.S - x.C,
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
            if counts is not None:
                assert_same(on_paper(case, name, number), dense(case, counts(Pairs(case)).double()))


BESIDE = {  # the entry, a variant, and its mask beside a window of 5 or documents of 7 and 17 tokens
    ("mask_forgotten", 1): lambda x: x.past | True,
    ("only_own_masked", 1): lambda x: x.far | x.past,
    ("mask_inverted", 0): lambda x: x.c >= x.p,
    ("strict_in_far_blocks", 0): lambda x: torch.where(x.own, x.past, x.n < x.i),
}


@pytest.mark.parametrize(("name", "number"), BESIDE)
def test_windows_and_documents_hide_keys_besides(name, number):
    for case in ALL_LAYOUTS:
        x = Pairs(case)
        counts = BESIDE[name, number](x)
        near, document = x.c > x.p - 5, (x.c < 7) == (x.p < 7)
        assert_same(on_paper(replace(case, window=5), name, number), dense(case, (counts & near).double()))
        packed = replace(case, documents=(7, 17))
        assert_same(on_paper(packed, name, number), dense(case, (counts & document).double()))


# Gradients that are right numbers in wrong places, or times a factor ------------------------------------------------


def over(x, y):
    """dk and dv."""
    return {"dk": x, "dv": y}


def each(change, *names):
    return lambda r: {name: change(r[name]) for name in names}


def everywhere(x):
    """(1, B, H, C, D) of one rank -> of all ranks."""
    return x.expand(3, *x.shape[1:])


def dealt_in_runs(x, case):
    """Rank r gets the tokens r C to r C + C - 1 in the place of its own."""
    whole = torch.empty_like(torch.cat(list(x), dim=2))
    for rank, chunk in enumerate(x):
        whole[:, :, case.positions(rank)] = chunk
    return torch.stack(whole.chunk(len(x), dim=2))


KV, SUM, MEAN = ("dk", "dv"), (lambda x: everywhere(x.sum(0, True))), (lambda x: everywhere(x.mean(0, True)))
NEXT, BEFORE = (lambda x: x.roll(-1, 0)), (lambda x: x.roll(1, 0))
PLACES = {  # the entry: for each variant what becomes of the right dq, dk and dv, (P, B, H, C, D), on 3 ranks
    "dq_averaged_over_ranks": [each(MEAN, "dq"), each(SUM, "dq")],
    "wrong_slice_of_the_gradient": [each(lambda x: everywhere(x[:1]), *KV), each(lambda x: everywhere(x[2:]), *KV)],
    "gradient_rows_rolled": [
        *(each(lambda x, by=by: x.roll(by, -2), *names) for names, by in ((("dk",), 1), (("dk",), -1))),
        *(each(lambda x, by=by: x.roll(by, -2), *names) for names in (("dv",), KV) for by in (1, -1)),
    ],
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
@pytest.mark.parametrize("layout", LAYOUTS)
def test_right_gradients_in_wrong_places(name, layout):
    case = Case(3, 18, True, layout, heads=2)
    right = compute(case)
    chunks = {n: torch.stack([case.cut(right[n], rank) for rank in range(3)]) for n in ("dq", *KV)}
    assert len(PLACES[name]) >= len(CATALOGUE[name].variants) - (name == "wrong_slice_of_the_gradient")
    for number, change in enumerate(PLACES[name]):
        if change is not None:
            changed = {n: case.join(list(x)) for n, x in change(chunks).items()}
            assert_same(on_paper(case, name, number), right | changed)


def test_parts_of_dk_and_dv_in_wrong_places():
    """The parts of all blocks stay with the queries' rank; or, in zigzag, go to the other half of their chunk."""
    for case in (Case(3, 18, heads=2), Case(3, 18, True, "zigzag", heads=2)):
        q, k, v, d_out = case.whole()
        x, right = Pairs(case), dense(case, case.visible().double())
        p = ((q @ k.mT / 2).masked_fill(~case.visible(), -math.inf) - right["lse"][..., None]).exp()
        d_s = p * (d_out @ v.mT - (d_out * right["out"]).sum(dim=-1, keepdim=True)) / 2

        def kv(to, d_s=d_s, p=p, q=q, d_out=d_out):
            """The part of each pair at the key number `to` (S, S)."""
            at = torch.nn.functional.one_hot(to, 18).double()  # (query, key, key that gets the part)
            return {n: torch.einsum("bhpc,pcn,bhpd->bhnd", w, at, y) for n, w, y in (("dk", d_s, q), ("dv", p, d_out))}

        places = torch.stack([case.positions(rank) for rank in range(3)])
        stay = places[x.r.expand(18, 18), x.n.expand(18, 18)]
        assert_same(on_paper(case, "gradients_stay_where_they_are_computed"), right | kv(stay))
        if case.causal:
            other = places[x.j, (x.n + 3) % 6].expand(18, 18)
            exchanged = torch.where(x.j < x.r, other, x.c.expand(18, 18))
            assert_same(on_paper(case, "gradients_in_the_other_half"), right | kv(exchanged))


def test_a_run_of_the_gradient_in_the_place_of_the_layout():
    case = Case(3, 18, True, "zigzag", heads=2)
    right, found = compute(case), on_paper(case, "wrong_slice_of_the_gradient", 2)
    assert_same(found, right, ["out", "lse", "dq"])
    for name in KV:
        for rank in range(3):
            assert torch.equal(case.cut(found[name], rank), right[name][:, :, 6 * rank : 6 * rank + 6])


# Gradients from wrong weights or from a wrong δ ---------------------------------------------------------------------


def by_the_formula(case, p_of, delta_of):
    """dq, dk and dv from whole matrices (B, H, S, S): weights, and δ, which may differ from key to key."""
    q, k, v, d_out = case.whole()
    s = (q @ k.mT / 2).masked_fill(~case.visible(), -math.inf)
    right = dense(case, case.visible().double())
    p, d_p, block = (s - right["lse"][..., None]).exp(), d_out @ v.mT, Pairs(case).j[0]
    of_block = torch.stack([block == n for n in range(case.world_size)]).double()  # (P, S)
    sums = (p @ of_block.mT @ of_block).clamp(min=1e-300)  # the weights of the key's whole block
    delta = (p * d_p).sum(dim=-1, keepdim=True)
    per_block = (p * d_p) @ of_block.mT @ of_block
    weights = p_of(p, p / sums)
    d_s = weights * (d_p - delta_of(delta, per_block, per_block / sums)) / 2
    return right | {"dq": d_s @ k, "dk": d_s.mT @ q, "dv": weights.mT @ d_out}


WHOLE_P, WHOLE_DELTA = (lambda p, own: p), (lambda delta, of_block, own: delta)
FORMULA = {  # the entry: its weights, from those of the whole row and of the block by itself; and its δ
    "delta_summed_per_block": (WHOLE_P, lambda delta, of_block, own: of_block),
}


@pytest.mark.parametrize("name", FORMULA)
def test_gradients_from_wrong_weights_or_delta(name):
    for case in EVERY:
        case = replace(case, heads=2)
        assert_same(on_paper(case, name), by_the_formula(case, *FORMULA[name]))


def test_the_lse_of_the_last_block_and_of_the_first_sequence():
    for case, number, last in (
        (replace(FULL, heads=2), 0, lambda x: x.j == (x.r + 1) % x.P),
        (replace(CAUSAL, heads=2), 1, lambda x: x.j == 0),  # the last one that a rank sees
    ):
        block = last(Pairs(case))

        def of_last(p, own, block=block):
            return p / (p * block).sum(dim=-1, keepdim=True)

        found = on_paper(case, "lse_of_the_last_block", number)
        assert_same(found, by_the_formula(case, of_last, WHOLE_DELTA), ["out", "dq", "dk", "dv"])
    case = replace(FULL, heads=2, batch=2)
    lse = dense(case, case.visible().double())["lse"]
    found = on_paper(case, "lse_of_the_first_sequence")
    assert_same(
        found, by_the_formula(case, lambda p, own: p * (lse - lse[:1]).exp()[..., None], WHOLE_DELTA), ["out", *KV]
    )
    assert not torch.allclose(found["dq"][1], compute(case)["dq"][1])


@pytest.mark.parametrize(("number", "whose"), [(0, lambda r, j: j), (2, lambda r, j: r - 1), (3, lambda r, j: r + 1)])
def test_delta_of_another_rank(number, whose):
    for case in EVERY:
        case = replace(case, heads=2)
        P, x = case.world_size, Pairs(case)

        def delta_of(delta, *_, case=case, P=P, x=x):
            """Query p has the δ of the query at the same place in another rank's chunk."""
            at = torch.stack([case.positions(rank) for rank in range(P)])
            return delta[:, :, at[whose(x.r, x.j) % P, x.i], 0]

        assert_same(on_paper(case, "delta_of_another_rank", number), by_the_formula(case, WHOLE_P, delta_of))


def test_delta_with_the_output_of_another_rank():
    case = Case(3, 18, heads=2)
    q, k, v, d_out = case.whole()
    right = dense(case, torch.ones(18, 18))
    p = (q @ k.mT / 2 - right["lse"][..., None]).exp()
    delta = torch.cat(
        [(d_out * out.repeat(1, 1, 3, 1)).sum(-1, True).expand(-1, -1, -1, 6) for out in right["out"].split(6, 2)], -1
    )
    d_s = p * (d_out @ v.mT - delta) / 2
    expected = right | {"dq": d_s @ k, "dk": d_s.mT @ q}
    assert_same(on_paper(case, "delta_of_another_rank", 1), expected)


def test_parts_of_gradients_that_are_lost():
    """dk and dv of a block from its own rank's queries only, from all; and dq from the own block's keys only."""
    case = Case(3, 18, heads=2)
    q, k, v, d_out = case.whole()
    right, own = dense(case, torch.ones(18, 18)), Pairs(case).own
    p = (q @ k.mT / 2 - right["lse"][..., None]).exp()
    d_s = p * (d_out @ v.mT - (d_out * right["out"]).sum(dim=-1, keepdim=True)) / 2
    kv = {"dk": (d_s * own).mT @ q, "dv": (p * own).mT @ d_out}
    assert_same(on_paper(case, "own_queries_only"), right | kv)
    assert_same(on_paper(case, "dq_of_the_own_block"), right | {"dq": (d_s * own) @ k})
    x = Pairs(case)
    last = x.j == (x.r + 1) % 3  # the block of the last round, and the last rank that a block meets
    assert_same(on_paper(case, "dq_of_the_last_round"), right | {"dq": (d_s * last) @ k})
    kv = {"dk": (d_s * last).mT @ q, "dv": (p * last).mT @ d_out}
    assert_same(on_paper(case, "dk_dv_of_the_last_round"), right | kv)
    mean, missing = (
        on_paper(replace(case, heads=4), "group_mean"),
        on_paper(replace(case, heads=4), "group_sum_missing"),
    )
    right = compute(replace(case, heads=4))
    assert_same(mean, right | {name: right[name] / 2 for name in KV})
    q, d_out = (x[:, 1::2] for x in replace(case, heads=4).whole()[::3])
    s = q @ replace(case, heads=4).whole()[1].mT / 2
    assert torch.allclose(missing["dv"], s.softmax(dim=-1).mT @ d_out)


# Other keys, values, scales and heads ---------------------------------------------------------------------------------


def same(block):
    """K and V are of one block."""
    return lambda r, t, P: (block(r, t, P), block(r, t, P))


IN_HAND = {  # the entry: for each variant the blocks of K and of V on rank r in round t, where it takes them for r - t
    "gathered_in_order_of_arrival": [
        same(lambda r, t, P: t),
        lambda r, t, P: (t, r - t),
        lambda r, t, P: (r - t, t),
        same(lambda r, t, P: 2 * r - t),
    ],
}


@pytest.mark.parametrize("name", IN_HAND)
def test_other_blocks_are_in_hand(name):
    for case in EVERY:
        x = Pairs(case)
        _, k, v, _ = case.whole()
        at = torch.stack([case.positions(rank) for rank in range(x.P)])
        for number, blocks in enumerate(IN_HAND[name]):
            found = on_paper(case, name, number)
            for rank in range(x.P):
                of_k, of_v = (at[block % x.P, x.n[0]] for block in blocks(rank, (rank - x.j[0]) % x.P, x.P))
                taken = dense(case, x.seen.double(), k[:, :, of_k], v[:, :, of_v])
                for result in ("out", "lse", "dq"):
                    assert torch.allclose(case.cut(found[result], rank), case.cut(taken[result], rank))


def test_gathered_in_order_of_arrival_and_without_a_mask():
    """The softmax does not know the order of its keys, and autograd sends dK and dV to where K and V came from."""
    for number in (0, 3):
        assert_same(on_paper(FULL, "gathered_in_order_of_arrival", number, autograd=True), compute(FULL))


@pytest.mark.parametrize(
    ("name", "number", "scale"),
    [
        ("scale_twice", 1, lambda given: 0.25),
        ("scale_of_padded_head", 0, lambda given: given or 8**-0.5),
        ("scale_of_padded_head", 1, lambda given: 8**-0.5),
        *(
            ("scale_of_another_size", number, lambda given, size=size: given or size**-0.5)
            for number, size in enumerate((6, 24, 4, 16, 64, 128))
        ),
    ],
)
def test_another_scale(name, number, scale):
    for given in (None, 0.3):
        case = replace(CAUSAL, scale=given)
        assert_same(on_paper(case, name, number), dense(case, case.visible().double(), scale=scale(given)))


# Partial results ------------------------------------------------------------------------------------------------------


def blocks_of(case):
    """The scores of each block (B, H, S, Ck) and its values, in the order in which a rank meets them."""
    q, k, v, _ = case.whole()
    s = (q @ k.repeat_interleave(case.heads // case.kv_heads, dim=1).mT / 2).masked_fill(~case.visible(), -math.inf)
    for rank in range(case.world_size):
        at = [case.positions((rank - t) % case.world_size) for t in range(case.world_size)]
        yield rank, [(case.cut(s, rank)[..., a], v[:, :, a]) for a in at]


def running_sums(parts, *, rescale_l, rescale_o):
    """One row at a time, in Python's numbers."""
    s, _ = parts[0]
    out, lse = torch.empty(*s.shape[:3], parts[0][1].shape[-1], dtype=torch.float64), torch.empty(s.shape[:3])
    lse = lse.double()
    for b, h, row in torch.cartesian_prod(*map(torch.arange, s.shape[:3])).tolist():
        m, l, o = -math.inf, 0.0, torch.zeros(out.shape[-1], dtype=torch.float64)
        for s_j, v_j in parts:
            largest = max(m, float(s_j[b, h, row].max()))
            f = math.exp(m - largest) if m > -math.inf else 0.0
            p = (s_j[b, h, row] - largest).exp()
            l, o, m = (l * f if rescale_l else l) + float(p.sum()), (o * f if rescale_o else o) + p @ v_j[b, h], largest
        out[b, h, row], lse[b, h, row] = o / l, m + math.log(l)
    return out, lse


@pytest.mark.parametrize(
    ("name", "rescaled"),
    [("l_not_rescaled", (False, True)), ("o_not_rescaled", (True, False))],
)
def test_running_sums(name, rescaled):
    for case in (Case(3, 12), Case(3, 12, True, "striped")):
        found = on_paper(case, name)
        for rank, parts in blocks_of(case):
            out, lse = running_sums(parts, rescale_l=rescaled[0], rescale_o=rescaled[1])
            assert torch.allclose(case.cut(found["out"], rank), out)
            assert torch.allclose(case.cut(found["lse"], rank), lse)


def test_out_or_lse_times_a_factor():
    right = compute(CAUSAL)
    assert_same(on_paper(CAUSAL, "lse_returned_in_base_2"), right | {"lse": right["lse"] * math.log2(math.e)})
    for rank, parts in blocks_of(CAUSAL):
        s, values = (torch.cat(x, dim=dim) for x, dim in zip(zip(*parts, strict=True), (-1, 2), strict=True))
        undivided = (s - s.amax(dim=-1, keepdim=True)).exp() @ values.repeat_interleave(2, dim=1)
        assert torch.allclose(CAUSAL.cut(on_paper(CAUSAL, "not_divided")["out"], rank), undivided)


def zeros_seen(case, multiple, where):
    """(S,): how many keys of zeros each query sees."""
    x = Pairs(case)
    lengths = [len(case.positions(rank)) for rank in range(case.world_size)]
    seen = torch.zeros(case.seq_len)
    for rank in range(case.world_size):
        for block, length in enumerate(lengths):
            tile = x.seen[case.positions(rank)][:, case.positions(block)]
            shown = {"seen": bool(tile.any()), "every": True, "whole": bool(tile.all())}[where]
            seen[case.positions(rank)] += shown * ((-length % multiple) if multiple else max(lengths) - length)
    return seen.double()


def test_padding_counts_in_l():
    """Each key of zeros adds e^0 = 1 to the sum of the weights, and nothing to that of the values."""
    others = ((n, where) for n in (None, 8, 16, 64, 128) for where in ("seen", "every", "whole"))
    variants = list(dict.fromkeys([(8, "seen"), *others]))
    assert len(variants) == len(CATALOGUE["padding_unmasked"].variants)
    for case in (FULL, CAUSAL, ZIGZAG, Case(3, 19), Case(3, 19, True)):
        right = compute(case)
        for number, (multiple, where) in enumerate(variants):
            found, more = on_paper(case, "padding_unmasked", number), zeros_seen(case, multiple, where)
            lse = torch.logaddexp(right["lse"], more.log())
            assert_same(found, {"lse": lse, "out": right["out"] * (right["lse"] - lse).exp()[..., None]})
            q, k, v, d_out = (x.clone().requires_grad_() for x in case.whole())
            k_of, v_of = (x.repeat_interleave(case.heads // case.kv_heads, dim=1) for x in (k, v))
            weights = (q @ k_of.mT / 2).exp() * case.visible()
            out = weights @ v_of / (weights.sum(dim=-1) + more)[..., None]
            gradients = torch.autograd.grad(out, (q, k, v), d_out.detach())
            assert_same(found, dict(zip(("dq", "dk", "dv"), gradients, strict=True)))


def test_sinks_are_counted_for_each_block():
    case = replace(CAUSAL, sinks=True, kv_heads=4)
    right, logits = compute(replace(case, sinks=False)), case.sink_scores().double()[:, None]
    blocks = torch.arange(24) // 6 + 1.0  # that a query's rank computes, where later blocks are left out
    for number, times in ((0, 4.0), (1, blocks)):
        lse = torch.logaddexp(right["lse"], logits + torch.as_tensor(times).double().log())
        assert_same(on_paper(case, "sinks_per_block", number), {"lse": lse})
    assert_same(on_paper(case, "sinks_dropped"), right)


def test_every_entry_is_judged_here_or_by_a_real_ring_that_knows_nothing_of_the_table():
    source = Path(__file__).read_text()
    here = {name for name in CATALOGUE if name in COUNTS or f'"{name}"' in source}
    assert set(CATALOGUE) <= here | {name.partition("/")[0] for name in BY_HAND}


def test_chunks_of_two_lengths_are_not_on_paper():
    for name in ("gathered_in_order_of_arrival", "wrong_slice_of_the_gradient", "delta_of_another_rank"):
        with pytest.raises(NotOnPaper):
            on_paper(Case(3, 19), name)
