"""What chapter 12 runs, on one process and on the ranks of a ring: small models of transformers."""

import contextlib
import re
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, BatchEncoding, PreTrainedModel
from transformers.utils import logging

from ringlab.models import hugging_face
from ringlab.models.hugging_face import use_ring
from ringlab.models.hugging_face_batch import BATCH, PACKED, shard_batch
from ringlab.support import processes
from ringlab.support.processes import PRELOAD, RankContext

PRELOAD.append(__name__)  # transformers is imported once, not once a rank
logging.disable_progress_bar()  # of loading and saving weights
logging.set_verbosity_error()
SIZES = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2}
SIZES |= dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0)
LOOP = textwrap.dedent(
    re.search(r"^    import torch\n.*?^ {8}train\(context\)[^\n]*\n", hugging_face.__doc__, re.M | re.S)[0]
)


WINDOW = {"sliding_window": 4}
BOTH = {"layer_types": ["sliding_attention", "full_attention"], **WINDOW}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
CHUNKS = {"layer_types": ["chunked_attention", "full_attention"], "attention_chunk_size": 4}
CHUNKS |= {**EXPERTS, "num_experts_per_tok": 1, "intermediate_size_mlp": 48}
OF_GPT2 = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
OF_ROBERTA = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
SAME = {  # models that give in the ring what they give on one process: arguments of in_the_ring
    "Llama": ("llama", {}),
    "Llama, checkpointing": ("llama", {}, True),
    "Qwen 3": ("qwen3", {}),
    "Mistral, window 4": ("mistral", WINDOW),
    "Gemma 3, window 4": ("gemma3_text", BOTH),
    "GPT-2": ("gpt2", OF_GPT2),
    "RoBERTa": ("roberta", {"is_decoder": True, "pad_token_id": 1, **OF_ROBERTA}),
    "Llama 4, chunks of 4": ("llama4_text", CHUNKS),
    "gpt-oss, window 4": ("gpt_oss", {**EXPERTS, **BOTH}),
    "Gemma 2": ("gemma2", {"layer_types": ["full_attention"] * 2}),
    "Llama, packed": ("llama", {}, False, True),
    "Mistral, packed": ("mistral", WINDOW, False, True),
}
REFUSED = {
    "LFM 2": ("lfm2", {"layer_types": ["conv", "full_attention"]}),
    "ZAYA": ("zaya", {}),
    "Llama in both directions": ("llama", {"is_causal": False}),
    "Llama with dropout": ("llama", {"attention_dropout": 0.1}),
}


def tiny(name: str, **options: object) -> PreTrainedModel:
    """A small random model in float64, with the same weights in every process."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **{**SIZES, **options})
    model = AutoModelForCausalLM.from_config(config, experts_implementation="eager")  # others know no float64
    return model.double().train()


@dataclass
class Step:
    loss: float
    gradient: Tensor  # of all weights, in one row
    calls: int  # of the ring, in all layers


def step(model: PreTrainedModel, batch: BatchEncoding) -> Step:
    """One forward and backward pass; loss and gradient are summed over the ranks."""
    with mock.patch.object(hugging_face, "ring_flash_attention", side_effect=hugging_face.ring_flash_attention) as ring:
        loss = model(**batch).loss
        loss.backward()
    results = [loss.detach(), torch.cat([weight.grad.flatten() for weight in model.parameters()])]
    if dist.is_initialized():
        for result in results:
            dist.all_reduce(result)
    return Step(results[0].item(), results[1], ring.call_count)


def in_the_ring(name: str, options: dict, checkpointing: bool = False, packed: bool = False) -> Step | str:
    """A step of a model in the ring, on the two sequences of chapter 11, in one row if packed; or why not."""
    model = tiny(name, **options)
    if checkpointing:
        model.activation_checkpointing_enable()
    try:
        use_ring(model, layout="zigzag")
        return step(model, shard_batch(PACKED if packed else BATCH, layout="zigzag"))
    except ValueError as error:
        return str(error)


def refusal(work: Callable[[], object]) -> str:
    try:
        work()
    except ValueError as error:
        return str(error)
    raise AssertionError("it was accepted")


def refused_input() -> dict[str, str]:
    """What is passed, and why the ring refuses it."""
    model, shard = tiny("llama"), shard_batch(BATCH)
    use_ring(model)
    on_the_left = {**BATCH, "attention_mask": BATCH["attention_mask"].flip(1)}
    wrong = {
        "positions of the shard": {"position_ids": torch.arange(8)[None]},
        "two documents without their lengths": {"position_ids": shard["position_ids"] % 16},
        "cu_seq_lens, not given to shard_batch": {"cu_seq_lens_q": torch.tensor([0, 16, 32])},
        "a cache": {"use_cache": True},
    }
    said = {what: refusal(lambda: model(**{**shard, **change})) for what, change in wrong.items()}  # noqa: B023
    said["padding on the left"] = refusal(lambda: shard_batch(on_the_left))
    said["generate"] = refusal(lambda: model.generate(torch.ones(1, 4, dtype=torch.int64), max_new_tokens=2))
    return said


def run_loop(context: RankContext, folder: str, loader: list) -> list[tuple[float, float]]:
    """Run the training loop of the docstring of hugging_face.py as it stands, and return what it prints."""
    printed = []
    names = {"NAME": folder, "loader": loader, "print": lambda *seen: printed.append(seen)}
    with mock.patch.object(processes, "join_ring", return_value=contextlib.nullcontext(context)):  # it has joined
        exec(LOOP, names)
    return printed


def chapter(context: RankContext, cases: dict[str, tuple], folder: str, loader: list) -> tuple:
    """All that the chapter asks of the ranks: this rank's shard, a step of each case, refusals, and the loop."""
    steps = {case: in_the_ring(*model) for case, model in cases.items()}
    return dict(shard_batch(BATCH)), steps, refused_input(), run_loop(context, folder, loader)
