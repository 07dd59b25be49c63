"""What the doctor can give to a function, by the names of its signature, and in which order dimensions come.

An option means what it means in ../../ringlab/ring/flash_ring.py, and has this form:
    window_size    flash-attn's pair (left, right): a window of w keys is (w - 1, 0), no window (-1, -1)
    cu_seqlens     the documents of the whole sequence by where each begins, and its end: int32, documents + 1 numbers
    sinks          attention sinks, a learned logit (H,) in the softmax of each query head
    initial_state  of a state ring (B, H, D, D), what was there before the first token: the same on every rank
    log_decay, g   of a state ring (B, H, C), or k's shape if so claimed; decay is e^log_decay. Its beta is (B, H, C)
    w_k, w_v, chosen, count    of a ring of latents and of an index, as in latent_case.py

Before: case.py. After: patient.py, the claims; calls.py, the call.
Source: the signatures of flash_attn_func, ring-flash-attention, torch.nn.functional.scaled_dot_product_attention.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch

NAMES = {  # an option: the names of it
    "causal": ("causal", "is_causal"),
    "scale": ("scale", "softmax_scale", "sm_scale", "scaling"),
    "group": ("group", "process_group", "pg", "cp_group", "sp_group"),
    "layout": ("layout",),
    "documents": ("documents", "cu_seqlens", "cu_seqlens_q", "cu_seqlens_k"),
    "window": ("window", "window_size"),
    "sinks": ("sinks",),
    "log_decay": ("log_decay", "g", "decay"),
    "beta": ("beta",),
    "state": ("state", "initial_state", "h0"),
    "weight": ("weight",),
    **{name: (name,) for name in ("w_k", "w_v", "chosen", "count")},
}
OPTION = {name: option for option, names in NAMES.items() for name in names}
TENSORS = {"bhsd": (0, 1, 2, 3), "bshd": (0, 2, 1, 3), "sbhd": (2, 0, 1, 3)}  # where their dimensions are in ours
ANY = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
GIVES = f"gives q, k, v of this rank, and any of {', '.join(NAMES)}: wrap the function, or use functools.partial"


def arguments_of(name: str, function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The parameters of a function that the doctor can give. Raises ValueError when it cannot be called."""
    if inspect.isclass(inspect.unwrap(function)):
        raise ValueError(f"{name} is a class; expected a function, or an object of the class that its module makes")
    try:
        signature = inspect.signature(_callee(function))
    except ValueError as error:
        raise ValueError(f"{name} has no signature ({error}); wrap it in a function attention(q, k, v)") from error
    given = {each: of for each, of in signature.parameters.items() if each in OPTION and of.kind not in ANY}
    try:
        signature.bind(*"qkv", **dict.fromkeys(given))
    except TypeError as error:
        raise ValueError(f"{name}{signature} cannot be called as f(q, k, v): {error}; the doctor {GIVES}") from error
    return given


def _callee(function: Callable[..., Any]) -> Callable[..., Any]:
    """Whose signature counts: a torch.nn.Module shows that of its `forward`, also when torch.compile has wrapped it."""
    function = inspect.unwrap(function)
    function = getattr(function, "_orig_mod", function)
    return function.forward if isinstance(function, torch.nn.Module) else function
