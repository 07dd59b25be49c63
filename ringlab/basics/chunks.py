"""What the rings of this project ask of q, k and v: each rank checks its chunks, and the ranks agree before they send.

A reader of the ring may skip this file.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ringlab.basics.naive_attention import check_qkv, check_tensors, resolve_scale
from ringlab.support.agreement import Agreed, Group, agree_same


def check_chunks(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise ValueError unless q, k and v are chunks (B, H, C, D) of the same tokens, and fit as `check_qkv` says."""
    check_qkv(q, k, v)
    if q.shape != k.shape:
        raise ValueError(
            f"q has shape {tuple(q.shape)} and k {tuple(k.shape)}; expected chunks of the same tokens, so one shape"
        )


def check_grouped_chunks(
    q: Tensor, k: Tensor, v: Tensor, *, same_tokens: bool = True, same_head_dim: bool = True
) -> None:
    """Raise ValueError unless q is (B, H, C, D), k and v are (B, G, C, D), and all have one dtype and one device.

    H must be a multiple of G. Without `same_tokens` q may have another number of tokens: cross-attention. Without
    `same_head_dim` v may have a D of its own.
    """
    check_tensors(q, k, v)
    (B, H, C, D), (B_k, G, C_k, D_k) = q.shape, k.shape
    shapes = f"q has shape {tuple(q.shape)} and k {tuple(k.shape)}"
    if H % G:
        raise ValueError(f"{shapes}; expected {H} heads to be a multiple of {G}: each head of k serves as many of q")
    if (B_k, D_k) != (B, D):
        raise ValueError(f"{shapes}; expected the same B and D")
    if same_tokens and C_k != C:
        fits = H == G and C % C_k == 0
        hint = ": they would fit as (B, S, H, D), and here x.transpose(1, 2) makes them (B, H, S, D)" if fits else ""
        raise ValueError(f"{shapes}; expected chunks of the same tokens{hint}")
    alike, words = (4, "one shape (B, G, C, D) for both") if same_head_dim else (3, "the same B, heads and tokens")
    if k.shape[:alike] != v.shape[:alike]:
        raise ValueError(f"k has shape {tuple(k.shape)} and v {tuple(v.shape)}; expected {words}")


def needs_gradients(*inputs: Tensor) -> bool:
    """Whether autograd expects a backward pass for any of the inputs."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in inputs)


def as_autocast(*inputs: Tensor) -> list[Tensor]:
    """The inputs as torch's own attention takes them: under autocast in its dtype, but float64 as it is.

    Their gradients go back through the cast, so each has the dtype of its input. What is no tensor stays as it is.
    """
    return [
        x.to(torch.get_autocast_dtype(x.device.type))
        if isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64 and under_autocast(x)
        else x
        for x in inputs
    ]


def under_autocast(x: Tensor) -> bool:
    """Whether autocast is on for the device of x. Some devices have none."""
    return torch.amp.is_autocast_available(x.device.type) and torch.is_autocast_enabled(x.device.type)


def check_forward_only(q: Tensor, k: Tensor, v: Tensor) -> None:
    """`check_chunks`, and ValueError when a backward pass is expected too."""
    check_chunks(q, k, v)
    if needs_gradients(q, k, v):
        raise ValueError("the input requires gradients; this ring is forward only: call it under torch.no_grad()")


def agree_on_chunks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
    group: Group,
    *,
    function: str,
    check: Callable[[Tensor, Tensor, Tensor], None],
    settings: Callable[[], dict[str, Any]] = dict,
) -> tuple[float, Agreed]:
    """The scale, and the chunk length C of every rank's k, as `agree` has it; or the same ValueError on all ranks.

    q (B, H, C, D), k and v (B, G, C, D) are this rank's chunks. `check` raises ValueError for wrong input. B, H, G, D,
    that of v, the dtype, the scale, whether there is a backward pass, `settings` and the name of the `function` must be
    the same on every rank; C may differ.
    """

    def facts() -> tuple[int, dict[str, Any]]:
        check(q, k, v)
        B, H, _, D = q.shape
        same = {"B": B, "H": H, "G": k.shape[1], "D": D, "dtype": str(q.dtype), "scale": resolve_scale(scale, D)}
        same |= {"head dim of v": v.shape[-1], "gradients": needs_gradients(q, k, v)}
        return k.shape[2], same | settings()

    lengths = agree_same(facts, group, function=function)
    return resolve_scale(scale, q.shape[-1]), lengths
