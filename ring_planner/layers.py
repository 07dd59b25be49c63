"""Layers that do not keep keys and values of whole heads: a gated delta rule, and latent attention.

A reader may skip this file: presets.py has models with such layers.

Source: Yang et al. 2025 (Gated DeltaNet), section 3; DeepSeek-AI 2024 (DeepSeek-V2), section 2.1.
"""

from dataclasses import dataclass

DELTA = 64  # tokens that the delta rule computes at once


@dataclass(frozen=True)
class LinearLayers:
    """The layers of a hybrid that are a gated delta rule, in place of softmax attention: linear_attention.py.

    Queries and keys have `key_heads` heads of `key_dim` numbers, values and gates `heads` of `value_dim`. A short
    convolution of `kernel` tokens is over queries, keys and values.
    """

    layers: int
    heads: int
    key_heads: int
    key_dim: int
    value_dim: int
    kernel: int

    @property
    def values(self) -> int:
        """Numbers of a token in v, in the gate, or in the output."""
        return self.heads * self.value_dim

    @property
    def channels(self) -> int:
        """Numbers of a token in q, k and v."""
        return 2 * self.key_heads * self.key_dim + self.values

    @property
    def state(self) -> int:
        """Numbers of the state: it stands for all tokens so far."""
        return self.heads * self.key_dim * self.value_dim

    @property
    def flops(self) -> int:
        """FLOPs of a token, forward, in pieces of `DELTA` tokens: the products of `in_chunks` and of the states."""
        D, Dv = self.key_dim, self.value_dim
        inside = 2 * DELTA * (3 * D + Dv) + DELTA * (D + Dv)  # scores, k kᵀ, scores · taken, scores · u; the solve
        return self.heads * (inside + 2 * D * D + 4 * D * Dv + 2 * D * D * Dv // DELTA)

    def projections(self, hidden: int) -> int:
        """Weights of a layer's products: of q, k, v, the gate, decay and beta, and of the output."""
        return hidden * (self.channels + 2 * self.values + 2 * self.heads)


@dataclass(frozen=True)
class Latents:
    """Of latent attention (MLA): a token has a latent of `rank` numbers, and `rope` rotated ones for all heads.

    A head's query and key have `key` + `rope` numbers, its value `value`. Queries too are made from a latent, of
    `q_rank` numbers (0: from the hidden state). An index (DSA) has `index_heads` of `index_dim` numbers: its weights
    are counted, its scores are not. (In DeepSeek-V3.2 they are 6 % of attention's products.)
    """

    rank: int
    rope: int
    key: int
    value: int
    q_rank: int = 0
    index_heads: int = 0
    index_dim: int = 0
    index_keys: int = 2048  # that an index chooses for a query

    @property
    def sent(self) -> int:
        """Numbers of a token that travel in place of K and V of all heads: `ringlab.ring_latent_attention`."""
        return self.rank + self.rope

    def projections(self, hidden: int, heads: int) -> int:
        """Weights of a layer's products."""
        queries = heads * (self.key + self.rope)
        into = self.q_rank * (hidden + queries) if self.q_rank else hidden * queries
        index = self.index_dim * (self.index_heads * (self.q_rank or hidden) + hidden) + hidden * self.index_heads
        out = heads * self.value * hidden
        return into + hidden * self.sent + self.rank * heads * (self.key + self.value) + out + index
