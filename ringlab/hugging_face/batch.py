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

`python examples/compare.py` runs it: a first reader may skip this file.
Before: seam.py. After: masks.py, the masks of its layers.
Source: transformers 5.23, ForCausalLMLoss (labels, shift_labels, num_items_in_batch), DataCollatorWithFlattening.
"""

import zlib
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from ringlab.models.mesh import TEXT, MeshOrGroup, placed
from ringlab.models.transformer import IGNORED, summed_loss
from ringlab.ring.documents import document_positions
from ringlab.ring.layouts import Layout, LayoutName, is_own, layout_of, order, positions
from ringlab.support.agreement import agree_same, members
from ringlab.support.expect import expect
from ringlab.support.extras import extra

with extra("hf", __name__):
    from transformers import BatchEncoding

MEANING = {"s_aux": " (attention sinks)", "past_key_values": " (a cache)"}
MEANING |= {"cu_seq_lens_q": " (packed documents: for shard_batch)"}
UNDERSTOOD = {"input_ids", "labels", "attention_mask", "position_ids"}
UNDERSTOOD |= {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}  # max_length: the longest document


def refuse(passed: dict[str, Any], understood: set[str]) -> None:
    """Raise ValueError for all that was passed and would be dropped. None, False and 0 are nothing."""
    rest = {name: x for name, x in passed.items() if name not in understood and x is not None}
    wrong = {name: x for name, x in rest.items() if not (isinstance(x, (bool, int, float)) and x == 0)}
    kinds = {name: "a tensor" if isinstance(x, Tensor) else f"a {type(x).__name__}" for name, x in wrong.items()}
    values = {name: x if isinstance(x, bool | int | float | str) else kinds[name] for name, x in wrong.items()}
    given = ", ".join(f"{name}{MEANING.get(name, '')} is {x}" for name, x in values.items())
    expect(not wrong, given, "none: the ring knows nothing of it, and would leave it out")


def shard_batch(
    batch: dict[str, Tensor],
    mesh_or_group: MeshOrGroup = None,
    layout: LayoutName | Layout = "zigzag",
    causal: bool = True,
    pad_to: int | None = None,
) -> BatchEncoding:
    """A batch (B, S), the same on every rank of a ring -> this rank's arguments of the model, (B, C).

    The batch has input_ids and may have labels, not shifted; attention_mask, 0 for padding, on the right only and with
    labels of -100; position_ids, 0, 1, 2, ... in each document; cu_seq_lens_q and cu_seq_lens_k, (documents + 1,).
    All rows are packed alike. Padding after packed documents is one more document. `pad_to` adds padding up to so many
    tokens, and as many more as equal shards in this layout need: 1 adds no others. A ContextParallel stands for mesh
    and layout.

    The result has input_ids and position_ids (1, C); with several documents in a row also documents, their lengths;
    with labels also labels and shift_labels, both shifted in each whole document, and num_items_in_batch, the labels of
    the whole batch. Sum that over the rings of a mesh. There is no mask: under a causal mask no token sees padding on
    its right. With `causal` False, for an encoder, labels are not shifted. Then padding is a document of its own, the
    same in all rows. Raises ValueError on every rank for another batch, and where the ranks have different ones.
    """
    where = placed(mesh_or_group, layout)
    group, layout, (rank, world_size) = where.mesh_or_group, where.layout, where.place
    sized = pad_to is None or (type(pad_to) is int and pad_to > 0)
    least, multiple = pad_to if sized else 0, max(1, layout_of(layout).multiple) * world_size
    if least and isinstance(batch.get("input_ids"), Tensor) and batch["input_ids"].dim() == 2:
        batch = padded(batch, least, multiple)

    def check() -> tuple[tuple[int, ...], dict[str, Any]]:
        expect(sized, f"pad_to is {pad_to!r}", "a number of tokens, or None")
        number, documents = check_batch(batch, causal)
        S = batch["input_ids"].shape[1]  # a model in a ring expects equal shards
        given = f"{S} tokens in the {layout} layout on {world_size} ranks"
        expect(S % multiple == 0, given, f"a multiple of {multiple}: pad_to=1 adds padding")
        same = {"the batch": number, "documents": documents, "causal": bool(causal), "layout": str(layout)}
        same["the positions of the layout"] = order(layout, S, world_size) if is_own(layout) else None
        return documents, same

    documents = agree_same(check, group, expected="one batch and layout in a ring: use no sampler by rank")[0]
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


def padded(batch: dict[str, Any], least: int, multiple: int) -> dict[str, Any]:
    """A batch (B, S) with padding on the right, up to a multiple of `multiple` tokens, `least` or more."""
    tokens = batch["input_ids"]
    more = -(-max(tokens.shape[1], least) // multiple) * multiple - tokens.shape[1]
    if more:
        batch = {"attention_mask": torch.ones_like(tokens), **batch}
        for name, value in {"input_ids": 0, "attention_mask": 0, "position_ids": 0, "labels": IGNORED}.items():
            if isinstance(batch.get(name), Tensor):  # others are refused, on every rank
                batch[name] = F.pad(batch[name], (0, more), value=value)
    return batch


def shifted(labels: Tensor) -> Tensor:
    """Labels (B, S), each of its own token -> each of the token that follows, and none of the last."""
    return F.pad(labels[:, 1:], (0, 1), value=IGNORED)


def shape_of(x: Any) -> Any:
    return tuple(x.shape) if isinstance(x, Tensor) else x


def check_batch(batch: dict[str, Tensor], causal: bool = True) -> tuple[int, tuple[int, ...]]:
    """A number that tells batches apart, and the lengths of the documents. Raises ValueError as `shard_batch` says."""
    refuse(batch, UNDERSTOOD)
    tokens: Any = batch.get("input_ids")
    fits = isinstance(tokens, Tensor) and tokens.dim() == 2 and tokens.numel() > 0
    expect(fits, f"input_ids are {shape_of(tokens)}", "a tensor (B, S) with tokens")
    S = tokens.shape[1]
    for name in ("attention_mask", "labels"):
        x = batch.get(name, tokens)
        fits = isinstance(x, Tensor) and x.shape == tokens.shape
        expect(fits, f"{name} is {shape_of(x)}", f"the shape of input_ids, {tuple(tokens.shape)}")
    mask = batch.get("attention_mask", torch.ones_like(tokens))
    on_the_right = "padding on the right only: set tokenizer.padding_side = 'right'"
    falls = (mask[:, 1:] <= mask[:, :-1]).all()
    expect(falls or not mask[:, 0].all(), "attention_mask has a hole between tokens", "ones, then zeros for padding")
    expect(falls, "attention_mask has padding before tokens", on_the_right)
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
        words = f"cu_seq_lens_q is {edges[:8]} and cu_seq_lens_k {keys[:8]}"
        expect(fits, words, f"the same, from 0 up to {S}: where each document of a row begins, and where the last ends")
    elif at is not None and real > 0:
        edges = [0, *(1 + (at[0, 1:real] == 0).nonzero().flatten()).tolist(), real]
    else:
        edges = [0, S]
    documents = tuple(b - a for a, b in pairwise(edges))
    expected = document_positions(documents)
    begin = "documents that begin at 0, and in B > 1 rows the same lengths: pack them into one row"
    counted = at is None or (at[:, : len(expected)] == expected.to(at)).all()
    expect(counted, "position_ids are not 0, 1, 2, ... in each document, the same in all rows", begin)
    return documents


def themselves(input_ids: Tensor | None = None, labels: Tensor | None = None, **_: Any) -> bool:
    """Whether each label is its own token, in a row of three tokens or more: two runs of one token may look so."""
    if input_ids is None or labels is None or input_ids.shape != labels.shape:
        return False
    real, several = labels != IGNORED, max(len(row.unique()) for row in input_ids) > 2
    return several and bool(real.any() and (labels == input_ids)[real].all())


def checksum_of_weights(model: nn.Module) -> int:
    """A number that tells the weights of ranks apart, but not their order. It reads each of them once."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    weights = [x.detach().flatten() for x in model.parameters() if not isinstance(x, DTensor)]  # that is one for all
    sums = [x.view(integers[x.element_size()]).sum(dtype=torch.int64).cpu() for x in weights]
    return zlib.crc32(repr([int(x) for x in sums]).encode())


def loss_part(
    logits: Tensor, labels: Tensor, vocab_size: int, num_items_in_batch: Any = None, shift_labels: Any = None, **_: Any
) -> Tensor:
    """This rank's part of the loss: the parts of all ranks sum to the mean over the labels of the batch.

    A model calls it as its `loss_function`. Its own loss would shift `labels` again, inside the shard.
    """
    complete = shift_labels is not None and num_items_in_batch is not None
    expect(complete, "labels without shift_labels or num_items_in_batch", "all three: use shard_batch")
    return summed_loss(logits, shift_labels) / num_items_in_batch


def backward(loss: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """The backward pass of this rank's part of the loss, under DDP or FSDP. Returns the loss of the batch, to print.

    They average gradients over the ranks of `group` (None: the whole job), and the parts must be summed. So the part is
    multiplied by the number of ranks here. Every rank calls it.
    """
    _, world_size = members(group)
    (loss * world_size).backward()
    whole = loss.detach().clone()
    dist.all_reduce(whole, group=group)
    return whole


BATCH = {"input_ids": TEXT[:, :-1], "attention_mask": (TEXT[:, :-1] != 0).long()}  # two sequences, one of them padded
BATCH |= {"labels": BATCH["input_ids"].masked_fill(BATCH["input_ids"] == 0, IGNORED)}
