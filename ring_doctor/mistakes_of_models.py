"""The catalogue of the mistakes of whole models in a ring: sharding, loss and gradients. whole_model.py finds them.

Before: mistakes_of_gradients.py, the mistakes of an attention. After: whole_model.py.
Source: each entry names who had it, where that is public.
"""

from typing import Any

from ring_doctor.case import LAYOUTS
from ring_doctor.mistakes import Mistake

# fmt: off
ROWS: tuple[tuple[Any, ...], ...] = (  # name, chapter, what it is, where to look, who had it
    ("labels_per_shard", 10,
     "Labels are shifted inside each shard, so the last token of a shard has a wrong label or none. In the zigzag "
     "layout the token in the middle has a wrong label too.",
     "the shift of the labels: shift first, then shard, text[:, 1:][:, at]; the loss must not shift them again",
     "huggingface/transformers PR #36607", "verl PR #4250", "bionemo-recipes PR #1449"),
    ("positions_per_shard", 10,
     "Each rank counts the positions of its tokens from 0. Distances to tokens of other ranks are wrong. In "
     "contiguous chunks a rank that rotates the keys of others with its own positions gives the same numbers.",
     "where the model gets its positions: from ringlab.positions(layout, S, rank, P), not from arange(C); keys are "
     "rotated before they travel", "vllm-project/speculators PR #871"),
    *((f"positions_of_{layout}", 7,
       f"The positions of the tokens are made for the {layout} layout, and the tokens are dealt out in another layout.",
       "the sharding: tokens, labels and positions must come from one call, with one layout") for layout in LAYOUTS),
    ("positions_missing", 10,
     "The ranks' model gives every token the same position: queries and keys are not rotated.",
     "the path from the positions to the rotation: an attention that replaces another must rotate too"),
    ("rotated_twice", 10,
     "Queries and keys are rotated twice, so every distance counts double.",
     "the rotation: either the model rotates, or the ring that replaces its attention, not both"),
    ("ring_not_called", 12,
     "Each rank attends to its own shard only, and no K/V block moves. Training works, with a shorter context.",
     "which attention the model really calls: count the messages, or print inside the ring",
     "axolotl PR #3928", "NVIDIA-NeMo/Automodel #3507"),
    ("mean_of_means", 11,
     "Each rank divides by the number of its own labels, and the ranks' means are averaged. This is right only while "
     "all ranks have equally many labels, so not with padding, prompts or documents.",
     "the division of the loss: divide by the labels of all ranks, as ringlab/models/mesh.py does in batch_loss"),
    ("loss_times_p", 11,
     "The reported loss is P times the right loss: the means of P ranks were added.",
     "the reduction of the reported loss over the ranks of the ring",
     "huggingface/transformers PR #48167", "SkyRL PR #1420"),
    ("loss_over_p", 11,
     "The reported loss is 1/P of the right loss: the parts of one sum were averaged.",
     "the reduction of the reported loss over the ranks of the ring: parts must be summed"),
    ("loss_not_reduced", 11,
     "Each rank reports the loss of its own tokens.",
     "the reported loss: sum the losses and the numbers of labels over the ring, then divide",
     "pytorch/torchtitan #3329"),
    ("gradients_times_p", 11,
     "The gradients are P times the right ones: summed where the loss was scaled already, or summed twice. Adam hides"
     " it, clipping does not.",
     "the factor of the loss, and the reduction of the gradients: one of them too many"),
    ("gradients_over_p", 11,
     "The gradients are 1/P of the right ones: DDP and fully_shard average parts that must be summed. Adam hides it, "
     "clipping does not.",
     "the factor of the loss: multiply by the number of ranks, as ringlab/models/mesh.py does in batch_loss",
     "NVIDIA/Megatron-LM #673 asks why the factor is there"),
    ("gradients_times_root_p", 11,
     "The gradients are √P times the right ones.",
     "a factor that was meant for a norm, or for the learning rate"),
    ("gradients_over_root_p", 11,
     "The gradients are 1/√P of the right ones: clipping took the norm over P ranks that hold equal gradients.",
     "the norm in clipping: gradients that every rank holds are counted once, and only shards are added up"),
    ("clipped_per_rank", 11,
     "Each rank clips its shard of the weights by the norm of this shard. The step then has another direction.",
     "the norm in clipping: add the squares of the shards over all ranks, and clip by that norm"),
    ("gradients_not_reduced", 11,
     "Each rank keeps the gradients of its own tokens, so the ranks' weights drift apart.",
     "the step before the optimizer: sum the gradients over the ring, with all_reduce, DDP or fully_shard"),
)
# fmt: on
MISTAKES = {name: Mistake(name, what, look, chapter, tuple(wild)) for name, chapter, what, look, *wild in ROWS}
