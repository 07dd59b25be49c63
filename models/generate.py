"""Generation: the ring reads the prompt once. Then each new token asks all ranks, and one merge joins their answers.

    prompt      the ring; every rank keeps K and V of its own tokens (the cache)
    new token   every rank: (m, l, o) of the token's query over its own keys. Then over all ranks:
                M = max m        l = Σ e^(m - M) l        o = Σ e^(m - M) o        out = o / l

A new token has one query, and the cache has many keys. So the query goes to the keys: every rank computes it. A rank
sends B·H·(D + 2) numbers to the merge of a layer, however long the context is. A ring would move the whole cache for
each token, (P - 1) · 2·B·G·C·D numbers a rank. The ranks store the new tokens in turn, so that their caches stay
equally long.

Shapes: B prompts of any lengths, padded on the right to S tokens; a rank has C = S/P of them, k and v (B, G, C, D) a
layer. A new token is (B, 1), q (B, H, 1, D). m, l (B, G, H/G) and o (B, G, H/G, D) are its running softmax.

    $ python -m models.generate
    prompts of 13 and 6 tokens, 12 new ones, 4 ranks
    ok    the tokens of one process: 121 224 66 114 ... and 65 82 197 108 ...
    tokens in the caches: 7 7 7 6
    a new token: 144 numbers a rank and layer to merge, however long the context; a ring: 2,688 here

Before: transformer.py, the model. After: your own prompts.
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

from basics.blockwise_attention import attend_tile
from basics.naive_attention import resolve_scale
from basics.online_softmax import State, finish, start
from models.transformer import Config, Transformer
from support.agreement import agree, members
from support.processes import RankContext, launch
from training.causal import positions
from training.flash_ring import ring_flash_attention

HIDDEN = 2**62  # the position of padding: in the future of every token


class SpreadCache:
    """The attention of a model that generates: K and V of each layer, spread over the ranks of `group`.

    Give it to a Transformer as its attention. `at` (B, C) are the positions of the tokens that are stored here.
    """

    def __init__(self, layout: str = "zigzag", window: int | None = None, group: ProcessGroup | None = None) -> None:
        self.layout, self.window, self.group = layout, window, group
        self.blocks: list[tuple[Tensor, Tensor]] = []  # k and v (B, G, C, D) of each layer
        self.at = torch.empty(0)
        self.new: Tensor | None = None  # the position of the new token (B, 1); None while the prompt is read
        self.mine = False  # whether this rank stores the new token
        self.layer = 0  # of the next call

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:
        """q (B, H, C, D), k and v (B, G, C, D) of a prompt's chunk or of one new token -> out, as q."""
        if self.new is None:
            self.blocks.append((k, v))
            ring = partial(ring_flash_attention, causal=True, layout=self.layout, window=self.window, group=self.group)
            return ring(q, k, v)
        if self.mine:
            k, v = (torch.cat(pair, dim=2) for pair in zip(self.blocks[self.layer], (k, v), strict=True))
            self.blocks[self.layer] = k, v
        k, v = self.blocks[self.layer]
        self.layer += 1
        q = q.unflatten(1, (k.shape[1], -1)).flatten(2, 3)  # (B, G, H/G, D): the heads of a group share its keys
        hidden = self.at > self.new  # (B, C)
        if self.window is not None:
            hidden |= self.at <= self.new - self.window
        state = attend_tile(start(q), q, k, v, scale=resolve_scale(None, q.shape[-1]), future=hidden[:, None, None])
        return finish(merge_over_ranks(state, self.group))[0].to(v.dtype).flatten(1, 2).unsqueeze(2)

    def store(self, position: Tensor, step: int) -> None:
        """Announce new token number `step` at `position` (B, 1) of the sequences; the ranks store them in turn."""
        rank, world_size = members(self.group)
        self.new, self.layer, self.mine = position, 0, step % world_size == rank
        if self.mine:
            self.at = torch.cat([self.at, position], dim=1)


def merge_over_ranks(state: State, group: ProcessGroup | None = None) -> State:
    """(m, l, o) of the same queries over the keys of each rank -> (m, l, o) over all keys, on every rank.

    It sends B·H numbers to find the largest m, and B·H·(D + 1) to sum l and o. Shyam et al. 2024, algorithm 3.
    """
    m, l, o = state
    largest = m.clone()
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    share = torch.exp(m - largest)  # 0 on a rank that sees no key; on some rank it is 1
    sums = torch.cat([l[..., None], o], dim=-1) * share[..., None]
    dist.all_reduce(sums, group=group)
    return largest, sums[..., 0], sums[..., 1:]


@torch.no_grad()
def generate(model: Transformer, cache: SpreadCache, prompts: Sequence[Sequence[int]], new_tokens: int) -> Tensor:
    """The `new_tokens` most probable tokens after each prompt, one by one: (B, new_tokens), the same on every rank.

    `model` was made with `cache` as its attention. Every rank of the cache's group calls this with the same prompts.
    Raises ValueError on every rank for an empty prompt, for fewer than 1 new token, and where the ranks disagree.
    """

    def check() -> tuple[list[list[int]], int]:
        if not prompts or not all(prompts) or new_tokens < 1:
            raise ValueError(
                f"prompts of {[len(prompt) for prompt in prompts]} tokens, {new_tokens} new ones; expected a prompt "
                f"at least, of 1 token or more each, and 1 new token or more"
            )
        return [list(prompt) for prompt in prompts], new_tokens

    if any(other != check() for other in agree(check, cache.group)):
        raise ValueError("the ranks have different prompts or numbers of new tokens; expected the same on each")
    rank, world_size = members(cache.group)
    device = next(model.parameters()).device
    lengths = torch.tensor([[len(prompt)] for prompt in prompts], device=device)  # (B, 1)
    seq_len = -(-int(lengths.max()) // (2 * world_size)) * 2 * world_size  # fits every layout
    text = nn.utils.rnn.pad_sequence([torch.tensor(list(prompt)) for prompt in prompts], batch_first=True).to(device)
    text = nn.functional.pad(text, (0, seq_len - text.shape[1]))

    at = positions(cache.layout, seq_len, rank, world_size).to(device)
    cache.blocks, cache.new = [], None
    cache.at = torch.where(at < lengths, at, HIDDEN)  # (B, C)
    logits = model(text[:, at], at)  # (B, C, vocab)
    last = (at == lengths - 1).to(logits.dtype)  # (B, C): the rank with a prompt's last token knows what follows
    logits = (logits * last[..., None]).sum(dim=1)
    dist.all_reduce(logits, group=cache.group)

    tokens = []
    for step in range(new_tokens):
        token = logits.argmax(dim=-1, keepdim=True)  # (B, 1)
        dist.broadcast(token, group_src=0, group=cache.group)  # a rounding must not part the ranks
        tokens.append(token)
        if step < new_tokens - 1:
            cache.store(lengths + step, step)
            logits = model(token, (lengths + step)[:, None])[:, -1]  # every rank computes the token
    return torch.cat(tokens, dim=1)


CONFIG = Config(layers=2, hidden=64, heads=4, kv_heads=2)
PROMPTS = (b"A ring reads.", b"Short.")
NEW = 12


def seeded(attention: Any) -> Transformer:
    """A model with large random weights, so that its answers depend on the whole prompt."""
    torch.manual_seed(0)
    model = Transformer(CONFIG, attention)
    for weight in model.parameters():
        if weight.dim() == 2:
            nn.init.normal_(weight, std=0.3)
    return model


def _answers(context: RankContext) -> tuple[Tensor, list[int]]:
    """The new tokens, and how many tokens this rank's cache has at the end."""
    cache = SpreadCache()
    tokens = generate(seeded(cache), cache, PROMPTS, NEW)
    return tokens, [k.shape[2] for k, _ in cache.blocks]


@torch.no_grad()
def alone(model: Transformer, prompt: Sequence[int], new_tokens: int) -> list[int]:
    """What one process generates after one prompt without a cache: it reads everything again for each token."""
    text = list(prompt)
    for _ in range(new_tokens):
        text.append(int(model(torch.tensor([text]), torch.arange(len(text)))[0, -1].argmax()))
    return text[len(prompt) :]


def main() -> int:
    P = 4
    model = seeded(nn.functional.scaled_dot_product_attention)
    right = [alone(model, prompt, NEW) for prompt in PROMPTS]
    results = launch(_answers, P, device="cpu")
    ok = all(tokens.tolist() == right for tokens, _ in results)
    print(f"prompts of {' and '.join(str(len(prompt)) for prompt in PROMPTS)} tokens, {NEW} new ones, {P} ranks")
    words = " and ".join(" ".join(map(str, tokens[:4])) + " ..." for tokens in right)
    print(f"{'ok   ' if ok else 'WRONG'} the tokens of one process: {words}")
    print(f"tokens in the caches: {' '.join(str(lengths[0]) for _, lengths in results)}")
    B, D = len(PROMPTS), CONFIG.hidden // CONFIG.heads
    merge, C = B * CONFIG.heads * (D + 2), results[0][1][0]
    ring = (P - 1) * 2 * B * CONFIG.kv_heads * C * D
    print(f"a new token: {merge} numbers a rank and layer to merge, however long the context; a ring: {ring:,} here")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
