"""What the examples train: a random model and eight short texts. Yours come from `from_pretrained` and from a data set.

All is in float64, and no layer of Starcoder2 computes in float32. So a difference from one process is a mistake.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import Starcoder2Config, Starcoder2ForCausalLM

from ringlab import share_gpus

share_gpus()  # where there are fewer than ranks: then NCCL must know before there is a group
FOLDER = Path(sys.argv[2] if sys.argv[2:] else "run")  # of checkpoints; all hosts must see it
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STEPS, B = 4, 2
SIZES = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": 0, "eos_token_id": 0}


def model() -> Starcoder2ForCausalLM:
    torch.manual_seed(0)
    return Starcoder2ForCausalLM(Starcoder2Config(**SIZES)).double().train()


def rows() -> list[dict[str, list[int]]]:
    """Eight texts of 9 to 24 tokens."""
    draw = torch.Generator().manual_seed(1)
    return [{"input_ids": torch.randint(1, 61, (n,), generator=draw).tolist()} for n in (24, 17, 24, 9, 24, 24, 13, 24)]


def collate(rows: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    """A batch (B, 24), padded on the right: 24 tokens are a multiple of 2P for rings of 3 and of 4."""
    tokens = torch.tensor([row["input_ids"] + [0] * (24 - len(row["input_ids"])) for row in rows])
    return {"input_ids": tokens, "attention_mask": (tokens > 0).long(), "labels": tokens.masked_fill(tokens == 0, -100)}


def batches() -> list[dict[str, Tensor]]:
    """The same on every rank: no sampler by rank."""
    return [collate(rows()[at : at + B]) for at in range(0, B * STEPS, B)]


def keep(losses: list[float], model: nn.Module) -> None:
    """Print the losses and write them, and the weights, to the file of the first argument. compare.py reads it."""
    weights = [w.full_tensor() if isinstance(w, DTensor) else w for w in model.state_dict().values()]
    if not dist.is_initialized() or dist.get_rank() == 0:
        print("".join(f"step {step}: loss {loss:.6f}\n" for step, loss in enumerate(losses)), end="")
        if sys.argv[1:]:
            torch.save((losses, [w.cpu() for w in weights]), sys.argv[1])
