"""A patient: any attention that is called on every rank with its chunks, and its claims about what it can do.

    out = f(q, k, v)            or      out, lse = f(q, k, v)

f gets those options that its signature has, under any of the names in NAMES: causal, scale, group, layout, documents,
window, sinks. What f cannot do is not asked: a function without `causal` is asked for full attention, or, with
`--causal`, for causal attention only. Options that only its **options could take are not given.
An option means what it means in ../../ringlab/ring/flash_ring.py, and has this form:
    window_size    flash-attn's pair (left, right): a window of w keys is (w - 1, 0), no window (-1, -1). Under a causal
                   mask a window is also (w - 1, w - 1), as transformers gives it, and (w - 1, -1)
    cu_seqlens     the documents of the whole sequence by where each begins, and its end: int32, documents + 1 numbers
    sinks          attention sinks, a learned logit (H,) in the softmax of each query head
    initial_state  of a state ring (B, H, D, D), what was there before the first token: the same on every rank
    log_decay, g   of a state ring (B, H, C), or k's shape if so claimed; decay is e^log_decay. Its beta is (B, H, C)
    w_k, w_v, chosen           of a ring of latents, as in latent_case.py

A patient file is a module that adapts a library to this. It has a function `attention` and, where they differ from what
stands in `Patient`, its fields as constants in capitals. A function `setup(context)` is called once on each rank: there
a way that needs a mesh of ranks builds it, as in ../patients/libraries.py. Where it has several functions,
CLAIMS says what differs for the others, by name.

Before: case.py. After: questions.py.
Source: the signatures of flash_attn_func, ring-flash-attention, torch.nn.functional.scaled_dot_product_attention.
"""

import difflib
import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from ring_doctor.asking.case import Case
from ring_doctor.asking.latent_case import LATENTS, OneHead
from ring_doctor.asking.names import by_name, layout_of, module_named, name_of, portable
from ring_doctor.asking.state_case import Convolution
from ringlab.ring.layouts import LAYOUTS
from ringlab.support.expect import expect

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
    **{name: (name,) for name in ("w_k", "w_v", "chosen")},
}
OPTION = {name: option for option, names in NAMES.items() for name in names}
TENSORS = {"bhsd": (0, 1, 2, 3), "bshd": (0, 2, 1, 3), "sbhd": (2, 0, 1, 3)}  # where their dimensions are in ours
ANY = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
GIVES = f"gives q, k, v of this rank, and any of {', '.join(NAMES)}: wrap the function, or use functools.partial"
LEAST, MOST = 3, 16  # ranks: with 2, the next rank is also the previous rank; each rank is a process here


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
    own_values: bool = True  # V may have a head dim of its own
    gradients: bool = True
    state: bool | str = False  # state_case.py: True, or "each key" for its decay too; "latents"
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
        most, why = max(self.worlds, default=0), "with 2, the next rank is also the previous rank, and many mistakes"
        expect(all(type(n) is int and n > 0 for n in self.worlds), f"worlds is {self.worlds}", "numbers from 1 on")
        expect(most >= LEAST, f"{most} ranks at most", f"{LEAST} or more: {why} do not show")
        expect(most <= MOST, f"{most} ranks", f"{MOST} or fewer: each is a process of this machine")
        words = f"one of {', '.join(LAYOUTS)}, or module:name of a Layout, or of a function as --help shows it"
        for layout in self.layouts:
            expect(layout in LAYOUTS or ":" in layout, f"layout is {layout!r}", words)
            layout_of(layout)
        for dtype in self.dtypes:
            dtype_of(dtype)
        expect(self.tensors in TENSORS, f"tensors is {self.tensors!r}", f"one of {', '.join(TENSORS)}")
        G, shape, takes = self.kv_heads or self.heads, self.shape, self.takes
        for name in ("batch", "heads", "kv_heads", "head_dim", "chunk"):
            size = G if name == "kv_heads" else getattr(self, name)
            least = 4 if name == "chunk" else 1  # documents end within a chunk
            expect(type(size) is int and size >= least, f"{name} is {size!r}", f"a whole number from {least} on")
        even = "zigzag" not in self.layouts or self.chunk % 2 == 0
        expect(even, f"chunk is {self.chunk} tokens a rank in the zigzag layout", "an even number")
        if shape:
            fits = len(shape) == 5 and all(type(n) is int and n > 0 for n in shape)
            expect(fits, f"shape is {shape}", "five whole numbers from 1 on: B, H, G, S, D")
            given = f"shape is {shape}: {shape[3]} tokens on {', '.join(map(str, self.worlds))} ranks"
            expect(self.world_of_shape, given, "equal parts, two a rank for zigzag")
        for heads, of_keys in [(self.heads, G), *([shape[1:3]] if shape else [])]:
            given = f"{heads} query heads and {of_keys} key/value heads"
            expect(heads % of_keys == 0, given, "a multiple of the latter")
        given = f"{self.name} has no argument `layout` and is to be examined in {', '.join(self.layouts)}"
        expect("layout" in takes or len(self.layouts) == 1, given, "the one layout for which it is made")
        if "causal" not in takes and len(self.causal) > 1:
            raise ValueError(f"{self.name} has no argument `causal`; say whether it is causal or not")

    @property
    def takes(self) -> frozenset[str]:
        """Which options its signature has, under whatever name."""
        return frozenset(OPTION[name] for name in arguments_of(self.name, self.function))

    @property
    def others(self) -> list[str]:
        """Its other arguments, which keep their defaults."""
        more = [*inspect.signature(_callee(self.function)).parameters.values()][3:]
        return [it.name for it in more if it.name not in OPTION and it.kind not in ANY]

    def base_case(self, world_size: int, seed: int) -> Case:
        """The plain question from which the others differ, in the first dtype."""
        heads = max(self.heads, self.heads_per_rank * world_size)
        kv_heads = self.kv_heads if self.kv_heads and heads == self.heads else heads
        sizes: Any = {"batch": self.batch, "heads": heads, "kv_heads": kv_heads, "head_dim": self.head_dim}
        return Case(world_size, self.chunk * world_size, **sizes, dtype=dtype_of(self.dtypes[0]), seed=seed)

    @property
    def world_of_shape(self) -> int:
        """The most ranks among which S of `shape` can be dealt out equally; 0: none, or no shape."""
        parts = 2 if "zigzag" in self.layouts else 1
        return max((P for P in self.worlds if self.shape and self.shape[3] % (parts * P) == 0), default=0)


OTHERS = {"NAME", "FUNCTION", "SETUP", "STATE", "SHAPE", "HEADS_PER_RANK"}  # a file may mean anything by these
CONSTANTS = {field.name.upper() for field in fields(Patient)} - OTHERS  # of a patient file


def patient_of(function: Callable[..., Any] | str | Patient, name: str = "", **claims: Any) -> Patient:
    """The patient that is meant: a function, "module:function", a patient file "module", or a Patient, claimed anew.

    path/to/file.py stands for a module too. `name` is for the report. `claims` are fields of `Patient`, one thing or
    several. What they leave out says the patient file, or the signature: without `layout`, contiguous; without
    `causal`, full attention.
    Raises ValueError as `Patient` does, and when the name cannot be imported.
    """
    if isinstance(function, str):
        name = name or function
        function, of_file = _in_file(function)
        claims = of_file | claims
    known = {field.name for field in fields(Patient)} - {"name", "function"}
    unknown = ", ".join(sorted(set(claims) - known))
    expect(not unknown, f"{unknown} given", f"some of {', '.join(sorted(known))}")
    for several in {"causal", "layouts", "dtypes", "worlds"} & set(claims):
        if isinstance(claims[several], bool | int | str):
            claims[several] = (claims[several],)
    if isinstance(function, Patient):
        return replace(function, name=name or function.name, **claims)
    expect(callable(function), f"{function!r} is {type(function).__name__}", "a function, or its name module:function")
    name = name or name_of(function)
    if claims.get("state") and [*inspect.signature(function).parameters][:2] == ["x", "weight"]:
        function = Convolution(portable(function))
    takes = {OPTION[argument] for argument in arguments_of(name, function)}
    usual: dict[str, Any] = {} if "causal" in takes else {"causal": (False,)}
    few = {"grouped": False, "dtypes": ("float64", "float32")}
    if "w_k" in takes:
        function, claims, usual = OneHead(portable(function)), claims | {"state": LATENTS}, usual | few
    elif claims.get("state"):
        usual = few | {"causal": (True,), "layouts": ("contiguous", "zigzag")}
    usual |= {} if "layout" in takes else {"layouts": ("contiguous",)}
    return Patient(name, portable(function), **usual | claims)


def _in_file(name: str) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The function that a name means, and what its module claims of it."""
    home, _, function_name = name.partition(":")
    function = by_name(f"{home}:{function_name or 'attention'}")
    said = vars(module_named(home))
    of_this = said.get("CLAIMS", {}).get(function_name or "attention")
    if function_name and of_this is None:
        claims = ", ".join(sorted(CONSTANTS.intersection(said)))
        unused = f"{claims} of its module hold for {home}, without :{function_name}, and are not used here"
        return function, {"about": unused} if claims else {}
    for constant in filter(str.isupper, said):  # a misspelt claim would accuse a right ring
        near = [] if constant in CONSTANTS else difflib.get_close_matches(constant, CONSTANTS, n=1, cutoff=0.8)
        expect(not near, f"{name} has a constant {constant}", f"{''.join(near)}, or another name")
    of_file = {constant.lower(): said[constant] for constant in CONSTANTS if constant in said}
    return function, {"setup": said.get("setup"), **of_file, **(of_this or {})}


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


def dtype_of(name: str) -> torch.dtype:
    """torch.float32 for "float32". Raises ValueError for what is no floating-point dtype."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"dtype is {name!r}; expected float64, float32, bfloat16 or float16")
    return dtype
