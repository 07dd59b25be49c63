"""A transformer in the ring: tokens meet only in attention, so only attention sends messages.

    h = x + W_o attention(rotary(W_q n), rotary(W_k n), W_v n)     n = RMSNorm(x)
    y = h + W_2 (silu(W_1 n) · W_3 n)                              n = RMSNorm(h), one piece of the tokens at a time

In a hybrid most layers are linear: a state in place of keys, behind a short convolution. They need no positions: a
state knows the order of its tokens.

    q, k, v = silu(convolution(W_q n, W_k n, W_v n))               q and k have norm 1
    h = x + W_o (RMSNorm(gated_delta_rule(q, k, v, decay, β)) · silu(W_z n))

Shapes: tokens and labels (B, C) on each rank, at their positions `at` (C,); x (B, C, hidden), q (B, H, C, D), k and v
(B, G, C, D), logits (B, C, vocab). Attention is an argument: torch's on one process,
`flash_ring.scaled_dot_product_attention` in a ring. So is what linear layers do: `ring_of_states` in a ring. Nothing
else in the model knows of ranks.

Activation checkpointing forgets what is inside the attention and inside each piece of the feedforward. The backward
pass computes both again. A layer then keeps two tensors, x and h. The price: its K/V blocks go round three times in a
step instead of twice, 3 · (P-1) hops. The gradients make P-1 hops as before.

    $ python -m ringlab.models.transformer
    4 ranks, zigzag, float64, against one process:
    ok    the ring: loss 5.5722, off by 3.2e-16, gradients by 6.5e-16, 9 hops
    ok    with activation checkpointing: loss 5.5722, off by 0.0e+00, gradients by 6.8e-16, 12 hops
    ok    three linear layers, one of attention: loss 5.5485, off by 0.0e+00, gradients by 3.4e-15, 9 hops

Before: ../ring/flash_ring.py, the full ring. After: mesh.py, which shares out the weights too.
Source: Liu & Abbeel 2023 (Blockwise Parallel Transformer), section 3, and Liu et al. 2024, section 3; Touvron et al.
2023 (LLaMA), section 2.2; Yang et al. 2025 (Gated DeltaNet), section 3.3, for the linear layer.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ringlab.basics.naive_attention import accumulation_dtype
from ringlab.ring.documents import IGNORED
from ringlab.ring.flash_ring import scaled_dot_product_attention
from ringlab.ring.layouts import positions, rotary
from ringlab.states.linear_attention import linear_attention
from ringlab.states.short_convolution import ring_short_convolution, short_convolution
from ringlab.states.state_ring import ring_linear_attention
from ringlab.support.expect import expect
from ringlab.support.processes import RankContext, launch

TEXT = torch.tensor([list(b"Keys and values go round a ring. ")])  # (1, S + 1)
S = TEXT.shape[1] - 1
TAPS = 4  # tokens that the short convolution mixes


@dataclass(frozen=True)
class Config:
    vocab: int = 256
    layers: int = 2
    hidden: int = 64
    heads: int = 4  # H
    kv_heads: int = 2  # G
    feedforward: int = 192  # the inner width
    piece: int = 256  # tokens that the feedforward takes at a time
    linear: int = 0  # layers before each layer of attention that are linear: 3 in Qwen3-Next
    tied: bool = False  # one weight for the embedding and the head
    checkpointing: bool = False

    def __post_init__(self) -> None:
        given, pairs = f"hidden is {self.hidden}, heads {self.heads}", "rotary turns pairs of channels"
        multiple = f"hidden to be a multiple of 2 x heads, {2 * self.heads}: {pairs}"
        expect(self.hidden % (2 * self.heads) == 0, given, multiple)
        given = f"heads is {self.heads}, kv_heads {self.kv_heads}"
        expect(self.heads % self.kv_heads == 0, given, "kv_heads to divide heads")
        fits = self.linear >= 0 and self.layers % (self.linear + 1) == 0
        multiple = "layers a multiple of linear + 1: linear layers stand before each layer of attention"
        expect(fits, f"layers is {self.layers}, linear {self.linear}", f"linear to be 0 or more, and {multiple}")


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


class Linear(NamedTuple):
    """How tokens mix in a linear layer: convolution(x, weight) -> y, rule(q, k, v, log_decay, beta) -> (out, state)."""

    convolution: Callable[..., Tensor] = short_convolution
    rule: Callable[..., tuple[Tensor, Tensor | None]] = linear_attention


ALONE = Linear()


def ring_of_states(**where: Any) -> Linear:
    """The same over the ranks of a ring: `layout` and `group` as of `ring_linear_attention`."""
    return Linear(partial(ring_short_convolution, **where), partial(ring_linear_attention, **where))


class LinearLayer(Layer):
    """The gated delta rule in place of attention. It needs no positions."""

    def __init__(self, config: Config, linear: Any) -> None:
        """`linear` is a Linear, or an object with such functions."""
        super().__init__(config, linear)
        self.linear, H, channels = linear, config.heads, (config.heads + 2 * config.kv_heads) * self.D
        self.wz, self.gates = (nn.Linear(config.hidden, width, bias=False) for width in (config.hidden, 2 * H))
        self.taps = nn.Parameter(torch.empty(channels, 1, TAPS).uniform_(-(TAPS**-0.5), TAPS**-0.5))
        self.log_rate = nn.Parameter(torch.linspace(-4, 0, H))  # heads forget after 80 tokens, ... after 1 or 2
        self.bias, self.norm3 = nn.Parameter(torch.zeros(H)), nn.RMSNorm(self.D, eps=1e-5)

    def attend(self, x: Tensor, at: Tensor) -> Tensor:
        n, wide = self.norm1(x), accumulation_dtype(x.dtype)  # (B, C, hidden)
        qkv = torch.cat([w(n) for w in (self.wq, self.wk, self.wv)], dim=2).mT  # (B, channels, C)
        qkv = F.silu(self.linear.convolution(qkv, self.taps[:, 0])).unflatten(1, (-1, self.D)).mT
        q, k, v = qkv.split([self.config.heads, *[self.config.kv_heads] * 2], dim=1)  # (B, H, C, D), (B, G, C, D)
        beta, forget = self.gates(n).mT.to(wide).chunk(2, dim=1)  # (B, H, C)
        log_decay = -self.log_rate.to(wide).exp()[:, None] * F.softplus(forget + self.bias.to(wide)[:, None])
        out, _ = self.linear.rule(F.normalize(q, dim=3), F.normalize(k, dim=3), v, log_decay, beta.sigmoid())
        return self.wo(self.norm3(out).transpose(1, 2).flatten(2) * F.silu(self.wz(n)))


class Transformer(nn.Module):
    """tokens (B, C) at positions `at` (C,) -> logits (B, C, vocab) of the tokens that follow.

    With `last` (B, C), True for one token of a row or none: logits (B, vocab) after that token, or 0.
    """

    def __init__(
        self,
        config: Config,
        attention: Callable[..., Tensor] = F.scaled_dot_product_attention,
        linear: Any = ALONE,
    ) -> None:
        super().__init__()
        self.config, cycle = config, config.linear + 1
        self.embedding = nn.Embedding(config.vocab, config.hidden)
        self.layers = nn.ModuleList(
            LinearLayer(config, linear) if (i + 1) % cycle else Layer(config, attention) for i in range(config.layers)
        )
        self.norm = nn.RMSNorm(config.hidden, eps=1e-5)
        self.head = nn.Linear(config.hidden, config.vocab, bias=False)
        for weight in self.parameters():
            if weight.dim() == 2:
                nn.init.normal_(weight, std=0.02)
        if config.tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, at: Tensor, last: Tensor | None = None) -> Tensor:
        x = self.embedding(tokens)  # (B, C, hidden)
        for layer in self.layers:
            x = layer(x, at)
        x = self.norm(x)
        if last is None:
            return self.head(x)
        return self.head((x * last[..., None]).sum(dim=1)) * last.any(dim=1, keepdim=True)


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
    """FLOPs of a step on `batch` sequences of S tokens: 6 · tokens · (weights + hidden · (layers · S + linear · 3 D)).

    A weight is multiplied and added once for each token in the forward pass, and twice in the backward pass. The
    embedding is looked up, so it has none. Attention: QKᵀ and PV are 4 · S · hidden FLOPs a token, half of the scores
    are masked, and the backward pass has twice as many. A linear layer reads the state, writes it, and reads it again:
    three products of D x D numbers a head. What is computed again does not count.
    """
    weights = sum(w.numel() for w in model.parameters() if w.dim() > 1) - model.embedding.weight.numel()
    mixing = sum(3 * layer.D if isinstance(layer, LinearLayer) else seq_len for layer in model.layers)
    return 6.0 * batch * seq_len * (weights + model.norm.weight.numel() * mixing)


CASES = {
    "the ring": Config(),
    "with activation checkpointing": Config(checkpointing=True, piece=3),
    "three linear layers, one of attention": Config(layers=4, linear=3),
}


def _step(config: Config, rank: int, world_size: int, *mixers: Any) -> list[Tensor]:
    """This rank's part of the loss of the batch and of all gradients, float64."""
    torch.manual_seed(0)
    model = Transformer(config, *mixers).double()
    tokens, labels, at = shard_text(TEXT, "zigzag", rank, world_size)
    loss = summed_loss(model(tokens, at), labels) / S
    return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]


def _steps(context: RankContext) -> list[tuple[list[Tensor], int]]:
    """For each case the loss and the gradients, summed over the ranks, and the hops of this rank in its attention."""
    mixers, steps = (partial(scaled_dot_product_attention, layout="zigzag"), ring_of_states(layout="zigzag")), []
    for config in CASES.values():
        with mock.patch.object(dist, "batch_isend_irecv", side_effect=dist.batch_isend_irecv) as hop:
            results = _step(config, context.rank, context.world_size, *mixers)
        for result in results:
            dist.all_reduce(result)
        steps.append((results, hop.call_count * (config.linear + 1) // config.layers))
    return steps


def main() -> int:
    print("4 ranks, zigzag, float64, against one process:")
    ok = True
    for (name, config), (results, hops) in zip(CASES.items(), launch(_steps, 4)[0], strict=True):
        exact = _step(config, rank=0, world_size=1)
        loss, *gradients = [((a - b).norm() / b.norm()).item() for a, b in zip(results, exact, strict=True)]
        right = all(x < 1e-10 for x in (loss, *gradients)) and hops == (12 if config.checkpointing else 9)
        errors = f"off by {loss:.1e}, gradients by {max(gradients):.1e}"
        print(f"{'ok   ' if right else 'off  '} {name}: loss {exact[0]:.4f}, {errors}, {hops} hops")
        ok &= right
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
