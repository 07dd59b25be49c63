"""The inputs of an X-ray: with them the output and the gradients of a ring are its matrices of weights.

Two runs with the same scores, scale X, and the same dO Vᵀ, which is Y, have the same W and dS:

    run 1    Q = X, K = I,  V = Yᵀ, dO = I    dV = Wᵀ dO shows Wᵀ, dQ = scale dS K shows dS
    run 2    Q = I, K = Xᵀ, V = I,  dO = Y    out = W V shows W, dK = scale dSᵀ Q shows dSᵀ

Before: names.py. After: case.py, which asks with them.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from ringlab.support.expect import expect

RUNS = ("X-ray 1", "X-ray 2")


def probes(seq_len: int, head_dim: int, scale: float | None = None) -> dict[str, tuple[Tensor, Tensor, Tensor, Tensor]]:
    """{name of the run: (q, k, v, d_out)}, float64. bfloat16 stores them exactly, unless a scale is given.

    Raises ValueError unless S tokens fit into D numbers.
    """
    expect(head_dim >= seq_len, f"{seq_len} tokens with D = {head_dim}", f"{seq_len} or more: a column each")
    generator = torch.Generator().manual_seed(seq_len)

    def shuffled_rows(low: float, high: float, step: float) -> Tensor:
        order = torch.rand(seq_len, seq_len, generator=generator).argsort(dim=1)
        numbers = torch.linspace(low, high, seq_len, dtype=torch.float64)
        return step * (numbers / step).round()[order]

    largest = head_dim**0.5 if scale is None else 1 / scale
    x = shuffled_rows(-largest, largest, largest * 2**-20 if scale else 1 / 8)
    y = shuffled_rows(0.75, 1.25, 1 / 64) * (1 - 2 * (torch.arange(seq_len) % 2))

    def wide(matrix: Tensor) -> Tensor:
        return pad(matrix[None, None], (0, head_dim - seq_len))

    one = wide(torch.eye(seq_len, dtype=torch.float64))
    return {RUNS[0]: (wide(x), one, wide(y.T), one), RUNS[1]: (one, wide(x.T), one, wide(y))}
