"""A case for a ring: how many ranks, which mask and layout, which dtype and numbers; and the right results.

    out = softmax(scale Q Kᵀ, where visible) V        and its gradients, for random Q, K, V and dO

Shapes: B sequences, H query heads, G key/value heads, P ranks, S tokens, D numbers in a head. The whole q and d_out are
(B, H, S, D), k and v (B, G, S, D). Rank r gets the tokens at `positions(r)`. All cases are small enough to be computed
by definition.

Before: inputs.py. After: calls.py, how a ring is called.
Source: Liu et al. 2024, equation 1; the right answers come from ../ringlab/support/rounding.py.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import torch
from torch import Tensor

from ring_doctor.inputs import INPUTS, UNROUNDED
from ring_doctor.names import named
from ringlab.support.rounding import Right, exact_attention
from ringlab.training.layouts import LAYOUTS, Layout
from ringlab.training.layouts import positions as positions_of_layout
from ringlab.training.masks import Mask


@dataclass(frozen=True)
class Case:
    """A case. Another seed gives other numbers."""

    world_size: int
    seq_len: int = 24
    causal: bool = False
    layout: str = "contiguous"  # or zigzag, striped, or "module:name" of a `Layout` or of a function that deals out
    documents: tuple[int, ...] | None = None
    window: int | None = None
    batch: int = 1
    heads: int = 2
    kv_heads: int = 2
    head_dim: int = 4
    dtype: torch.dtype = torch.float64
    scale: float | None = None
    sinks: bool = False  # attention sinks: for each query head a learned logit in every softmax, without a value
    inputs: str = "normal"  # a name in INPUTS
    seed: int = 0

    def whole(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k, v and d_out of the whole sequence, in the case's dtype."""
        generator = torch.Generator().manual_seed(self.seed)
        q_shape, k_shape = ((self.batch, n, self.seq_len, self.head_dim) for n in (self.heads, self.kv_heads))
        shapes = q_shape, k_shape, k_shape, q_shape
        numbers = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
        q, k, v, d_out = (x.to(self.dtype) for x in INPUTS[self.inputs](self, *numbers))
        return q, k, v, d_out

    def sink_scores(self) -> Tensor:
        """(H,): the learned logit of each query head, in the case's dtype."""
        return torch.linspace(-1.0, 2.0, self.heads, dtype=torch.float64).to(self.dtype)

    def positions(self, rank: int) -> Tensor:
        """Where in the sequence the tokens of `rank` stand: (C,), int64."""
        return positions(self.layout, self.seq_len, rank, self.world_size)

    def cut(self, x: Tensor, rank: int) -> Tensor:
        """The chunk of `rank`, (B, H, C, ...), of a whole tensor (B, H, S, ...)."""
        return x[:, :, self.positions(rank).to(x.device)]

    def join(self, chunks: Sequence[Tensor]) -> Tensor:
        """The whole tensor (B, H, S, ...) from the chunks of all ranks."""
        order = torch.cat([self.positions(rank) for rank in range(self.world_size)])
        return torch.cat(list(chunks), dim=2)[:, :, order.argsort().to(chunks[0].device)]

    @property
    def one_token_each(self) -> bool:
        return self.seq_len == self.world_size

    @property
    def large_tiles(self) -> bool:
        """Whether a rank has more tokens than a tile of a usual kernel, 128."""
        return self.seq_len > 128 * self.world_size

    @property
    def equal_chunks(self) -> bool:
        return len({len(self.positions(rank)) for rank in range(self.world_size)}) == 1

    def visible(self) -> Tensor:
        """(S, S) bool: True where the query, a row, sees the key, a column."""
        return _visible(self.seq_len, self.causal, self.documents, self.window)

    def right(self) -> dict[str, Right]:
        """The right out, lse, dq, dk and dv of the whole sequence, and how far rounding may move them."""
        return _right(self)

    def words(self) -> str:
        """The case in words: "P = 3, causal, zigzag, 4 query heads on 2, C = 6, float32"."""
        said = [f"P = {self.world_size}", self.mask(), *self.features()]
        return ", ".join(said) + f", {str(self.dtype).removeprefix('torch.')}"

    def mask(self) -> str:
        """Which keys a query sees by its position, and the layout: "causal, zigzag"."""
        said = "causal" if self.causal else "no mask" if self.documents is None else "documents alone"
        return f"{said}, {self.layout}"

    def features(self) -> list[str]:
        """What else is asked, the same words for every number of ranks: ["batch of 2", "C = 6"]."""
        first = ", ".join(map(str, self.documents[:-1])) if self.documents else ""
        said = [f"documents of {first} and the other tokens"] if first else []
        said += [f"window of {self.window}"] if self.window else []
        said += [f"{self.heads} query heads on {self.kv_heads}"] if self.heads != self.kv_heads else []
        said += ["attention sinks"] if self.sinks else []
        said += [f"scale {self.scale:g}"] if self.scale is not None else []
        said += [f"batch of {self.batch}"] if self.batch > 1 else []
        said += [f"{self.inputs} scores"] if self.inputs == "large" else []
        said += [f"{self.inputs} inputs"] if self.inputs not in ("normal", "large") else []
        said += [f"D = {self.head_dim}"] if self.large_tiles else []
        if self.seq_len % self.world_size:
            return [*said, f"C = {self.seq_len // self.world_size} or {self.seq_len // self.world_size + 1}"]
        return [*said, f"C = {self.seq_len // self.world_size}"]


@lru_cache(maxsize=512)
def positions(layout: str, seq_len: int, rank: int, world_size: int) -> Tensor:
    """Where the tokens of `rank` stand: (C,), int64. Do not write into this tensor.

    Raises ValueError for a length that does not fit the layout, and for a function of the user that does not return
    such positions. A function, unlike a `Layout`, may return them in any order.
    """
    found = layout_of(layout)
    if isinstance(found, str | Layout):
        return positions_of_layout(found, seq_len, rank, world_size)
    at = torch.as_tensor(found(seq_len, rank, world_size)).long().cpu()
    if at.dim() != 1 or len(at) == 0 or at.min() < 0 or at.max() >= seq_len:
        raise ValueError(
            f"{layout}({seq_len}, {rank}, {world_size}) returned {at.tolist()}; expected the positions, 0 to "
            f"{seq_len - 1}, of the tokens of rank {rank}"
        )
    return at


def layout_of(name: str) -> str | Layout | Callable[[int, int, int], Tensor]:
    """The layout of this name. Raises ValueError when there is none.

    "module:name" names a `Layout`, or a function positions(seq_len, rank, world_size) -> (C,).
    """
    return name if name in LAYOUTS else named(name)


@lru_cache(maxsize=512)
def _visible(seq_len: int, causal: bool, documents: tuple[int, ...] | None, window: int | None) -> Tensor:
    mask = Mask(causal, documents, window)
    mask.check_length(seq_len)
    keys = torch.arange(seq_len)
    seen = torch.zeros(seq_len, seq_len, dtype=torch.bool)
    for first, end in mask.visible_keys(keys, seq_len):
        seen |= (first[:, None] <= keys) & (keys < end[:, None])
    return seen


@lru_cache(maxsize=512)
def _right(case: Case) -> dict[str, Right]:
    if case.sinks:
        return _right_with_sinks(case)
    runs = case.documents is not None or case.window is not None
    visible = case.visible() if runs else None  # a causal mask of a long sequence takes no S x S numbers
    exact = partial(
        exact_attention, causal=case.causal, visible=visible, scale=case.scale, fused_blocks=case.world_size
    )
    if case.inputs not in UNROUNDED:
        return exact(*case.whole())
    in_float32 = exact(*(x.float() for x in case.whole()))
    results = {name: Right(right.exact, right.sums, case.dtype, right.why) for name, right in in_float32.items()}
    return results | {"lse": exact(*case.whole())["lse"]}  # kernels sum lse from weights in 16 bits


def _right_with_sinks(case: Case) -> dict[str, Right]:
    """A learned logit is the score of one more key, whose value is 0. One more dimension of q and k gives it."""
    q, k, v, d_out = case.whole()
    scale = case.head_dim**-0.5 if case.scale is None else case.scale
    sink = torch.zeros(*k.shape[:2], 1, case.head_dim + 1, dtype=torch.float64)
    sink[..., -1] = 1 / scale
    q, k = (torch.nn.functional.pad(x, (0, 1)) for x in (q, k))
    q[..., -1] = case.sink_scores()[:, None]
    v, d_out = (torch.nn.functional.pad(x, (0, 1)) for x in (v, d_out))
    visible = torch.nn.functional.pad(case.visible(), (0, 1), value=True)
    k, v = torch.cat([k, sink], dim=2), torch.nn.functional.pad(v, (0, 0, 0, 1))
    results = exact_attention(q, k, v, d_out, visible=visible, scale=scale, fused_blocks=case.world_size)

    def without(x: Tensor) -> Tensor:
        return x[:, :, : case.seq_len, : case.head_dim] if x.dim() == 4 else x

    return {
        name: replace(right, exact=without(right.exact), sums=without(right.sums)) for name, right in results.items()
    }
