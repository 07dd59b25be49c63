"""Numbers for q, k, v and dO that show what random numbers hide: overflow, sums in 16 bits, the weights themselves.

    normal             random, 1.5 times a standard normal q
    large              every score is about 800 or about -800: e^800 overflows and e^-800 is 0
    silent rank        no number of the last rank's out enters the loss
    16-bit sums        a right ring of 4 ranks rounds nothing to 16 bits, one that sums in 16 bits does; gradients alike
    X-ray 1, X-ray 2   the results are the weights W of attention and the gradients dS of its scores

Two runs with the same scores, scale X, and the same dO Vᵀ, which is Y, have the same W and dS:

    run 1    Q = X, K = I,  V = Yᵀ, dO = I    dV = Wᵀ dO shows Wᵀ, dQ = scale dS K shows dS
    run 2    Q = I, K = Xᵀ, V = I,  dO = Y    out = W V shows W, dK = scale dSᵀ Q shows dSᵀ

Shapes: the whole q and d_out (B, H, S, D), k and v (B, G, S, D); in an X-ray B = H = G = 1 and D ≥ S.

Before: names.py. After: case.py, which asks with them, and xray.py, which reads the results.
Source: none; the equations are those of Dao et al. 2022, algorithm 4.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ring_doctor.case import Case

RUNS = ("X-ray 1", "X-ray 2")
LARGE = 800.0  # added to every score of `large` inputs: e^800 is more than float64 holds


def _normal(case: "Case", q: Tensor, k: Tensor, v: Tensor, d_out: Tensor) -> Iterable[Tensor]:
    return 1.5 * q, k, v, d_out


def _large(case: "Case", q: Tensor, k: Tensor, v: Tensor, d_out: Tensor) -> Iterable[Tensor]:
    """Every score of a query is about 800 or about -800: e^800 overflows and e^-800 is 0. The weights are as before."""
    side = (LARGE * case.head_dim**0.5) ** 0.5
    q[..., 0], k[..., 0] = side, side
    q[:, :, 1::2, 0] = -side
    return q, k, v, d_out


def _silent_rank(case: "Case", q: Tensor, k: Tensor, v: Tensor, d_out: Tensor) -> Iterable[Tensor]:
    """No number of the last rank's out enters the loss, as where a rank holds nothing but padding: its dO is 0."""
    d_out[:, :, case.positions(case.world_size - 1)] = 0
    return 1.5 * q, k, v, d_out


FOUR = 4  # ranks of the inputs below
HIDES = 16.0, -32.0  # a number of q and a number of k: their score is so low that its weight is 0 beside a score of 0


def _sums(case: "Case", q: Tensor, k: Tensor, v: Tensor, d_out: Tensor) -> Iterable[Tensor]:
    """Every weight is 0, 1, 1/2 or 1/4. The mean over the values of four blocks can be stored in 16 bits; the mean over
    some of them cannot.

    A query sees only the first key of each block: column 0 hides the others. Three such keys would need weights of 1/3,
    so these queries see only the first key of block 0: column 1 hides the others.
    Right rings compute some blocks in one piece: a hybrid the rows of its 2 x 2 mesh; under a causal mask, a ring that
    has gathered all keys, the blocks before its own. The means over these blocks can be stored too.
    """
    half = torch.finfo(case.dtype).eps / 2
    rows = [(1, -1, 1, -1), (1, 0, half, half), (half, half, 1, 0), (1, 1 + 4 * half, 1 + 2 * half, 1 + 2 * half)]
    rows = [(half, 0.75 + half, half, 0.75 - half), (half, half, 4 * half, 1)] if case.causal else rows
    first = _in_order(case)[:, 0]
    q, k, v = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    of_few = case.visible()[:, first].sum(dim=1) == 3
    q[..., 0], q[..., 1] = HIDES[0] * ~of_few, HIDES[0] * of_few
    k[..., :2] = HIDES[1]
    k[:, :, first, 0], k[:, :, first[0], 1] = 0.0, 0.0
    v[:, :, first] = _patterns(rows, case.kv_heads, case.head_dim)
    return q, k, v, d_out


def _gradients(case: "Case", q: Tensor, k: Tensor, v: Tensor, d_out: Tensor) -> Iterable[Tensor]:
    """Each gradient is a sum of four parts that can be stored in 16 bits; the sum of some of the parts cannot.

    Of two keys with equal weights one has the value 1 and the other -1, so out and delta are 0 and dP is dO or -dO.
    dk and dv, sums over ranks: of each rank one query sees the first two keys of block 0, which all ranks see.
    dq, a sum over blocks: the last query of each rank sees the first two keys of each block, if no mask hides one.
    The dO of all other queries is 0. In 16 bits 1 + half is 1: a sum that adds the halves to 1 one by one loses both.
    """
    half = torch.finfo(case.dtype).eps / 2
    by_rank = (1, 0, half, half), (half, half, 1, 0)
    by_block = ((half, half, 0, 1), (half, half, 1, 0)) if case.causal else by_rank
    keys = _in_order(case)[:, :2]
    last_two = _in_order(case)[:, -2:]
    patterns = _patterns(by_rank, case.kv_heads, case.head_dim - 1)
    q, k, v, d_out = (torch.zeros_like(x) for x in (q, k, v, d_out))
    k[..., :2] = HIDES[1]
    k[:, :, keys.flatten(), 0], k[:, :, keys[0], 1] = 0.0, 0.0
    k[:, :, keys[:, 0], 2:] = _patterns(by_block, case.kv_heads, case.head_dim - 2)
    v[:, :, keys[0], 0] = torch.tensor([1.0, -1.0], dtype=v.dtype)
    v[:, :, keys.flatten(), 1] = torch.tensor([1.0, -1.0], dtype=v.dtype).repeat(FOUR)
    q[..., 1] = HIDES[0]
    d_out[:, :, last_two[:, 0], 0], d_out[:, :, last_two[:, 0], 2:] = patterns[..., 0], patterns[..., 1:]
    of_all = last_two[case.visible()[last_two[:, 1]][:, keys.flatten()].all(dim=1), 1]
    q[:, :, of_all, 0], q[:, :, of_all, 1], d_out[:, :, of_all, 1] = HIDES[0], 0.0, 1.0
    return q, k, v, d_out


def _in_order(case: "Case") -> Tensor:
    """(P, C): the positions of each rank from the first to the last."""
    return torch.stack([case.positions(rank).sort().values for rank in range(FOUR)])


def _patterns(rows: Sequence[Sequence[float]], heads: int, columns: int) -> Tensor:
    """(1, heads, 4, columns): a row of numbers for each column, another one for the next column or head."""
    row = (torch.arange(heads)[:, None] + torch.arange(columns)) % len(rows)
    return torch.tensor(rows, dtype=torch.float64)[row].mT[None]


def _of_xray(case: "Case", *_: Tensor) -> Iterable[Tensor]:
    heads = case.heads, case.kv_heads, case.kv_heads, case.heads
    run = probes(case.seq_len, case.head_dim, case.scale)[case.inputs]
    return [x.expand(-1, n, -1, -1) for x, n in zip(run, heads, strict=True)]


def probes(seq_len: int, head_dim: int, scale: float | None = None) -> dict[str, tuple[Tensor, Tensor, Tensor, Tensor]]:
    """{name of the run: (q, k, v, d_out)}, float64. bfloat16 stores them exactly, unless a scale is given.

    Raises ValueError unless S tokens fit into D numbers.
    """
    if head_dim < seq_len:
        raise ValueError(f"{seq_len} tokens with D = {head_dim}; expected {seq_len} or more: a column each")
    generator = torch.Generator().manual_seed(seq_len)

    def shuffled_rows(low: float, high: float, step: float) -> Tensor:
        order = torch.rand(seq_len, seq_len, generator=generator).argsort(dim=1)
        numbers = torch.linspace(low, high, seq_len, dtype=torch.float64)
        return step * (numbers / step).round()[order]

    largest = head_dim**0.5 if scale is None else 1 / scale
    x = shuffled_rows(-largest, largest, largest * 2**-20 if scale else 1 / 8)
    y = shuffled_rows(0.75, 1.25, 1 / 64) * (1 - 2 * (torch.arange(seq_len) % 2))
    one = torch.eye(seq_len, dtype=torch.float64)
    more = torch.zeros(1, 1, seq_len, head_dim - seq_len, dtype=torch.float64)

    def wide(matrix: Tensor) -> Tensor:
        return torch.cat([matrix[None, None], more], dim=-1)

    x, x_t, y, y_t, one = wide(x), wide(x.T), wide(y), wide(y.T), wide(one)
    return {RUNS[0]: (x, one, y_t, one), RUNS[1]: (one, x_t, one, y)}


UNROUNDED = ("16-bit sums", "16-bit gradients")  # inputs for which a right ring of 4 ranks rounds nothing to 16 bits
INPUTS: dict[str, Callable[..., Iterable[Tensor]]] = {
    "normal": _normal,
    "large": _large,
    "silent rank": _silent_rank,
    "16-bit sums": _sums,
    "16-bit gradients": _gradients,
    **dict.fromkeys(RUNS, _of_xray),
}
