"""Pass-Q: a few new tokens over a long cache. Their queries go round the ring, and partial results come home.

    round t     rank r has Q_j in hand, j = (r - t) mod P:      out_j, lse_j = attention(Q_j, K and V of rank r)
                meanwhile Q_j goes on to rank r + 1
    home        one all-to-all: rank r sends out_j and lse_j to rank j, for every j
    at home     rank r merges P partial results of its queries

The ring of training sends K and V (pass-KV), as large as the whole context. The next question of a conversation is a
few tokens over a long cache, so its queries are less to send: `numbers_sent` counts both. In pass-Q each
rank has all new queries in hand, one block after the other. So its work depends only on how many keys it keeps.

Shapes: rank r has T_r new tokens and keeps S_r keys, its new tokens' keys among them. Any of these may be 0, and they
may differ from rank to rank. q and out (B, H, T_r, D), k (B, G, S_r, D), v (B, G, S_r, Dv). `at` (B, T_r) and
`keys_at` (B, S_r) are positions in each text of the batch, int64, rising.
With T and S tokens on all ranks, a rank sends on average (P-1)/P · B·H·T·D numbers of Q, in q's dtype, and (P-1)/P ·
B·H·T·(Dv+1) of partial results, in float32 at least. Pass-KV sends (P-1)/P · B·G·S·(D+Dv).

A conversation reads each text over the cache of all before it, in parts, and answers after each (`reply`). A part has
no more than so many tokens of each text, because its activations need less memory than those of the whole. The result
is that of one forward pass over all tokens. Slots are in rising order of positions, the empty ones last.

A first reader may skip this file. Its tests compare attention and answers with those of one process.
Before: generate.py, one new token. After: your own texts.
Source: Yang et al. 2025 (arXiv 2411.01783v3), section 3.5: algorithm 2 is pass-KV, algorithm 3 pass-Q; 3.2, appendix B.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from ringlab.basics.chunks import agree_on_chunks, check_grouped_chunks, needs_gradients
from ringlab.models.generate import EMPTY, SpreadCache, agree_on_prompts, read, write
from ringlab.models.transformer import Transformer
from ringlab.ring.flash_ring import keys_of, merge_into, nothing_seen, queries_of, reversed_rows
from ringlab.ring.fused_block import fused_forward
from ringlab.ring.masks import Mask
from ringlab.ring.overlap import arriving_blocks
from ringlab.ring.partition import BlockSlice, cut, kept
from ringlab.ring.schedule import check_sinks, check_softcap
from ringlab.support.agreement import agree_same, members, one_pass
from ringlab.support.expect import expect
from ringlab.ways.all_to_all import swap

Pieces = tuple[tuple[BlockSlice, ...], ...]  # of each text
Partial = tuple[Tensor, Tensor]  # out (B, H, T, Dv) and lse (B, H, T) of T queries, float32 at least
Attend = Callable[[Tensor, Tensor, Tensor, Pieces], Partial]
Group = ProcessGroup | None


@dataclass(frozen=True, eq=False)
class Places:
    """Which tokens are where, and who sees whom. `agree_on_places` makes it, once for all layers of a model.

    On each rank: the positions of its new tokens (B, T_r) and of its keys (B, S_r), int64, rising. The position
    EMPTY stands for no token.
    """

    mask: Mask
    queries: tuple[Tensor, ...]
    keys: tuple[Tensor, ...]
    group: Group

    @kept  # every layer asks for the same
    def pieces(self, rank: int, block: int) -> Pieces:
        """What the new tokens of `rank` see of the keys of `block`, in each text."""
        texts = []
        for at, keys_at, tokens in zip(self.queries[rank], self.keys[block], torch.cat(self.keys, dim=1), strict=True):
            runs = self.mask.visible_keys(at[at < EMPTY], int((tokens < EMPTY).sum()))
            runs = [(torch.searchsorted(keys_at, first), torch.searchsorted(keys_at, end)) for first, end in runs]
            texts.append(tuple(piece for run in runs for piece in cut(*run)))
        return tuple(texts)


def cached_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    places: Places,
    *,
    passing: str = "auto",
    scale: float | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, str]:
    """This rank's new tokens over the keys of all ranks: out (B, H, T_r, Dv), in q's dtype, and what travelled.

    q (B, H, T_r, D), k (B, G, S_r, D) and v (B, G, S_r, Dv) are those of `places`. `passing` is "Q", "KV", or "auto":
    what is fewer bytes, counted with Dv = D. The other options are those of `ring_flash_attention`. Forward only.
    When the input of a rank is wrong, or the ranks disagree, every rank raises the same ValueError before anything
    travels.
    """
    group = places.group
    rank, _ = members(group)

    def check(q: Tensor, k: Tensor, v: Tensor) -> None:
        expect(passing in ("auto", *WAYS), f"passing is {passing!r}", "'Q', 'KV' or 'auto'")
        check_grouped_chunks(*(a_token(x) for x in (q, k, v)), same_tokens=False, same_head_dim=False)
        check_sinks(sinks, q)
        check_softcap(softcap)
        forward_only = "torch.no_grad(): a cache is forward only"
        expect(not needs_gradients(q, k, v), "the input requires gradients", forward_only)
        (texts, new), tokens = places.queries[rank].shape, places.keys[rank].shape[1]
        fits = (*(x.shape[2] for x in (q, k, v)), len(q)) == (new, tokens, tokens, texts)
        shapes = ", ".join(str(tuple(x.shape)) for x in (q, k, v))
        expected = f"{texts} text(s), q of {new} tokens, k and v of {tokens}"
        expect(fits, f"q, k and v are {shapes}", f"what the places say: {expected}")

    settings = {"passing": passing, "softcap": softcap, "sinks": getattr(sinks, "dtype", None)}
    options: dict[str, Any] = {"function": "cached_attention", "check": check, "settings": lambda: settings}
    scale, _ = agree_on_chunks(q, k, v, scale, group, **options)
    if passing == "auto":
        new, tokens = (sum(at.shape[1] for at in of_ranks) for of_ranks in (places.queries, places.keys))
        keys, queries, home = numbers_sent(q.shape[1], k.shape[1], q.shape[3], new, max(tokens, new))
        partial_bytes = max(q.element_size(), 4)
        passing = "KV" if keys * q.element_size() <= queries * q.element_size() + home * partial_bytes else "Q"
    attention = partial(attend_pieces, scale=scale, softcap=softcap)
    with one_pass(group):
        out = WAYS[passing](q, k, v, places, nothing_seen(q, v, sinks), attention, group)
    return out.to(q.dtype), passing


def pass_q(q: Tensor, k: Tensor, v: Tensor, places: Places, state: Partial, attend: Attend, group: Group) -> Tensor:
    """Yang et al. 2025, algorithm 3. `state` is the out and lse of this rank's queries before they see a key."""
    rank, world_size = members(group)
    parts: list[Partial] = [state] * world_size
    lengths = [at.shape[1] for at in places.queries]
    for t, (q_j, _) in enumerate(arriving_blocks(q, q[..., :0], lengths=lengths, group=group)):  # Q alone
        j = (rank - t) % world_size
        parts[j] = attend(q_j, k, v, places.pieces(j, rank))
    for part in swap(parts, [[x.shape for x in state]] * world_size, group):  # home, to the ranks of the queries
        merge_into(*state, *part)
    return state[0]


def pass_kv(q: Tensor, k: Tensor, v: Tensor, places: Places, state: Partial, attend: Attend, group: Group) -> Tensor:
    """The ring, with other queries than keys: Yang et al. 2025, algorithm 2. The arguments are those of `pass_q`."""
    rank, world_size = members(group)
    lengths = [at.shape[1] for at in places.keys]
    for t, (k_j, v_j) in enumerate(arriving_blocks(k, v, lengths=lengths, group=group)):
        j = (rank - t) % world_size
        merge_into(*state, *attend(q, k_j, v_j, places.pieces(rank, j)))
    return state[0]


WAYS = {"Q": pass_q, "KV": pass_kv}


def numbers_sent(heads: int, kv_heads: int, head_dim: int, new: float, tokens: float) -> tuple[float, float, float]:
    """Numbers that P ranks send in a layer, divided by P - 1: K and V of all tokens; or the queries of the new ones,
    and their partial results."""
    return 2 * kv_heads * head_dim * tokens, heads * head_dim * new, heads * (head_dim + 1) * new


def attend_pieces(q: Tensor, k: Tensor, v: Tensor, pieces: Pieces, *, scale: float, softcap: float | None) -> Partial:
    """The out and lse of queries over the keys of one rank that they see."""
    out, lse = nothing_seen(q, v)
    for text, of_text in enumerate(pieces):
        row = slice(text, text + 1)
        for piece in of_text:
            block = *queries_of(piece, q[row]), *keys_of(piece, k[row], v[row])  # (1, H or G, tokens, ...)
            part = fused_forward(*reversed_rows(piece, *block), scale=scale, softcap=softcap, causal=piece.triangle)
            merge_into(*queries_of(piece, out[row], lse[row]), *reversed_rows(piece, *part))
    return out, lse


def a_token(x: Tensor) -> Tensor:
    """x (B, heads, C, D) as it is, but with a token of zeros where it has none: the checks of tensors expect one."""
    return x.new_zeros(*x.shape[:2], 1, x.shape[3]) if x.dim() == 4 and x.shape[2] == 0 else x


def agree_on_places(at: Tensor, keys_at: Tensor, group: Group = None, **mask: Any) -> Places:
    """The places of all ranks, from the positions of this rank's new tokens and of its keys.

    `at` is (B, T_r) and `keys_at` (B, S_r). `mask`: the fields of `Mask`.
    Raises the same ValueError on every rank for positions that are not int64, 0 or more and rising (EMPTY at the end);
    unless the keys of all ranks are the tokens 0, 1, 2, ... of each text, each on one rank, the new tokens among them;
    and where a mask does not fit, or the ranks disagree about it.
    """

    def check() -> tuple[list[Tensor], dict[str, Any]]:
        for name, x in (("at", at), ("keys_at", keys_at)):
            fits = x.dtype == torch.int64 and x.dim() == 2 and len(x) == len(at)
            given = f"{name} is {x.dtype} of shape {tuple(x.shape)}, at {tuple(at.shape)}"
            expect(fits, given, "int64, (B, tokens)")
            rising = ((x >= 0) & (x <= EMPTY)).all() and ((x.diff() > 0) | (x[..., 1:] == EMPTY)).all()
            few = ", ".join(map(str, x.flatten()[:8].tolist())) + (", ..." if x.numel() > 8 else "")
            expect(rising, f"{name} is {few}", "positions from 0 on, in rising order, EMPTY at the end")
        return [at.cpu(), keys_at.cpu()], {"mask": Mask(**mask), "number of texts": len(at)}

    queries, keys = zip(*agree_same(check, group), strict=True)
    expect((torch.cat(queries, dim=1) < EMPTY).any(), "the ranks have no new token", "1 or more on one of them")
    for text, (new, tokens) in enumerate(zip(torch.cat(queries, dim=1), torch.cat(keys, dim=1), strict=True)):
        places, last = tokens[tokens < EMPTY].sort().values.tolist(), max(new[new < EMPTY].tolist(), default=-1)
        key, place = next(((key, place) for place, key in enumerate(places) if key != place), (0, 0))
        given = f"text {text} has a key at position {key} where {place} should follow"
        expect(key == place, given, "the keys 0, 1, 2, ... of each text, each on one rank")
        given = f"text {text} has a new token at position {last} and {len(places)} keys"
        expect(last < len(places), given, "a key for each new token")
        Mask(**mask).check_length(len(places))
    return Places(Mask(**mask), queries, keys, group)


# A conversation -------------------------------------------------------------------------------------------------------


class GrowingCache(SpreadCache):
    """A SpreadCache that can read on. Give it to a Transformer as its attention, and to `reply`."""

    passing = "auto"  # what shall travel

    def begin(self, at: Tensor, room: int) -> None:
        """As that of a SpreadCache. A conversation that there was is over."""
        super().begin(at, room)
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
        self.room, self.stored, self.new, self.layer = room, 0, None, 0

    def read_chunk(self, q: Tensor, k: Tensor, v: Tensor, *, window: int | None = None, **options: Any) -> Tensor:
        """The attention of a part, q (B, H, n, D), k and v (B, G, n, D), over all tokens read so far."""
        expect(window == self.window, f"a layer has the window {window}", f"that of the cache, {self.window}")
        layer = self.layer - 1
        if layer == len(self.blocks):
            self.blocks.append((k[:, :, :0], v[:, :, :0]))
        keys, values = (
            torch.cat([old, x], dim=2).gather(2, self.order[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))
            for old, x in zip(self.blocks[layer], (k, v), strict=True)
        )
        out, _ = cached_attention(q, keys, values, self.places, passing=self.passing, **options)
        self.blocks[layer] = F.pad(keys, (0, 0, 0, self.room)), F.pad(values, (0, 0, 0, self.room))
        return out


@torch.no_grad()
def reply(
    model: Transformer, cache: GrowingCache, texts: Sequence[Sequence[int]], new_tokens: int, part: int = 2**62
) -> Tensor:
    """Read a text more of each of B conversations, in parts of `part` tokens, and write an answer: (B, new_tokens).

    Every rank of the cache's group calls this with the same weights and texts. The first call begins the conversations.
    Raises ValueError on every rank, before anything is sent, as `agree_on_prompts` does; for a `part` below 1, and for
    another number of texts than before.
    """
    agree_on_prompts(model, cache, texts, new_tokens, part=part)
    expect(part >= 1, f"part is {part!r}", "1 token or more")  # on every rank: they have agreed on it
    if cache.unread is None:
        nothing = torch.empty(len(texts), 0, dtype=torch.int64, device=next(model.parameters()).device)
        cache.begin(nothing, room=0)
        cache.unread = nothing
    begun = len(cache.unread)
    expect(len(texts) == begun, f"{len(texts)} texts for {begun} conversations", "one for each")
    whole = [[*unread, *text] for unread, text in zip(cache.unread.tolist(), texts, strict=True)]
    logits = read(model, cache, whole, new_tokens, part)
    answers = write(model, cache, logits, new_tokens)
    cache.unread, cache.lengths = answers[:, -1:], cache.lengths + new_tokens - 1
    return answers
