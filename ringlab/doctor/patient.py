"""A patient: any attention that is called on every rank with its chunks, and its claims about what it can do.

    out = f(q, k, v)            or      out, lse = f(q, k, v)

f gets those of `causal=, scale=, group=, layout=, documents=, window=, sinks=` that its signature has. They mean what
they mean in ../training/flash_ring.py; `sinks` are attention sinks, a learned logit (H,) in the softmax of each query
head. What f cannot do is not asked: a function without `causal` is asked for full attention, or, with `--causal`, for
causal attention only.

Shapes: q (B, H, C, D), k and v (B, G, C, D) of this rank's tokens; out like q; lse (B, H, C), natural. With
`heads_last` they are (B, C, H, D), (B, C, G, D), and lse still (B, H, C).

A patient file is a module that adapts a library to this. It has a function `attention` and, where they differ from what
stands in `Patient`, constants in capitals: LAYOUTS, CAUSAL, DTYPES, WORLDS, HEADS_LAST, GROUPED, UNEQUAL, GRADIENTS,
HEADS, HEAD_DIM, and ABOUT and VERSION for the report. A function `setup(context)` is called once on each rank: there a
way that needs a mesh of ranks builds it, as in ../tests/mesh_patients.py.

Before: case.py. After: questions.py.
Source: the interface of torch.nn.functional.scaled_dot_product_attention.
"""

import importlib
import inspect
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ringlab.doctor.case import LAYOUTS, Case, layout_of, named

OPTIONS = ("causal", "scale", "group", "layout", "documents", "window", "sinks")


@dataclass(frozen=True)
class Patient:
    """A ring to examine. Raises ValueError when its claims contradict its signature."""

    name: str  # for the report
    function: Callable[..., Any]  # known by its name in a module: it is sent to other processes
    causal: tuple[bool, ...] = (False, True)  # full attention, causal attention
    layouts: tuple[str, ...] = LAYOUTS  # with two or more, the function takes `layout`
    dtypes: tuple[str, ...] = ("float64", "float32", "bfloat16")  # all questions use the first that the function takes
    worlds: tuple[int, ...] = (1, 2, 3, 4)
    heads_last: bool = False
    grouped: bool = True  # K and V may have fewer heads
    unequal: bool = True  # contiguous chunks may have different lengths
    gradients: bool = True
    heads: int = 2  # query heads; with grouped queries twice as many. A function that refuses so few is asked with more
    head_dim: int = 4
    setup: Callable[..., None] | None = None
    about: str = ""
    version: str = ""

    def __post_init__(self) -> None:
        for layout in self.layouts:
            if layout not in LAYOUTS and ":" not in layout:
                raise ValueError(
                    f"layout is {layout!r}; expected one of {', '.join(LAYOUTS)}, or module:name of a Layout "
                    f"or of a function positions(seq_len, rank, world_size)"
                )
        if len(self.layouts) > 1 and "layout" not in self.takes:
            raise ValueError(
                f"{self.name} has no argument `layout` and is to be examined in {', '.join(self.layouts)}; expected "
                f"one layout: name the layout for which it is made"
            )
        if len(self.causal) > 1 and "causal" not in self.takes:
            raise ValueError(f"{self.name} has no argument `causal`; say whether it is causal or not")

    @property
    def takes(self) -> frozenset[str]:
        """Which of OPTIONS its signature has."""
        return frozenset(OPTIONS) & frozenset(signature(self.name, self.function).parameters)

    def call(
        self, case: Case, q: Tensor, k: Tensor, v: Tensor, group: ProcessGroup | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """This rank's out (B, H, C, D), and lse (B, H, C) if it is returned. Raises ValueError for other results."""
        layout = layout_of(case.layout)
        options = {"causal": case.causal, "layout": case.layout if callable(layout) else layout, "group": group}
        given: dict[str, Any] = {"scale": case.scale, "documents": case.documents, "window": case.window}
        given["sinks"] = case.sink_scores().to(q.device) if case.sinks else None
        options |= {name: value for name, value in given.items() if value is not None}
        options = {name: value for name, value in options.items() if name in self.takes}
        inputs = [x.transpose(1, 2) for x in (q, k, v)] if self.heads_last else [q, k, v]
        returned = self.function(*inputs, **options)
        out, lse = returned[:2] if isinstance(returned, tuple | list) and len(returned) > 1 else (returned, None)
        expected = inputs[0].shape
        if not isinstance(out, Tensor) or out.shape != expected:
            got = f"shape {tuple(out.shape)}" if isinstance(out, Tensor) else f"a {type(out).__name__}"
            raise ValueError(
                f"{self.name} returned {got}; expected the output of this rank's queries, shape {tuple(expected)}, or "
                f"(output, lse)"
            )
        if isinstance(lse, Tensor) and lse.shape != q.shape[:3]:
            raise ValueError(
                f"{self.name} returned an lse of shape {tuple(lse.shape)}; expected (B, H, C) = {tuple(q.shape[:3])}"
            )
        return (out.transpose(1, 2) if self.heads_last else out), (lse if isinstance(lse, Tensor) else None)


def signature(name: str, function: Callable[..., Any]) -> inspect.Signature:
    """The signature of a patient. Raises ValueError when it cannot be called as f(q, k, v)."""
    found = inspect.signature(function)
    try:
        found.bind(*"qkv", **{option: None for option in OPTIONS if option in found.parameters})
    except TypeError as error:
        raise ValueError(
            f"{name}{found} cannot be called as f(q, k, v): {error}; expected a function of this rank's q, k and v, "
            f"and of any of {', '.join(OPTIONS)}"
        ) from error
    return found


def from_function(function: Callable[..., Any], name: str = "", **claims: Any) -> Patient:
    """The patient that a function is; `claims` are fields of `Patient`. Raises ValueError as `Patient` does.

    What `claims` leaves out follows from the signature: without `layout`, contiguous; without `causal`, full attention.
    """
    if not name:
        named_function = getattr(function, "func", function)  # of a functools.partial
        name = f"{named_function.__module__}:{getattr(named_function, '__qualname__', named_function)}"
    try:
        pickle.dumps(function)
    except (AttributeError, TypeError, pickle.PicklingError) as error:
        raise ValueError(
            f"{name} cannot be sent to other processes: {error}; expected a function at the top level of a module"
        ) from error
    has = signature(name, function).parameters
    if "layout" not in has:
        claims.setdefault("layouts", ("contiguous",))
    if "causal" not in has:
        claims.setdefault("causal", (False,))
    return Patient(name, function, **claims)


def from_name(name: str, **claims: Any) -> Patient:
    """The patient "module:function", or a patient file "module". Raises ValueError when it cannot be imported."""
    module_name, _, function_name = name.partition(":")
    function = named(f"{module_name}:{function_name or 'attention'}")
    if not function_name:
        module = importlib.import_module(module_name)
        names = "LAYOUTS CAUSAL DTYPES WORLDS HEADS_LAST GROUPED UNEQUAL GRADIENTS HEADS HEAD_DIM"
        for constant in names.split():
            if hasattr(module, constant):
                claims.setdefault(constant.lower(), getattr(module, constant))
        for constant in ("ABOUT", "VERSION"):
            claims.setdefault(constant.lower(), str(getattr(module, constant, "")))
        claims.setdefault("setup", getattr(module, "setup", None))
    return from_function(function, name, **claims)


def dtype_of(name: str) -> torch.dtype:
    """torch.float32 for "float32". Raises ValueError for what is no floating-point dtype."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"dtype is {name!r}; expected float64, float32, bfloat16 or float16")
    return dtype
