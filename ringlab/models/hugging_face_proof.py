"""A proof, on one process, that a model may be cut into shards: nothing but its attention mixes tokens.

    own = alone             attention of whole rows: by the model itself, and by what its layers tell the ring
    shard of cut(whole)  =  cut(shard)             cut: each token sees itself only
    ∂ logits_i / ∂ embedding_j  =  0, i ≠ j        with cut, for all pairs of tokens

A ring computes attention between shards. All else in a model must be a function of a token and its position alone: no
convolution over the sequence, no state, no position that is counted inside a shard, no frequency that depends on the
longest position. A list of models that break this rule misses the next model. So each model is asked, with its own
weights, whether the three lines above hold.

`cut` gives v of the token itself, and a sum over the numbers of its q and k. So an error in q, k or v changes the
logits. The gradients must be exactly 0: this needs no tolerance, in any dtype. Two values are the same here when they
differ by less than the root of the dtype's eps, in norm.

The second line is asked of 256 tokens, the others of 16. What begins beyond these is not seen, such as a scale that
grows with long rows. The third line is asked in training too, where a batch norm mixes tokens.

Shapes: S = 16 tokens; logits or hidden states (B, S, ·); in a layer q is (B, H, S, D), k (B, G, S, D), v (B, G, S, Dv).

`python -m ringlab.models.hugging_face` runs it: a first reader may skip this file.

Before: hugging_face_masks.py, what a layer asks for. After: hugging_face.py, the model in the ring.
Source: transformers 5.23, AttentionInterface.get_interface.
"""

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from traceback import extract_tb
from typing import Any

import torch
from torch import Tensor, nn

from ringlab.support.extras import extra
from ringlab.training.masks import Mask

with extra("hf", __name__):
    from transformers import AttentionInterface, PreTrainedModel

from ringlab.models.hugging_face_batch import expect
from ringlab.models.hugging_face_masks import Attention

S = 16
LONG = 256  # tokens, or as many as the model has positions: some parts drop tokens only when there are many


def prove(model: PreTrainedModel, attention: Attention, name: str) -> tuple[int, int]:
    """How often `model` calls `attention`, registered as `name`, in a forward pass; and its number of position 0.

    The model's weights, mode and attention stay as they are. Raises ValueError with the reason if it cannot be cut.
    """
    own = model.config._attn_implementation
    modes = [(part, part.training, getattr(part, "gradient_checkpointing", None)) for part in model.modules()]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    ids = torch.randint(*ids_of(model), (S, S), generator=torch.Generator().manual_seed(0)).to(model.device)
    try:
        model.eval()
        right = of_each_call(model, ids[:1])
        model.set_attn_implementation(name)
        attention.stand_in, attention.at = cut, torch.arange(S)
        layers = count_calls(model, attention, ids[:1], len(right))
        first = first_position(model, ids[:1])
        check_gradients(model, ids, first)
        check_shards(model, attention, first)
        for part, _, checkpointed in modes:
            part.training = True
            if checkpointed:
                part.gradient_checkpointing = False
        with torch.random.fork_rng([model.device] if model.device.type == "cuda" else []):  # dropout mixes no tokens
            check_gradients(model, ids, first)
        model.eval()
        attention.stand_in, attention.at, attention.longest = alone, torch.arange(S), None
        same = not any(far(x, y) for x, y in zip(of_each_call(model, ids[:1]), right, strict=True))
        other = f"{type(model).__name__} computes another attention than its layers tell AttentionInterface"
        expect(same, other, "the same: what they do not pass on, the ring would leave out")
    finally:
        attention.stand_in, attention.at, attention.longest = None, None, None
        model.set_attn_implementation(own)
        for part, mode, checkpointed in modes:
            part.training = mode
            if checkpointed:
                part.gradient_checkpointing = checkpointed
        for buffer, before in buffers:  # statistics of a batch norm
            buffer.copy_(before)
    return layers, first


def ids_of(model: PreTrainedModel) -> tuple[int, int]:
    """The upper half of the vocabulary, where no token is special: the first id and the end."""
    vocabulary = model.get_input_embeddings().weight.shape[0]
    return vocabulary // 2, vocabulary


def special_ids(model: PreTrainedModel) -> list[int]:
    """The ids with which a text or a part of it begins and ends."""
    named = (getattr(model.config.get_text_config(), f"{name}_token_id", None) for name in ("bos", "eos", "sep"))
    each = [id for ids in named for id in (ids if isinstance(ids, list) else [ids])]
    return [id for id in each if isinstance(id, int) and 0 <= id < ids_of(model)[1]]


def rows_of(model: PreTrainedModel, ids: Tensor, at: Tensor | None = None) -> Tensor:
    """A row for each token of ids (B, S), at positions (S,): logits, or what a model without a head returns."""
    given = {} if at is None else {"position_ids": at[None].to(ids), "attention_mask": torch.ones_like(ids)}
    try:
        rows = model(input_ids=ids, use_cache=False, **given)[0]
    except ValueError:
        raise  # a refusal of what a layer passes
    except Exception as error:
        where = extract_tb(error.__traceback__)[-1]
        line = f"{Path(where.filename).name}, line {where.lineno}"
        raise ValueError(
            f"{type(model).__name__} raises {type(error).__name__} in {line}: {error}; expected a forward pass from "
            f"{', '.join(['token ids', *given])} alone, that looks into no mask"
        ) from error
    name = type(model).__name__
    row = "a row for each token: use the ring in its base model, and compute the rest from the rows of all ranks"
    of_tokens = rows.dim() == 3 and rows.shape[:2] == ids.shape
    expect(of_tokens, f"{name} returns {tuple(rows.shape)} for {tuple(ids.shape)} tokens", row)
    expect(rows.isfinite().all(), f"{name} returns NaN or infinity", "finite numbers: load its weights")
    return rows


def check_kind(model: PreTrainedModel) -> None:
    """Raise ValueError for what the proof cannot see: losses, dropped layers, and what a long sequence changes."""
    config, name = model.config.get_text_config(), type(model).__name__
    meta = any(weight.is_meta for weight in model.parameters())
    expect(not meta, f"{name} has weights on the meta device", "loaded ones: the proof computes with them")
    alone = not model.config.is_encoder_decoder
    expect(alone, f"{name} is an encoder with a decoder", "a decoder alone: the ring shares out one text")
    state = f"{name} keeps more of earlier tokens than their keys and values, says transformers (_is_stateful), as a "
    state += "convolution or a state space does"
    expect(not model._is_stateful, state, "attention in every layer, and nothing else over tokens")
    takes = "position_ids" in inspect.signature(model.forward).parameters
    expect(takes, f"{name} takes no position_ids", "it to: a shard's are not 0, 1, 2, ...")
    reasons = {"output_router_logits": "its loss of the router would be that of a shard"}
    reasons |= {"layerdrop": "the ranks would leave out different layers"}
    for option, reason in reasons.items():
        given = getattr(config, option, None)
        expect(not given, f"{option} is {given} in the config of {name}", f"none: {reason}")


# What stands in for the ring ----------------------------------------------------------------------------------------


def cut(q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:
    """No attention: what a token gets comes from its own q, k and v, (B, H, S, Dv)."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    unequal = torch.arange(1, q.shape[3] + 1).to(q).cos()  # a rotation of q or k changes this sum, unlike q·k
    return v + ((q + 2 * k) * unequal).mean(dim=3, keepdim=True).to(v.dtype)


def alone(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """What the ring would compute with these options, on one process, by the definition: (B, H, S, Dv)."""
    scale, sinks, softcap = (options.get(name) for name in ("scale", "sinks", "softcap"))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = q @ k.mT * (1 / math.sqrt(q.shape[3]) if scale is None else scale)  # (B, H, S, S)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    keys = torch.arange(q.shape[2])
    seen = torch.zeros(len(keys), len(keys), dtype=torch.bool)
    mask = Mask(options["causal"], options["documents"], options["window"])
    for begin, end in mask.visible_keys(keys, len(keys)):
        seen |= (keys >= begin[:, None]) & (keys < end[:, None])
    scores = scores.masked_fill(~seen.to(q.device), -math.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores)[:, None, None].expand(*scores.shape[:3], 1)], dim=3)
    return scores.softmax(dim=3)[..., : len(keys)] @ v


@contextmanager
def watched(outs: list[Tensor]) -> Iterator[None]:
    """Every attention gets large q and k, so that its scores matter, and its result is added to `outs`."""
    get = AttentionInterface.get_interface

    def sharp(x: Tensor) -> Tensor:
        return 1.5 * x / x.square().mean().sqrt().clamp(min=1e-6)

    def get_watched(register: AttentionInterface, name: str, default: Callable) -> Callable:
        attention = get(register, name, default)

        def watch(module: nn.Module, query: Tensor, key: Tensor, *rest: Any, **named: Any) -> Any:
            result = attention(module, sharp(query), sharp(key), *rest, **named)
            outs.append(result[0].detach())
            return result

        return watch

    AttentionInterface.get_interface = get_watched
    try:
        yield
    finally:
        AttentionInterface.get_interface = get


# What is proved -----------------------------------------------------------------------------------------------------


def far(x: Tensor, y: Tensor) -> bool:
    """Whether x and y differ by more than rounding. Float32 at most: transformers computes norms and weights in it."""
    coarse = max(torch.finfo(y.dtype).eps, torch.finfo(torch.float32).eps)
    return bool((x.double() - y.double()).norm() > math.sqrt(coarse) * y.double().norm())


@torch.no_grad()
def of_each_call(model: PreTrainedModel, ids: Tensor) -> list[Tensor]:
    """The result of every attention in a forward pass, (1, S, H, Dv) each, with large scores."""
    outs: list[Tensor] = []
    with watched(outs):
        rows_of(model, ids)
    return outs


@torch.no_grad()
def count_calls(model: PreTrainedModel, attention: Attention, ids: Tensor, own: int) -> int:
    """The calls of `attention` in a forward pass: as many as of the model's own attention."""
    attention.calls = 0
    rows_of(model, ids)
    name, calls = type(model).__name__, attention.calls
    inside = "it to in every layer: the ring has no other way in"
    expect(calls, f"{name} does not ask AttentionInterface for its attention", inside)
    asks = f"{name} asks AttentionInterface {own} time(s) for its own attention, and {calls} time(s) for another"
    expect(own == calls, asks, "the same number: else a part of it attends without the ring")
    return own


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
def check_shards(model: PreTrainedModel, attention: Attention, first: int) -> None:
    """Raise ValueError unless each quarter of the tokens, the last in reverse order, gets its rows of the whole.

    The positions grow by a factor up to the last that the model has. The first quarter has small positions only.
    """
    end = max(S, getattr(model.config.get_text_config(), "max_position_embeddings", None) or S)
    length = min(LONG, end)
    ids = torch.randint(*ids_of(model), (1, length), generator=torch.Generator().manual_seed(1)).to(model.device)
    for i, token in enumerate(special_ids(model)):  # in the first two quarters: a model might number texts by them
        ids[0, 1 + i :: length // 2] = token
    at = torch.logspace(0, 1, length, base=end - first).round().long() - 1 + first
    attention.at, attention.longest = torch.arange(length), None
    whole, attention.longest = rows_of(model, ids, at), int(at.max())
    *shards, last = torch.arange(length).chunk(4)
    for shard in (*shards, last.flip(0)):
        attention.at = shard
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

    embedding, hooks = model.get_input_embeddings(), []
    for name, part in model.named_modules():
        hooks.append(part.register_forward_pre_hook(partial(before, name), with_kwargs=True))
        hooks.append(part.register_forward_hook(partial(after, name)))
    try:
        with torch.enable_grad():
            rows = rows_of(model, ids, torch.arange(S) + first)
    finally:
        for hook in hooks:
            hook.remove()
    kind = type(model).__name__
    by_itself = torch.equal(embedding(ids.view(-1, 1)).view(S, S, -1), embedding(ids))
    expect(by_itself, f"the input embeddings of {kind} mix tokens", "a row for each token id")
    embedded = [x for name, x in seen if model.get_submodule(name) is embedding]
    expect(embedded, f"{kind} does not call its input embeddings for token ids", "it to")
    if not mixes(rows, embedded[0]):
        return
    name = next((name for name, x in seen if mixes(x, embedded[0])), "")
    raise ValueError(
        f"{name} ({type(model.get_submodule(name)).__name__}) of {kind} mixes tokens without "
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
    own = torch.eye(S, dtype=torch.bool, device=gradient.device)[:, :, None]
    return bool(gradient.masked_fill(own, 0).any())
