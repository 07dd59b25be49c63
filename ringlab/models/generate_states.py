"""Generation with states: a linear layer remembers a text of any length in as many numbers.

    prompt      a ring of states; the state after the last token goes to every rank
    new token   o = h'ᵀ q with h' = the state after this token: every rank computes it, and no message is sent

Beside the state a layer keeps the last k - 1 tokens before its short convolution. Both are the same on every rank. The
layers of attention keep K and V as in generate.py: they grow with the text, so they are spread over the ranks.

Shapes: B prompts of any lengths, padded on the right: padding writes nothing and keeps the whole state. A state is
(B, H, D, D), the tokens of a convolution (B, N, k - 1) with N channels.

    $ python -m ringlab.models.generate_states
    4 ranks, 3 linear layers and 1 of attention, the prompts of generate.py
    ok    the tokens of one process: 216 214 131 168 ... and 191 234 62 236 ...
    a rank keeps 896 numbers of keys and values, which grow with the text, and 8,448 of states

Before: generate.py, K and V spread over the ranks. After: pass_q.py, a few new tokens instead of one.
Source: Katharopoulos et al. 2020, section 3.4, for the recurrence; Yang et al. 2025 (Gated DeltaNet).
"""

import sys

import torch
import torch.distributed as dist
from torch import Tensor

from ringlab.models.generate import EMPTY, NEW, PROMPTS, SpreadCache, as_one_process, generate, seeded
from ringlab.models.transformer import ring_of_states
from ringlab.states.linear_attention import recurrence
from ringlab.states.short_convolution import short_convolution
from ringlab.support.processes import RankContext, launch


class HybridCache(SpreadCache):
    """A SpreadCache that keeps states too: Transformer(config, cache, cache) is a model that generates with it."""

    def begin(self, at: Tensor, room: int) -> None:
        super().begin(at, room)
        self.states: list[Tensor] = []  # of the linear layers, (B, H, D, D); the next layer's first
        self.ends: list[Tensor] = []  # the last tokens before each convolution, (B, N, k - 1), in the same order

    def grow(self, at: Tensor, room: int) -> None:
        super().grow(at, room)
        self.counts = (at < EMPTY).sum(dim=1, keepdim=True)  # (B, 1): the tokens of each prompt
        dist.all_reduce(self.counts, group=self.group)
        self.ring = ring_of_states(layout=self.layout, group=self.group)

    def convolution(self, x: Tensor, weight: Tensor) -> Tensor:
        """x (B, N, n) of a prompt's chunk or of a new token, weight (N, k) -> y (B, N, n)."""
        if self.new is not None:
            row = torch.cat([self.ends.pop(0), x], dim=2)  # (B, N, k)
            self.ends.append(row[..., 1:])
            return short_convolution(row, weight)[..., -1:]
        kept = self.counts + torch.arange(1 - weight.shape[1], 0, device=x.device)  # (B, k - 1): positions
        self.ends.append(x @ (self.at[:, : x.shape[2], None] == kept[:, None]).to(x))
        dist.all_reduce(self.ends[-1], group=self.group)  # one rank has the token, the others zeros
        return self.ring.convolution(x, weight)

    def rule(self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
        """q (B, H, n, D), k and v (B, G, n, D), log_decay and beta (B, H, n) -> out (B, H, n, D) and the last state."""
        if self.new is not None:
            out, last = recurrence(q, k, v, log_decay, beta, state=self.states.pop(0))
        else:
            padding = self.at[:, None, : q.shape[2]] == EMPTY
            out, mine = self.ring.rule(q, k, v, log_decay.masked_fill(padding, 0), beta.masked_fill(padding, 0))
            last = log_decay.new_zeros(*q.shape[:2], k.shape[3], v.shape[3]) if mine is None else mine
            dist.all_reduce(last, group=self.group)  # one rank has the state, the others zeros
        self.states.append(last)
        return out, last


SIZES = {"layers": 4, "linear": 3}


def answers_on_rank(context: RankContext) -> tuple[Tensor, list[int]]:
    """The tokens that this rank generates after PROMPTS (B, NEW); how many numbers it keeps: of keys, and of states."""
    cache = HybridCache()
    tokens = generate(seeded(cache, cache, **SIZES), cache, PROMPTS, NEW)
    keys = sum(x.numel() for block in cache.blocks for x in block)
    return tokens, [keys, sum(x.numel() for x in (*cache.states, *cache.ends))]


def main() -> int:
    results = launch(answers_on_rank, 4)
    print("4 ranks, 3 linear layers and 1 of attention, the prompts of generate.py")
    ok = as_one_process([tokens for tokens, _ in results], **SIZES)
    keys, states = results[0][1]
    print(f"a rank keeps {keys:,} numbers of keys and values, which grow with the text, and {states:,} of states")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
