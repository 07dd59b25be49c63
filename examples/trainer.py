"""transformers' Trainer: torchrun --nproc_per_node=4 examples/trainer.py"""

from tempfile import TemporaryDirectory

import tiny
import torch
import torch.distributed as dist
from transformers import TrainingArguments

from ringlab.hugging_face.trainer import RingTrainer


def train(folder: str) -> None:
    args = TrainingArguments(
        folder,
        per_device_train_batch_size=tiny.B,  # of a ring
        num_train_epochs=1,
        train_sampling_strategy="sequential",
        learning_rate=1e-3,
        activation_checkpointing=True,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=not torch.cuda.is_available(),  # else accelerate forms no group on CPUs
    )
    trainer = RingTrainer(model=tiny.model(), args=args, train_dataset=tiny.rows(), data_collator=tiny.collate)
    trainer.train()
    tiny.keep([log["loss"] for log in trainer.state.log_history if "loss" in log], trainer.model)


with TemporaryDirectory() as folder:
    train(folder)
if dist.is_initialized():  # by Trainer, whose model is gone now
    dist.destroy_process_group()
