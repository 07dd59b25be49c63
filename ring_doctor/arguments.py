"""What a function may be called with besides q, k and v: seven options, under the names that the field gives them.

    attention(q, k, v, is_causal=False, softmax_scale=None, process_group=None)    takes causal, scale and group

An option means what it means in ../training/flash_ring.py, and has this form:
    window_size    flash-attn's pair (left, right): a window of w keys is (w - 1, 0), no window (-1, -1)
    cu_seqlens     the documents of the whole sequence by where each begins, and its end: int32, documents + 1 numbers
    sinks          attention sinks, a learned logit (H,) in the softmax of each query head

An option without a value is left out. Where the signature has no default for it, it is given what changes nothing.

Shapes: none here.

Before: case.py. After: patient.py.
Source: the signatures of flash_attn_func, ring-flash-attention, torch.nn.functional.scaled_dot_product_attention.
"""

import inspect
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from ring_doctor.case import Case, layout_of

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
WRAP = "give it by functools.partial in a module of yours, or wrap the function in one that takes q, k and v"


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
        first = next(iter(signature.parameters), "")
        if first == "self":
            raise ValueError(
                f"{name}{signature} is a method of a class; expected that of an object, which its module makes: "
                f"thing = Class(...), and module:thing.method"
            ) from error
        unknown = list(signature.parameters.values())[3:]
        unknown = [of for of in unknown if of.default is of.empty and of.name not in OPTION and of.kind not in ANY]
        if unknown:
            names = " and ".join(of.name for of in unknown)
            raise ValueError(f"{name}{signature} needs {names}, which the doctor does not know; {WRAP}") from error
        raise ValueError(
            f"{name}{signature} cannot be called as f(q, k, v): {error}; expected a function of this rank's q, k and "
            f"v, and of any of {', '.join(NAMES)}"
        ) from error
    return given


ANY = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


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
    given: dict[str, Any] = {
        "causal": case.causal,
        "scale": case.scale,
        "group": group,
        "layout": case.layout if callable(layout) else layout,
        "documents": case.documents,
        "window": case.window,
        "sinks": case.sink_scores().to(device) if case.sinks else None,
    }
    found = {}
    for name, parameter in takes.items():
        value = given[OPTION[name]]
        if value is None and parameter.default is not parameter.empty:
            continue
        found[name] = FORMS.get(name, FORMS.get(OPTION[name], _as_it_is))(value, case, device)
    return found


def _as_it_is(value: Any, case: Case, device: torch.device) -> Any:
    return value


def _cumulative(documents: tuple[int, ...] | None, case: Case, device: torch.device) -> torch.Tensor:
    return torch.tensor([0, *accumulate(documents or (case.seq_len,))], dtype=torch.int32, device=device)


FORMS: dict[str, Callable[[Any, Case, torch.device], Any]] = {  # by the name in the signature, or by the option
    "scale": lambda scale, case, device: case.head_dim**-0.5 if scale is None else scale,
    "group": lambda group, case, device: group or dist.group.WORLD,
    "window_size": lambda window, case, device: (-1, -1) if window is None else (window - 1, 0),
    **dict.fromkeys(("cu_seqlens", "cu_seqlens_q", "cu_seqlens_k"), _cumulative),
}
