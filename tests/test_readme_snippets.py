"""The Python code of docs/use.md runs as it stands, on real processes: full attention and its gradients."""

import re

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ringlab.basics.naive_attention import naive_attention
from ringlab.support.processes import launch
from ringlab.support.rounding import exact_attention
from ringlab.training.layouts import rotary
from tests.attention import assert_right
from tests.commands import ROOT, TORCHRUN, run

PAGE = (ROOT / "docs/use.md").read_text()
FORWARD, TRAINING = re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S)
WORDS, TEXT = 11, (2, 49)  # the size of the vocabulary; B and S + 1: 48 tokens on 1, 2, 3 or 4 ranks


@pytest.mark.slow
def test_the_forward_snippet_is_full_attention_on_torchruns_processes(tmp_path):
    """As a file of its own, to which only one line is added: what every rank had is written down."""
    P, script = 3, tmp_path / "snippet.py"
    script.write_text(FORWARD + f"\ntorch.save((q, k, v, out), f'{tmp_path}/{{context.rank}}.pt')\n")
    done = run(*TORCHRUN, f"--nproc_per_node={P}", script, PYTHONPATH=str(ROOT))  # found from there, installed or not
    assert done.returncode == 0, done.stderr
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(P)]
    q, k, v, out = (torch.cat(chunks, dim=2) for chunks in zip(*ranks, strict=True))
    assert q.shape == (1, 8, 512 * P, 64)  # as its comment says
    assert_right(out, exact_attention(q, k, v, causal=True, fused_blocks=P)["out"])


class Model(nn.Module):
    """A transformer of two layers without its norms and MLPs: 4 query heads on 2 key/value heads, D = 6, float64."""

    def __init__(self, attention):
        super().__init__()
        torch.manual_seed(0)
        self.attention = attention
        self.embedding = nn.Embedding(WORDS, 24)
        self.to_qkv = nn.ModuleList(nn.Linear(24, (4 + 2 + 2) * 6) for _ in range(2))
        self.to_words = nn.Linear(24, WORDS)
        self.double()

    def forward(self, tokens, at):
        x = self.embedding(tokens)  # (B, C, 24)
        for to_qkv in self.to_qkv:
            q, k, v = to_qkv(x).unflatten(2, (8, 6)).transpose(1, 2).split([4, 2, 2], dim=1)
            x = x + self.attention(q, k, v, at).transpose(1, 2).flatten(2)
        return self.to_words(x)


def full_attention(q, k, v, at):
    q, k = rotary(q, at), rotary(k, at)
    return naive_attention(q, k.repeat_interleave(2, dim=1), v.repeat_interleave(2, dim=1), causal=True)


def text_of_the_tests():
    return torch.randint(WORDS, TEXT, generator=torch.Generator().manual_seed(1))


def exact_gradients():
    """The gradients of every weight, on one device, without the page's code."""
    model, text = Model(full_attention), text_of_the_tests()
    logits = model(text[:, :-1], torch.arange(TEXT[1] - 1))
    F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten()).backward()
    return [weight.grad for weight in model.parameters()]


def train(context, code, wrap):
    """One rank: run the page's code on a model that is wrapped, or not. Returns the gradients."""
    names = {}
    exec(compile(code, "use.md", "exec"), names)
    model = Model(names["attention"])
    if wrap == "DDP":
        model = nn.parallel.DistributedDataParallel(model)
    elif wrap == "fully_shard":
        from torch.distributed import fsdp  # a second's import, for this alone

        fsdp.fully_shard(model, mesh=dist.init_device_mesh("cpu", (context.world_size,)))
    names["gradients"](model, text_of_the_tests(), context.rank, context.world_size)
    grads = [weight.grad for weight in model.parameters()]
    return [grad.full_tensor() if wrap == "fully_shard" else grad for grad in grads]


def train_both(context, code, other_code, wrap):
    return train(context, code, wrap), train(context, other_code, wrap)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_the_training_snippet_gives_the_gradients_of_full_attention(ranks, world_size):
    for gradients in ranks(world_size, train, TRAINING, None):
        torch.testing.assert_close(gradients, exact_gradients())


@pytest.mark.slow
@pytest.mark.parametrize("wrap", ["DDP", "fully_shard"])
def test_ddp_and_fully_shard_average_so_the_loss_is_multiplied_by_p(wrap):
    """As the page says: without the last two lines, and with the loss times P; else every gradient is 1/P of it."""
    P = 4
    assert "leave out the last two lines and multiply the loss by P" in " ".join(PAGE.split())
    without_sum = TRAINING.rstrip().rsplit("\n", 2)[0] + "\n"
    assert "all_reduce" not in without_sum
    multiplied = without_sum.replace("loss.backward()", "(world_size * loss).backward()")
    for right, divided in launch(train_both, P, multiplied, without_sum, wrap):
        torch.testing.assert_close(right, exact_gradients())
        pairs = zip(divided, exact_gradients(), strict=True)
        assert {f"{gradient.norm() / exact.norm():.4f}" for gradient, exact in pairs} == {"0.2500"}
    assert f"(measured on {P} ranks: 0.2500)" in PAGE
