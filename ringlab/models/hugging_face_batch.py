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

    $ python -m ringlab.models.hugging_face_batch
    the loss of one process: 5.1340. 4 ranks, zigzag, with the same logits:
    off     labels shifted on each rank: off by 1.5e-01
    off     the mean over each rank's own labels: off by 1.3e-03
    ok      labels shifted first, sum / labels of the batch: the same to 1e-10
    off     packed, a label across the boundary: off by 2.8e-02
    ok      packed, each document by itself: the same to 1e-10
    refused padding on the left: rank 0: attention_mask has padding before tokens

Before: train.py, a run with our own model. After: hugging_face_masks.py, the masks of its layers.
Source: transformers 5.23, ForCausalLMLoss (labels, shift_labels, num_items_in_batch), DataCollatorWithFlattening.
"""

import sys
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from ringlab.models.mesh import TEXT
from ringlab.models.transformer import IGNORED, summed_loss
from ringlab.support.agreement import agree, members
from ringlab.support.extras import extra
from ringlab.support.processes import RankContext, launch
from ringlab.training.documents import document_positions
from ringlab.training.layouts import Layout, positions

with extra("hf", __name__):
    from transformers import BatchEncoding

MeshOrGroup = DeviceMesh | ProcessGroup | None
MEANING = {"s_aux": " (attention sinks)", "past_key_values": " (a cache)"}
MEANING |= {"cu_seq_lens_q": " (packed documents: for shard_batch)"}
UNDERSTOOD = {"input_ids", "labels", "attention_mask", "position_ids"}
UNDERSTOOD |= {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}  # max_length: the longest document


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


def loss_part(
    logits: Tensor, labels: Tensor, vocab_size: int, num_items_in_batch: Any = None, shift_labels: Any = None, **_: Any
) -> Tensor:
    """This rank's part of the loss: the parts of all ranks sum to the mean over the labels of the batch.

    A model calls it as its `loss_function`. Its own loss would shift `labels` again, inside the shard.
    """
    both = shift_labels is not None and num_items_in_batch is not None
    expect(both, "labels without shift_labels or num_items_in_batch", "all three: use shard_batch")
    return summed_loss(logits, shift_labels) / num_items_in_batch


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
LOGITS = torch.randn(*TEXT[:, :-1].shape, 128, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
CASES = {  # what should come of it
    "labels shifted on each rank": "off",
    "the mean over each rank's own labels": "off",
    "labels shifted first, sum / labels of the batch": "ok",
    "packed, a label across the boundary": "off",
    "packed, each document by itself": "ok",
    "padding on the left": "refused",
}


def _loss(context: RankContext, case: str) -> float:
    """The loss of the batch: the sum of the parts, or the mean of the means."""
    batch = PACKED if "packed" in case else BATCH
    mask = batch["attention_mask"]
    shard = shard_batch({**batch, "attention_mask": mask.flip(1) if "left" in case else mask})
    at = positions("zigzag", mask.shape[1], context.rank, context.world_size)
    if case.startswith("labels shifted on"):
        shard["shift_labels"] = shifted(batch["labels"][:, at])
    if "across" in case:
        shard["shift_labels"] = shifted(batch["labels"])[:, at]
    if "mean" in case:
        shard["num_items_in_batch"] = (shard["shift_labels"] != IGNORED).sum() * context.world_size
    loss = loss_part(LOGITS.reshape(*mask.shape, 128)[:, at], vocab_size=128, **shard)
    dist.all_reduce(loss)
    return loss.item()


def _demo(context: RankContext) -> list[float | str]:
    return [attempt(_loss, context, case) for case in CASES]


def main() -> int:
    labels = shifted(BATCH["labels"])
    exact = (summed_loss(LOGITS, labels) / (labels != IGNORED).sum()).item()
    print(f"the loss of one process: {exact:.4f}. 4 ranks, zigzag, with the same logits:")

    def judge(case: str, loss: float) -> tuple[str, str]:
        error = abs(loss - exact) / exact
        return ("ok", "the same to 1e-10") if error < 1e-10 else ("off", f"off by {error:.1e}")

    return judged(CASES, launch(_demo, 4)[0], judge)


if __name__ == "__main__":
    sys.exit(main())
