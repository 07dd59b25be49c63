"""The catalogue, continued: masks that are wrong in a ring.

What a query sees depends on where in the sequence its token and the key stand, and so on the layout. A mistake replaces
the step `sees`: which keys of a block the queries of a rank see.

Before: mistakes_of_travel.py. After: mistakes_of_other_ways.py.
Source: each entry names who had it, where that is public.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial, wraps
from itertools import accumulate

import torch
from torch import Tensor

from ring_doctor.case import LAYOUTS, Case, positions
from ring_doctor.mistakes import Change, mistake, replaces, variant_of
from ring_doctor.paper_ring import NotOnPaper, Steps

MASK = "the mask of a block: it follows from the positions of the rank's queries and of the block's keys"
FLAG = "the causal flag of each call of the kernel: which block is whole, a triangle, or left out"

Mask = Callable[[Case, int, int], Tensor]


def _square(case: Case, rank: int, block: int) -> Tensor:
    """(Cq, Ck) bool, all True."""
    return torch.ones(len(case.positions(rank)), len(case.positions(block)), dtype=torch.bool)


def _queries(case: Case, rank: int) -> Tensor:
    """(Cq, 1): the positions of the queries. Those of the keys, case.positions(block), are (Ck,)."""
    return case.positions(rank)[:, None]


def _but_causal(steps: Steps, case: Case, rank: int, block: int) -> Tensor:
    """What the right mask shows without `causal`: the own document, and no key before the window."""
    seen = steps.sees(replace(case, causal=False, window=None), rank, block)
    return seen if case.window is None else seen & (case.positions(block) > _queries(case, rank) - case.window)


def _in_causal(steps: Steps, sees: Mask, *, only: bool = False) -> Steps:
    """With this mask in causal cases, and the right mask in the others.

    Windows and documents hide keys besides. With `only` they do not: this mask is all that the kernel gets.
    """

    def mask(case: Case, rank: int, block: int) -> Tensor:
        if not case.causal:
            return steps.sees(case, rank, block)
        seen = sees(case, rank, block)
        return seen if only else seen & _but_causal(steps, case, rank, block)

    return replace(steps, sees=mask)


def in_causal(wrong: Callable[[Steps, Case, int, int], Tensor]) -> Change:
    """`replaces("sees")` in causal cases only."""
    return wraps(wrong)(lambda steps: _in_causal(steps, partial(wrong, steps)))


@mistake("The causal mask is forgotten: a query sees future keys too.", look=FLAG, chapter=7)
def mask_forgotten(steps: Steps) -> Steps:
    return replace(steps, sees=lambda case, r, j: steps.sees(replace(case, causal=False, window=None), r, j))


@variant_of(mask_forgotten)
def mask_forgotten_but_not_the_window(steps: Steps) -> Steps:
    return _in_causal(steps, _square)


@mistake(
    "The causal flag is passed for every block, so each block is a triangle by its own indices.", look=FLAG, chapter=7
)
def causal_per_block(steps: Steps) -> Steps:
    return _causal_per_block(steps, skips=False, only=True)


def _causal_per_block(steps: Steps, *, skips: bool, only: bool) -> Steps:
    """`skips`: blocks that no query should see are left out."""

    def sees(case: Case, rank: int, block: int) -> Tensor:
        triangle = _square(case, rank, block).tril()
        return triangle & steps.sees(case, rank, block).any() if skips else triangle

    return _in_causal(steps, sees, only=only)


for _skips, _only in ((True, True), (False, False), (True, False)):
    variant_of(causal_per_block)(partial(_causal_per_block, skips=_skips, only=_only))


@mistake("Only the own block is masked. All other blocks are used whole, future blocks too.", look=FLAG, chapter=7)
def only_own_masked(steps: Steps) -> Steps:
    return _only_own_masked(steps, only=True)


@variant_of(only_own_masked)
def only_own_masked_but_by_windows_and_documents(steps: Steps) -> Steps:
    return _only_own_masked(steps, only=False)


def _only_own_masked(steps: Steps, *, only: bool) -> Steps:
    return _in_causal(steps, lambda case, r, j: steps.sees(case, r, j) if r == j else _square(case, r, j), only=only)


@mistake("The own block is not masked: a query sees the later tokens of its own chunk.", look=FLAG, chapter=7)
@in_causal
def own_block_unmasked(steps: Steps, case: Case, rank: int, block: int) -> Tensor:
    return _square(case, rank, block) if rank == block else steps.sees(case, rank, block)


@mistake("The causal mask is inverted: a query sees itself and the future.", look=MASK, chapter=7)
def mask_inverted(steps: Steps) -> Steps:
    return _in_causal(steps, lambda case, r, j: case.positions(j) >= _queries(case, r))


@variant_of(mask_inverted)
def hidden_and_seen_exchanged(steps: Steps) -> Steps:
    return _in_causal(steps, lambda case, r, j: ~steps.sees(case, r, j))


@mistake("The causal mask is strict: a query does not see its own key.", look="< instead of <= in the mask", chapter=7)
def diagonal_hidden(steps: Steps) -> Steps:
    return _in_causal(steps, lambda case, r, j: steps.sees(case, r, j) & (case.positions(j) != _queries(case, r)))


@variant_of(diagonal_hidden)
@in_causal
def diagonal_hidden_in_triangles(steps: Steps, case: Case, rank: int, block: int) -> Tensor:
    """In striped the blocks of earlier ranks are triangles too, and lose their diagonal."""

    strict = rank == block or (case.layout == "striped" and block < rank)
    return _square(case, rank, block).tril(-1) if strict else steps.sees(case, rank, block)


@variant_of(diagonal_hidden)
@in_causal
def diagonal_hidden_in_all_triangles(steps: Steps, case: Case, rank: int, block: int) -> Tensor:
    """In striped the blocks of later ranks are triangles of one row less, and lose a diagonal as well."""

    if rank == block or case.layout == "striped":
        return _square(case, rank, block).tril(-2 if block > rank else -1)
    return steps.sees(case, rank, block)


def _strict_in_far_blocks(steps: Steps, far: Mask) -> Steps:
    """Query i of a rank sees the keys 0 to i - 1 of another rank's block, where `far` shows the block at all."""

    def sees(case: Case, rank: int, block: int) -> Tensor:
        if rank == block:
            return steps.sees(case, rank, block)
        return _square(case, rank, block).tril(-1) & far(case, rank, block)

    return _in_causal(steps, sees)


@mistake(
    "Blocks of other ranks, and not the own block, have a strict mask by their indices: query i sees keys 0 to i - 1.",
    look=FLAG,
    chapter=7,
)
def strict_in_far_blocks(steps: Steps) -> Steps:
    return _strict_in_far_blocks(steps, _square)


@variant_of(strict_in_far_blocks)
def strict_in_earlier_blocks(steps: Steps) -> Steps:
    """Blocks of later ranks are left out."""
    return _strict_in_far_blocks(steps, lambda case, r, j: _square(case, r, j) & (j < r))


@variant_of(strict_in_far_blocks)
def strict_in_seen_pairs(steps: Steps) -> Steps:
    return _strict_in_far_blocks(steps, steps.sees)


BORDER = "the slices where a block is received or used: [1:], [:-1], or a boundary that is off by one"


def _without_a_key(steps: Steps, *, at: int, own_too: bool) -> Steps:
    """No query sees the key number `at` of a block, of the own block only with `own_too`."""

    def sees(case: Case, rank: int, block: int) -> Tensor:
        seen = steps.sees(case, rank, block).clone()
        seen[:, at] &= block == rank and not own_too
        return seen

    return replace(steps, sees=sees)


@mistake(
    "A key at the border of a block is lost: the first or the last key, of each block that arrives or of all blocks.",
    look=BORDER,
    chapter=4,
)
def key_lost_at_a_border(steps: Steps) -> Steps:
    return _without_a_key(steps, at=-1, own_too=False)


for _at, _own_too in ((0, False), (-1, True), (0, True)):
    variant_of(key_lost_at_a_border)(partial(_without_a_key, at=_at, own_too=_own_too))


@variant_of(key_lost_at_a_border)
@in_causal
def key_before_the_chunk_lost(steps: Steps, case: Case, rank: int, block: int) -> Tensor:
    """Of gathered keys: the past of a chunk ends a key too early."""
    seen = steps.sees(case, rank, block).clone()
    seen[:, -1] &= block != rank - 1
    return seen


@mistake("A causal mask is used where full attention is asked for.", look=FLAG, chapter=7)
@replaces("sees")
def causal_unasked(steps: Steps, case: Case, rank: int, block: int) -> Tensor:
    return steps.sees(replace(case, causal=True), rank, block)


@mistake("A query sees the next token too.", look="a mask off by one: triu(2) instead of triu(1)", chapter=7)
def next_token_seen(steps: Steps) -> Steps:
    return _in_causal(steps, _next_token_seen)


def _next_token_seen(case: Case, rank: int, block: int) -> Tensor:
    return case.positions(block) <= _queries(case, rank) + 1


@variant_of(next_token_seen)
@in_causal
def next_token_of_the_triangle_seen(steps: Steps, case: Case, rank: int, block: int) -> Tensor:
    """By the indices within the triangles that the kernel is called for."""

    if rank == block or (case.layout == "striped" and block < rank):
        return _square(case, rank, block).tril(1)
    if case.layout == "striped" and len(case.positions(rank)) > 1:
        # query i + 1 sees the keys up to i + 1, without the last key
        seen = _square(case, rank, block).tril()
        seen[0], seen[:, -1] = False, False
        return seen
    return steps.sees(case, rank, block)


@variant_of(next_token_seen)
def next_token_of_the_own_block_seen(steps: Steps) -> Steps:
    return _in_causal(steps, lambda case, r, j: (_next_token_seen if r == j else steps.sees)(case, r, j))


LAYOUT = "where the mask is made: it must use the layout of the data. After an all-to-all: undo the layout first"


@mistake(
    "The mask follows the numbers of the ranks, as in contiguous chunks, and the layout is another.",
    look=LAYOUT,
    chapter=7,
)
@in_causal
def chunk_index_under_zigzag(steps: Steps, case: Case, rank: int, block: int) -> Tensor:
    square = _square(case, rank, block)
    return square.tril() if rank == block else square & (block < rank)


@mistake("In zigzag the mask takes the two half chunks of a rank in exchanged order.", look=LAYOUT, chapter=7)
def halves_swapped(steps: Steps) -> Steps:
    def exchanged(case: Case, rank: int) -> Tensor:
        at = case.positions(rank)
        return at.roll(len(at) // 2) if case.layout == "zigzag" else at

    def sees(case: Case, rank: int, block: int) -> Tensor:
        return case.visible()[exchanged(case, rank)][:, exchanged(case, block)]

    return _in_causal(steps, sees)


@mistake(
    "In zigzag a block of an earlier rank gives the last half of its keys instead of the first.", look=FLAG, chapter=7
)
@in_causal
def other_half_of_the_keys(steps: Steps, case: Case, rank: int, block: int) -> Tensor:
    if case.layout != "zigzag" or block >= rank:
        return steps.sees(case, rank, block)
    return _square(case, rank, block) & (torch.arange(len(case.positions(block))) >= len(case.positions(block)) // 2)


@mistake(
    "In zigzag the first half of the queries meets a block of a later rank instead of the last.", look=FLAG, chapter=7
)
@in_causal
def other_half_of_the_queries(steps: Steps, case: Case, rank: int, block: int) -> Tensor:
    if case.layout != "zigzag" or block <= rank:
        return steps.sees(case, rank, block)
    rows = torch.arange(len(case.positions(rank)))[:, None] < len(case.positions(rank)) // 2
    return _square(case, rank, block) & rows


def _striped(steps: Steps, later: bool, diagonal: int) -> Steps:
    def sees(case: Case, rank: int, block: int) -> Tensor:
        if case.layout != "striped" or block == rank or (block > rank) != later:
            return steps.sees(case, rank, block)
        return _square(case, rank, block).tril(diagonal)

    return _in_causal(steps, sees)


@mistake("In striped query i sees key i of the blocks of later ranks too.", look=FLAG, chapter=7)
def striped_diagonal_kept(steps: Steps) -> Steps:
    return _striped(steps, later=True, diagonal=0)


@mistake("In striped query i does not see key i of the blocks of earlier ranks.", look=FLAG, chapter=7)
def striped_diagonal_lost(steps: Steps) -> Steps:
    return _striped(steps, later=False, diagonal=-1)


def _positions_of(layout: str, steps: Steps, case: Case, rank: int, block: int) -> Tensor:
    """The data are in one layout, and the mask is made for another layout."""
    try:
        queries, keys = (positions(layout, case.seq_len, r, case.world_size) for r in (rank, block))
    except ValueError as error:  # the tokens do not fit that layout
        raise NotOnPaper from error
    return case.visible()[queries][:, keys]


for _layout in LAYOUTS:
    _change = replaces("sees")(partial(_positions_of, _layout))
    _change.__name__ = f"positions_of_{_layout}"
    mistake(f"The mask is made for the {_layout} layout. The data are in another.", look=LAYOUT, chapter=7)(_change)


def _last_tile_lost(steps: Steps, *, tile: int) -> Steps:
    def sees(case: Case, rank: int, block: int) -> Tensor:
        seen = steps.sees(case, rank, block)
        keys = seen.shape[1]
        return seen & (torch.arange(keys) < keys // tile * tile) if keys > tile else seen

    return replace(steps, sees=sees)


@mistake(
    "Of more keys than a tile of the kernel has, only whole tiles count: the last keys of each chunk are lost.",
    look="the number of tiles: rounded up, with the last one masked",
    chapter=8,
)
def last_tile_lost(steps: Steps) -> Steps:
    return _last_tile_lost(steps, tile=128)


for _tile in (64, 256):
    variant_of(last_tile_lost)(partial(_last_tile_lost, tile=_tile))


# Windows and documents ---------------------------------------------------------------------------------------------

WINDOW = "what the ring makes of the window, in each block"
DOCUMENTS = "the boundaries of the documents: in tokens of the whole sequence, or of a chunk?"


@mistake(
    "The window is dropped without a word. Every query sees the whole past.",
    look=WINDOW,
    chapter=15,
    wild=("accelerate PR #4177", "prime-rl PR #2828", "TransformerEngine PR #3527", "ring-flash-attention #35"),
)
def window_ignored(steps: Steps) -> Steps:
    return replace(steps, sees=lambda case, r, j: steps.sees(replace(case, window=None), r, j))


def _other_window(steps: Steps, more: int) -> Steps:
    def sees(case: Case, rank: int, block: int) -> Tensor:
        window = None if case.window is None else max(1, case.window + more)
        return steps.sees(replace(case, window=window), rank, block)

    return replace(steps, sees=sees)


@mistake(
    "A query sees one key more than the window has.", look="window or window - 1 keys before the own one", chapter=15
)
def window_one_more(steps: Steps) -> Steps:
    return _other_window(steps, 1)


@mistake(
    "A query sees one key less than the window has.", look="window or window - 1 keys before the own one", chapter=15
)
def window_one_less(steps: Steps) -> Steps:
    return _other_window(steps, -1)


@variant_of(window_one_more)
def window_one_more_in_seen_blocks(steps: Steps) -> Steps:
    """The hops are those of the right window, so no further block is met."""
    wider = _other_window(steps, 1)
    return _where_seen(steps, wider.sees)


def _where_seen(steps: Steps, sees: Mask) -> Steps:
    """Another mask, in the blocks of which a right ring sees a pair."""

    def mask(case: Case, rank: int, block: int) -> Tensor:
        return sees(case, rank, block) & steps.sees(case, rank, block).any()

    return replace(steps, sees=mask)


@mistake("The window is applied in the own block only: of earlier blocks every key is seen.", look=WINDOW, chapter=15)
def window_in_the_own_block_only(steps: Steps) -> Steps:
    def sees(case: Case, rank: int, block: int) -> Tensor:
        return steps.sees(case if rank == block else replace(case, window=None), rank, block)

    return replace(steps, sees=sees)


@variant_of(window_in_the_own_block_only)
def window_in_the_own_block_only_where_seen(steps: Steps) -> Steps:
    """Blocks that lie before the window are left out."""
    return _where_seen(steps, window_in_the_own_block_only(steps).sees)


@mistake(
    "The number of hops that a window needs is rounded down: the farthest chunk of the window is not met.",
    look="how many chunks before the own one a window of W tokens reaches: (W - 1) / C, rounded up",
    chapter=15,
)
def window_hops_rounded_down(steps: Steps) -> Steps:
    return _fewer_hops(steps, less=1)


@variant_of(window_hops_rounded_down)
def window_in_whole_chunks(steps: Steps) -> Steps:
    """W / C hops, rounded down: right where C divides W."""
    return _fewer_hops(steps, less=0)


def _fewer_hops(steps: Steps, *, less: int) -> Steps:
    def sees(case: Case, rank: int, block: int) -> Tensor:
        seen = steps.sees(case, rank, block)
        if case.window is None or case.layout != "contiguous":
            return seen
        return seen & (rank - block <= (case.window - less) // len(case.positions(block)))

    return replace(steps, sees=sees)


@mistake("The window is counted by the indices within each block, not in the sequence.", look=WINDOW, chapter=15)
def window_per_block(steps: Steps) -> Steps:
    """Each block of the past gets the band of the own block."""
    return _window_per_block(steps, upper_edge=True)


@variant_of(window_per_block)
def window_per_block_without_causal(steps: Steps) -> Steps:
    """In blocks of the past the band has no upper edge: the kernel is called with the window and without causal."""
    return _window_per_block(steps, upper_edge=False)


def _window_per_block(steps: Steps, *, upper_edge: bool) -> Steps:
    def sees(case: Case, rank: int, block: int) -> Tensor:
        if case.window is None:
            return steps.sees(case, rank, block)
        band = _square(case, rank, block).triu(1 - case.window)
        return (band.tril() if upper_edge else band) & steps.sees(replace(case, window=None), rank, block)

    return replace(steps, sees=sees)


@mistake(
    "The documents are ignored: tokens see tokens of other documents.",
    look=DOCUMENTS,
    chapter=15,
    wild=("axolotl #3608", "trl PR #6843 and unsloth PR #3823, which forbid packing instead"),
)
def documents_ignored(steps: Steps) -> Steps:
    return replace(steps, sees=lambda case, r, j: steps.sees(replace(case, documents=None), r, j))


@mistake(
    "The lengths of the documents, each divided by P, are taken as boundaries within every chunk.",
    look=DOCUMENTS,
    chapter=15,
    wild=("TransformerEngine #1930",),
)
def documents_per_chunk(steps: Steps) -> Steps:
    return _documents_per_chunk(steps, tail_is_a_document=False)


@variant_of(documents_per_chunk)
def documents_per_chunk_and_the_tail_is_one(steps: Steps) -> Steps:
    return _documents_per_chunk(steps, tail_is_a_document=True)


def _documents_per_chunk(steps: Steps, *, tail_is_a_document: bool) -> Steps:
    def sees(case: Case, rank: int, block: int) -> Tensor:
        if case.documents is None:
            return steps.sees(case, rank, block)
        ends = torch.tensor(list(accumulate(n // case.world_size for n in case.documents)))
        rows, keys = _square(case, rank, block).shape
        mine, theirs = (torch.searchsorted(ends, torch.arange(n), right=True) for n in (rows, keys))
        mine = mine[:, None]
        seen = (mine == theirs) & (tail_is_a_document | (mine < len(case.documents)))
        return seen & steps.sees(replace(case, documents=None), rank, block)

    return replace(steps, sees=sees)


@mistake(
    "Each chunk is taken for a sequence of its own: documents end where a rank's chunk ends.",
    look=DOCUMENTS,
    chapter=15,
)
@replaces("sees")
def documents_end_with_the_chunk(steps: Steps, case: Case, rank: int, block: int) -> Tensor:
    seen = steps.sees(case, rank, block)
    return seen if case.documents is None or rank == block else torch.zeros_like(seen)
