"""On a GPU the merge of two results is one pass over memory, by a Triton kernel, in place of five.

    share = 1 / (1 + e^(lse - lse_j))    out = (1 - share) out + share out_j    lse = log(e^lse + e^lse_j)

`merge_into` of flash_ring.py is the same in PyTorch: each of its lines is a pass. Measured once, by hand, on an H100
(forward, S = 32,768, 4 ranks in turn, as a share of PyTorch's own attention): 0.856 with a kernel like this one, 0.758
without.

Shapes: out, out_j (B, H, Sq, D) and lse, lse_j (B, H, Sq), of any strides. One program merges ROWS rows of a head.

A reader of the ring may skip this file. It needs Triton, which PyTorch for CUDA brings; flash_ring.py takes its own
lines where that is missing.
Source: online_softmax.py, `merge`; the Triton manual, fused softmax.
"""
# ruff: noqa: ANN001  # what a kernel gets has types of Triton

import torch
from torch import Tensor

from ringlab.support.extras import extra

with extra("triton", __name__):
    import triton
    import triton.language as tl

ROWS = 16


@triton.jit
def _merge(  # type: ignore[no-untyped-def]
    out, lse, out_j, lse_j, H, Sq, D,
    out_b, out_h, out_s, out_d, lse_b, lse_h, lse_s, out_j_b, out_j_h, out_j_s, out_j_d, lse_j_b, lse_j_h, lse_j_s,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
) -> None:  # fmt: skip
    tiles = (Sq + ROWS - 1) // ROWS  # of a head
    head, tile = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(0) % tiles
    b, h, s = head // H, head % H, tile.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, COLUMNS)
    here = s < Sq
    numbers = here[:, None] & (d < D)[None, :]
    lse += b * lse_b + h * lse_h + s * lse_s
    lse_j += b * lse_j_b + h * lse_j_h + s * lse_j_s
    out += b * out_b + h * out_h + s[:, None] * out_s + d[None, :] * out_d
    out_j += b * out_j_b + h * out_j_h + s[:, None] * out_j_s + d[None, :] * out_j_d

    old, new = tl.load(lse, mask=here, other=0.0), tl.load(lse_j, mask=here, other=0.0)
    saw_nothing = new == float("-inf")
    share = tl.where(saw_nothing, 0.0, 1 / (1 + tl.exp(old - new)))[:, None]
    rest = tl.where(saw_nothing, 1.0, 1 / (1 + tl.exp(new - old)))[:, None]  # 1 - share, without its rounding
    merged = rest * tl.load(out, mask=numbers, other=0.0) + share * tl.load(out_j, mask=numbers, other=0.0)
    tl.store(out, merged, mask=numbers)
    most = tl.maximum(old, new)
    tl.store(lse, tl.where(saw_nothing, old, most + tl.log(tl.exp(old - most) + tl.exp(new - most))), mask=here)


def merge_rows(out: Tensor, lse: Tensor, out_j: Tensor, lse_j: Tensor) -> None:
    """`merge_into` of flash_ring.py: out and lse, both float32, become those of all keys. out_j has any dtype."""
    B, H, Sq, D = out.shape
    strides = (step for x in (out, lse, out_j, lse_j) for step in x.stride())
    with torch.cuda.device_of(out):
        grid = (B * H * triton.cdiv(Sq, ROWS),)
        _merge[grid](out, lse, out_j, lse_j, H, Sq, D, *strides, ROWS=ROWS, COLUMNS=triton.next_power_of_2(D))
