"""On paper a right ring is full attention, each entry of the catalogue computes what its sentence says, none twice.

COUNTS: who sees what. Beside the ring on paper stands one dense softmax; a row is an entry, and the mistake in a line
that knows nothing of rounds, tiles or merges. An entry with variants has a line for each of them, in their order.
All other entries give the numbers of mistakes.json; `python -m tests.doctor.test_mistakes_on_paper` writes it.
"""

import itertools
import json
import re
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ring_doctor.asking.case import UNROUNDED, Case
from ring_doctor.catalogue import CATALOGUE
from ring_doctor.mistakes import PAGE, told, words
from ring_doctor.mistakes import backward as mistakes_of_backward
from ring_doctor.mistakes import states as mistakes_of_states
from ring_doctor.mistakes.paper_ring import RIGHT, NotOnPaper, compute
from ringlab.ring.layouts import LAYOUTS, positions
from tests.doctor.examined import by_autograd

ROOT, OF_MODELS = PAGE.parents[2], PAGE.parents[1] / "whole_models" / PAGE.name
MASKS = [(False, "contiguous"), *((True, layout) for layout in LAYOUTS)]
CASES = [
    *(Case(3, 18, causal, layout, heads=4, kv_heads=2) for causal, layout in MASKS),
    Case(4, 24, True, "zigzag", window=5, heads=8, kv_heads=2),
    Case(3, 18, True, "contiguous", documents=(7, 11)),
    Case(3, 18, True, "striped", documents=(7, 11)),
    Case(3, 19, True, heads=4, kv_heads=4),
    Case(3, 18, True, "zigzag", sinks=True),
    Case(3, 18, True, sinks=True),
    Case(3, 18, scale=0.3),
    Case(3, 18, True, window=8),
    Case(2, 12, batch=2),
    Case(2, 12, head_dim=8, value_dim=4),
    Case(4, 24, True, "striped", inputs="large"),
    *(Case(4, 32, inputs=inputs, dtype=torch.bfloat16) for inputs in UNROUNDED),
]


@given(
    st.integers(1, 5),
    st.sampled_from(MASKS),
    st.sampled_from([(2, 2), (4, 2), (3, 1)]),
    st.sampled_from(["nothing", "documents", "window", "sinks"]),
    st.booleans(),
    st.integers(0, 99),
)
def test_a_right_ring_on_paper_is_full_attention(world_size, mask, heads, more, autograd, seed):
    case = Case(world_size, 6 * world_size, *mask, heads=heads[0], kv_heads=heads[1], seed=seed)
    if more == "documents":
        case = replace(case, documents=(2, case.seq_len - 2))
    elif more == "window" and case.causal:
        case = replace(case, window=1 + seed % case.seq_len)
    elif more == "sinks":
        case = replace(case, sinks=True, kv_heads=case.heads)
    results = by_autograd(case, RIGHT) if autograd else compute(case)
    for name, right in case.right().items():
        assert name == "dsinks" or right.accepts(results[name]), name  # which is not computed on paper


def test_chunks_of_unequal_lengths():
    case = Case(4, 25, True)
    for name, right in case.right().items():
        assert right.accepts(compute(case)[name])
    for name in ("two_seats", "gathered_in_order_of_arrival", "wrong_slice_of_the_gradient", "delta_of_another_rank"):
        with pytest.raises(NotOnPaper):
            compute(case, CATALOGUE[name].variants[0](RIGHT))


def same(a, b):
    """Whether two answers are one, or one of them cannot be computed."""
    return a is None or b is None or all(torch.allclose(a[name], b[name], equal_nan=True) for name in a)


@pytest.mark.slow
def test_every_mistake_shows_somewhere_and_no_two_entries_are_one():
    changes = [("right", lambda steps: steps)]
    changes += [(name, variant) for name, mistake in CATALOGUE.items() for variant in mistake.variants]
    alike = [(a, b) for a, b in itertools.combinations(range(len(changes)), 2) if changes[a][0] != changes[b][0]]
    for case in CASES:
        found = {}
        for n in {n for pair in alike for n in pair}:
            with suppress(NotOnPaper, RuntimeError):  # keys and values of two head dims
                found[n] = compute(case, changes[n][1](RIGHT))
        alike = [(a, b) for a, b in alike if same(found.get(a), found.get(b))]
    names = {(changes[a][0], changes[b][0]) for a, b in alike}
    assert names == {("right", "last_tile_lost")}  # these are less than a tile


def test_every_entry_of_the_page_says_what_where_and_which_chapter():
    for page in (PAGE, OF_MODELS):
        text = page.read_text()
        entries = [entry for section in re.findall(r"^## (.+)$", text, re.M) for entry in words(section, page).values()]
        assert [entry.name for entry in entries] == re.findall(r"^#{3} *(.+)$", text, re.M)
        assert page == OF_MODELS or len({entry.what for entry in entries}) == len(entries)
        for entry in entries:
            assert entry.what[0].isupper() or entry.what.startswith(("dQ", "dK", "δ"))
            assert (entry.what[-1], entry.look[-1] == ".") == (".", False)
            chapters = list(ROOT.glob(f"notebooks/{entry.chapter:02}_*.ipynb"))
            assert len(chapters) == 1 or entry.name in mistakes_of_states.MISTAKES
    assert CATALOGUE["sums_in_16_bits"].wild[1:] == ("ring-flash-attention #67",)


def test_a_name_without_its_words_or_without_a_change_is_an_error():
    table = mistakes_of_backward.CHANGES
    with pytest.raises(ValueError, match=r"new, newer given once; expected words in README\.md, ## Backward"):
        told("Backward", {"newer": [], **table, "new": []})
    with pytest.raises(ValueError, match="delta_missing given once; expected words"):
        told("Backward", {name: changes for name, changes in table.items() if name != "delta_missing"})


# Each entry, by a line of its own -------------------------------------------------------------------------------------

FULL, CAUSAL = Case(4, 24, heads=4), Case(4, 24, True, heads=4)
ALL_LAYOUTS = [replace(CAUSAL, layout=layout) for layout in LAYOUTS]
ZIGZAG = ALL_LAYOUTS[1]
EVERY = [FULL, replace(FULL, world_size=3), *ALL_LAYOUTS]


def dense(case, counts):
    """All results of one softmax in which query p has key c counts[p, c] times."""
    *leaves, d_out = (x.double().requires_grad_() for x in case.whole())
    q, k, v = leaves[0], *(x.repeat_interleave(case.heads // x.shape[1], dim=1) for x in leaves[1:])
    s = q @ k.mT * case.head_dim**-0.5
    weights = counts * (s - s.amax(dim=-1, keepdim=True).detach()).exp()
    l = weights.sum(dim=-1, keepdim=True)
    out = weights / l.masked_fill(l == 0, 1.0) @ v
    gradients = torch.autograd.grad(out, leaves, d_out)
    lse = (l.log() + s.amax(dim=-1, keepdim=True))[..., 0].detach()
    return {"out": out.detach(), "lse": lse, **dict(zip(("dq", "dk", "dv"), gradients, strict=True))}


def assert_same(found, expected):
    for name in expected:
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
        self.far, self.own = self.r != self.j, self.r == self.j
        self.zigzag, self.striped = (self.case.layout == layout for layout in ("zigzag", "striped"))
        self.past = self.c <= self.p
        every, W = replace(self.case, causal=False, window=None), self.w or S
        self.document = every.visible()
        self.beside = self.document & (self.c > self.p - W)  # what windows and documents show besides
        self.round = (self.r - self.j) % P

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
ALL_MASKS = [*ALL_LAYOUTS, *(replace(case, window=5) for case in ALL_LAYOUTS), *PACKED]
COUNTS = {  # the entry: its cases, and for each variant how often a query has a key
    "own_block_twice": (EVERY, lambda x: x.seen * (1 + x.own.int())),
    "own_block_skipped": ([FULL], lambda x: x.far),
    "never_called": (EVERY, lambda x: x.seen & x.own),
    "chunk_index_under_zigzag": (ALL_LAYOUTS, lambda x: torch.where(x.own, x.n <= x.i, x.j < x.r)),
    "striped_diagonal_kept": (ALL_LAYOUTS, lambda x: torch.where(x.striped & (x.j > x.r), x.n <= x.i, x.past)),
    "other_half_of_the_keys": (ALL_LAYOUTS, lambda x: torch.where(x.zigzag & (x.j < x.r), x.n >= x.C // 2, x.past)),
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
    "other_half_of_the_queries": (ALL_LAYOUTS, lambda x: torch.where(x.zigzag & (x.j > x.r), x.i < x.C // 2, x.past)),
    "striped_diagonal_lost": (ALL_LAYOUTS, lambda x: x.past & ~(x.striped & (x.j < x.r) & (x.n == x.i))),
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


# All others: their numbers, as they were when each stood beside a second definition ----------------------------------


RECORDED = Path(__file__).with_name("mistakes.json")
ASKED = [  # unequal in all that an entry may confuse
    replace(FULL, dtype=torch.bfloat16),
    Case(3, 18, True, "zigzag", heads=6, kv_heads=3, scale=0.3, batch=2, dtype=torch.float16),
    Case(3, 19, True, heads=8, kv_heads=8, sinks=True),
    Case(3, 18, True, "striped", heads=6, value_dim=6),
]


def number_of(case, change):
    """All results in one number: their sum, with other weights for each. None where the mistake cannot be computed."""
    try:
        results = compute(case, change(RIGHT))
    except (NotOnPaper, RuntimeError):  # shapes that do not fit
        return None
    flat = torch.cat([results[name].double().flatten() for name in sorted(results)]).nan_to_num(1e3, 2e3, -2e3)
    return round((flat * torch.arange(1.0, len(flat) + 1).sqrt().cos()).sum().item(), 9)


def numbers_of(name):
    return [[number_of(case, change) for case in ASKED] for change in CATALOGUE[name].variants]


@pytest.mark.parametrize("name", sorted({*CATALOGUE} - {*COUNTS}))
def test_an_entry_has_the_numbers_that_were_recorded(name):
    found, recorded = numbers_of(name), json.loads(RECORDED.read_text())[name]
    assert [[x is None for x in row] for row in found] == [[x is None for x in row] for row in recorded]
    for row, known in zip(found, recorded, strict=True):
        assert [x for x in row if x is not None] == pytest.approx([x for x in known if x is not None], 1e-7, 1e-7)


def test_every_line_has_its_entry():
    assert {name: len(row) - 1 for name, row in COUNTS.items()} == {n: len(CATALOGUE[n].variants) for n in COUNTS}
    assert {*json.loads(RECORDED.read_text())} == {*CATALOGUE} - {*COUNTS}


if __name__ == "__main__":
    rows = [f'"{name}": {json.dumps(numbers_of(name))}' for name in sorted({*CATALOGUE} - {*COUNTS})]
    RECORDED.write_text("{\n" + ",\n".join(rows) + "\n}\n")
