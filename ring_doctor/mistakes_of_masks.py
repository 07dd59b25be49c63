"""The catalogue, continued: masks that are wrong in a ring.

What a query sees depends on where in the sequence its token and the key stand, and so on the layout. A mistake replaces
the step `sees`: which keys of a block the queries of a rank see. Such a wrong step gets the right steps, the case, the
rank of the queries and the block of the keys: a tile (Cq, Ck).

Before: mistakes_of_travel.py. After: mistakes_of_other_ways.py.
Source: each entry names who had it, where that is public.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from ring_doctor.case import LAYOUTS, Case, positions
from ring_doctor.mistakes import Change, but, entry
from ring_doctor.paper_ring import NotOnPaper, Steps

Sees = Callable[[Steps, Case, int, int], Tensor]  # (Cq, Ck) bool


def right(steps: Steps, case: Case, rank: int, block: int) -> Tensor:
    return steps.sees(case, rank, block)


def whole(steps: Steps, case: Case, rank: int, block: int) -> Tensor:
    return torch.ones(len(case.positions(rank)), len(case.positions(block)), dtype=torch.bool)


def triangle(diagonal: int) -> Sees:
    """Query i sees the keys 0 to i + diagonal of every block."""
    return lambda *tile: whole(*tile).tril(diagonal)


def of_visible(at: Callable[[Case, int], Tensor]) -> Sees:
    """The right mask of a sequence in which the tokens of a rank stand at(case, rank)."""
    return lambda steps, case, r, j: case.visible()[at(case, r)][:, at(case, j)]


def by_positions(sees: Callable[[Tensor, Tensor], Tensor]) -> Sees:
    """`sees` gets the positions of the queries (Cq, 1) and of the keys (Ck,)."""
    return lambda steps, case, r, j: sees(case.positions(r)[:, None], case.positions(j))


def both(one: Sees, other: Sees) -> Sees:
    return lambda *tile: one(*tile) & other(*tile)


def own(sees: Sees, far: Sees = right) -> Sees:
    """One mask in the own block, and another in the blocks of other ranks."""
    return lambda steps, case, r, j: (sees if r == j else far)(steps, case, r, j)


def earlier(sees: Sees, later: Sees) -> Sees:
    """The blocks of other ranks only: one mask in those of earlier ranks, another in those of later ranks."""
    return own(right, lambda steps, case, r, j: (sees if j < r else later)(steps, case, r, j))


def met(sees: Sees) -> Sees:
    """In the blocks of which a right ring sees a pair."""
    return lambda steps, *tile: sees(steps, *tile) & steps.sees(*tile).any()


def in_layout(layout: str, sees: Sees, otherwise: Sees = right) -> Sees:
    return lambda steps, case, r, j: (sees if case.layout == layout else otherwise)(steps, case, r, j)


def of_case(change: Callable[[Case], Case]) -> Change:
    """The mask of another case."""
    return but(sees=lambda steps, case, r, j: steps.sees(change(case), r, j))


def in_causal(sees: Sees, *, only: bool = False) -> Change:
    """With this mask in causal cases, and the right mask in the others.

    Windows and documents hide keys besides. With `only` they do not: this mask is all that the kernel gets.
    """

    def mask(steps: Steps, case: Case, rank: int, block: int) -> Tensor:
        if not case.causal or only:
            return (sees if case.causal else right)(steps, case, rank, block)
        besides = right(steps, replace(case, causal=False, window=None), rank, block)
        if case.window is not None:
            besides = besides & (case.positions(block) > case.positions(rank)[:, None] - case.window)
        return sees(steps, case, rank, block) & besides

    return but(sees=mask)


def next_of_the_triangle(steps: Steps, case: Case, rank: int, block: int) -> Tensor:
    """Striped, a block of a later rank: query i + 1 sees the keys up to i + 1, without the last key."""
    if len(case.positions(rank)) == 1:
        return right(steps, case, rank, block)
    seen = whole(steps, case, rank, block).tril()
    seen[0], seen[:, -1] = False, False
    return seen


def without_a_key(at: int, of: Callable[[int, int], bool]) -> Sees:
    """No query of a rank sees the key number `at` of the blocks of(rank, block)."""

    def sees(steps: Steps, case: Case, rank: int, block: int) -> Tensor:
        seen = steps.sees(case, rank, block).clone()
        seen[:, at] &= not of(rank, block)
        return seen

    return sees


def exchanged_halves(case: Case, rank: int) -> Tensor:
    at = case.positions(rank)
    return at.roll(len(at) // 2) if case.layout == "zigzag" else at


def last_keys(steps: Steps, case: Case, rank: int, block: int) -> Tensor:
    keys = len(case.positions(block))
    return whole(steps, case, rank, block) & (torch.arange(keys) >= keys // 2)


def first_queries(steps: Steps, case: Case, rank: int, block: int) -> Tensor:
    rows = len(case.positions(rank))
    return whole(steps, case, rank, block) & (torch.arange(rows)[:, None] < rows // 2)


def in_place_of(layout: str, case: Case, rank: int, world_size: int | None = None) -> Tensor:
    """The positions of a rank in another layout, or of so many ranks. Raises NotOnPaper where the tokens do not fit."""
    try:
        return positions(layout, case.seq_len, rank, world_size or case.world_size)
    except ValueError as error:
        raise NotOnPaper from error


def whole_tiles(tile: int) -> Change:
    def sees(steps: Steps, case: Case, rank: int, block: int) -> Tensor:
        seen = steps.sees(case, rank, block)
        keys = seen.shape[1]
        return seen & (torch.arange(keys) < keys // tile * tile) if keys > tile else seen

    return but(sees=sees)


def other_window(more: int) -> Change:
    return of_case(lambda case: case if case.window is None else replace(case, window=max(1, case.window + more)))


def where_met(change: Change) -> Change:
    """The hops are those of the right mask, so no further block is met."""
    return but(sees=met(lambda steps, *tile: change(steps).sees(*tile)))


def no_window(case: Case) -> Case:
    return replace(case, window=None)


def fewer_hops(less: int) -> Change:
    def sees(steps: Steps, case: Case, rank: int, block: int) -> Tensor:
        seen = steps.sees(case, rank, block)
        if case.window is None or case.layout != "contiguous":
            return seen
        return seen & (rank - block <= (case.window - less) // len(case.positions(block)))

    return but(sees=sees)


def window_by_indices(*, upper_edge: bool) -> Change:
    """Each block of the past gets the band of the own block; without `upper_edge` it hides nothing above."""

    def sees(steps: Steps, case: Case, rank: int, block: int) -> Tensor:
        if case.window is None:
            return steps.sees(case, rank, block)
        band = whole(steps, case, rank, block).triu(1 - case.window)
        return (band.tril() if upper_edge else band) & steps.sees(no_window(case), rank, block)

    return but(sees=sees)


def documents_by_indices(*, tail_is_a_document: bool) -> Change:
    def sees(steps: Steps, case: Case, rank: int, block: int) -> Tensor:
        if case.documents is None:
            return steps.sees(case, rank, block)
        ends = torch.tensor(list(accumulate(n // case.world_size for n in case.documents)))
        rows, keys = whole(steps, case, rank, block).shape
        mine, theirs = (torch.searchsorted(ends, torch.arange(n), right=True) for n in (rows, keys))
        mine = mine[:, None]
        seen = (mine == theirs) & (tail_is_a_document | (mine < len(case.documents)))
        return seen & steps.sees(replace(case, documents=None), rank, block)

    return but(sees=sees)


strict, next_seen = triangle(-1), by_positions(lambda query, key: key <= query + 1)
own_window = own(right, lambda steps, case, r, j: steps.sees(no_window(case), r, j))
MASK = "the mask of a block: it follows from the positions of the rank's queries and of the block's keys"
FLAG = "the causal flag of each call of the kernel: which block is whole, a triangle, or left out"
BORDER = "the slices where a block is received or used: [1:], [:-1], or a boundary that is off by one"
LAYOUT = "where the mask is made: it must use the layout of the data. After an all-to-all: undo the layout first"
WINDOW = "what the ring makes of the window, in each block"
EDGE = "window or window - 1 keys before the own one"
DOCUMENTS = "the boundaries of the documents: in tokens of the whole sequence, or of a chunk?"

# fmt: off
MISTAKES = (
    entry("mask_forgotten", "The causal mask is forgotten: a query sees future keys too.", FLAG, 7,
          of_case(lambda case: replace(case, causal=False, window=None)), in_causal(whole)),
    entry("causal_per_block",
          "The causal flag is passed for every block, so each block is a triangle by its own indices.", FLAG, 7,
          *(in_causal(sees, only=only) for only in (True, False) for sees in (triangle(0), met(triangle(0))))),
    entry("only_own_masked", "Only the own block is masked. All other blocks are used whole, future blocks too.",
          FLAG, 7, in_causal(own(right, whole), only=True), in_causal(own(right, whole))),
    entry("own_block_unmasked", "The own block is not masked: a query sees the later tokens of its own chunk.",
          FLAG, 7, in_causal(own(whole))),
    entry("mask_inverted", "The causal mask is inverted: a query sees itself and the future.", MASK, 7,
          in_causal(by_positions(lambda query, key: key >= query)), in_causal(lambda *tile: ~right(*tile))),
    # In striped the blocks of earlier ranks are triangles too, and lose their diagonal. The blocks of later ranks are
    # triangles of one row less. The last variant takes a diagonal of these as well.
    entry("diagonal_hidden", "The causal mask is strict: a query does not see its own key.",
          "< instead of <= in the mask", 7, in_causal(both(right, by_positions(lambda query, key: key != query))),
          in_causal(own(strict, in_layout("striped", earlier(strict, right)))),
          in_causal(own(strict, in_layout("striped", earlier(strict, triangle(-2)))))),
    entry("strict_in_far_blocks",
          "Blocks of other ranks, and not the own block, have a strict mask by their indices: query i sees keys 0 to "
          "i - 1.", FLAG, 7, in_causal(own(right, strict)),
          in_causal(own(right, lambda steps, case, r, j: strict(steps, case, r, j) & (j < r))),
          in_causal(own(right, both(strict, right)))),
    entry("key_lost_at_a_border",
          "A key at the border of a block is lost: the first or the last key, of each block that arrives or of all "
          "blocks.", BORDER, 4, *(but(sees=without_a_key(at, lambda r, j: r != j)) for at in (-1, 0)),
          *(but(sees=without_a_key(at, lambda r, j: True)) for at in (-1, 0)),
          in_causal(without_a_key(-1, lambda r, j: j == r - 1))),  # of gathered keys: the past ends a key too early
    entry("causal_unasked", "A causal mask is used where full attention is asked for.", FLAG, 7,
          of_case(lambda case: replace(case, causal=True))),
    entry("next_token_seen", "A query sees the next token too.", "a mask off by one: triu(2) instead of triu(1)", 7,
          in_causal(next_seen),
          in_causal(own(triangle(1), in_layout("striped", earlier(triangle(1), next_of_the_triangle)))),
          in_causal(own(next_seen))),
    entry("chunk_index_under_zigzag",
          "The mask follows the numbers of the ranks, as in contiguous chunks, and the layout is another.", LAYOUT, 7,
          in_causal(own(triangle(0), lambda steps, case, r, j: whole(steps, case, r, j) & (j < r)))),
    entry("halves_swapped", "In zigzag the mask takes the two half chunks of a rank in exchanged order.", LAYOUT, 7,
          in_causal(of_visible(exchanged_halves))),
    entry("other_half_of_the_keys",
          "In zigzag a block of an earlier rank gives the last half of its keys instead of the first.", FLAG, 7,
          in_causal(in_layout("zigzag", earlier(last_keys, right)))),
    entry("other_half_of_the_queries",
          "In zigzag the first half of the queries meets a block of a later rank instead of the last.", FLAG, 7,
          in_causal(in_layout("zigzag", earlier(right, first_queries)))),
    entry("striped_diagonal_kept", "In striped query i sees key i of the blocks of later ranks too.", FLAG, 7,
          in_causal(in_layout("striped", earlier(right, triangle(0))))),
    entry("striped_diagonal_lost", "In striped query i does not see key i of the blocks of earlier ranks.", FLAG, 7,
          in_causal(in_layout("striped", earlier(strict, right)))),
    *(entry(f"positions_of_{layout}", f"The mask is made for the {layout} layout. The data are in another.", LAYOUT, 7,
            but(sees=of_visible(partial(in_place_of, layout)))) for layout in LAYOUTS),
    entry("last_tile_lost",
          "Of more keys than a tile of the kernel has, only whole tiles count: the last keys of each chunk are lost.",
          "the number of tiles: rounded up, with the last one masked", 8,
          *(whole_tiles(tile) for tile in (128, 64, 256))),
    entry("window_ignored", "The window is dropped without a word. Every query sees the whole past.", WINDOW, 13,
          of_case(no_window),
          wild=("accelerate PR #4177", "prime-rl PR #2828", "TransformerEngine PR #3527", "ring-flash-attention #35")),
    entry("window_one_more", "A query sees one key more than the window has.", EDGE, 13,
          other_window(1), where_met(other_window(1))),
    entry("window_one_less", "A query sees one key less than the window has.", EDGE, 13, other_window(-1)),
    entry("window_in_the_own_block_only",
          "The window is applied in the own block only: of earlier blocks every key is seen.", WINDOW, 13,
          but(sees=own_window), but(sees=met(own_window))),
    entry("window_hops_rounded_down",
          "The number of hops that a window needs is rounded down: the farthest chunk of the window is not met.",
          "how many chunks before the own one a window of W tokens reaches: (W - 1) / C, rounded up", 13,
          fewer_hops(1), fewer_hops(0)),  # (W - 1) / C or W / C hops, rounded down: this is right where C divides W
    entry("window_per_block", "The window is counted by the indices within each block, not in the sequence.",
          WINDOW, 13, window_by_indices(upper_edge=True), window_by_indices(upper_edge=False)),
    entry("documents_ignored", "The documents are ignored: tokens see tokens of other documents.", DOCUMENTS, 13,
          of_case(lambda case: replace(case, documents=None)),
          wild=("axolotl #3608", "trl PR #6843 and unsloth PR #3823, which forbid packing instead")),
    entry("documents_per_chunk",
          "The lengths of the documents, each divided by P, are taken as boundaries within every chunk.", DOCUMENTS, 13,
          documents_by_indices(tail_is_a_document=False), documents_by_indices(tail_is_a_document=True),
          wild=("TransformerEngine #1930",)),
    entry("documents_end_with_the_chunk",
          "Each chunk is taken for a sequence of its own: documents end where a rank's chunk ends.", DOCUMENTS, 13,
          but(sees=lambda steps, case, r, j: steps.sees(case, r, j) & (case.documents is None or r == j))),
)
# fmt: on
