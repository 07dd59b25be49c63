"""A training script of one's own, right, whose lines test_running_jobs.py spoils: python job.py RANKS

It forks its ranks: so torch is imported once. Rank r has the tokens of zigzag. The gradients are summed by hand.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F

from ringlab.models.transformer import Config, Transformer
from ringlab.ring.flash_ring import scaled_dot_product_attention
from ringlab.ring.layouts import positions, rotary  # noqa: F401

LAYOUT, IGNORED, STEPS = "zigzag", -100, 3
B, S = 2, 24
P, DTYPE = int(sys.argv[1]), torch.float64
CONFIG = Config(vocab=32, layers=1, hidden=24, heads=6, kv_heads=2, feedforward=40, piece=5)


def attention(q, k, v, **options):
    return scaled_dot_product_attention(q, k, v, layout=LAYOUT, **options)


def build():
    torch.manual_seed(3)
    model = Transformer(CONFIG, attention)
    for weight in model.parameters():  # scores of size 1, so that positions matter
        torch.nn.init.normal_(weight, std=0.3) if weight.dim() == 2 else torch.nn.init.uniform_(weight, 0.5, 1.5)
    return model.to(DTYPE)


def batches():
    draw = torch.Generator().manual_seed(5)
    for _ in range(STEPS):
        text = torch.randint(32, (B, S + 1), generator=draw)
        labels = text[:, 1:].clone()
        labels[:, :5] = IGNORED
        yield text, labels


def take_step(model, wrapped, optimizer, text, labels, rank):
    at = positions(LAYOUT, S, rank, P)
    tokens = text[:, :-1][:, at]
    labels = labels[:, at]
    count = (labels != IGNORED).sum()
    dist.all_reduce(count)
    logits = wrapped(tokens, at)
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum") / count
    loss.backward()
    for weight in model.parameters():
        dist.all_reduce(weight.grad)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()


def train(rank, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=P)
    model = build()
    wrapped = model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for text, labels in batches():
        take_step(model, wrapped, optimizer, text, labels, rank)
    Path("trained").touch()


if __name__ == "__main__":
    torch.set_num_threads(1)
    store, rank = Path(f"store-{os.getpid()}").absolute(), 0
    while rank < P - 1 and os.fork():
        rank += 1
    train(rank, store)
