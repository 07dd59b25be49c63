"""Rings whose mask is another one than it should be, and rings that lose rows."""

from itertools import accumulate

import torch

from ringlab.training.flash_ring import ring_flash_attention
from tests.sick.plain_ring import PlainRing
from tests.sick.ring import CAUSAL, MASKED, SickRing
from tests.wrong_rings import FLASH as WRONG


def local(rows, keys, diagonal=0):
    """A triangle of local indices: query i sees the keys 0 ... i + diagonal."""
    return torch.ones(rows, keys, dtype=torch.bool).tril(diagonal)


class PerBlock(PlainRing):
    def seen(self, block):
        rows, keys = self.lengths[self.rank], self.lengths[block]
        return local(rows, keys) if self.causal else super().seen(block)


class HalvesSwapped(PlainRing):
    def place(self, rank):
        early, late = super().place(rank).chunk(2)
        return torch.cat([late, early])


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


def striped(case):
    return case.causal and case.layout == "striped" and case.world_size > 1


def windowed(case):
    return case.window is not None and case.window < case.seq_len


def window_per_block_shows(case):
    """In a later block local index 0 sees all keys of an earlier one, however far away."""
    return windowed(case) and case.world_size > 1


def documents(case):
    return case.documents is not None and len(case.documents) > 1


def cut_documents(case):
    return documents(case) and case.world_size > 1


def striped_or_zigzag(case):
    return zigzag(case) or striped(case)


def plain(ring, shows, takes=CAUSAL, **facts):
    return SickRing(ring.attention, shows=shows, takes=takes, **facts)


def flash(patch, shows, **facts):
    return SickRing(ring_flash_attention, patch, shows, CAUSAL, **facts)


IN_ZIGZAG, IN_STRIPED = {"layouts": ("zigzag",)}, {"layouts": ("striped",)}
BY_RANK = {"equals": ("chunk_index_under_zigzag", "positions_of_contiguous")}
TRIANGLE = {**IN_STRIPED, "equals": ("causal_per_block",)}
SICK = {
    "causal_per_block": plain(PerBlock, blocks),
    "next_token_seen/triangles": flash(WRONG["the_next_token_seen"], causal),
    "diagonal_hidden/triangles": flash(WRONG["the_diagonal_hidden"], causal),
    "chunk_index_under_zigzag": flash(WRONG["contiguous_slices"], striped_or_zigzag, **BY_RANK),
    "halves_swapped": plain(HalvesSwapped, causal, **IN_ZIGZAG),
    "other_half_of_the_keys": flash(WRONG["last_half_of_the_keys"], zigzag, **IN_ZIGZAG),
    "other_half_of_the_queries": flash(WRONG["first_half_of_the_queries"], zigzag, **IN_ZIGZAG),
    "striped_diagonal_kept": flash(WRONG["first_query_kept"], striped, **TRIANGLE),
    "window_ignored": SickRing(window_changed(None), shows=windowed, takes=MASKED),
    "window_per_block": plain(WindowPerBlock, window_per_block_shows, MASKED),
    "window_one_more": SickRing(window_changed(1), shows=windowed, takes=MASKED),
    "window_one_less": SickRing(window_changed(-1), shows=lambda case: (case.window or 1) > 1, takes=MASKED),
    "documents_ignored": SickRing(documents_ignored, shows=documents, takes=MASKED),
    "documents_per_chunk": plain(DocumentsPerChunk, cut_documents, MASKED),
    "documents_per_chunk/tail_counts": plain(TailOfTheChunkCounts, cut_documents, MASKED),
    "nan_of_unseen_rows": plain(NaNOfUnseenRows, striped_or_zigzag),
}
