"""A transformer in the ring: tokens meet only in attention, so only attention sends messages.

    h = x + W_o attention(rotary(W_q n), rotary(W_k n), W_v n)     n = RMSNorm(x)
    y = h + W_2 (silu(W_1 n) · W_3 n)                              n = RMSNorm(h), one piece of the tokens at a time

Shapes: tokens and labels (B, C) on each rank, at their positions `at` (C,); x (B, C, hidden), q (B, H, C, D), k and v
(B, G, C, D), logits (B, C, vocab). Attention is an argument: torch's on one process,
`flash_ring.scaled_dot_product_attention` in a ring. Nothing else in the model knows of ranks.

Activation checkpointing forgets what is inside the attention and inside each piece of the feedforward. The backward
pass computes both again. A layer then keeps two tensors, x and h. The price: its K/V blocks go round three times in a
step instead of twice, 3 · (P-1) hops. The gradients make P-1 hops as before.

    $ python -m ringlab.models.transformer
    one process: loss 5.5722. 4 ranks, zigzag, float64, against it:
    ok    the ring: loss off by 3.2e-16, gradients by 6.5e-16, 9 hops a layer
    ok    with activation checkpointing: loss off by 0.0e+00, gradients by 6.8e-16, 12 hops a layer

Before: ../training/flash_ring.py, the trainable ring. After: mesh.py, which shares out the weights too.
Source: Liu & Abbeel 2023 (Blockwise Parallel Transformer), section 3, and Liu et al. 2024, section 3; Touvron et al.
2023 (LLaMA), section 2.2.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ringlab.support.processes import RankContext, launch
from ringlab.training.flash_ring import scaled_dot_product_attention
from ringlab.training.layouts import positions, rotary

IGNORED = -100  # the label of a token that has no loss
TEXT = torch.tensor([list(b"Keys and values go round a ring. ")])  # (1, S + 1)
S = TEXT.shape[1] - 1


@dataclass(frozen=True)
class Config:
    vocab: int = 256
    layers: int = 2
    hidden: int = 64
    heads: int = 4  # H
    kv_heads: int = 2  # G
    feedforward: int = 192  # the inner width
    piece: int = 256  # tokens that the feedforward takes at a time
    tied: bool = False  # one weight for the embedding and the head
    checkpointing: bool = False

    def __post_init__(self) -> None:
        if self.hidden % (2 * self.heads):
            raise ValueError(
                f"hidden is {self.hidden}, heads {self.heads}; expected hidden to be a multiple of 2 x heads, "
                f"{2 * self.heads}: rotary turns pairs of channels"
            )
        if self.heads % self.kv_heads:
            raise ValueError(f"heads is {self.heads}, kv_heads {self.kv_heads}; expected kv_heads to divide heads")


class Layer(nn.Module):
    def __init__(self, config: Config, attention: Callable[..., Tensor]) -> None:
        super().__init__()
        self.config, self.attention, self.D = config, attention, config.hidden // config.heads
        linear = partial(nn.Linear, bias=False)
        self.norm1, self.norm2 = (nn.RMSNorm(config.hidden, eps=1e-5) for _ in range(2))
        self.wq, self.wo = linear(config.hidden, config.hidden), linear(config.hidden, config.hidden)
        self.wk, self.wv = (linear(config.hidden, config.kv_heads * self.D) for _ in range(2))
        self.w1, self.w3 = (linear(config.hidden, config.feedforward) for _ in range(2))
        self.w2 = linear(config.feedforward, config.hidden)

    def attend(self, x: Tensor, at: Tensor) -> Tensor:
        n = self.norm1(x)  # (B, C, hidden)
        q, k, v = (w(n).unflatten(2, (-1, self.D)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        q, k = rotary(q, at), rotary(k, at)  # (B, H, C, D), (B, G, C, D)
        out = self.attention(q, k, v, is_causal=True, enable_gqa=True)  # (B, H, C, D)
        return self.wo(out.transpose(1, 2).flatten(2))  # (B, C, hidden)

    def feed(self, h: Tensor) -> Tensor:
        n = self.norm2(h)  # (B, piece, hidden)
        return self.w2(F.silu(self.w1(n)) * self.w3(n))  # (B, piece, feedforward) -> (B, piece, hidden)

    def forward(self, x: Tensor, at: Tensor) -> Tensor:
        h = x + self.run(self.attend, x, at)  # (B, C, hidden)
        return torch.cat([part + self.run(self.feed, part) for part in h.split(self.config.piece, dim=1)], dim=1)

    def run(self, half: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        if not self.config.checkpointing:
            return half(*inputs)
        return checkpoint(half, *inputs, use_reentrant=False, preserve_rng_state=False)  # no dropout: no random state


class Transformer(nn.Module):
    """tokens (B, C) at positions `at` (C,) -> logits (B, C, vocab) of the tokens that follow."""

    def __init__(self, config: Config, attention: Callable[..., Tensor] = F.scaled_dot_product_attention) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab, config.hidden)
        self.layers = nn.ModuleList(Layer(config, attention) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.hidden, eps=1e-5)
        self.head = nn.Linear(config.hidden, config.vocab, bias=False)
        for weight in self.parameters():
            if weight.dim() == 2:
                nn.init.normal_(weight, std=0.02)
        if config.tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, at: Tensor) -> Tensor:
        x = self.embedding(tokens)  # (B, C, hidden)
        for layer in self.layers:
            x = layer(x, at)
        return self.head(self.norm(x))


def shard_text(text: Tensor, layout: str, rank: int, world_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """text (B, S + 1) -> this rank's tokens (B, C), labels (B, C) and positions (C,); errors as `positions`.

    Labels are shifted first and shared out then: the label of a chunk's last token is often on another rank.
    """
    at = positions(layout, text.shape[1] - 1, rank, world_size)
    return text[:, :-1][:, at], text[:, 1:][:, at], at


def summed_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of logits (B, C, vocab) with labels (B, C), summed over the labels that are not IGNORED.

    A sum, because the means of ranks with unequal numbers of labels do not make the mean of the batch.
    """
    wide = logits.flatten(0, 1).to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(wide, labels.flatten(), ignore_index=IGNORED, reduction="sum")


def flops_of_a_step(model: Transformer, batch: int, seq_len: int) -> float:
    """FLOPs of a step on `batch` sequences of S tokens: 6 · tokens · (weights + layers · hidden · S).

    A weight is multiplied and added once for each token in the forward pass, and twice in the backward pass. The
    embedding is looked up, so it has none. Attention: QKᵀ and PV are 4 · S · hidden FLOPs a token, half of the scores
    are masked, and the backward pass has twice as many. What is computed again does not count.
    """
    weights = sum(w.numel() for w in model.parameters() if w.dim() == 2) - model.embedding.weight.numel()
    return 6.0 * batch * seq_len * (weights + len(model.layers) * model.norm.weight.numel() * seq_len)


CASES = {"the ring": Config(), "with activation checkpointing": Config(checkpointing=True, piece=3)}


def _step(config: Config, attention: Callable[..., Tensor], rank: int, world_size: int) -> list[Tensor]:
    """This rank's part of the loss of the batch and of all gradients, float64."""
    torch.manual_seed(0)
    model = Transformer(config, attention).double()
    tokens, labels, at = shard_text(TEXT, "zigzag", rank, world_size)
    loss = summed_loss(model(tokens, at), labels) / S
    return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]


def _steps(context: RankContext) -> list[tuple[list[Tensor], int]]:
    """For each case the loss and the gradients, summed over the ranks, and the hops of this rank in a layer."""
    ring, steps = partial(scaled_dot_product_attention, layout="zigzag"), []
    for config in CASES.values():
        with mock.patch.object(dist, "batch_isend_irecv", side_effect=dist.batch_isend_irecv) as hop:
            results = _step(config, ring, context.rank, context.world_size)
        for result in results:
            dist.all_reduce(result)
        steps.append((results, hop.call_count // config.layers))
    return steps


def main() -> int:
    exact = _step(Config(), F.scaled_dot_product_attention, rank=0, world_size=1)
    print(f"one process: loss {exact[0]:.4f}. 4 ranks, zigzag, float64, against it:")
    ok = True
    for (name, config), (results, hops) in zip(CASES.items(), launch(_steps, 4)[0], strict=True):
        loss, *gradients = [((a - b).norm() / b.norm()).item() for a, b in zip(results, exact, strict=True)]
        right = max(loss, *gradients) < 1e-10 and hops == (12 if config.checkpointing else 9)
        errors = f"loss off by {loss:.1e}, gradients by {max(gradients):.1e}"
        print(f"{'ok   ' if right else 'off  '} {name}: {errors}, {hops} hops a layer")
        ok &= right
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
