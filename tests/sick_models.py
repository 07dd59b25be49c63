"""Steps of a tiny transformer in a ring, right or with real mistakes: what doctor/whole_model.py must tell apart."""

import math
from functools import partial
from pathlib import Path
from random import random

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from ringlab.models.transformer import IGNORED, Config, Transformer
from ringlab.training.flash_ring import scaled_dot_product_attention
from ringlab.training.layouts import positions as positions_of
from tests.attention import SEED

ROOT = Path(__file__).parent.parent
CONFIG = Config(vocab=32, layers=2, hidden=24, heads=6, kv_heads=2, feedforward=40, piece=5)


def step(text, mistakes=(), layout="zigzag", dtype=torch.float64, per_token=False, *, positions=None, targets=None):
    """The loss of the batch, or with per_token that of each token of this rank, and the gradients."""
    rank, P = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(SEED)
    ring = partial(scaled_dot_product_attention, layout=layout)
    model = Transformer(CONFIG, F.scaled_dot_product_attention if "ring_not_called" in mistakes else ring)
    for weight in model.parameters():  # scores of size 1, so that positions matter
        torch.nn.init.normal_(weight, std=0.3) if weight.dim() == 2 else torch.nn.init.uniform_(weight, 0.5, 1.5)
    model = model.to(dtype)

    at = positions_of(layout, text.shape[1] - 1, rank, P)
    tokens = text[:, :-1][:, at]
    labels = (text[:, 1:] if targets is None else targets)[:, at]
    if "labels_per_shard" in mistakes and targets is None:
        labels = tokens.roll(-1, dims=1)
    if "labels_per_shard, the last ignored" in mistakes and targets is None:
        labels = F.pad(tokens[:, 1:], (0, 1), value=IGNORED)
    if positions is not None:
        at = positions
    elif "positions_per_shard" in mistakes:
        at = torch.arange(len(at))
    elif other := [mistake for mistake in mistakes if mistake.startswith("positions_of_")]:
        at = positions_of(other[0].removeprefix("positions_of_"), text.shape[1] - 1, rank, P)

    wrapped = DistributedDataParallel(model) if "DDP" in mistakes else model
    losses = F.cross_entropy(
        wrapped(tokens, at).flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="none"
    )
    count = (labels != IGNORED).sum()
    if "mean_of_means" in mistakes:
        count = count * P
    else:
        dist.all_reduce(count)
    loss = losses.sum() / count
    loss.backward()
    for name, weight in model.named_parameters():
        if "gradients_not_reduced" not in mistakes and "DDP" not in mistakes:
            dist.all_reduce(weight.grad)
        if "gradients_times_p" in mistakes or ("embedding twice" in mistakes and name == "embedding.weight"):
            weight.grad *= P
        if "gradients_times_root_p" in mistakes:
            weight.grad *= math.sqrt(P)
    gradients = {name: weight.grad for name, weight in model.named_parameters()}
    if per_token:
        return losses.detach().view(labels.shape), gradients
    loss = loss.detach()
    if "loss_not_reduced" not in mistakes:
        dist.all_reduce(loss)
    if "loss_times_p" in mistakes:
        loss *= P
    if "loss_over_p" in mistakes:
        loss /= P
    return loss, gradients


def blind_step(text, mistakes=(), layout="contiguous"):
    """Without positions= and targets=."""
    return step(text, mistakes, layout)


def unknown_mistake(text, *, positions=None, targets=None):
    loss, gradients = step(text, positions=positions, targets=targets)
    if dist.get_world_size() > 1:
        gradients["embedding.weight"][0] *= -1
    return loss, gradients


def random_step(text, *, positions=None, targets=None):
    return torch.tensor(random()), {"weight": torch.ones(2)}


def wrong_result(text):
    return 1.0


def wrong_shape(text):
    return torch.zeros(len(text), text.shape[1]), {"weight": torch.ones(2)}


def deaf_step(text, *, positions=None, targets=None):
    """Takes targets= and does not obey."""
    return step(text, positions=positions)


def failing_step(text, *, positions=None, targets=None):
    if dist.get_world_size() == 3:
        raise OverflowError("three are too many")
    return step(text, positions=positions, targets=targets)
