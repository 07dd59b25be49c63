"""TRL's SFTTrainer in the ring: its own loss and its own numbers, from the logits of shards.

    loss                   TRL's fused head takes shift_labels as they are      the same as Trainer's
    mean_token_accuracy    right labels of all ranks / labels of all ranks      right as it is
    entropy                summed over all ranks / labels of all ranks          right as it is
    num_tokens             the length of position_ids (1, C): one row           wrong; here the tokens of the batch

SFTTrainer takes the loss from a fused head. That would shift labels inside a shard, but not if it gets shift_labels.

Shapes: as in hugging_face_trainer.py. With packing=True a row holds documents, (1, S) or more rows one after the other.
`python examples/compare.py sft` runs it beside one process: a first reader may skip this file.
Before: hugging_face_trainer.py, the same for Trainer. After: examples/sft.py, what to copy.
Source: TRL 1.16, SFTTrainer.compute_loss, add_fused_lm_head and DataCollatorForLanguageModeling.
"""

from typing import Any

import torch
from torch import nn

from ringlab.support.extras import extra

with extra("loops", __name__):
    from trl import SFTTrainer

from ringlab.models.hugging_face_trainer import InRing


class RingSFTTrainer(InRing, SFTTrainer):
    """TRL's SFTTrainer in a ring."""

    _total_train_tokens: int  # TRL's

    def shard(self, batch: dict[str, Any]) -> dict[str, Any]:
        tokens = batch["attention_mask"].sum() if "attention_mask" in batch else batch["input_ids"].numel()
        return {**super().shard(batch), "tokens": int(tokens)}

    def compute_loss(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        tokens, seen = torch.tensor(inputs.pop("tokens"), device=self.args.device), self._total_train_tokens
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        if self.model.training:
            self._total_train_tokens = seen + self.accelerator.gather(tokens).sum().item() // self.ranks
            self._metrics["train"]["num_tokens"] = [self._total_train_tokens]
        return loss
