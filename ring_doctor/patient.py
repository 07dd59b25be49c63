"""A patient: any attention that is called on every rank with its chunks, and its claims about what it can do.

    out = f(q, k, v)            or      out, lse = f(q, k, v)

f gets those options that its signature has, under any of the names in arguments.py: causal, scale, group, layout,
documents, window, sinks. What f cannot do is not asked: a function without `causal` is asked for full attention, or,
with `--causal`, for causal attention only. Options that only its **options could take are not given.

Shapes: q (B, H, C, D), k and v (B, G, C, D) of this rank's tokens; out like q; lse (B, H, C), natural, or in another of
the shapes that `lse_of` knows. With `tensors` "bshd" they are (B, C, H, D) and (B, C, G, D), with "sbhd" (C, B, H, D).

A patient file is a module that adapts a library to this. It has a function `attention` and, where they differ from what
stands in `Patient`, constants in capitals: those in CONSTANTS, and ABOUT and VERSION for the report. A function
`setup(context)` is called once on each rank: there a way that needs a mesh of ranks builds it, as in
../tests/mesh_patients.py.

Before: arguments.py. After: questions.py.
Source: the interface of torch.nn.functional.scaled_dot_product_attention.
"""

import difflib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ring_doctor.arguments import OPTION, arguments_of, hides_arguments, values
from ring_doctor.case import LAYOUTS, Case
from ring_doctor.names import by_name, module_named, portable

TENSORS = {"bhsd": (0, 1, 2, 3), "bshd": (0, 2, 1, 3), "sbhd": (2, 0, 1, 3)}  # where their dimensions are in ours
CONSTANTS = {"LAYOUTS", "CAUSAL", "DTYPES", "WORLDS", "TENSORS", "GROUPED", "UNEQUAL", "GRADIENTS", "BATCH", "HEADS"}
CONSTANTS |= {"KV_HEADS", "HEAD_DIM", "CHUNK"}


class WrongResult(ValueError):
    """A function returned what is no attention. That is a fault; a ValueError of its own refuses a question."""


@dataclass(frozen=True)
class Patient:
    """A ring to examine. Raises ValueError when its claims contradict its signature."""

    name: str  # for the report
    function: Callable[..., Any]  # one that pickle sends to other processes, or one that `by_name` finds
    causal: tuple[bool, ...] = (False, True)  # full attention, causal attention
    layouts: tuple[str, ...] = LAYOUTS  # with two or more, the function takes `layout`
    dtypes: tuple[str, ...] = ("float64", "float32", "bfloat16")  # all questions use the first that the function takes
    worlds: tuple[int, ...] = (1, 2, 3, 4, 5)  # 3 and 4 are asked everything
    tensors: str = "bhsd"  # a name in TENSORS: the order of dimensions that the function takes
    grouped: bool = True  # K and V may have fewer heads
    unequal: bool = True  # contiguous chunks may have different lengths
    gradients: bool = True
    batch: int = 1
    heads: int = 2  # query heads; with grouped queries twice as many. A function that refuses so few is asked with more
    heads_per_rank: int = 0  # there are at least as many query heads: an all-to-all needs them
    kv_heads: int | None = None  # None: as many as query heads
    head_dim: int = 4
    chunk: int = 6  # tokens of a rank
    shape: tuple[int, int, int, int, int] | None = None  # B, H, G, S, D of one more question, as large as the user's
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
        for dtype in self.dtypes:
            dtype_of(dtype)
        if self.tensors not in TENSORS:
            raise ValueError(f"tensors is {self.tensors!r}; expected one of {', '.join(TENSORS)}")
        sizes = {"batch": self.batch, "heads": self.heads, "head_dim": self.head_dim, "chunk": self.chunk}
        for name, size in (sizes | {"kv_heads": self.kv_heads or self.heads}).items():
            least = 4 if name == "chunk" else 1  # documents end within a chunk
            if type(size) is not int or size < least:
                raise ValueError(f"{name} is {size!r}; expected a whole number from {least} on")
        _check_heads(self.heads, self.kv_heads or self.heads)
        if "zigzag" in self.layouts and self.chunk % 2:
            raise ValueError(f"chunk is {self.chunk} tokens a rank in the zigzag layout; expected an even number")
        if self.shape:
            _check_shape(self)
        if len(self.layouts) > 1 and "layout" not in self.takes:
            raise ValueError(
                f"{self.name} has no argument `layout` and is to be examined in {', '.join(self.layouts)}; expected "
                f"one layout: name the layout for which it is made"
            )
        if len(self.causal) > 1 and "causal" not in self.takes:
            raise ValueError(f"{self.name} has no argument `causal`; say whether it is causal or not")

    @property
    def takes(self) -> frozenset[str]:
        """Which options its signature has, under whatever name."""
        return frozenset(OPTION[name] for name in arguments_of(self.name, self.function))

    @property
    def notes(self) -> list[str]:
        """What a reader of the report must know about its signature, in sentences."""
        if not hides_arguments(self.function):
            return []
        return [f"its signature has **options: it was given only what the signature names, {_listed(self.takes)}"]

    def base_case(self, world_size: int, dtype: torch.dtype, seed: int) -> Case:
        """The plain question from which the others differ."""
        heads = max(self.heads, self.heads_per_rank * world_size)
        return Case(
            world_size,
            self.chunk * world_size,
            batch=self.batch,
            heads=heads,
            kv_heads=self.kv_heads if self.kv_heads and heads == self.heads else heads,
            head_dim=self.head_dim,
            dtype=dtype,
            seed=seed,
        )

    @property
    def world_of_shape(self) -> int:
        """The most ranks among which S of `shape` can be dealt out equally; 0: none, or no shape."""
        parts = 2 if "zigzag" in self.layouts else 1
        return max((P for P in self.worlds if self.shape and self.shape[3] % (parts * P) == 0), default=0)

    def large_case(self, base: Case) -> Case:
        """`base` in the sizes of `shape`, which must be there."""
        assert self.shape, "only a patient with a shape is asked in it"
        B, H, G, S, D = self.shape
        return replace(base, batch=B, heads=H, kv_heads=G, seq_len=S, head_dim=D)

    def theirs(self, x: Tensor) -> Tensor:
        """A view of x (B, H, C, D) in the order of dimensions that the function takes."""
        return x.permute(TENSORS[self.tensors])

    def ours(self, x: Tensor) -> Tensor:
        """A view (B, H, C, D) of a tensor of the function."""
        back = torch.tensor(TENSORS[self.tensors]).argsort().tolist()
        return x.permute(back)

    def call(
        self, case: Case, q: Tensor, k: Tensor, v: Tensor, group: ProcessGroup | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """This rank's out (B, H, C, D), and lse (B, H, C) if it is returned. Raises ValueError for other results."""
        options = values(arguments_of(self.name, self.function), case, group, q.device)
        inputs = [self.theirs(x) for x in (q, k, v)]
        returned = self.function(*inputs, **options)
        out, lse = returned[:2] if isinstance(returned, tuple | list) and len(returned) > 1 else (returned, None)
        expected = inputs[0].shape
        if not isinstance(out, Tensor) or out.shape != expected:
            got = f"shape {tuple(out.shape)}" if isinstance(out, Tensor) else f"a {type(out).__name__}"
            raise WrongResult(
                f"{self.name} returned {got}; expected the output of this rank's queries, shape {tuple(expected)}, or "
                f"(output, lse)"
            )
        return self.ours(out), self.lse_of(lse, q) if isinstance(lse, Tensor) else None

    def lse_of(self, lse: Tensor, q: Tensor) -> Tensor | None:
        """A view (B, H, C) of the lse that the function returned with queries (B, H, C, D).

        It may also be (B, C, H), of one sequence (H, C) or (C, H), and have a last dimension of 1. Where H = C and the
        tensors are not (B, H, S, D), nobody can tell which it is: then None, and it is not compared. Raises ValueError
        for other shapes.
        """
        B, H, C = q.shape[:3]
        x = lse.squeeze(-1) if lse.dim() == 4 else lse[None] if lse.dim() == 2 else lse
        if x.shape == (B, H, C):
            return None if H == C and C > 1 and self.tensors != "bhsd" else x
        if x.shape == (B, C, H):
            return x.transpose(1, 2)
        raise WrongResult(f"{self.name} returned an lse of shape {tuple(lse.shape)}; expected (B, H, C) = {(B, H, C)}")


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "none of the options"


def _check_heads(heads: int, kv_heads: int) -> None:
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads and {kv_heads} key/value heads; expected a multiple of the latter")


def _check_shape(patient: Patient) -> None:
    """Raises ValueError when no number of ranks can be asked in the user's shape."""
    shape = patient.shape or ()
    if len(shape) != 5 or any(type(n) is not int or n < 1 for n in shape):
        raise ValueError(f"shape is {shape}; expected five whole numbers from 1 on: B, H, G, S, D")
    _, H, G, S, _ = shape
    if not patient.world_of_shape:
        worlds = ", ".join(map(str, patient.worlds))
        raise ValueError(f"shape is {shape}: {S} tokens on {worlds} ranks; expected equal parts, two a rank for zigzag")
    _check_heads(H, G)


def patient_of(function: Callable[..., Any] | str, **claims: Any) -> Patient:
    """The patient that is meant: a function, or a name as `from_name` takes it. A claim may be one thing or several.

    Raises ValueError as `Patient` does.
    """
    if unknown := set(claims) - {field.name for field in fields(Patient)}:
        known = ", ".join(sorted(field.name for field in fields(Patient) if field.name not in ("name", "function")))
        raise ValueError(f"{', '.join(sorted(unknown))} given; expected some of {known}")
    for name in {"causal", "layouts", "dtypes", "worlds"} & set(claims):
        if isinstance(claims[name], bool | int | str):
            claims[name] = (claims[name],)
    return from_name(function, **claims) if isinstance(function, str) else from_function(function, **claims)


def from_function(function: Callable[..., Any], name: str = "", **claims: Any) -> Patient:
    """The patient that a function is; `claims` are fields of `Patient`. Raises ValueError as `Patient` does.

    What `claims` leaves out follows from the signature: without `layout`, contiguous; without `causal`, full attention.
    """
    if not callable(function):
        raise ValueError(f"{function!r} is {type(function).__name__}; expected a function, or its name module:function")
    if not name:
        named_function = getattr(function, "func", function)  # of a functools.partial
        kind = type(named_function)
        name = getattr(named_function, "__qualname__", kind.__qualname__)
        name = f"{getattr(named_function, '__module__', kind.__module__)}:{name}"
    takes = {OPTION[argument] for argument in arguments_of(name, function)}
    if "layout" not in takes:
        claims.setdefault("layouts", ("contiguous",))
    if "causal" not in takes:
        claims.setdefault("causal", (False,))
    return Patient(name, portable(function), **claims)


def from_name(name: str, **claims: Any) -> Patient:
    """The patient "module:function", or a patient file "module"; path/to/file.py stands for a module too.

    Raises ValueError when it cannot be imported.
    """
    home, _, function_name = name.partition(":")
    function = by_name(f"{home}:{function_name or 'attention'}")
    if not function_name:
        module = module_named(home)
        for name_in_module in filter(str.isupper, vars(module)):  # a misspelt claim would accuse a right ring
            near = difflib.get_close_matches(name_in_module, CONSTANTS, n=1, cutoff=0.8)
            if near and name_in_module not in CONSTANTS:
                raise ValueError(f"{name} has a constant {name_in_module}; expected {near[0]}, or another name")
        for constant in CONSTANTS:
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
