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

    $ python -m ringlab.models.conversation
    1. 42 and 25 tokens, read in parts of 16 at most; what travels: KV KV Q
    ok    the answers of one process: 182 195 203 238 14 228 and 97 31 4 4 191 78; slots on each rank: 12 14 12 12
    2. 4 and 9 tokens, read in parts of 16 at most; what travels: Q
    ok    the answers of one process: 76 28 16 164 10 4 and 110 0 19 138 31 78; slots on each rank: 14 17 15 14

Before: pass_q.py, what travels. After: your own texts.
Source: Yang et al. 2025 (arXiv 2411.01783v3), sections 3.2 and 3.5, for a prefill over a cache.
"""

import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from ringlab.basics.chunks import as_autocast
from ringlab.models.generate import EMPTY, SpreadCache, agree_on_prompts, alone, read, seeded, write
from ringlab.models.pass_q import WAYS, agree_on_places, cached_attention
from ringlab.models.transformer import Transformer
from ringlab.support.agreement import agree
from ringlab.support.processes import RankContext, launch
from ringlab.training.flash_ring import left_as_it_is
from ringlab.training.layouts import Layout


class GrowingCache(SpreadCache):
    """A SpreadCache that can read on. Give it to a Transformer as its attention, and to `reply`.

    `passing` is "Q", "KV" or "auto", as in pass_q.py. `passed` says what travelled in each part read so far.
    """

    def __init__(
        self,
        layout: str | Layout = "zigzag",
        window: int | None = None,
        group: ProcessGroup | None = None,
        passing: str = "auto",
    ) -> None:
        super().__init__(layout, window, group)
        self.passing = passing

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
        if window != self.window:
            raise ValueError(f"a layer has the window {window}; expected that of the cache, {self.window}")
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
    model: Transformer, cache: GrowingCache, texts: Sequence[Sequence[int]], new_tokens: int, part: int = 2**62
) -> Tensor:
    """Read a text more of each of B conversations, in parts of `part` tokens, and write an answer: (B, new_tokens).

    Every rank of the cache's group calls this with the same weights and texts. The first call begins the conversations.
    Raises ValueError on every rank, before anything is computed, as `agree_on_prompts` does; and for a `part` below 1,
    for another number of texts than before, and for a `passing` that is none.
    """

    def check() -> None:
        if type(part) is not int or part < 1:
            raise ValueError(f"part is {part!r}; expected 1 token or more")
        if cache.passing not in ("auto", *WAYS):
            raise ValueError(f"passing is {cache.passing!r}; expected 'Q', 'KV' or 'auto'")
        if cache.unread is not None and len(texts) != len(cache.unread):
            raise ValueError(f"{len(texts)} texts for {len(cache.unread)} conversations; expected one for each")

    agree(check, cache.group)
    agree_on_prompts(model, cache, texts, new_tokens, part=part, passing=cache.passing)
    if cache.unread is None:
        nothing = torch.empty(len(texts), 0, dtype=torch.int64, device=next(model.parameters()).device)
        cache.begin(nothing, room=0)
        cache.unread = nothing
    whole = [[*unread, *text] for unread, text in zip(cache.unread.tolist(), texts, strict=True)]
    logits = read(model, cache, whole, new_tokens, part)
    answers = write(model, cache, logits, new_tokens)
    cache.unread, cache.lengths = answers[:, -1:], cache.lengths + new_tokens - 1
    return answers


TEXTS = ((b"The queries go to the keys: they are few. ", b"A long prompt, in parts. "), (b"Why?", b"And then?"))
PART, NEW = 16, 6


def talk(context: RankContext) -> list[tuple[Tensor, list[str], int]]:
    """For each of TEXTS: the answers (B, NEW), what travelled in its parts, and how many slots this rank has."""
    cache = GrowingCache()
    model, replies = seeded(cache), []
    for texts in TEXTS:
        parts = len(cache.passed)
        answers = reply(model, cache, texts, NEW, part=PART)
        replies.append((answers, cache.passed[parts:], cache.at.shape[1]))
    return replies


def main() -> int:
    P, ok = 4, True
    model, said = seeded(F.scaled_dot_product_attention), [b"" for _ in TEXTS[0]]
    for i, (texts, of_ranks) in enumerate(zip(TEXTS, zip(*launch(talk, P), strict=True), strict=True)):
        said = [before + text for before, text in zip(said, texts, strict=True)]
        right = [alone(model, text, NEW) for text in said]
        same = all(answers.tolist() == right for answers, _, _ in of_ranks)
        counts, slots = " and ".join(str(len(text)) for text in texts), " ".join(str(n) for _, _, n in of_ranks)
        print(f"{i + 1}. {counts} tokens, read in parts of {PART} at most; what travels: {' '.join(of_ranks[0][1])}")
        words = " and ".join(" ".join(map(str, answer)) for answer in right)
        print(f"{'ok   ' if same else 'WRONG'} the answers of one process: {words}; slots on each rank: {slots}")
        said = [text + bytes(answer) for text, answer in zip(said, right, strict=True)]
        ok &= same
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
