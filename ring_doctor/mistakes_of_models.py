"""The catalogue of the mistakes of whole models in a ring: sharding, loss and gradients. whole_model.py finds them.

Before: mistakes_of_gradients.py, the mistakes of an attention. After: whole_model.py.
Source: each entry names who had it, where that is public.
"""

from ring_doctor.mistakes import Mistake

LAYOUT_OF_POSITIONS = (
    "The positions of the tokens are made for the {} layout, and the tokens are dealt out in another layout."
)

MISTAKES = {
    mistake.name: mistake
    for mistake in (
        Mistake(
            "labels_per_shard",
            "Labels are shifted inside each shard, so the last token of a shard has a wrong label or none. In the "
            "zigzag layout the token in the middle has a wrong label too.",
            "the shift of the labels: shift first, then shard, text[:, 1:][:, at]; the loss must not shift them again",
            12,
            ("huggingface/transformers PR #36607", "verl PR #4250", "bionemo-recipes PR #1449"),
        ),
        Mistake(
            "positions_per_shard",
            "Each rank counts the positions of its tokens from 0. Distances to tokens of other ranks are wrong. In "
            "contiguous chunks a rank that rotates the keys of others with its own positions gives the same numbers.",
            "where the model gets its positions: from ringlab.positions(layout, S, rank, P), not from arange(C); keys "
            "are rotated before they travel",
            12,
            ("vllm-project/speculators PR #871",),
        ),
        *(
            Mistake(
                f"positions_of_{layout}",
                LAYOUT_OF_POSITIONS.format(layout),
                "the sharding: tokens, labels and positions must come from one call, with one layout",
                7,
            )
            for layout in ("contiguous", "zigzag", "striped")
        ),
        Mistake(
            "positions_missing",
            "The ranks' model gives every token the same position: queries and keys are not rotated.",
            "the path from the positions to the rotation: an attention that replaces another must rotate too",
            12,
        ),
        Mistake(
            "rotated_twice",
            "Queries and keys are rotated twice, so every distance counts double.",
            "the rotation: either the model rotates, or the ring that replaces its attention, not both",
            12,
        ),
        Mistake(
            "ring_not_called",
            "Each rank attends to its own shard only, and no K/V block moves. Training works, with a shorter context.",
            "which attention the model really calls: count the messages, or print inside the ring",
            14,
            ("axolotl PR #3928", "NVIDIA-NeMo/Automodel #3507"),
        ),
        Mistake(
            "mean_of_means",
            "Each rank divides by the number of its own labels, and the ranks' means are averaged. This is right only "
            "while all ranks have equally many labels, so not with padding, prompts or documents.",
            "the division of the loss: divide by the labels of all ranks, as ringlab/models/mesh.py does in batch_loss",
            13,
        ),
        Mistake(
            "loss_times_p",
            "The reported loss is P times the right loss: the means of P ranks were added.",
            "the reduction of the reported loss over the ranks of the ring",
            13,
            ("huggingface/transformers PR #48167", "SkyRL PR #1420"),
        ),
        Mistake(
            "loss_over_p",
            "The reported loss is 1/P of the right loss: the parts of one sum were averaged.",
            "the reduction of the reported loss over the ranks of the ring: parts must be summed",
            13,
        ),
        Mistake(
            "loss_not_reduced",
            "Each rank reports the loss of its own tokens.",
            "the reported loss: sum the losses and the numbers of labels over the ring, then divide",
            13,
            ("pytorch/torchtitan #3329",),
        ),
        Mistake(
            "gradients_times_p",
            "The gradients are P times the right ones: summed where the loss was scaled already, or summed twice. Adam "
            "hides it, clipping does not.",
            "the factor of the loss, and the reduction of the gradients: one of them too many",
            13,
        ),
        Mistake(
            "gradients_over_p",
            "The gradients are 1/P of the right ones: DDP and fully_shard average parts that must be summed. Adam "
            "hides it, clipping does not.",
            "the factor of the loss: multiply by the number of ranks, as ringlab/models/mesh.py does in batch_loss",
            13,
            ("NVIDIA/Megatron-LM #673 asks why the factor is there",),
        ),
        Mistake(
            "gradients_times_root_p",
            "The gradients are √P times the right ones.",
            "a factor that was meant for a norm, or for the learning rate",
            13,
        ),
        Mistake(
            "gradients_over_root_p",
            "The gradients are 1/√P of the right ones: clipping took the norm over P ranks that hold equal gradients.",
            "the norm in clipping: gradients that every rank holds are counted once, and only shards are added up",
            13,
        ),
        Mistake(
            "clipped_per_rank",
            "Each rank clips its shard of the weights by the norm of this shard. The step then has another direction.",
            "the norm in clipping: add the squares of the shards over all ranks, and clip by that norm",
            13,
        ),
        Mistake(
            "gradients_not_reduced",
            "Each rank keeps the gradients of its own tokens, so the ranks' weights drift apart.",
            "the step before the optimizer: sum the gradients over the ring, with all_reduce, DDP or fully_shard",
            13,
        ),
    )
}
