"""A Hugging Face batch in the ring: shift the labels in the whole sequence, then give each rank its tokens.

    input_ids[:, at]   shifted labels[:, at]   position_ids[at]        at: the positions of this rank in the layout
    loss of a rank  =  sum over the labels of its shard  /  number of labels of the whole batch

The loss of transformers shifts the labels itself and takes the mean over the tokens that it sees. In a shard both are
wrong: the next token may be on another rank, and ranks with padding have fewer labels. Here the losses of the ranks sum
to the loss of one process.

A row may hold packed documents. position_ids that restart at 0 tell where each begins, or cu_seq_lens_q does. Then
position_ids restart in the shards too, and every rank gets the lengths of all documents, for its layers. The first
token of a document is not predicted. transformers' own loss predicts it from the document before, unless its label is
-100. DataCollatorWithFlattening sets that label to -100, and so does `shard_batch`.

Shapes: a batch is input_ids and labels (B, S), as a tokenizer gives them. A rank has input_ids and labels (B, C),
C = S/P, at position_ids (1, C), and logits (B, C, vocab).

`python -m ringlab.models.hugging_face` runs it: a first reader may skip this file.

Before: train.py, a run with our own model. After: hugging_face_masks.py, the masks of its layers.
Source: transformers 5.23, ForCausalLMLoss (labels, shift_labels, num_items_in_batch), DataCollatorWithFlattening.
"""

import zlib
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ringlab.models.mesh import TEXT
from ringlab.models.transformer import IGNORED, summed_loss
from ringlab.support.agreement import agree, members
from ringlab.support.extras import extra
from ringlab.training.documents import document_positions
from ringlab.training.layouts import Layout, layout_of, positions

with extra("hf", __name__):
    from transformers import BatchEncoding, PreTrainedModel
    from transformers.generation.configuration_utils import GenerationMode

MeshOrGroup = DeviceMesh | ProcessGroup | None
MEANING = {"s_aux": " (attention sinks)", "past_key_values": " (a cache)"}
MEANING |= {"cu_seq_lens_q": " (packed documents: for shard_batch)"}
UNDERSTOOD = {"input_ids", "labels", "attention_mask", "position_ids"}
UNDERSTOOD |= {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}  # max_length: the longest document

LOOP = {"input_ids", "attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep"}
LOOP |= {"generation_config", "logits_processor", "stopping_criteria", "streamer", "synced_gpus"}
NOT_HERE = ("output_attentions", "output_hidden_states", "prefill_chunk_size", "token_healing", "cache_config")


def expect(fine: Any, given: str, expected: str) -> None:
    """Raise ValueError, "given; expected", unless all is fine."""
    if not fine:
        raise ValueError(f"{given}; expected {expected}")


def refuse(passed: dict[str, Any], understood: set[str]) -> None:
    """Raise ValueError for all that was passed and would be dropped. None, False and 0 are nothing."""
    rest = {name: x for name, x in passed.items() if name not in understood and x is not None}
    wrong = {name: x for name, x in rest.items() if not (isinstance(x, (bool, int, float)) and x == 0)}
    given = {name: "a tensor" if isinstance(x, Tensor) else x for name, x in wrong.items()}
    each = ", ".join(f"{name}{MEANING.get(name, '')} is {x}" for name, x in given.items())
    expect(not wrong, each, "none: the ring knows nothing of it, and would leave it out")


def group_of(mesh_or_group: MeshOrGroup) -> ProcessGroup | None:
    return mesh_or_group.get_group() if isinstance(mesh_or_group, DeviceMesh) else mesh_or_group


def shard_batch(
    batch: dict[str, Tensor],
    mesh_or_group: MeshOrGroup = None,
    layout: str | Layout = "zigzag",
    causal: bool = True,
) -> BatchEncoding:
    """A batch (B, S), the same on every rank of a ring -> this rank's arguments of the model, (B, C).

    The batch has input_ids and may have labels, not shifted; attention_mask, 0 for padding, on the right only and with
    labels of -100; position_ids, 0, 1, 2, ... in each document; cu_seq_lens_q and cu_seq_lens_k, (documents + 1,).
    All rows are packed alike. Padding after packed documents is one more document.

    The result has input_ids and position_ids (1, C); with several documents in a row also documents, their lengths;
    with labels also labels and shift_labels, both shifted in each whole document, and num_items_in_batch, the labels of
    the whole batch. Sum that over the rings of a mesh. There is no mask: under a causal mask no token sees padding on
    its right. With `causal` False, for an encoder, labels are not shifted. Then padding is a document of its own, the
    same in all rows. Raises ValueError on every rank for another batch, and where the ranks have different ones.
    """
    group = group_of(mesh_or_group)
    rank, world_size = members(group)
    seen = agree(partial(check_batch, batch, causal), group)
    one = "one batch for all of a ring: use no sampler by rank"
    expect(len(set(seen)) == 1, "the ranks have different batches", one)
    _, documents = seen[0]
    tokens = batch["input_ids"]
    place = document_positions(documents).to(tokens.device)  # (S,)
    at = positions(layout, tokens.shape[1], rank, world_size).to(tokens.device)
    shard: dict[str, Any] = {"input_ids": tokens[:, at], "position_ids": place[None, at]}
    if len(documents) > 1:
        shard["documents"] = documents
    if not causal:
        shard["causal"] = False
    if "labels" in batch:
        labels = batch["labels"]
        if causal:
            labels = shifted(labels.masked_fill(place == 0, IGNORED))  # no document predicts the next
        shard |= dict.fromkeys(("labels", "shift_labels"), labels[:, at])
        shard["num_items_in_batch"] = (labels != IGNORED).sum().clamp(min=1)
    return BatchEncoding(shard)


def shifted(labels: Tensor) -> Tensor:
    """Labels (B, S), each of its own token -> each of the token that follows, and none of the last."""
    return F.pad(labels[:, 1:], (0, 1), value=IGNORED)


def shape_of(x: Any) -> Any:
    return tuple(x.shape) if isinstance(x, Tensor) else x


def check_batch(batch: dict[str, Tensor], causal: bool = True) -> tuple[int, tuple[int, ...]]:
    """A number that tells batches apart, and the lengths of the documents. Raises ValueError as `shard_batch` says."""
    refuse(batch, UNDERSTOOD)
    tokens: Any = batch.get("input_ids")
    right = isinstance(tokens, Tensor) and tokens.dim() == 2 and tokens.numel() > 0
    expect(right, f"input_ids are {shape_of(tokens)}", "a tensor (B, S) with tokens")
    S = tokens.shape[1]
    for name in ("attention_mask", "labels"):
        x = batch.get(name, tokens)
        right = isinstance(x, Tensor) and x.shape == tokens.shape
        expect(right, f"{name} is {shape_of(x)}", f"the shape of input_ids, {tuple(tokens.shape)}")
    mask = batch.get("attention_mask", torch.ones_like(tokens))
    on_the_right = "padding on the right only: set tokenizer.padding_side = 'right'"
    expect((mask[:, 1:] <= mask[:, :-1]).all(), "attention_mask has padding before tokens", on_the_right)
    documents = packed_documents(batch, S, int(mask.any(dim=0).sum()))
    padding = (mask == 0) | (torch.arange(S).to(tokens) >= sum(documents))
    behind = "the documents of cu_seq_lens_q end behind the tokens of attention_mask"
    unseen = "them to end with these: without a causal mask a token would see the padding"
    expect(causal or len(documents) == 1 or not padding[0, : sum(documents)].any(), behind, unseen)
    no_labels = "labels" not in batch or (batch["labels"][padding] == IGNORED).all()
    expect(no_labels, "labels where attention_mask is 0, or after the last document", f"{IGNORED} there")
    alike = "the same in all rows with causal=False, where a token would see the padding behind it: sort by length, or "
    alike += "pack the rows into one"
    expect(causal or (mask == mask[:1]).all(), "the rows have padding of unequal lengths", alike)
    if len(documents) == 1:  # under a causal mask no token of it sees the padding behind it
        documents = (S,) if causal else (min(int(mask[0].sum()), *documents),)
    if sum(documents) < S:
        documents = (*documents, S - sum(documents))
    contents = [x.long().cpu().numpy().tobytes() for x in (tokens, batch.get("labels", mask))]
    return zlib.crc32(b"".join(contents)), documents


def packed_documents(batch: dict[str, Tensor], S: int, real: int) -> tuple[int, ...]:
    """The lengths of the documents in a row of S tokens, from position_ids or cu_seq_lens_q; `real` are no padding."""
    at, given = batch.get("position_ids"), batch.get("cu_seq_lens_q", batch.get("cu_seq_lens_k"))
    fits = at is None or (isinstance(at, Tensor) and tuple(at.shape) in ((1, S), tuple(batch["input_ids"].shape)))
    expect(fits, f"position_ids are {shape_of(at)}", f"a tensor (1, S) or (B, S), with S = {S}")
    if given is not None:
        edges, keys = (torch.as_tensor(batch.get(f"cu_seq_lens_{x}", given)).flatten().tolist() for x in "qk")
        fits = all(isinstance(edge, int) for edge in edges) and len(edges) > 1 and edges == keys
        fits = fits and edges[0] == 0 and edges[-1] <= S and all(a < b for a, b in pairwise(edges))
        said = f"cu_seq_lens_q is {edges[:8]} and cu_seq_lens_k {keys[:8]}"
        expect(fits, said, f"the same, from 0 up to {S}: where each document of a row begins, and where the last ends")
    elif at is not None and real > 0:
        edges = [0, *(1 + (at[0, 1:real] == 0).nonzero().flatten()).tolist(), real]
    else:
        edges = [0, S]
    documents = tuple(b - a for a, b in pairwise(edges))
    right = document_positions(documents)
    begin = "documents that begin at 0, and in B > 1 rows the same lengths: pack them into one row"
    counted = at is None or (at[:, : len(right)] == right.to(at)).all()
    expect(counted, "position_ids are not 0, 1, 2, ... in each document, the same in all rows", begin)
    return documents


def checksum_of_weights(model: nn.Module) -> int:
    return checksum(x for x in model.parameters() if not isinstance(x, DTensor))  # a DTensor is one for all


def checksum(tensors: Iterable[Tensor]) -> int:
    """A number that tells tensors apart. It reads each of them once."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    sums = [x.detach().flatten().view(integers[x.element_size()]).sum(dtype=torch.int64).cpu() for x in tensors]
    return zlib.crc32(repr([int(x) for x in sums]).encode())


def loss_part(
    logits: Tensor, labels: Tensor, vocab_size: int, num_items_in_batch: Any = None, shift_labels: Any = None, **_: Any
) -> Tensor:
    """This rank's part of the loss: the parts of all ranks sum to the mean over the labels of the batch.

    A model calls it as its `loss_function`. Its own loss would shift `labels` again, inside the shard.
    """
    both = shift_labels is not None and num_items_in_batch is not None
    expect(both, "labels without shift_labels or num_items_in_batch", "all three: use shard_batch")
    return summed_loss(logits, shift_labels) / num_items_in_batch


def arguments(
    model: PreTrainedModel, layout: str | Layout, loop: dict[str, Any], args: tuple, kwargs: dict[str, Any], group: Any
) -> dict[str, Any]:
    """Fill `loop` with the arguments of transformers' loop, lengths (B, 1) and how many new tokens are stored at most.

    Returns what must be the same on all ranks. Raises ValueError for what a spread cache cannot do.
    """
    layout_of(layout)
    dropout = "model.eval(): dropout would differ from rank to rank"
    expect(not model.training, "the model is in training mode", dropout)
    loop |= prepared(model, args, kwargs)
    tokens, config = loop["input_ids"], loop["generation_config"]
    unknown = sorted(name for name, x in loop.items() if name not in LOOP and x is not None and x != {})  # of pictures
    unknown += [name for name in NOT_HERE if getattr(config, name, None)]
    own = "none of them: a rank has input_ids, and K, V and hidden states of its own tokens only"
    expect(not unknown, f"generate got {', '.join(unknown)}", own)
    guidance = config.guidance_scale
    expect(guidance in (None, 1), f"guidance_scale is {guidance}", "None: it needs a second cache")
    kind = config.cache_implementation
    given = f"use_cache is {config.use_cache} and cache_implementation is {kind}"
    usual = config.use_cache is not False and kind in (None, "dynamic")
    expect(usual, given, "the defaults: the spread cache is the only cache here")
    cache = getattr(loop.get("past_key_values"), "_is_user_defined", False)
    expect(not cache, "past_key_values were given", "none: each call of generate fills a cache of its own")
    streams = loop.get("streamer") is not None and members(group)[0] > 0
    expect(not streams, "a streamer was given", "one on rank 0 only, whose tokens hold on every rank")
    vocab = model.get_input_embeddings().weight.shape[0]
    known = tokens.numel() > 0 and tokens.min() >= 0 and tokens.max() < vocab
    expect(known, f"input_ids are {tuple(tokens.shape)}", f"tokens in each row, from 0 to {vocab - 1}")
    mask = loop.get("attention_mask")
    mask = torch.ones_like(tokens) if mask is None else mask.to(tokens)
    left = "padding on the left only, as tokenizers add it with padding_side='left': new tokens follow the last column"
    at_left = mask.shape == tokens.shape and (mask[:, -1] == 1).all() and (mask.diff(dim=1) >= 0).all()
    expect(at_left, "attention_mask has padding at its end or between tokens", left)
    at, right = loop["position_ids"], mask.cumsum(dim=1) - 1
    counted = at.shape[-1:] == right.shape[-1:] and not ((at - right) * mask).any()
    expect(counted, "position_ids were given", "none, or 0, 1, 2, ... in each prompt")
    lengths, text = mask.sum(dim=1, keepdim=True), model.config.get_text_config()
    limit = getattr(text, "max_position_embeddings", None)
    short = not limit or getattr(text, "rope_parameters", None) or lengths.max() <= limit  # else learned positions
    expect(short, f"a prompt has {int(lengths.max())} tokens", f"{limit} at most, max_position_embeddings")
    loop |= {"lengths": lengths, "stored": max(config.max_length - tokens.shape[1] - 1, 0)}
    return {
        "prompts": (tuple(tokens.shape), checksum([tokens, mask])),
        "arguments": zlib.crc32(repr(sorted(config.to_diff_dict().items())).encode()),
        "layout": str(layout),
        "weights": checksum_of_weights(model),
    }


def prepared(model: PreTrainedModel, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments that `generate` prepares for its loop of greedy search and sampling. Nothing is generated."""
    own = type(model)
    loop: dict[str, Any] = {}

    def keep(model: PreTrainedModel, input_ids: Tensor, **given: Any) -> Tensor:
        loop.update(given, input_ids=input_ids)
        return input_ids

    def known(model: PreTrainedModel, mode: GenerationMode, *_: Any) -> None:
        one = mode in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
        expect(one, f"generate was asked for {mode.value}", "greedy search or sampling, num_beams=1")

    for name in ("custom_generate", "cache_implementation"):  # they would leave this path before the loop
        given = kwargs.get(name)
        expect(given is None, f"{name} is {given}", "None: the spread cache has transformers' own loop")
    model.__class__ = type(own.__name__, (own,), {"_sample": keep, "_get_deprecated_gen_repo": known})
    try:
        own.generate(model, *args, **kwargs)
    except ValueError:
        raise
    except Exception as error:
        raise ValueError(f"generate raises {type(error).__name__}: {error}") from error  # on every rank
    finally:
        model.__class__ = own
    expect(loop, f"generate of {own.__name__} did not reach its loop", "transformers' own generate")
    return loop


# What the demonstrations of these files share -----------------------------------------------------------------------


def attempt(work: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """What `work` returns, or the words of its ValueError."""
    try:
        return work(*args, **options)
    except ValueError as error:
        return str(error)


def relative(results: Sequence[Tensor], exact: Sequence[Tensor]) -> list[float]:
    """The error of each result, in norm."""
    return [((a - b).norm() / b.norm()).item() for a, b in zip(results, exact, strict=True)]


def judged(cases: dict[str, str], results: Sequence[Any], judge: Callable[[str, Any], tuple[str, str]]) -> int:
    """Print what came of each case; 1 unless it is what `cases` say. Words instead of a result are a refusal."""
    ok = True
    for (case, expected), result in zip(cases.items(), results, strict=True):
        seen, said = ("refused", result.partition("; ")[0]) if isinstance(result, str) else judge(case, result)
        print(f"{seen:8}{case}: {said}")
        ok &= seen == expected
    return 0 if ok else 1


BATCH = {"input_ids": TEXT[:, :-1], "attention_mask": (TEXT[:, :-1] != 0).long()}  # two sequences, one of them padded
BATCH |= {"labels": BATCH["input_ids"].masked_fill(BATCH["input_ids"] == 0, IGNORED)}
PACKED = {name: x.flatten()[None] for name, x in BATCH.items()}  # both in one row
PACKED["position_ids"] = torch.arange(BATCH["input_ids"].shape[1]).repeat(2)[None]
