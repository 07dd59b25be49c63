"""How a function is called on a rank, and what it may return: seven options under the names that the field gives them.

    attention(q, k, v, is_causal=False, softmax_scale=None, process_group=None)    takes causal, scale and group

An option means what it means in ../ringlab/training/flash_ring.py, and has this form:
    window_size    flash-attn's pair (left, right): a window of w keys is (w - 1, 0), no window (-1, -1)
    cu_seqlens     the documents of the whole sequence by where each begins, and its end: int32, documents + 1 numbers
    sinks          attention sinks, a learned logit (H,) in the softmax of each query head

Shapes: q (B, H, C, D), k and v (B, G, C, D) of this rank's tokens; out like q; lse (B, H, C), natural, or in another of
the shapes that `lse_of` knows. With tensors "bshd" they are (B, C, H, D) and (B, C, G, D), with "sbhd" (C, B, H, D).

Before: case.py. After: patient.py, the claims.
Source: the signatures of flash_attn_func, ring-flash-attention, torch.nn.functional.scaled_dot_product_attention.
"""

import inspect
from collections.abc import Callable
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ring_doctor.case import Case, layout_of

if TYPE_CHECKING:
    from ring_doctor.patient import Patient

NAMES = {  # an option: the names of it
    "causal": ("causal", "is_causal"),
    "scale": ("scale", "softmax_scale", "sm_scale", "scaling"),
    "group": ("group", "process_group", "pg", "cp_group", "sp_group"),
    "layout": ("layout",),
    "documents": ("documents", "cu_seqlens", "cu_seqlens_q", "cu_seqlens_k"),
    "window": ("window", "window_size"),
    "sinks": ("sinks",),
}
OPTION = {name: option for option, names in NAMES.items() for name in names}
TENSORS = {"bhsd": (0, 1, 2, 3), "bshd": (0, 2, 1, 3), "sbhd": (2, 0, 1, 3)}  # where their dimensions are in ours
ANY = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
WRAP = "give it by functools.partial in a module of yours, or wrap the function in one that takes q, k and v"


class WrongResult(ValueError):
    """A function returned what is no attention. That is a fault; a ValueError of its own refuses a question."""


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
        others = list(signature.parameters.values())[3:]
        unknown = [of.name for of in others if of.default is of.empty and of.name not in OPTION and of.kind not in ANY]
        if next(iter(signature.parameters), "") == "self":
            why = "is a method of a class; expected that of an object, which its module makes: thing = Class(...), and "
            why += "module:thing.method"
        elif unknown:
            why = f"needs {' and '.join(unknown)}, which the doctor does not know; {WRAP}"
        else:
            why = f"cannot be called as f(q, k, v): {error}; expected a function of this rank's q, k and v, and of any "
            why += f"of {', '.join(NAMES)}"
        raise ValueError(f"{name}{signature} {why}") from error
    return given


def _callee(function: Callable[..., Any]) -> Callable[..., Any]:
    """Whose signature counts: a torch.nn.Module shows that of its `forward`, also when torch.compile has wrapped it."""
    function = inspect.unwrap(function)
    function = getattr(function, "_orig_mod", function)
    return function.forward if isinstance(function, torch.nn.Module) else function


def hides_arguments(function: Callable[..., Any]) -> bool:
    """Whether the signature ends in **options, which do not say what they may be."""
    return any(of.kind is of.VAR_KEYWORD for of in inspect.signature(_callee(function)).parameters.values())


def values(
    takes: dict[str, inspect.Parameter], case: Case, group: ProcessGroup | None, device: torch.device
) -> dict[str, Any]:
    """The arguments for a case, by the names of the signature."""
    layout = layout_of(case.layout)
    ends = [0, *accumulate(case.documents or (case.seq_len,))]
    given: dict[str, Any] = {
        "causal": case.causal,
        "scale": case.scale,
        "group": group,
        "layout": case.layout if callable(layout) else layout,
        "documents": case.documents,
        "window": case.window,
        "sinks": case.sink_scores().to(device) if case.sinks else None,
    }
    forms = {  # of what is given, and of what must be given although the case has none
        "scale": case.head_dim**-0.5 if case.scale is None else case.scale,
        "group": group or dist.group.WORLD,
        "window_size": (-1, -1) if case.window is None else (case.window - 1, 0),
        **dict.fromkeys(NAMES["documents"][1:], torch.tensor(ends, dtype=torch.int32, device=device)),
    }
    needed = {
        name: OPTION[name]
        for name, parameter in takes.items()
        if given[OPTION[name]] is not None or parameter.default is parameter.empty
    }
    return {name: forms.get(name, forms.get(option, given[option])) for name, option in needed.items()}


def theirs(patient: "Patient", x: Tensor) -> Tensor:
    """A view of x (B, H, C, D) in the order of dimensions that the function takes."""
    return x.permute(TENSORS[patient.tensors])


def ours(patient: "Patient", x: Tensor) -> Tensor:
    """A view (B, H, C, D) of a tensor of the function."""
    return x.permute(torch.tensor(TENSORS[patient.tensors]).argsort().tolist())


def call(
    patient: "Patient", case: Case, q: Tensor, k: Tensor, v: Tensor, group: ProcessGroup | None = None
) -> tuple[Tensor, Tensor | None]:
    """This rank's out (B, H, C, D), and lse (B, H, C) if it is returned. Raises WrongResult for other results."""
    options = values(arguments_of(patient.name, patient.function), case, group, q.device)
    inputs = [theirs(patient, x) for x in (q, k, v)]
    returned = patient.function(*inputs, **options)
    out, lse = returned[:2] if isinstance(returned, tuple | list) and len(returned) > 1 else (returned, None)
    expected = inputs[0].shape
    if not isinstance(out, Tensor) or out.shape != expected:
        got = f"shape {tuple(out.shape)}" if isinstance(out, Tensor) else f"a {type(out).__name__}"
        raise WrongResult(
            f"{patient.name} returned {got}; expected the output of this rank's queries, shape {tuple(expected)}, or "
            f"(output, lse)"
        )
    return ours(patient, out), lse_of(patient, lse, q) if isinstance(lse, Tensor) else None


def lse_of(patient: "Patient", lse: Tensor, q: Tensor) -> Tensor | None:
    """A view (B, H, C) of the lse that the function returned with queries (B, H, C, D).

    It may also be (B, C, H), of one sequence (H, C) or (C, H), and have a last dimension of 1. Where H = C and the
    tensors are not (B, H, S, D), nobody can tell which it is: then None, and it is not compared. Raises WrongResult
    for other shapes.
    """
    B, H, C = q.shape[:3]
    x = lse.squeeze(-1) if lse.dim() == 4 else lse[None] if lse.dim() == 2 else lse
    if x.shape == (B, H, C):
        return None if H == C and C > 1 and patient.tensors != "bhsd" else x
    if x.shape == (B, C, H):
        return x.transpose(1, 2)
    raise WrongResult(f"{patient.name} returned an lse of shape {tuple(lse.shape)}; expected (B, H, C) = {(B, H, C)}")
