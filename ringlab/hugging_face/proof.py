"""A proof, on one process, that a model may be cut into shards: only its attention and linear layers mix tokens.

    own = full_attention    attention of whole rows: by the model itself, and by what its layers tell the ring
    shard of own_token(whole)  =  own_token(shard)     own_token: each token sees itself only
    ∂ logits_i / ∂ embedding_j  =  0, i ≠ j        with own_token, for all pairs of tokens

A ring computes attention between shards, and the linear layers of states.py. All else in a model must be a
function of a token and its position alone. A list of models that break this rule misses the next model. So each model
is asked, with its own weights, whether the three lines above hold.

`own_token` gives v of the token itself, and a sum over the numbers of its q and k. So an error in q, k or v changes the
logits. The gradients must be exactly 0: this needs no tolerance, in any dtype. Two values are the same here when they
differ by less than the root of the dtype's eps, in norm.

The second line is asked of 256 tokens, the others of 16: what begins beyond these is not seen. The last two are asked
in training too, where a batch norm mixes tokens. Noise stands in for each weight that is 0.

Shapes: S = 16 tokens; logits or hidden states (B, S, ·); in a layer q is (B, H, S, D), k (B, G, S, D), v (B, G, S, Dv).

`python examples/compare.py` runs it: a first reader may skip this file.
Before: attention.py, what a layer calls. After: forward.py, a forward pass in the ring.
Source: the definition of attention; transformers 5.23, AttentionInterface.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from traceback import extract_tb
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from ringlab.support.extras import extra

with extra("hf", __name__):
    from transformers import PreTrainedModel

from ringlab.hugging_face.attention import LayerAttention, Pass, Proved, full_attention, own_token
from ringlab.hugging_face.indexers import check_indexers
from ringlab.hugging_face.seam import as_it_was, mixing_layers, own_forwards, spread, watched
from ringlab.hugging_face.states import ALONE, cut
from ringlab.support.expect import expect

S = 16
LONG = 256  # tokens, or as many as the model has positions: some parts drop tokens only when there are many


def prove(model: PreTrainedModel, attention: LayerAttention, name: str) -> Proved:
    """What is true of `model`, whose layers call `attention`, registered as `name`.

    The model's weights, mode and attention stay as they are. Raises ValueError with the reason if it cannot be cut.
    """
    ids = torch.randint(*ids_of(model), (S, S), generator=torch.Generator().manual_seed(0)).to(model.device)
    linear, before = mixing_layers(model), attention.now
    attention.now = now = Pass(proof=True)
    with as_it_was(model) as checkpointed, without_zeros(model):
        try:
            model.eval()
            check_indexers(model, lambda: rows_of(model, ids[:1]))
            right = of_each_call(model, linear, ids[:1])
            model.set_attn_implementation(name)
            told: list[Any] = []
            spread(linear, cut(told))
            now.stand_in, now.at = own_token, torch.arange(S)
            packs = count_calls(model, now, ids[:1], len(right) - len(linear), told)
            first = first_position(model, ids[:1])
            check_gradients(model, ids, first)
            check_shards(model, now, first)
            for part in checkpointed:
                part.gradient_checkpointing = False
            for part in model.modules():
                part.training = True
            with torch.random.fork_rng([model.device] if model.device.type == "cuda" else []):
                check_gradients(model, ids, first)  # dropout mixes no tokens
                with NoDropout():
                    check_shards(model, now, first)
            model.eval()
            spread(linear, ALONE)
            now.stand_in, now.at, now.longest = full_attention, torch.arange(S), None
            by_ring = of_each_call(model, linear, ids[:1])
        finally:
            own_forwards(model)
            attention.now = before
    same = not any(far(x, y) for x, y in zip(by_ring, right, strict=True))
    other = f"{type(model).__name__} computes another attention than its layers tell AttentionInterface"
    expect(same, other, "the same: what they do not pass on, the ring would leave out")
    return Proved(len(right) - len(linear), first, packs)


@contextmanager
def without_zeros(model: nn.Module) -> Iterator[None]:
    """Inside, each weight that is 0 is a small random number. Slices of fully_shard stay as they are."""
    generator, kept = torch.Generator().manual_seed(0), []
    weights = [torch.atleast_1d(x.data) for x in model.parameters() if not isinstance(x, DTensor)]
    for x in (x for x in weights if x.is_floating_point() and x.element_size() > 1):
        at = (x == 0).nonzero(as_tuple=True)
        kept.append((x, at, x[at]))  # a zero may be -0
        x[at] = (0.1 * torch.randn(len(at[0]), generator=generator)).to(x)
    try:
        yield
    finally:
        for x, at, zeros in kept:
            x[at] = zeros


class NoDropout(TorchFunctionMode):
    """Inside, dropout leaves out nothing."""

    def __torch_function__(self, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if "dropout" in getattr(function, "__name__", ""):
            return args[0]
        return function(*args, **(kwargs or {}))


def ids_of(model: PreTrainedModel) -> tuple[int, int]:
    """The upper half of the vocabulary, where no token is special: the first id and the end."""
    vocabulary = model.get_input_embeddings().weight.shape[0]
    return vocabulary // 2, vocabulary


def special_ids(model: PreTrainedModel) -> list[int]:
    """The ids with which a text or a part of it begins and ends."""
    named = (getattr(model.config.get_text_config(), f"{name}_token_id", None) for name in ("bos", "eos", "sep"))
    all_ids = [id for ids in named for id in (ids if isinstance(ids, list) else [ids])]
    return [id for id in all_ids if isinstance(id, int) and 0 <= id < ids_of(model)[1]]


def rows_of(model: PreTrainedModel, ids: Tensor, at: Tensor | None = None, **given: Any) -> Tensor:
    """A row for each token of ids (B, S), at positions (S,): logits, or what a model without a head returns."""
    given |= {} if at is None else {"position_ids": at[None].to(ids), "attention_mask": torch.ones_like(ids)}
    try:
        rows = model(input_ids=ids, use_cache=False, **given)[0]
    except ValueError:
        raise  # a refusal of what a layer passes
    except Exception as error:
        where = extract_tb(error.__traceback__)[-1]
        line = f"{Path(where.filename).name}, line {where.lineno}"
        float64 = (model.dtype, type(error)) == (torch.float64, RuntimeError)
        wide = " (for float64, experts_implementation='eager')" if float64 else ""
        raise ValueError(
            f"{type(model).__name__} raises {type(error).__name__} in {line}: {error}; expected a forward pass from "
            f"{', '.join(['token ids', *given])} alone, that looks into no mask{wide}"
        ) from error
    name = type(model).__name__
    row = "a row for each token: use the ring in its base model, and compute the rest from the rows of all ranks"
    of_tokens = rows.dim() == 3 and rows.shape[:2] == ids.shape
    expect(of_tokens, f"{name} returns {tuple(rows.shape)} for {tuple(ids.shape)} tokens", row)
    expect(rows.isfinite().all(), f"{name} returns NaN or infinity", "finite numbers: load its weights")
    return rows


# What is proved -----------------------------------------------------------------------------------------------------


def far(x: Tensor, y: Tensor) -> bool:
    """Whether x and y differ by more than rounding. Float32 at most: transformers computes norms and weights in it."""
    coarse = max(torch.finfo(y.dtype).eps, torch.finfo(torch.float32).eps)
    return bool((x.double() - y.double()).norm() > math.sqrt(coarse) * y.double().norm())


@torch.no_grad()
def of_each_call(model: PreTrainedModel, linear: list[nn.Module], ids: Tensor) -> list[Tensor]:
    """The result of every attention in a forward pass, (1, S, H, Dv), with large scores, and of every linear layer."""
    outs: list[Tensor] = []

    def sharp(x: Tensor) -> Tensor:
        return 1.5 * x / x.square().mean().sqrt().clamp(min=1e-6)

    def watch(attention: Callable) -> Callable:
        def call(module: nn.Module, query: Tensor, key: Tensor, *rest: Any, **named: Any) -> Any:
            result = attention(module, sharp(query), sharp(key), *rest, **named)
            outs.append(result[0].detach())
            return result

        return call

    with ExitStack() as stack:
        stack.enter_context(watched(watch))
        for layer in linear:
            stack.callback(layer.register_forward_hook(lambda *call: outs.append(of_floats(call[2]))).remove)
        rows_of(model, ids)
    return outs


def of_floats(x: Tensor) -> Tensor:
    """x, or 0 in the place of positions: `check_indexers` compares these."""
    return x if x.is_floating_point() else torch.zeros(1)


@torch.no_grad()
def count_calls(model: PreTrainedModel, now: Pass, ids: Tensor, expected: int, told: list[Any]) -> bool:
    """Raise ValueError unless a pass calls the ring as often as the model's own attention. Returns if documents pass.

    Linear layers note in `told` which documents they were told.
    """
    rows_of(model, ids)
    name, calls = type(model).__name__, now.calls
    inside = "it to in every layer: the ring has no other way in"
    expect(calls, f"{name} does not ask AttentionInterface for its attention", inside)
    asks = f"{name} asks AttentionInterface {expected} time(s) for its own attention, and {calls} time(s) for another"
    expect(expected == calls, asks, "the same number: else a part of it attends without the ring")
    now.calls, now.documents = 0, (S,)
    told.clear()
    with suppress(ValueError):  # it takes no documents
        rows_of(model, ids, documents=(S,))
    now.documents = None
    return now.calls == expected and {*told} <= {(S,)}


@torch.no_grad()
def first_position(model: PreTrainedModel, ids: Tensor) -> int:
    """The number of position 0 in this model: with it, given positions change no bit of the result."""
    rows = rows_of(model, ids)
    padding = getattr(model.config.get_text_config(), "pad_token_id", None) or 0
    for first in (0, padding + 1):
        if torch.equal(rows_of(model, ids, torch.arange(S) + first), rows):
            return first
    raise ValueError(
        f"{type(model).__name__} counts positions neither from 0 nor from pad_token_id + 1 = {padding + 1}; expected "
        f"one of these: a shard must be given the positions that its tokens have in the whole sequence"
    )


@torch.no_grad()
def check_shards(model: PreTrainedModel, now: Pass, first: int) -> None:
    """Raise ValueError unless each quarter of the tokens, the last in reverse order, gets its rows of the whole.

    The positions grow by a factor up to the last that the model has. The first quarter has small positions only.
    A model that draws random numbers, other than those of dropout, has other rows each time: it is not asked.
    """
    end = max(S, getattr(model.config.get_text_config(), "max_position_embeddings", None) or S)
    length = min(LONG, end)
    ids = torch.randint(*ids_of(model), (1, length), generator=torch.Generator().manual_seed(1)).to(model.device)
    for i, token in enumerate(special_ids(model)):  # in the first two quarters: a model might number texts by them
        ids[0, 1 + i :: length // 2] = token
    at = torch.logspace(0, 1, length, base=end - first).round().long() - 1 + first
    now.at, now.longest = torch.arange(length), None
    whole = rows_of(model, ids, at)
    if model.training and far(rows_of(model, ids, at), whole):
        return
    now.longest = int(at.max())
    *shards, last = torch.arange(length).chunk(4)
    for shard in (*shards, last.flip(0)):
        now.at = shard
        same = not far(rows_of(model, ids[:, shard], at[shard]), whole[:, shard])
        other = f"{type(model).__name__} computes other values for tokens in a shard than for the same tokens, at the "
        why = "the same: something depends on the number of tokens, on their order or on the longest position"
        expect(same, f"{other}same positions, in the whole sequence", why)


def check_gradients(model: PreTrainedModel, ids: Tensor, first: int) -> None:
    """Raise ValueError, with the name of a part, unless row b of token b in sequence b depends on that token only."""
    seen: list[tuple[str, Tensor]] = []  # a part, and a tensor that it computed

    def before(name: str, _: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        parent = name.rpartition(".")[0]
        seen.extend((parent, x) for x in (*args, *kwargs.values()) if is_of_tokens(x))

    def after(name: str, _: nn.Module, __: Any, result: Any) -> None:
        if not seen and isinstance(result, Tensor):  # the embedding, which may be frozen
            result.requires_grad_()
        seen.extend((name, x) for x in (result if isinstance(result, tuple) else [result]) if is_of_tokens(x))

    with ExitStack() as stack, torch.enable_grad():
        for name, part in model.named_modules():
            stack.callback(part.register_forward_pre_hook(partial(before, name), with_kwargs=True).remove)
            stack.callback(part.register_forward_hook(partial(after, name)).remove)
        rows = rows_of(model, ids, torch.arange(S) + first)
    embedding, kind = model.get_input_embeddings(), type(model).__name__
    by_itself = torch.equal(embedding(ids.view(-1, 1)).view(S, S, -1), embedding(ids))
    expect(by_itself, f"the input embeddings of {kind} mix tokens", "a row for each token id")
    embedded = [x for name, x in seen if model.get_submodule(name) is embedding]
    expect(embedded, f"{kind} does not call its input embeddings for token ids", "it to")
    if not mixes(rows, embedded[0]):
        return
    name = next((name for name, x in seen if mixes(x, embedded[0])), "")
    raise ValueError(
        f"{name or 'the model itself'} ({type(model.get_submodule(name)).__name__}) of {kind} mixes tokens without "
        f"AttentionInterface, as a convolution, a state or an attention of its own does; expected no such part: each "
        f"rank would compute it for its shard alone"
    )


def is_of_tokens(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dim() == 3 and x.shape[:2] == (S, S) and x.requires_grad


def mixes(result: Tensor, embedded: Tensor) -> bool:
    """Whether token b of sequence b in `result` depends on another token of `embedded` (S, S, ·)."""
    token = torch.arange(S)
    picked = result[token, token].double()
    unequal = torch.randn(picked.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(picked)
    (gradient,) = torch.autograd.grad(
        (picked * unequal).sum(), embedded, retain_graph=True, allow_unused=True, materialize_grads=True
    )
    same_token = torch.eye(S, dtype=torch.bool, device=gradient.device)[:, :, None]
    return bool(gradient.masked_fill(same_token, 0).any())
