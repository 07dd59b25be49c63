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
    ok    padded: all numbers and weights the same to 1e-6
    ok    packed: all numbers and weights the same to 1e-6
    ok    loss_type dft: all numbers and weights the same to 1e-6

Before: hugging_face_trainer.py, the same for Trainer. After: examples/sft.py, what to copy.
Source: TRL 1.16, SFTTrainer.compute_loss, add_fused_lm_head and DataCollatorForLanguageModeling.
"""

import sys
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from ringlab.support.extras import extra

with extra("loops", __name__):
    from datasets import Dataset, disable_progress_bars
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast, PrinterCallback
    from trl import SFTConfig, SFTTrainer

from ringlab.models.hugging_face_trainer import InRing, as_torchrun, error, small_model, weights_of
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


NUMBERS: tuple[str, ...] = ("loss", "grad_norm", "eval_loss", "entropy", "mean_token_accuracy", "num_tokens")
NUMBERS += ("eval_entropy", "eval_mean_token_accuracy")


def trained(kind: type[SFTTrainer], **options: Any) -> tuple[Tensor, Tensor]:
    """All numbers that a small run reports, and the weights after it."""
    model = small_model()
    rows = Dataset.from_list([{"input_ids": torch.randint(1, 61, (n,)).tolist()} for n in (24, 17, 24, 9, 24, 24, 13)])
    words = {str(number): number for number in range(61)}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, "0")), pad_token="0", eos_token="0")
    with TemporaryDirectory() as folder:
        steps = {"logging_steps": 1, "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "use_cpu": True}
        steps |= {"bf16": False, "max_length": 24, "num_train_epochs": 1, "ddp_find_unused_parameters": False}
        steps |= {"optim": "sgd", "learning_rate": 0.1}  # AdamW would divide small gradients by themselves
        sizes = {"per_device_train_batch_size": 1, "per_device_eval_batch_size": 2, "gradient_accumulation_steps": 3}
        args = SFTConfig(folder, **{**steps, **sizes, **options})
        trainer = kind(model=model, args=args, train_dataset=rows, eval_dataset=rows, processing_class=tokenizer)
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        logs = [*trainer.state.log_history, trainer.evaluate()]
    numbers = [log[name] for log in logs for name in NUMBERS if name in log]
    return torch.tensor(numbers), weights_of(model)


CASES: dict[str, dict[str, Any]] = {
    "padded": {},
    "packed": {"packing": True, "eval_packing": False},
    "loss_type dft": {"loss_type": "dft"},
}


def _demo(context: RankContext) -> list[tuple[Tensor, Tensor]]:
    as_torchrun()
    disable_progress_bars()
    return [trained(RingSFTTrainer, **options) for options in CASES.values()]


def main() -> int:
    print("Starcoder2, 3 micro-batches a step, SGD: SFTTrainer on one process, and on 3 ranks against it:")
    disable_progress_bars()
    ok, start = True, weights_of(small_model())
    for (case, options), results in zip(CASES.items(), launch(_demo, 3)[0], strict=True):
        (numbers, weights), exact = results, trained(SFTTrainer, **options)
        off = [error(numbers, exact[0]), error(weights - start, exact[1] - start)]
        same = max(off) < 1e-6  # 16 roundings of float32, in which TRL's head computes
        print(
            f"{'ok   ' if same else 'WRONG'} {case}: all numbers and weights the same to 1e-6" + (not same) * str(off)
        )
        ok &= same
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
