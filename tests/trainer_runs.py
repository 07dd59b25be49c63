"""Small runs of a Trainer, on one process and in a ring: what tests/test_models_hugging_face_trainer.py compares."""

import os
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType
from datasets import Dataset, disable_progress_bars
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from transformers import (
    AutoModelForCausalLM,
    DataCollatorWithFlattening,
    PreTrainedTokenizerFast,
    PrinterCallback,
    Starcoder2Config,
    Starcoder2ForCausalLM,
    Trainer,
    TrainingArguments,
)
from trl import SFTConfig

from ringlab.models.hugging_face import use_ring
from ringlab.models.hugging_face_batch import shifted
from ringlab.models.hugging_face_sft import RingSFTTrainer
from ringlab.models.hugging_face_trainer import RingTrainer
from ringlab.models.transformer import IGNORED, summed_loss
from ringlab.support.agreement import members

NUMBERS = (
    "loss",
    "grad_norm",
    "learning_rate",
    "eval_loss",
    "train_loss",
    "entropy",
    "mean_token_accuracy",
    "num_tokens",
)
NUMBERS += ("eval_entropy", "eval_mean_token_accuracy")
CASES = {
    "accumulation": {"gradient_accumulation_steps": 3},
    "checkpointing": {"activation_checkpointing": True},
    "packing": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "num_train_epochs": 2},
    "lora": {},
    "by length": {"train_sampling_strategy": "group_by_length", "num_train_epochs": 2},
}
BF16 = {"optim": "sgd", "learning_rate": 0.1}
REFUSED = {
    "label_smoothing_factor": {"label_smoothing_factor": 0.1},
    "neftune_noise_alpha": {"neftune_noise_alpha": 5.0},
    "include_for_metrics": {"include_for_metrics": ["inputs"]},
    "auto_find_batch_size": {"auto_find_batch_size": True},
    "average_tokens_across_devices": {"average_tokens_across_devices": False},
    "train_sampling_strategy": {"train_sampling_strategy": "batch_rebalance"},
    "include_num_input_tokens_seen": {"include_num_input_tokens_seen": "non_padding"},
    "dispatch_batches": {"accelerator_config": {"dispatch_batches": True}},
}
FUNCTIONS = ("compute_loss_func", "compute_metrics", "preprocess_logits_for_metrics")


OPTIONS = {"logging_steps": 1, "save_strategy": "no", "report_to": "none", "disable_tqdm": True}
OPTIONS |= {"per_device_train_batch_size": 1, "per_device_eval_batch_size": 2, "num_train_epochs": 1}
OPTIONS |= {"ddp_find_unused_parameters": False, "use_cpu": True}


def rows():
    draw = torch.Generator().manual_seed(3)
    return [{"input_ids": torch.randint(1, 61, (n,), generator=draw).tolist()} for n in (24, 17, 24, 9, 24, 24, 13)]


def collate(rows):
    """Rows of any lengths -> a batch (B, S), padded on the right."""
    S = max(len(row["input_ids"]) for row in rows)
    tokens = torch.tensor([row["input_ids"] + [0] * (S - len(row["input_ids"])) for row in rows])
    real = tokens != 0
    return {"input_ids": tokens, "attention_mask": real.long(), "labels": tokens.masked_fill(~real, IGNORED)}


def whole_loss(logits, labels, vocab_size, num_items_in_batch=None, **_):
    """As transformers' own loss, which computes in float32."""
    return summed_loss(logits, shifted(labels)) / num_items_in_batch


def small_model():
    """Starcoder2 has no layer that computes in float32. Llama's norms do, and then a loss times 3 rounds otherwise."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": 0, "eos_token_id": 0}
    return Starcoder2ForCausalLM(Starcoder2Config(**sizes)).double()


def weights_of(model):
    return torch.cat([weight.detach().flatten() for weight in model.parameters()])


def as_torchrun():
    """Set what torchrun sets and accelerate reads. `launch` has formed the group already."""
    rank, world_size = members()
    os.environ |= dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)) | {"WORLD_SIZE": str(world_size)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}  # asked for, and not used


def trainer_of(kind, folder, case="", more=None, **options):
    """Seven rows in batches of 1, in the order of a seed; they are evaluated in batches of 2, the last of them of 1."""
    model = small_model()
    if case == "bf16":
        model = model.float()
    elif kind is Trainer:
        model.loss_function = whole_loss
    args = TrainingArguments(folder, **{**OPTIONS, "learning_rate": 1e-3, **CASES.get(case, {}), **options})
    if case == "lora":
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    collator = DataCollatorWithFlattening() if case == "packing" else collate
    data = {"train_dataset": rows(), "eval_dataset": rows(), "data_collator": collator}
    trainer = kind(model=model, args=args, **data, **(more or {}))
    trainer.remove_callback(PrinterCallback)
    return trainer


def numbers_of(trainer):
    """All numbers that a Trainer reported, and those of a last evaluation."""
    logs = [*trainer.state.log_history, trainer.evaluate()]
    return {name: [float(log[name]) for log in logs if name in log] for name in NUMBERS}


def reported(trainer):
    return numbers_of(trainer), weights_of(trainer.model)


def run(kind, case="", more=None, **options):
    with TemporaryDirectory() as folder:
        trainer = trainer_of(kind, folder, case, more=more, **options)
        trainer.train()
        return reported(trainer)


def resumed(kind, folder, again):
    """Two epochs, with a checkpoint after each second step; or the same from the checkpoint of step 4 on."""
    options = {"save_strategy": "steps", "save_steps": 2, "num_train_epochs": 2, "gradient_accumulation_steps": 2}
    trainer = trainer_of(kind, folder, **options)
    trainer.train(resume_from_checkpoint=str(Path(folder, "checkpoint-4")) if again else None)
    return reported(trainer)


class CountsOwnRanks(RingTrainer):
    """Planted: accelerate's own gather, which takes each rank for other sequences, and cuts the last batch."""

    evaluation_loop = Trainer.evaluation_loop


class CountsTheBatch(RingTrainer):
    """Planted: the labels of the whole batch are counted on each rank, so on all of them P times."""

    get_batch_samples = Trainer.get_batch_samples

    def _prepare_inputs(self, inputs):
        return super()._prepare_inputs(inputs if "shift_labels" in inputs else self.shard(inputs))


class ShiftsAgain(RingTrainer):
    """Planted: a loss of the user's own, which shifts the labels of a shard."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        logits, labels = model(**{**inputs, "labels": None}).logits, inputs["labels"]
        return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


class AddsToIt(RingTrainer):
    """Planted: a regulariser that Trainer's scale multiplies by the number of ranks."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        out = model(**{**inputs, "num_items_in_batch": num_items_in_batch})
        return (out.loss + 1e-2) * self.accelerator.num_processes


class DealsToRanks(Trainer):
    """What one would write first: the model is in the ring, the batches are not."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        use_ring(self.model)


SFT = {"padded": {}, "packed": {"packing": True, "eval_packing": False}, "loss_type dft": {"loss_type": "dft"}}


def sft(kind, case):
    """A small run of TRL's Trainer, whose head computes in float32."""
    words = {str(number): number for number in range(61)}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, "0")), pad_token="0", eos_token="0")
    options = {"bf16": False, "max_length": 24, "gradient_accumulation_steps": 3}
    options |= {"optim": "sgd", "learning_rate": 0.1}  # AdamW would divide small gradients by themselves
    data = {"train_dataset": Dataset.from_list(rows()), "eval_dataset": Dataset.from_list(rows())}
    with TemporaryDirectory() as folder:
        args = SFTConfig(folder, **{**OPTIONS, **options, **SFT[case]})
        trainer = kind(model=small_model(), args=args, processing_class=tokenizer, **data)
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        return reported(trainer)


def sft_in_a_ring(context):
    as_torchrun()
    disable_progress_bars()
    return {case: sft(RingSFTTrainer, case) for case in SFT}


def said(work, *args, **kwargs):
    try:
        work(*args, **kwargs)
    except ValueError as error:
        return str(error)
    return "not refused"


def refusals():
    found = {name: said(run, RingTrainer, **options) for name, options in REFUSED.items()}
    found |= {name: said(run, RingTrainer, more={name: print}) for name in FUNCTIONS}
    with TemporaryDirectory() as folder:
        trainer = trainer_of(RingTrainer, folder)
        found["predict"] = said(trainer.predict, rows())
        trainer.data_collator = lambda rows: {"input_ids": collate(rows)["input_ids"]}
        found["labels"] = said(trainer.evaluate)
        found["a batch for each rank"] = said(run, DealsToRanks)
        found |= {kind.__name__: said(run, kind) for kind in (ShiftsAgain, AddsToIt)}
        found["model_init"] = said(
            RingTrainer, args=trainer.args, model_init=small_model, train_dataset=rows(), data_collator=collate
        )
    return found


def in_a_ring(context, folder):
    """Everything on one ring of three ranks."""
    as_torchrun()
    found = {case: run(RingTrainer, case) for case in CASES}
    found["first"], found["again"] = (resumed(RingTrainer, folder, again) for again in (False, True))
    found["own ranks"], found["the batch"] = run(CountsOwnRanks), run(CountsTheBatch)
    found["right"], found["bf16"] = run(RingTrainer), run(RingTrainer, "bf16", bf16=True, **BF16)
    return found, refusals()


def on_a_mesh(context, dp):
    """RingTrainer on dp rings, each of the rest of the ranks; or, with as many ranks as dp, a Trainer."""
    as_torchrun()
    if context.world_size == dp:
        return run(Trainer, "accumulation")
    mesh = init_device_mesh("cpu", (dp, context.world_size // dp), mesh_dim_names=("dp", "cp"))
    return run(RingTrainer, "accumulation", more={"mesh": mesh})


def with_fsdp2(context):
    """RingTrainer with accelerate's FSDP2, which accelerate gives to GPUs only: so it is told that these are GPUs."""
    as_torchrun()
    create, config = Trainer.create_accelerator_and_postprocess, {"version": 2, "reshard_after_forward": True}

    def told(trainer):
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        create(trainer)

    with mock.patch.object(Trainer, "create_accelerator_and_postprocess", told), TemporaryDirectory() as folder:
        trainer = trainer_of(RingTrainer, folder, "accumulation", fsdp=True, fsdp_config=config)
        trainer.train()
        assert isinstance(trainer.model, FSDPModule)
        whole = [weight.full_tensor().detach().flatten() for weight in trainer.model.parameters()]
        return numbers_of(trainer), torch.cat(whole)


def not_told(context):
    """What RingTrainer says where accelerate was not told of the other ranks."""
    return said(run, RingTrainer)


def loaded(folder):
    """The weights of the last checkpoint, in a model of its own."""
    last = max(Path(folder).glob("checkpoint-*"), key=lambda path: int(path.name.partition("-")[2]))
    return weights_of(AutoModelForCausalLM.from_pretrained(last, dtype=torch.float64))
