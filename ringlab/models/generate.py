"""Generation: the ring reads the prompt once. For each new token, every rank attends to its own keys; one merge joins.

    prompt      the ring; every rank keeps K and V of its own tokens (the cache)
    new token   every rank: (m, l, o) of the token's query over its own keys. Then over all ranks:
                M = max m        l = Σ e^(m - M) l        o = Σ e^(m - M) o        out = o / l

A new token has one query, and the cache has many keys. So the query goes to the keys: every rank computes it. In a
layer a rank gives one message to the merge, with B·H·(D + 2) numbers, however long the context is. A ring would move
the whole cache for each token, (P - 1) · 2·B·G·C·D numbers a rank. The ranks store the new tokens in turn, so that
their caches stay equally long.

Shapes: B prompts of any lengths, padded on the right. A cache has C slots on each rank, for its part of the prompts and
of the new tokens: k and v (B, G, C, D) a layer. A new token is (B, 1), q (B, H, 1, D). m, l (B, G, H/G) and o
(B, G, H/G, D) are its running softmax.

    $ python -m ringlab.models.generate
    prompts of 13 and 6 tokens, 12 new ones, 4 ranks
    ok    the tokens of one process: 121 224 66 114 ... and 65 82 197 108 ...
    a new token: 144 numbers a rank and layer to merge, however long the context; a ring: 2,688 here

Before: transformer.py, the model. After: pass_q.py, a few new tokens instead of one.
Source: Shyam et al. 2024 (Tree Attention), algorithm 3; Milakov & Gimelshein 2018, section 3.1, for the merge.
"""

import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ringlab.basics.blockwise_attention import attend_tile
from ringlab.basics.chunks import as_autocast
from ringlab.basics.naive_attention import resolve_scale
from ringlab.basics.online_softmax import State, finish, start, update
from ringlab.models.transformer import Config, Transformer
from ringlab.ring.backward import left_as_it_is
from ringlab.ring.flash_ring import ring_flash_attention
from ringlab.ring.fused_block import capped_attend
from ringlab.ring.layouts import Layout, layout_of, positions
from ringlab.ring.masks import Mask
from ringlab.ring.partition import Partition
from ringlab.support.agreement import WRONG, agree_same, members, of_every_rank
from ringlab.support.expect import expect
from ringlab.support.processes import RankContext, launch

EMPTY = 2**62  # the position in an empty slot, and of padding: in the future of every token


class SpreadCache:
    """The attention of a model that generates: K and V of each layer, spread over the ranks of `group`.

    Give it to a Transformer as its attention. `at` (B, C) are the positions of the tokens in this rank's slots.
    """

    def __init__(
        self, layout: str | Layout = "zigzag", window: int | None = None, group: ProcessGroup | None = None
    ) -> None:
        self.layout, self.window, self.group = layout, window, group
        self.begin(torch.empty(1, 0, dtype=torch.int64), room=0)

    def begin(self, at: Tensor, room: int) -> None:
        """Empty the cache for prompts with tokens `at` (B, n) on this rank, and `room` more slots for new tokens."""
        self.at = torch.cat([at, at.new_full((len(at), room), EMPTY)], dim=1)  # (B, C)
        self.room, self.stored = room, 0  # slots for new tokens here; how many new tokens all ranks have stored
        self.blocks: list[tuple[Tensor, Tensor]] = []  # k and v (B, G, C, D) of each layer
        self.layer = 0  # the next to be called
        self.facts: dict[int, dict[str, Any]] = {}  # how each layer is called, the same for its prompt and new tokens
        self.new: Tensor | None = None  # the position of the new token (B, 1); None while the prompt is read
        self.lengths, self.parts = at.new_zeros(len(at), 1), 0  # tokens of each text that were read, in so many parts

    def grow(self, at: Tensor, room: int) -> None:
        """Make slots for tokens `at` (B, n) on this rank, and for `room` new ones. This cache reads one part only."""
        self.begin(at, room)

    def store(self, position: Tensor) -> None:
        """Announce the new token at `position` (B, 1) of the sequences; the ranks store new tokens in turn.

        Raises ValueError, on every rank, when all slots are full.
        """
        rank, world_size = members(self.group)
        full = self.stored == self.room * world_size
        expect(not full, f"the cache is full after {self.stored} new tokens", "`begin` with more room")
        self.new, self.layer = position, 0
        turn, owner = divmod(self.stored, world_size)
        self.slot = None  # another rank stores it
        if owner == rank:
            self.slot = self.at.shape[1] - self.room + turn
            self.at[:, self.slot] = position[:, 0]
        self.stored += 1

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = True, enable_gqa: bool = True, **options: Any
    ) -> Tensor:
        """The attention of a model whose layers all have the window of this cache: `attend`, as torch's is called."""
        expect(is_causal, "is_causal is False", "True: a new token sees the tokens before it")
        return self.attend(q, k, v, window=self.window, **options)

    @left_as_it_is
    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        window: int | None = None,
        scale: float | None = None,
        sinks: Tensor | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """q (B, H, n, D), k (B, G, n, D), v (B, G, n, Dv) of a prompt's chunk, or of a new token -> out (B, H, n, Dv).

        The options are those of `ring_flash_attention`, and each layer has its own. Raises ValueError on every rank
        where the ranks disagree, and for a new token whose options, heads or dtype are not those of its prompt.
        """
        q, k, v = as_autocast(q, k, v)
        options = {"window": window, "scale": scale, "softcap": softcap}
        shapes = [x.shape[:2] + x.shape[3:] for x in (q, k, v)]
        facts = {**options, "sinks": sinks is not None, "dtype": q.dtype, "shapes": shapes}
        agreed = self.facts.setdefault(self.layer, facts)  # the ring has compared the prompt's on all ranks
        if facts != agreed or not (self.new is None or q.shape[2] == k.shape[2] == 1):
            of_every_rank(q, self.group, call=WRONG)  # which raises, on every rank
        self.layer += 1
        if self.new is None:
            return self.read_chunk(q, k, v, sinks=sinks, **options)
        keys, values = self.blocks[self.layer - 1]  # (B, G, C, D) and (B, G, C, Dv)
        if self.slot is not None:
            keys[:, :, self.slot], values[:, :, self.slot] = k[:, :, 0], v[:, :, 0]
        q = q.unflatten(1, (k.shape[1], -1)).flatten(2, 3)  # (B, G, H/G, D): a group shares its keys
        hidden = self.at > self.new  # (B, C)
        if window is not None:
            hidden |= self.at <= self.new - window
        scale, future = resolve_scale(scale, q.shape[-1]), hidden[:, None, None]
        tile = attend_tile if softcap is None else partial(capped_attend, softcap=softcap)
        state = start(q.new_empty(*q.shape[:3], values.shape[-1]))  # m, l (B, G, H/G) and o (B, G, H/G, Dv)
        with torch.autocast(q.device.type, enabled=False):  # it would compute the scores in 16 bits
            state = tile(state, q, keys, values, scale=scale, future=future)
        state = merge_over_ranks(state, self.group, call=self.stored * len(self.blocks) + self.layer)
        if sinks is not None:  # one more key of each query head, with the value 0; it is on no rank
            scores = sinks.to(state[0]).view(1, *q.shape[1:3], 1)
            state = update(state, scores, torch.zeros_like(values[:, :, :1]))
        return finish(state)[0].to(v.dtype).flatten(1, 2).unsqueeze(2)

    def read_chunk(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        """The attention of a prompt's chunk, in the ring. Its K and V are kept, with slots for new tokens."""
        keys, values = (nn.functional.pad(x, (0, 0, 0, self.room)) for x in (k, v))
        self.blocks.append((keys, values))
        return ring_flash_attention(q, k, v, causal=True, layout=self.layout, group=self.group, **options)


def merge_over_ranks(state: State, group: ProcessGroup | None = None, call: int = 0) -> State:
    """(m, l, o) of the same queries over the keys of each rank -> (m, l, o) over all keys, the same bits on every rank.

    It gives B·H·(D + 2) numbers to all ranks. `call` is as in `of_every_rank`. Shyam et al. 2024, algorithm 3.
    """
    m, l, o = state
    parts = of_every_rank(torch.cat([m[..., None], l[..., None], o], dim=-1), group, call)  # (P, B, G, H/G, D + 2)
    largest = parts[..., 0].amax(dim=0)
    share = torch.exp(parts[..., 0] - largest)  # (P, B, G, H/G): 0 for a rank that sees no key, 1 for some rank
    sums = (share[..., None] * parts[..., 1:]).sum(dim=0)
    return largest, sums[..., 0], sums[..., 1:]


@torch.no_grad()
def generate(model: Transformer, cache: SpreadCache, prompts: Sequence[Sequence[int]], new_tokens: int) -> Tensor:
    """The `new_tokens` most probable tokens after each prompt, one by one: (B, new_tokens), the same on every rank.

    Every rank of the cache's group calls this with the same weights and the same prompts. Raises ValueError as
    `agree_on_prompts` does, on every rank, before anything is computed.
    """
    agree_on_prompts(model, cache, prompts, new_tokens)
    cache.begin(torch.empty(len(prompts), 0, dtype=torch.int64, device=next(model.parameters()).device), room=0)
    logits = read(model, cache, prompts, new_tokens)
    return write(model, cache, logits, new_tokens)


def read(
    model: Transformer, cache: SpreadCache, texts: Sequence[Sequence[int]], new_tokens: int, part: int = 2**62
) -> Tensor:
    """Read texts over the cache, in parts of `part` tokens -> logits (B, vocab) after each text, on every rank."""
    rank, world_size = members(cache.group)
    device = cache.lengths.device
    counts = torch.tensor([[len(text)] for text in texts], device=device)  # (B, 1)
    longest, multiple = int(counts.max()), max(1, layout_of(cache.layout).multiple) * world_size
    text = nn.utils.rnn.pad_sequence([torch.tensor(list(text)) for text in texts], batch_first=True)
    columns = nn.functional.pad(text, (0, multiple)).to(device)
    logits, stored = torch.zeros(()), cache.lengths
    for begun in range(0, longest, part):
        n = min(part, longest - begun)
        turned = (rank + cache.parts) % world_size  # the first tokens of a part are on another rank each time
        dealt = positions(cache.layout, -(-n // multiple) * multiple, turned, world_size).to(device)  # (C,)
        column = begun + dealt
        real = (dealt < n) & (column < counts)  # (B, C); the rest is padding
        at = stored + column
        room = -(-(new_tokens - 1) // world_size) if begun + n == longest else 0
        cache.grow(torch.where(real, at, EMPTY), room)
        cache.parts += 1
        last = real & (column == counts - 1)  # the rank with a text's last token knows what follows
        logits = logits + model(columns[:, column], at[:, None], last)
    dist.all_reduce(logits, group=cache.group)
    cache.lengths = stored + counts
    return logits


def agree_on_prompts(
    model: Transformer, cache: SpreadCache, prompts: Sequence[Sequence[int]], new_tokens: int, **settings: Any
) -> None:
    """Check the prompts on every rank, and that all ranks have the same ones and the same `settings`.

    Raises the same ValueError on every rank: for an empty prompt, fewer than 1 new token, a token that the model does
    not know, a model with another attention than `cache`, a wrong layout or window, and where the ranks disagree.
    """

    def check() -> tuple[None, dict[str, Any]]:
        counts, vocab = [len(prompt) for prompt in prompts], model.embedding.num_embeddings
        least = "a prompt at least, of 1 token or more each, and 1 new token or more"
        some = min(counts, default=0) > 0 and new_tokens > 0
        expect(some, f"prompts of {counts} tokens, {new_tokens} new ones", least)
        unknown = next((repr(x) for prompt in prompts for x in prompt if type(x) is not int or not 0 <= x < vocab), "")
        expect(not unknown, f"{unknown} is in a prompt", f"tokens: Python integers from 0 to {vocab - 1}")
        ours = all(layer.attention is cache for layer in model.layers)
        expect(ours, "the model has another attention", "this cache in every layer: make it by Transformer(..., cache)")
        Partition(Mask(causal=True, window=cache.window), cache.layout, (2,) * members(cache.group)[1])
        texts = [list(prompt) for prompt in prompts]
        same = {"prompts": texts, "new_tokens": new_tokens, "layout": cache.layout, "window": cache.window, **settings}
        return None, same

    agree_same(check, cache.group)


def write(model: Transformer, cache: SpreadCache, logits: Tensor, new_tokens: int) -> Tensor:
    """The new tokens (B, new_tokens) after the texts that were read, with the logits (B, vocab) after each text."""
    tokens = []
    for step in range(new_tokens):
        chosen = of_every_rank(logits.argmax(dim=-1, keepdim=True), cache.group, step)  # (P, B, 1)
        token = chosen[0]  # rank 0's: a rounding must not part the ranks
        tokens.append(token)
        if step < new_tokens - 1:
            at = cache.lengths + step
            cache.store(at)
            logits = model(token, at[:, None])[:, -1]  # every rank computes the token
    return torch.cat(tokens, dim=1)


CONFIG = Config(layers=2, hidden=64, heads=4, kv_heads=2)
PROMPTS = (b"A ring reads.", b"Short.")
NEW = 12


def seeded(attention: Any) -> Transformer:
    """A model of CONFIG's sizes with large random weights: its answers depend on the whole prompt."""
    torch.manual_seed(0)
    model = Transformer(CONFIG, attention)
    for weight in model.parameters():
        if weight.dim() == 2:
            nn.init.normal_(weight, std=0.3)
    return model


def answers(context: RankContext) -> tuple[Tensor, Tensor]:
    """The tokens that this rank generates after PROMPTS (B, NEW), and the positions in its slots at the end (B, C)."""
    cache = SpreadCache()
    tokens = generate(seeded(cache), cache, PROMPTS, NEW)
    return tokens, cache.at


@torch.no_grad()
def alone(model: Transformer, prompt: Sequence[int], new_tokens: int) -> list[int]:
    """What one process generates after one prompt without a cache: it reads everything again for each token."""
    text = list(prompt)
    for _ in range(new_tokens):
        text.append(int(model(torch.tensor([text]), torch.arange(len(text)))[0, -1].argmax()))
    return text[len(prompt) :]


def as_one_process(of_ranks: Sequence[Tensor]) -> bool:
    """Whether the tokens of all ranks (B, NEW) are those of a `seeded` model on one process. It says so."""
    model = seeded(nn.functional.scaled_dot_product_attention)
    right = [alone(model, prompt, NEW) for prompt in PROMPTS]
    ok = all(tokens.tolist() == right for tokens in of_ranks)
    words = " and ".join(" ".join(map(str, tokens[:4])) + " ..." for tokens in right)
    print(f"{'ok   ' if ok else 'WRONG'} the tokens of one process: {words}")
    return ok


def main() -> int:
    P = 4
    results = launch(answers, P)
    print(f"prompts of {' and '.join(str(len(prompt)) for prompt in PROMPTS)} tokens, {NEW} new ones, {P} ranks")
    ok = as_one_process([tokens for tokens, _ in results])
    B, C, D = len(PROMPTS), results[0][1].shape[1], CONFIG.hidden // CONFIG.heads
    merge, ring = B * CONFIG.heads * (D + 2), (P - 1) * 2 * B * CONFIG.kv_heads * C * D
    print(f"a new token: {merge} numbers a rank and layer to merge, however long the context; a ring: {ring:,} here")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
