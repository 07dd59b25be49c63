"""A Hugging Face batch in the ring: shift the labels in the whole sequence, then give each rank its tokens.

    input_ids[:, at]   shifted labels[:, at]   position_ids at        at: the positions of this rank in the layout
    loss of a rank  =  sum over the labels of its shard  /  number of labels of the whole batch

The loss of transformers shifts the labels itself and takes the mean over the tokens that it sees. In a shard both are
wrong: the next token may be on another rank, and ranks with padding have fewer labels. Here the losses of the ranks sum
to the loss of one process.

Shapes: a batch is input_ids and labels (B, S), as a tokenizer gives them. A rank has input_ids and labels (B, C),
C = S/P, at position_ids (1, C), and logits (B, C, vocab).

    $ python -m models.hugging_face_batch
    the loss of one process: 5.1340. 4 ranks, zigzag, with the same logits:
    off     labels shifted on each rank: off by 1.5e-01
    off     the mean over each rank's own labels: off by 1.3e-03
    ok      labels shifted first, sum / labels of the batch: the same to 1e-10
    refused padding on the left: rank 0: attention_mask has padding before tokens

Before: train.py, a run with our own model. After: hugging_face.py, the model that takes this batch.
Source: transformers 5.23, ForCausalLMLoss (labels, shift_labels, num_items_in_batch).
"""

import sys
import zlib
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from models.mesh import TEXT
from models.transformer import IGNORED, summed_loss
from support.agreement import agree, members
from support.processes import RankContext, launch
from training.causal import positions

try:
    from transformers import BatchEncoding
except ModuleNotFoundError as error:
    missing = f"{error}; expected transformers: pip install -r requirements-hf.txt"
    if __name__ == "__main__":
        sys.exit(missing)
    raise ModuleNotFoundError(missing, name=error.name) from None

MeshOrGroup = DeviceMesh | ProcessGroup | None
MEANING = {"s_aux": " (attention sinks)", "cu_seq_lens_q": " (packed documents)", "past_key_values": " (a cache)"}


def refuse(passed: dict[str, Any], understood: set[str]) -> None:
    """Raise ValueError for all that was passed and would be dropped. None, False and 0 are nothing."""
    rest = {name: x for name, x in passed.items() if name not in understood and x is not None}
    wrong = {name: x for name, x in rest.items() if not (isinstance(x, (bool, int, float)) and x == 0)}
    if wrong:
        given = {name: "a tensor" if isinstance(x, Tensor) else x for name, x in wrong.items()}
        each = ", ".join(f"{name}{MEANING.get(name, '')} is {x}" for name, x in given.items())
        raise ValueError(f"{each}; expected none: this ring has causal attention over one whole document only")


def group_of(mesh_or_group: MeshOrGroup) -> ProcessGroup | None:
    return mesh_or_group.get_group() if isinstance(mesh_or_group, DeviceMesh) else mesh_or_group


def shard_batch(batch: dict[str, Tensor], mesh_or_group: MeshOrGroup = None, layout: str = "zigzag") -> BatchEncoding:
    """A batch (B, S), the same on every rank of a ring -> this rank's arguments of the model, (B, C).

    The batch has input_ids and may have labels, not shifted; attention_mask, 0 for padding, on the right only and with
    labels of -100; position_ids, 0 ... S-1. The result has input_ids and position_ids (1, C); with labels also labels
    and shift_labels, both shifted in the whole sequence, and num_items_in_batch, the labels of the whole batch. Sum
    that over the rings of a mesh. There is no mask: under a causal mask no token sees padding on its right.
    Raises ValueError on every rank for another batch, and where the ranks have different ones.
    """
    group = group_of(mesh_or_group)
    rank, world_size = members(group)
    if len(set(agree(partial(check_batch, batch), group))) > 1:
        raise ValueError(
            "the ranks have different batches; expected one batch for all of a ring: use no sampler by rank"
        )
    tokens = batch["input_ids"]
    at = positions(layout, tokens.shape[1], rank, world_size).to(tokens.device)
    shard = {"input_ids": tokens[:, at], "position_ids": at[None]}
    if "labels" in batch:
        labels = shifted(batch["labels"])
        shard |= dict.fromkeys(("labels", "shift_labels"), labels[:, at])
        shard["num_items_in_batch"] = (labels != IGNORED).sum().clamp(min=1)
    return BatchEncoding(shard)


def shifted(labels: Tensor) -> Tensor:
    """Labels (B, S), each of its own token -> each of the token that follows, and none of the last."""
    return F.pad(labels[:, 1:], (0, 1), value=IGNORED)


def check_batch(batch: dict[str, Tensor]) -> int:
    """A number that tells batches apart. Raises ValueError as `shard_batch` says."""
    refuse(batch, {"input_ids", "labels", "attention_mask", "position_ids"})
    tokens = batch["input_ids"]
    mask, at = batch.get("attention_mask", torch.ones_like(tokens)), batch.get("position_ids")
    if mask.shape != tokens.shape:
        raise ValueError(
            f"attention_mask is {tuple(mask.shape)}; expected the shape of input_ids, {tuple(tokens.shape)}"
        )
    if (mask[:, 1:] > mask[:, :-1]).any():
        raise ValueError("attention_mask has padding before tokens; expected padding on the right only")
    if "labels" in batch and (batch["labels"][mask == 0] != IGNORED).any():
        raise ValueError(f"labels where attention_mask is 0; expected {IGNORED} there")
    if at is not None and not torch.equal(at, torch.arange(tokens.shape[1]).to(at).expand_as(at)):
        raise ValueError("position_ids are not 0 ... S-1; expected one document a row: packed ones are not supported")
    return zlib.crc32(tokens.cpu().contiguous().numpy())


def loss_part(
    logits: Tensor, labels: Tensor, vocab_size: int, num_items_in_batch: Any = None, shift_labels: Any = None, **_: Any
) -> Tensor:
    """This rank's part of the loss: the parts of all ranks sum to the mean over the labels of the batch.

    A model calls it as its `loss_function`. Its own loss would shift `labels` again, inside the shard.
    """
    if shift_labels is None or num_items_in_batch is None:
        raise ValueError("labels without shift_labels or num_items_in_batch; expected all three: use shard_batch")
    return summed_loss(logits, shift_labels) / num_items_in_batch


BATCH = {"input_ids": TEXT[:, :-1], "attention_mask": (TEXT[:, :-1] != 0).long()}  # two sequences, one of them padded
BATCH |= {"labels": BATCH["input_ids"].masked_fill(BATCH["input_ids"] == 0, IGNORED)}
LOGITS = torch.randn(*TEXT[:, :-1].shape, 128, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
CASES = {  # what should come of it
    "labels shifted on each rank": "off",
    "the mean over each rank's own labels": "off",
    "labels shifted first, sum / labels of the batch": "ok",
    "padding on the left": "refused",
}


def _loss(context: RankContext, case: str) -> float | str:
    """The loss of the batch: the sum of the parts, or the mean of the means; or why the batch was refused."""
    mask = BATCH["attention_mask"]
    try:
        shard = shard_batch({**BATCH, "attention_mask": mask.flip(1) if "left" in case else mask})
    except ValueError as error:
        return str(error)
    at = shard["position_ids"][0]
    if case.startswith("labels shifted on"):
        shard["shift_labels"] = shifted(BATCH["labels"][:, at])
    if "mean" in case:
        shard["num_items_in_batch"] = (shard["shift_labels"] != IGNORED).sum() * context.world_size
    loss = loss_part(LOGITS[:, at], vocab_size=128, **shard)
    dist.all_reduce(loss)
    return loss.item()


def _demo(context: RankContext) -> list[float | str]:
    return [_loss(context, case) for case in CASES]


def main() -> int:
    labels = shifted(BATCH["labels"])
    exact = (summed_loss(LOGITS, labels) / (labels != IGNORED).sum()).item()
    print(f"the loss of one process: {exact:.4f}. 4 ranks, zigzag, with the same logits:")
    ok = True
    for (case, expected), loss in zip(CASES.items(), launch(_demo, 4, device="cpu")[0], strict=True):
        if isinstance(loss, str):
            seen, said = "refused", loss.partition("; ")[0]
        else:
            error = abs(loss - exact) / exact
            seen, said = ("ok", "the same to 1e-10") if error < 1e-10 else ("off", f"off by {error:.1e}")
        print(f"{seen:8}{case}: {said}")
        ok &= seen == expected
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
