"""Rings whose mask is another one than it should be, and rings that lose rows."""

from itertools import accumulate

import torch

from ringlab.training.flash_ring import ring_flash_attention
from ringlab.training.layouts import positions
from tests.sick.plain_ring import PlainRing
from tests.sick.ring import CAUSAL, MASKED, SickRing, always, from_2
from tests.wrong_flash_rings import WRONG


def local(rows, keys, diagonal=0):
    """A triangle of local indices: query i sees the keys 0 ... i + diagonal."""
    return torch.ones(rows, keys, dtype=torch.bool).tril(diagonal)


class Forgotten(PlainRing):
    def visible(self, q_at, k_at):
        return torch.ones(q_at.shape[0], k_at.shape[1], dtype=torch.bool)


class PerBlock(PlainRing):
    def seen(self, block):
        rows, keys = self.lengths[self.rank], self.lengths[block]
        return local(rows, keys) if self.causal else super().seen(block)


class OnlyOwnMasked(PlainRing):
    def seen(self, block):
        return super().seen(block) | (block != self.rank)


class PerSeenBlock(PerBlock):
    """Blocks of later ranks are left out, as in contiguous chunks."""

    def seen(self, block):
        return super().seen(block) & (PlainRing.seen(self, block).any() or not self.causal)


def beside_windows(ring):
    """The ring with its causal mask, and windows and documents that are masked rightly besides."""

    class Beside(ring):
        def seen(self, block):
            (q_at, k_at), window, documents = (self.place(r) for r in (self.rank, block)), self.window, self.documents
            self.window = self.documents = None
            seen = super().seen(block)
            self.window, self.documents, causal, self.causal = window, documents, self.causal, False
            seen = seen & PlainRing.visible(self, q_at[:, None], k_at[None])
            self.causal = causal
            return seen

    return Beside


class KeyLost(PlainRing):
    """`[:-1]`, or `[1:]`, where a block is received."""

    at, own_too = -1, False

    def seen(self, block):
        seen = super().seen(block)
        seen[:, self.at] &= block == self.rank and not self.own_too
        return seen


class FirstKeyLost(KeyLost):
    at = 0


class OwnKeyLostToo(KeyLost):
    own_too = True


class StrictInFarBlocks(PlainRing):
    def seen(self, block):
        seen = super().seen(block)
        return local(*seen.shape, -1) & self.far(block, seen) if self.causal and block != self.rank else seen

    def far(self, block, seen):
        return torch.ones_like(seen)


class StrictInEarlierBlocks(StrictInFarBlocks):
    def far(self, block, seen):
        return torch.full_like(seen, block < self.rank)


class StrictInSeenPairs(StrictInFarBlocks):
    def far(self, block, seen):
        return seen


class Inverted(PlainRing):
    def visible(self, q_at, k_at):
        return (k_at > q_at) if self.causal else super().visible(q_at, k_at)


class Flipped(PlainRing):
    def visible(self, q_at, k_at):
        return (k_at >= q_at) if self.causal else super().visible(q_at, k_at)


class DiagonalHidden(PlainRing):
    def visible(self, q_at, k_at):
        return super().visible(q_at, k_at) & ((k_at != q_at) | (not self.causal))


class NextTokenSeen(PlainRing):
    def visible(self, q_at, k_at):
        return super().visible(q_at, k_at) | (k_at == q_at + 1)


class ChunkIndex(PlainRing):
    def seen(self, block):
        if not self.causal or block == self.rank:
            return super().seen(block)
        return torch.full((self.lengths[self.rank], self.lengths[block]), block < self.rank)


class OwnBlockUnmasked(PlainRing):
    def seen(self, block):
        return super().seen(block) | (block == self.rank)


class KeyBeforeTheChunkLost(PlainRing):
    def seen(self, block):
        seen = super().seen(block)
        seen[:, -1] &= not self.causal or block != self.rank - 1
        return seen


class CausalUnasked(PlainRing):
    def visible(self, q_at, k_at):
        return super().visible(q_at, k_at) & (k_at <= q_at)


class OneKeyMoreWhereSeen(PlainRing):
    def seen(self, block):
        seen = super().seen(block)
        if self.window is None or not seen.any():
            return seen
        self.window += 1
        wider = super().seen(block)
        self.window -= 1
        return wider


class WindowAtHome(PlainRing):
    far = True  # blocks before the window too

    def seen(self, block):
        seen = super().seen(block)
        if block == self.rank or not (self.far or seen.any()):
            return seen
        window, self.window = self.window, None
        seen = super().seen(block)
        self.window = window
        return seen


class WindowAtHomeWhereSeen(WindowAtHome):
    far = False


class FewerHops(PlainRing):
    less = 1

    def seen(self, block):
        seen = super().seen(block)
        reach = None if self.window is None else (self.window - self.less) // self.lengths[block]
        return seen if reach is None else seen & (self.rank - block <= reach)


class HopsOfWholeChunks(FewerHops):
    less = 0


class LastTileLost(PlainRing):
    def seen(self, block):
        keys = self.lengths[block]
        return super().seen(block) & ((torch.arange(keys) < keys // 128 * 128) | (keys < 128))


class HalvesSwapped(PlainRing):
    def place(self, rank):
        early, late = super().place(rank).chunk(2)
        return torch.cat([late, early])


class OtherHalfOfTheKeys(PlainRing):
    def seen(self, block):
        seen = super().seen(block)
        return seen.flip(1) if self.causal and block < self.rank else seen


class OtherHalfOfTheQueries(PlainRing):
    def seen(self, block):
        seen = super().seen(block)
        return seen.flip(0) if self.causal and block > self.rank else seen


class StripedDiagonalKept(PlainRing):
    def seen(self, block):
        return local(*super().seen(block).shape) if self.causal and block > self.rank else super().seen(block)


class StripedDiagonalLost(PlainRing):
    def seen(self, block):
        return local(*super().seen(block).shape, -1) if self.causal and block < self.rank else super().seen(block)


def positions_of(layout):
    class Elsewhere(PlainRing):
        def place(self, rank):
            return positions(layout, self.S, rank, self.P)

    return Elsewhere


class WindowPerBlock(PlainRing):
    def seen(self, block):
        window, self.window = self.window, None
        seen = super().seen(block)
        self.window = window
        i = torch.arange(seen.shape[0])[:, None]
        return seen if window is None else seen & (i - torch.arange(seen.shape[1]) < window)


def window_changed(by):
    """The flash ring with a window that is larger by so many tokens; None: no window."""

    def attention(q, k, v, *, window=None, **options):
        window = None if window is None or by is None else max(1, window + by)
        return ring_flash_attention(q, k, v, window=window, **options)

    return attention


def documents_ignored(q, k, v, *, documents=None, **options):
    return ring_flash_attention(q, k, v, **options)


class DocumentsPerChunk(PlainRing):
    """Local document numbers, by boundaries at length // P. A token past the last boundary is of no document."""

    tail_counts = False

    def seen(self, block):
        documents, self.documents = self.documents, None
        seen = super().seen(block)
        self.documents = documents
        if documents is None:
            return seen
        ends = torch.tensor(list(accumulate(length // self.P for length in documents)))
        rows, keys = (torch.searchsorted(ends, torch.arange(n), right=True) for n in seen.shape)
        return seen & (rows[:, None] == keys) & (self.tail_counts or keys < len(documents))


class TailOfTheChunkCounts(DocumentsPerChunk):
    """A token past the last boundary is of one more document."""

    tail_counts = True


class DocumentsEndWithTheChunk(PlainRing):
    def seen(self, block):
        return super().seen(block) & (self.documents is None or block == self.rank)


class TailLost(PlainRing):
    def visible(self, q_at, k_at):
        kept = self.S - self.S % self.P
        return super().visible(q_at, k_at) & (q_at < kept) & (k_at < kept)


class NaNOfUnseenRows(PlainRing):
    def attend(self, q, k, v, seen):
        out, lse = super().attend(q, k, v, seen)
        if seen.any():
            out = out.masked_fill(~seen.any(dim=-1)[:, None], torch.nan)
        return out, lse


def causal(case):
    return case.causal


def blocks(case):
    return case.causal and case.world_size > 1


def zigzag(case):
    return case.causal and case.layout == "zigzag" and case.world_size > 1


def several_tokens(case):
    return case.causal and not case.one_token_each


def uncausal(case):
    return not case.causal and case.seq_len > 1


def window_of_pairs(case):
    return windowed(case) and not case.one_token_each


def window_cut_short(less):
    def shows(case):
        C = len(case.positions(0))
        return windowed(case) and (case.window - less) // C < min(case.world_size - 1, -(-(case.window - 1) // C))

    return shows


def more_than_a_tile(case):
    return len(case.positions(0)) > 128


def striped(case):
    return case.causal and case.layout == "striped" and case.world_size > 1


def other_positions(layout):
    return lambda case: case.causal and case.world_size > 1 and case.layout != layout


def windowed(case):
    return case.window is not None and case.window < case.seq_len


def window_per_block_shows(case):
    """In a later block local index 0 sees all keys of an earlier one, however far away."""
    return windowed(case) and case.world_size > 1


def documents(case):
    return case.documents is not None and len(case.documents) > 1


def cut_documents(case):
    return documents(case) and case.world_size > 1


def tail(case):
    return case.seq_len % case.world_size > 0


def striped_or_zigzag(case):
    return zigzag(case) or striped(case)


def plain(ring, shows, takes=CAUSAL, **facts):
    return SickRing(ring.attention, shows=shows, takes=takes, **facts)


def flash(patch, shows, **facts):
    return SickRing(ring_flash_attention, patch, shows, CAUSAL, **facts)


IN_ZIGZAG, IN_STRIPED = {"layouts": ("zigzag",)}, {"layouts": ("striped",)}
BY_RANK = {"equals": ("chunk_index_under_zigzag", "positions_of_contiguous")}
EQUAL = {"equal_chunks": True}
TRIANGLE = {**IN_STRIPED, "equals": ("causal_per_block",)}
SICK = {
    "mask_forgotten": plain(Forgotten, causal),
    "causal_per_block": plain(PerBlock, blocks),
    "causal_per_block/seen_blocks": plain(PerSeenBlock, blocks),
    "causal_per_block/windows": plain(beside_windows(PerBlock), blocks, MASKED),
    "only_own_masked": plain(OnlyOwnMasked, blocks),
    "only_own_masked/windows": plain(beside_windows(OnlyOwnMasked), blocks, MASKED),
    "key_lost_at_a_border": plain(KeyLost, from_2),
    "key_lost_at_a_border/first": plain(FirstKeyLost, from_2),
    "key_lost_at_a_border/own_too": plain(OwnKeyLostToo, always),
    "strict_in_far_blocks": plain(StrictInFarBlocks, blocks),
    "strict_in_far_blocks/windows": plain(beside_windows(StrictInFarBlocks), blocks, MASKED),
    "strict_in_far_blocks/earlier": plain(StrictInEarlierBlocks, blocks),
    "strict_in_far_blocks/seen_pairs": plain(StrictInSeenPairs, blocks),
    "mask_forgotten/windows": plain(beside_windows(Forgotten), causal, MASKED),
    "key_lost_at_a_border/before_the_chunk": plain(KeyBeforeTheChunkLost, blocks, layouts=("contiguous",)),
    "causal_unasked": plain(CausalUnasked, uncausal),
    "own_block_unmasked": plain(OwnBlockUnmasked, several_tokens),
    "last_tile_lost": plain(LastTileLost, more_than_a_tile, in_xray=False),
    "mask_inverted": plain(Inverted, causal),
    "mask_inverted/flipped": plain(Flipped, causal),
    "mask_inverted/windows": plain(beside_windows(Flipped), causal, MASKED),
    "diagonal_hidden": plain(DiagonalHidden, causal, MASKED),
    "next_token_seen": plain(NextTokenSeen, causal),
    "next_token_seen/windows": plain(beside_windows(NextTokenSeen), causal, MASKED),
    "next_token_seen/triangles": flash(WRONG["the_next_token_seen"], causal),
    "diagonal_hidden/triangles": flash(WRONG["the_diagonal_hidden"], causal),
    "chunk_index_under_zigzag": flash(WRONG["contiguous_slices"], striped_or_zigzag, **BY_RANK),
    "chunk_index_under_zigzag/plain": plain(ChunkIndex, striped_or_zigzag, **BY_RANK),
    "halves_swapped": plain(HalvesSwapped, causal, **IN_ZIGZAG),
    "other_half_of_the_keys": flash(WRONG["last_half_of_the_keys"], zigzag, **IN_ZIGZAG),
    "other_half_of_the_keys/plain": plain(OtherHalfOfTheKeys, zigzag, **IN_ZIGZAG),
    "other_half_of_the_queries": flash(WRONG["first_half_of_the_queries"], zigzag, **IN_ZIGZAG),
    "other_half_of_the_queries/plain": plain(OtherHalfOfTheQueries, zigzag, **IN_ZIGZAG),
    "striped_diagonal_kept": flash(WRONG["first_query_kept"], striped, **TRIANGLE),
    "striped_diagonal_kept/plain": plain(StripedDiagonalKept, striped, **TRIANGLE),
    "striped_diagonal_lost": plain(StripedDiagonalLost, striped, **IN_STRIPED, equals=("strict_in_far_blocks",)),
    "positions_of_contiguous": plain(positions_of("contiguous"), other_positions("contiguous"), **EQUAL, **BY_RANK),
    "positions_of_zigzag": plain(positions_of("zigzag"), other_positions("zigzag"), **EQUAL),
    "positions_of_striped": plain(positions_of("striped"), other_positions("striped"), **EQUAL),
    "window_ignored": SickRing(window_changed(None), shows=windowed, takes=MASKED),
    "window_per_block": plain(WindowPerBlock, window_per_block_shows, MASKED),
    "window_one_more": SickRing(window_changed(1), shows=windowed, takes=MASKED),
    "window_one_more/where_seen": plain(OneKeyMoreWhereSeen, window_of_pairs, MASKED),
    "window_in_the_own_block_only": plain(WindowAtHome, window_per_block_shows, MASKED),
    "window_in_the_own_block_only/where_seen": plain(WindowAtHomeWhereSeen, window_per_block_shows, MASKED),
    "window_hops_rounded_down": plain(FewerHops, window_cut_short(1), MASKED, layouts=("contiguous",)),
    "window_hops_rounded_down/whole_chunks": plain(
        HopsOfWholeChunks, window_cut_short(0), MASKED, layouts=("contiguous",)
    ),
    "window_one_less": SickRing(window_changed(-1), shows=lambda case: (case.window or 1) > 1, takes=MASKED),
    "documents_ignored": SickRing(documents_ignored, shows=documents, takes=MASKED),
    "documents_per_chunk": plain(DocumentsPerChunk, cut_documents, MASKED),
    "documents_per_chunk/tail_counts": plain(TailOfTheChunkCounts, cut_documents, MASKED),
    "documents_end_with_the_chunk": plain(DocumentsEndWithTheChunk, cut_documents, MASKED),
    "tail_lost": plain(TailLost, tail),
    "nan_of_unseen_rows": plain(NaNOfUnseenRows, striped_or_zigzag),
}
