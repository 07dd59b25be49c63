"""A conversation: each text is read over the cache of all before it, in parts, and the model answers after each.

    a part       each rank stores K and V of its tokens, and computes their queries over the keys of all ranks
    its ring     moves Q or K and V, whatever is fewer bytes: the first part of a text has no cache, later ones have
    the answer   one token at a time, as in generate.py
    next text    the last token of the answer, which nobody has computed yet, and then the text

A long prompt is read in parts because the activations of a part need less memory than those of the whole. The result
is that of one forward pass over all tokens.

Shapes: B texts of any lengths. A part has at most `part` tokens of each text. The layout deals them out, padded on the
right: (B, n) on a rank, with positions of their own in each text. A cache has (B, C) slots on a rank, in rising order
of positions, the empty ones last, as pass_q.py wants them; and after them slots for new tokens.

A first reader may skip this file. Its tests compare the answers with those of one process.

Before: pass_q.py, what travels. After: your own texts.
Source: Yang et al. 2025 (arXiv 2411.01783v3), sections 3.2 and 3.5, for a prefill over a cache.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ringlab.basics.chunks import as_autocast
from ringlab.models import expect
from ringlab.models.generate import EMPTY, SpreadCache, agree_on_prompts, read, write
from ringlab.models.pass_q import agree_on_places, cached_attention
from ringlab.models.transformer import Transformer
from ringlab.training.flash_ring import left_as_it_is


class GrowingCache(SpreadCache):
    """A SpreadCache that can read on. Give it to a Transformer as its attention, and to `reply`.

    `passed` says what travelled in each part read so far, "Q" or "KV".
    """

    passing = "auto"  # what shall travel, as in pass_q.py

    def begin(self, at: Tensor, room: int) -> None:
        """As that of a SpreadCache. A conversation that there was is over."""
        super().begin(at, room)
        self.passed: list[str] = []
        self.unread: Tensor | None = None  # the last token of the answers (B, 1), before the first answer (B, 0)

    def grow(self, at: Tensor, room: int) -> None:
        """Make slots for tokens `at` (B, n) on this rank, and for `room` new tokens. The order of slots may change.

        Raises ValueError on every rank unless the caches of all ranks then have each token of each text once.
        """
        slots = torch.cat([self.at, at], dim=1)
        self.order = slots.argsort(dim=1, stable=True)[:, : int((slots < EMPTY).sum(dim=1).max())]
        slots = slots.gather(1, self.order)
        self.places = agree_on_places(at, slots, self.group, causal=True, window=self.window)
        self.at = torch.cat([slots, at.new_full((len(at), room), EMPTY)], dim=1)
        self.room, self.stored, self.new, self.layer, self.agreed = room, 0, None, 0, []

    @left_as_it_is
    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, window: int | None = None, **options: Any) -> Tensor:
        """As that of a SpreadCache, for a part q (B, H, n, D), k and v (B, G, n, D), or for a new token."""
        expect(window == self.window, f"a layer has the window {window}", f"that of the cache, {self.window}")
        if self.new is not None:
            return super().attend(q, k, v, window=window, **options)
        q, k, v = as_autocast(q, k, v)
        if self.layer == len(self.blocks):
            self.blocks.append((k[:, :, :0], v[:, :, :0]))
        keys, values = (
            torch.cat([old, x], dim=2).gather(2, self.order[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))
            for old, x in zip(self.blocks[self.layer], (k, v), strict=True)
        )
        out, passed = cached_attention(q, keys, values, self.places, passing=self.passing, group=self.group, **options)
        self.passed += [passed] if self.layer == 0 else []
        self.blocks[self.layer] = F.pad(keys, (0, 0, 0, self.room)), F.pad(values, (0, 0, 0, self.room))
        self.layer += 1
        return out


@torch.no_grad()
def reply(
    model: Transformer,
    cache: GrowingCache,
    texts: Sequence[Sequence[int]],
    new_tokens: int,
    part: int = 2**62,
    passing: str = "auto",
) -> Tensor:
    """Read a text more of each of B conversations, in parts of `part` tokens, and write an answer: (B, new_tokens).

    Every rank of the cache's group calls this with the same weights and texts. The first call begins the conversations.
    `passing` is "Q", "KV" or "auto", as in pass_q.py. Raises ValueError on every rank, before anything is sent, as
    `agree_on_prompts` does; for a `part` below 1, for another number of texts than before, and for another `passing`.
    """
    agree_on_prompts(model, cache, texts, new_tokens, part=part, passing=passing)
    expect(part >= 1, f"part is {part!r}", "1 token or more")  # on every rank: they have agreed on it
    if cache.unread is None:
        nothing = torch.empty(len(texts), 0, dtype=torch.int64, device=next(model.parameters()).device)
        cache.begin(nothing, room=0)
        cache.unread = nothing
    begun = len(cache.unread)
    expect(len(texts) == begun, f"{len(texts)} texts for {begun} conversations", "one for each")
    cache.passing = passing
    whole = [[*unread, *text] for unread, text in zip(cache.unread.tolist(), texts, strict=True)]
    logits = read(model, cache, whole, new_tokens, part)
    answers = write(model, cache, logits, new_tokens)
    cache.unread, cache.lengths = answers[:, -1:], cache.lengths + new_tokens - 1
    return answers
