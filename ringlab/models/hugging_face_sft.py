"""TRL's SFTTrainer in the ring: its own loss and its own numbers, from the logits of shards.

    loss                   TRL's fused head takes shift_labels as they are      the same as Trainer's
    mean_token_accuracy    right labels of all ranks / labels of all ranks      right as it is
    entropy                summed over all ranks / labels of all ranks          right as it is
    num_tokens             the length of position_ids (1, C): one row           wrong; here the tokens of the batch

SFTTrainer never asks the model for its loss. It puts a fused head into the model, which gives a log-probability for
each label, and takes the sum itself. Such a head would shift labels inside a shard, but not if it gets shift_labels.

Shapes: as in hugging_face_trainer.py. With packing=True a row holds documents, (1, S) or more rows one after the other.

    $ python -m ringlab.models.hugging_face_sft
    Starcoder2, 3 micro-batches a step, SGD: SFTTrainer on one process, and on 3 ranks against it:
    ok      padded: all numbers and weights the same to 1e-6
    ok      packed: all numbers and weights the same to 1e-6
    ok      loss_type dft: all numbers and weights the same to 1e-6

Before: hugging_face_trainer.py, the same for Trainer. After: examples/sft.py, what to copy.
Source: TRL 1.16, SFTTrainer.compute_loss, add_fused_lm_head and DataCollatorForLanguageModeling.
"""

import sys
from typing import Any

import torch
from torch import Tensor, nn

from ringlab.support.extras import extra

with extra("loops", __name__):
    from datasets import Dataset, disable_progress_bars
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

from ringlab.models.hugging_face_batch import judged, relative
from ringlab.models.hugging_face_trainer import InRing, as_torchrun, rows, trained
from ringlab.support.processes import RankContext, launch


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


CASES: dict[str, dict[str, Any]] = {
    "padded": {},
    "packed": {"packing": True, "eval_packing": False},
    "loss_type dft": {"loss_type": "dft"},
}


def _run(kind: type[SFTTrainer], options: dict[str, Any]) -> list[Tensor]:
    data, words = Dataset.from_list(rows()), {str(number): number for number in range(61)}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, "0")), pad_token="0", eos_token="0")
    options = {**options, "bf16": False, "max_length": 24, "gradient_accumulation_steps": 3}
    options |= {"optim": "sgd", "learning_rate": 0.1}  # AdamW would divide small gradients by themselves
    return trained(kind, SFTConfig, options, train_dataset=data, eval_dataset=data, processing_class=tokenizer)


def _demo(context: RankContext) -> list[list[Tensor]]:
    as_torchrun()
    disable_progress_bars()
    return [_run(RingSFTTrainer, options) for options in CASES.values()]


def main() -> int:
    print("Starcoder2, 3 micro-batches a step, SGD: SFTTrainer on one process, and on 3 ranks against it:")
    disable_progress_bars()

    def judge(case: str, results: list[Tensor]) -> tuple[str, str]:
        off = relative(results, _run(SFTTrainer, CASES[case]))
        same = max(off) < 1e-6  # 16 roundings of float32, in which TRL's head computes
        return ("ok", "all numbers and weights the same to 1e-6") if same else ("off", f"by {off}")

    return judged(dict.fromkeys(CASES, "ok"), launch(_demo, 3)[0], judge)


if __name__ == "__main__":
    sys.exit(main())
