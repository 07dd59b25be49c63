"""A case for a ring: how many ranks, which mask and layout, which dtype and numbers; and the right results.

    out = softmax(scale Q Kᵀ, where visible) V        and its gradients, for given Q, K, V and dO

The numbers show what random numbers hide: overflow, sums in 16 bits, the weights themselves.

    normal             random, 1.5 times a standard normal q
    large              every score is about 800 or about -800: e^800 overflows and e^-800 is 0
    silent rank        no number of the last rank's out enters the loss, as where a rank has nothing but padding
    16-bit sums        of 4 ranks: sums that cancel but for a rest, which running sums in 16 bits lose; gradients alike
    X-ray 1, X-ray 2   the results are the weights W of attention and the gradients dS of its scores

Shapes: the whole q and d_out (B, H, S, D), k and v (B, G, S, D); in an X-ray B = H = G = 1 and D ≥ S.

Before: probes.py. After: patient.py, what a ring may take; explaining/xray.py, which reads the results of an X-ray.
Source: Liu et al. 2024, equation 1; Dao et al. 2022, algorithm 4, for the X-ray.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from ring_doctor.asking.names import layout_of
from ring_doctor.asking.probes import RUNS, probes
from ringlab.ring.layouts import Layout
from ringlab.ring.layouts import positions as positions_of_layout
from ringlab.ring.masks import Mask
from ringlab.support.expect import expect
from ringlab.support.rounding import Right, exact_attention


@dataclass(frozen=True)
class Case:
    """A case. Another seed gives other numbers."""

    world_size: int
    seq_len: int = 24
    causal: bool = False
    layout: str = "contiguous"  # or zigzag, striped, or "module:name" of a `Layout` or of a function that deals out
    documents: tuple[int, ...] | None = None
    window: int | None = None
    window_right: int = 0  # beside it in window_size: under a causal mask it changes nothing; -1: no end
    batch: int = 1
    heads: int = 2
    kv_heads: int = 2
    head_dim: int = 4
    dtype: torch.dtype = torch.float64
    scale: float | None = None
    sinks: bool = False  # attention sinks: for each query head a learned logit in every softmax, without a value
    inputs: str = "normal"  # a name in INPUTS
    seed: int = 0
    value_dim: int | None = None  # of v and out; None: as of q and k

    @property
    def names(self) -> tuple[str, ...]:
        return tuple("qkv")  # the inputs of a rank's tokens; all of them have gradients

    @property
    def learned(self) -> dict[str, Tensor]:
        """The inputs that are the same on every rank. A rank returns its part of a gradient: the sum is the whole."""
        return {"sinks": self.sink_scores()} if self.sinks else {}

    def whole(self) -> tuple[Tensor, ...]:
        """The inputs and d_out of the whole sequence, in the case's dtype."""
        generator = torch.Generator().manual_seed(self.seed)
        H, G, of_k, of_v = self.heads, self.kv_heads, self.head_dim, self.value_dim or self.head_dim
        shapes = [(self.batch, n, self.seq_len, D) for n, D in ((H, of_k), (G, of_k), (G, of_v), (H, of_v))]
        numbers = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
        return tuple(x.to(self.dtype) for x in INPUTS[self.inputs](self, *numbers))

    def sink_scores(self) -> Tensor:
        """(H,): the learned logit of each query head, in the case's dtype."""
        return torch.linspace(-1.0, 2.0, self.heads, dtype=torch.float64).to(self.dtype)

    def positions(self, rank: int) -> Tensor:
        """Where in the sequence the tokens of `rank` stand: (C,), int64."""
        return positions(self.layout, self.seq_len, rank, self.world_size)

    def sizes(self) -> Tensor:
        """(S,): 4^r for the tokens of rank r, numbers that round nothing."""
        sizes = [torch.full((1, 1, len(self.positions(r))), 4.0**r) for r in range(self.world_size)]
        return self.join(sizes)[0, 0].double()

    def cut(self, x: Tensor, rank: int) -> Tensor:
        """The chunk of `rank`, (B, H, C, ...), of a whole tensor (B, H, S, ...)."""
        return x[:, :, self.positions(rank).to(x.device)]

    def chunks(self, x: Tensor) -> list[Tensor]:
        """The chunks of all ranks of a whole tensor."""
        return [self.cut(x, rank) for rank in range(self.world_size)]

    def join(self, chunks: Sequence[Tensor]) -> Tensor:
        """The whole tensor (B, H, S, ...) from the chunks of all ranks."""
        order = torch.cat([self.positions(rank) for rank in range(self.world_size)])
        return torch.cat(list(chunks), dim=2)[:, :, order.argsort().to(chunks[0].device)]

    @property
    def one_token_each(self) -> bool:
        return self.seq_len == self.world_size

    @property
    def large_tiles(self) -> bool:
        return self.seq_len > 128 * self.world_size  # a rank has more than a tile of a usual kernel

    @property
    def equal_chunks(self) -> bool:
        return len({len(self.positions(rank)) for rank in range(self.world_size)}) == 1

    def visible(self) -> Tensor:
        """(S, S) bool: whether the query, a row, sees the key, a column."""
        return _visible(self.seq_len, self.causal, self.documents, self.window, self.window_right)

    def exact(self, q: Tensor, k: Tensor, v: Tensor, d_out: Tensor) -> dict[str, Right]:
        """The results of attention to these tensors, under the mask of the case."""
        visible = self.visible() if self.documents or self.window else None  # causal alone: without S x S numbers
        return exact_attention(
            q, k, v, d_out, causal=self.causal, visible=visible, scale=self.scale, fused_blocks=self.world_size
        )

    def right(self) -> dict[str, Right]:
        """The right out, lse, dq, dk and dv of the whole sequence, and how far rounding may move them."""
        return _right(self)

    def numbers(self) -> str:
        """The kind of inputs in words."""
        made_for = f"inputs made for {self.inputs}" if self.inputs in UNROUNDED else f"{self.inputs} inputs"
        return {"large": "large scores", SIZES: SIZES}.get(self.inputs, made_for)

    def words(self) -> str:
        """The case in words: "P = 3, causal, zigzag, 4 query heads on 2, C = 6, float32"."""
        dtype = str(self.dtype).removeprefix("torch.")
        return ", ".join([f"P = {self.world_size}", self.mask(), *self.features(), dtype])

    def mask(self) -> str:
        """Which keys a query sees by its position, and the layout: "causal, zigzag"."""
        said = "causal" if self.causal else "no mask" if self.documents is None else "documents alone"
        return f"{said}, {self.layout}"

    def features(self) -> list[str]:
        """What else is asked, the same words for all numbers of ranks: ["batch of 2", "C = 6"]."""
        first = ", ".join(map(str, (self.documents or ())[:-1]))
        said = [f"documents of {first} and the other tokens"] if first else []
        right = f", window_size (W - 1, {self.window_right})" if self.window_right else ""
        said += [f"window of {self.window}{right}"] if self.window else []
        said += [f"{self.heads} query heads on {self.kv_heads}"] if self.heads != self.kv_heads else []
        said += ["attention sinks"] if self.sinks else []
        said += [f"V of D = {self.value_dim} beside {self.head_dim}"] if self.value_dim else []
        said += [f"scale {self.scale:g}"] if self.scale is not None else []
        said += [f"batch of {self.batch}"] if self.batch > 1 else []
        said += [self.numbers()] if self.inputs != "normal" else []
        said += [f"D = {self.head_dim}"] if self.large_tiles or self.scale is not None else []
        C, more = divmod(self.seq_len, self.world_size)
        return [*said, f"C = {C} or {C + 1}" if more else f"C = {C}"]


@lru_cache(maxsize=512)
def positions(layout: str, seq_len: int, rank: int, world_size: int) -> Tensor:
    """Where the tokens of `rank` stand: (C,), int64. Do not write into this tensor.

    Raises ValueError for a length that does not fit, and for a function of the user that returns no such positions. A
    function, unlike a `Layout`, may return them in any order.
    """
    found = layout_of(layout)
    if isinstance(found, str | Layout):
        return positions_of_layout(found, seq_len, rank, world_size)
    at = torch.as_tensor(found(seq_len, rank, world_size)).long().cpu()
    fits = at.dim() == 1 and len(at) > 0 and at.min() >= 0 and at.max() < seq_len
    expected = f"the positions, 0 to {seq_len - 1}, of the tokens of rank {rank}"
    expect(fits, f"{layout}({seq_len}, {rank}, {world_size}) returned {at.tolist()}", expected)
    return at


@lru_cache(maxsize=512)
def _visible(seq_len: int, causal: bool, documents: tuple[int, ...] | None, window: int | None, right: int) -> Tensor:
    mask = Mask(causal, documents, window if causal else None)
    mask.check_length(seq_len)
    seen = mask.dense(torch.arange(seq_len), seq_len)
    if causal or window is None:
        return seen
    after = torch.arange(seq_len) - torch.arange(seq_len)[:, None]  # the query
    return seen & (after > -window) & ((after <= right) | (right < 0))


@lru_cache(maxsize=512)
def _right(case: Case) -> dict[str, Right]:
    if case.sinks:
        return _right_with_sinks(case)
    right = case.exact(*case.whole())
    if case.inputs in UNROUNDED:  # and yet kernels sum lse from weights in 16 bits
        wide = case.exact(*(x.float() for x in case.whole()))
        right |= {name: replace(x, dtype=case.dtype) for name, x in wide.items() if name != "lse"}
        for name in right.keys() - {"lse"}:
            right[name].sums.add_(A_PIECE * right[name].exact.abs())
    return right


def _right_with_sinks(case: Case) -> dict[str, Right]:
    """A learned logit is the score of one more key, whose value is 0. One more dimension of q and k gives it."""
    q, k, v, d_out = case.whole()
    scale = case.head_dim**-0.5 if case.scale is None else case.scale
    sink = torch.zeros(*k.shape[:2], 1, case.head_dim + 1, dtype=torch.float64)
    sink[..., -1] = 1 / scale
    q, k = pad(q, (0, 1)), pad(k, (0, 1))
    q[..., -1] = case.sink_scores()[:, None]
    visible = pad(case.visible(), (0, 1), value=True)
    k, v = torch.cat([k, sink], dim=2), pad(v, (0, 0, 0, 1))
    results = exact_attention(q, k, v, d_out, visible=visible, scale=scale, fused_blocks=case.world_size)
    of_v = {name: (..., slice(case.seq_len), slice(None)) for name in ("out", "dv")}
    own = of_v | {name: (..., slice(case.seq_len), slice(case.head_dim)) for name in ("dq", "dk")}  # without the sink
    rows, sums = (x[..., -1] for x in (results["dq"].exact, results["dq"].sums))  # what each row adds to its sink
    more = (1 + rows[:, 0].numel() ** 0.5) * torch.finfo(torch.promote_types(case.dtype, torch.float32)).eps
    d_sinks = replace(results["dq"], exact=rows.sum((0, 2)), sums=(sums + more * rows.abs()).sum((0, 2)))
    found = {n: replace(results[n], exact=results[n].exact[at], sums=results[n].sums[at]) for n, at in own.items()}
    return results | found | {"dsinks": d_sinks}


A_PIECE = 0.6  # of a number: right rings may round each piece that they compute
FOUR = 4  # ranks of the inputs that show sums in 16 bits
HIDES = 16.0, -32.0  # a number of q and a number of k: their score is so low that its weight is 0 beside a score of 0
LARGE = 800.0  # added to or taken from the scores of `large` inputs: the weights are as before


def _large(case: Case, q: Tensor, k: Tensor, v: Tensor, d_out: Tensor) -> Iterable[Tensor]:
    side = (LARGE * case.head_dim**0.5) ** 0.5
    q[..., 0], k[..., 0] = side, side
    q[:, :, 1::2, 0] = -side
    return q, k, v, d_out


def _silent_rank(case: Case, q: Tensor, k: Tensor, v: Tensor, d_out: Tensor) -> Iterable[Tensor]:
    d_out[:, :, case.positions(case.world_size - 1)] = 0
    return 1.5 * q, k, v, d_out


def _sums(case: Case, q: Tensor, k: Tensor, v: Tensor, d_out: Tensor) -> Iterable[Tensor]:
    """Weights are 0, 1, 1/2 or 1/4. The values of four blocks cancel but for a small rest.

    A query sees only the first key of each block: column 0 hides the others. Three such keys would need weights of 1/3,
    so column 1 hides all but the first key of block 0 from these queries.
    Right rings compute some blocks in one piece and round it: whichever blocks that are, they move the rest by half of
    it at most. A running sum, or mean, that is rounded at each block moves it by three quarters of it at least.
    Half precision for bfloat16 cannot hold the last column at all.
    """
    half = torch.finfo(case.dtype).eps / 2
    means = 1.5, 0.8125 * half, -0.8125 * half, -1.5 - 2 * half
    first = _in_order(case)[:, 0]
    q, k, v = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    of_few = case.visible()[:, first].sum(dim=1) == 3
    q[..., 0], q[..., 1] = HIDES[0] * ~of_few, HIDES[0] * of_few
    k[..., :2] = HIDES[1]
    k[:, :, first, 0], k[:, :, first[0], 1] = 0.0, 0.0
    v[:, :, first] = _patterns([_parts(half), means], case.kv_heads, case.head_dim)
    v[..., -1] *= 2.0**-40 if case.dtype == torch.bfloat16 else 1.0
    return q, k, v, d_out


def _gradients(case: Case, q: Tensor, k: Tensor, v: Tensor, d_out: Tensor) -> Iterable[Tensor]:
    """Each gradient is a sum of four parts, as the sums of `_sums`.

    Of two keys with equal weights one has the value 1 and the other -1, so out and delta are 0 and dP is dO or -dO.
    dq, a sum over blocks: the last query of each rank sees the first two keys of each block, if no mask hides one.
    dk and dv, sums over ranks: the query before it sees the next two keys, of block 0 alone if a mask hides others.
    The dO of all other queries is 0.
    """
    rows = [_parts(torch.finfo(case.dtype).eps / 2)]
    keys, last_two = _in_order(case)[:, :4], _in_order(case)[:, -2:]
    of_blocks, of_ranks = keys[:, :2].flatten(), keys[: 1 if case.causal else FOUR, 2:].flatten()
    patterns = _patterns(rows, case.kv_heads, case.head_dim - 1)
    q, k, v, d_out = (torch.zeros_like(x) for x in (q, k, v, d_out))
    k[..., :2] = HIDES[1]
    k[:, :, of_blocks, 0], k[:, :, of_ranks, 1] = 0.0, 0.0
    k[:, :, keys[:, 0], 2:] = _patterns(rows, case.kv_heads, case.head_dim - 2)
    for column, seen in enumerate((of_ranks, of_blocks)):
        v[:, :, seen, column] = torch.tensor([1.0, -1.0], dtype=v.dtype).repeat(len(seen) // 2)
    q[..., 1] = HIDES[0]
    d_out[:, :, last_two[:, 0], 0], d_out[:, :, last_two[:, 0], 2:] = patterns[..., 0], patterns[..., 1:]
    of_all = last_two[case.visible()[last_two[:, 1]][:, of_blocks].all(dim=1), 1]
    q[:, :, of_all, 0], q[:, :, of_all, 1], d_out[:, :, of_all, 1] = HIDES[0], 0.0, 1.0
    return q, k, v, d_out


def _parts(half: float) -> tuple[float, ...]:
    """Four parts of a sum: in 16 bits 1 + half is 1, and 1 + 1.125 half is 1 + 2 half, which adds as much again."""
    return 1.125 * half, 1, 1.125 * half, -1


def _in_order(case: Case) -> Tensor:
    """(P, C): the positions of each rank from the first to the last."""
    return torch.stack([case.positions(rank).sort().values for rank in range(FOUR)])


def _patterns(rows: Sequence[Sequence[float]], heads: int, columns: int) -> Tensor:
    """(1, heads, 4, columns): a row of numbers for each column of each head; then the rows turned by one block more."""
    turned = torch.tensor([[*row[n:], *row[:n]] for n in range(FOUR) for row in rows], dtype=torch.float64)
    return turned[torch.arange(heads * columns).view(heads, columns) % len(turned)].mT[None]


def _of_xray(case: Case, *_: Tensor) -> Iterable[Tensor]:
    """A run of an X-ray; with SIZES the second one, whose out is then W with the size of each rank in its columns."""
    heads, name = (case.heads, case.kv_heads, case.kv_heads, case.heads), RUNS[case.inputs != RUNS[0]]
    run = zip(probes(case.seq_len, case.head_dim, case.scale)[name], heads, strict=True)
    q, k, v, d_out = (x.expand(-1, n, -1, -1) for x, n in run)
    return q, k, v * case.sizes()[:, None] if case.inputs == SIZES else v, d_out


SIZES = "V of rank r times 4^r"
UNROUNDED = ("16-bit sums", "16-bit gradients")
INPUTS: dict[str, Callable[..., Iterable[Tensor]]] = {
    "normal": lambda case, q, k, v, d_out: (1.5 * q, k, v, d_out),
    "large": _large,
    "silent rank": _silent_rank,
    "16-bit sums": _sums,
    "16-bit gradients": _gradients,
    **dict.fromkeys((*RUNS, SIZES), _of_xray),
}
