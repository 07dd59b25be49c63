"""TRL's SFTTrainer, with packing: torchrun --nproc_per_node=4 examples/sft.py"""

from tempfile import TemporaryDirectory

import tiny
import torch
import torch.distributed as dist
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig

from ringlab.hugging_face.trainer import RingSFTTrainer

words = models.WordLevel({str(number): number for number in range(61)}, "0")  # yours is of AutoTokenizer
tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), pad_token="0", eos_token="0")


def train(folder: str) -> None:
    args = SFTConfig(
        folder,
        per_device_train_batch_size=tiny.B,  # of a ring
        packing=True,
        max_length=32,
        optim="sgd",
        learning_rate=0.1,
        bf16=False,
        **{"num_train_epochs": 1, "logging_steps": 1, "save_strategy": "no", "report_to": "none"},
        use_cpu=not torch.cuda.is_available(),  # else accelerate forms no group on CPUs
    )
    data = Dataset.from_list(tiny.rows())
    trainer = RingSFTTrainer(model=tiny.model(), args=args, train_dataset=data, processing_class=tokenizer)
    trainer.train()
    tiny.keep([log["loss"] for log in trainer.state.log_history if "loss" in log], trainer.model)


with TemporaryDirectory() as folder:
    train(folder)
if dist.is_initialized():  # by Trainer, whose model is gone now
    dist.destroy_process_group()
