"""Inputs for an X-ray: two runs whose results show the weights W of attention and the gradients dS of its scores.

    run 1    Q = X, K = I,  V = Yᵀ, dO = I    dV = Wᵀ dO shows Wᵀ, dQ = scale dS K shows dS
    run 2    Q = I, K = Xᵀ, V = I,  dO = Y    out = W V shows W, dK = scale dSᵀ Q shows dSᵀ

Both runs have the same scores, scale X, and the same dO Vᵀ, which is Y. So both have the same W and dS.

scale X holds numbers from -1 to 1, all different in a row. So no weight is tiny, and no two weights of a row are alike.
Y is near 1 and -1 by turns, so that dS is not small either.

Shapes: all (1, 1, S, D) with D ≥ S; the columns from S on are 0.

Before: ../support/rounding.py. After: case.py, which asks with them, and xray.py, which reads the results.
Source: none; the equations are those of Dao et al. 2022, algorithm 4.
"""

import torch
from torch import Tensor

RUNS = ("X-ray 1", "X-ray 2")


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
