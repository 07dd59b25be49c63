"""Steps of a tiny transformer in a ring, right or with real mistakes, which the doctor must tell apart."""

from functools import partial
from random import random

import torch
import torch.distributed as dist
import torch.nn.functional as F

from ringlab.models.transformer import IGNORED, Config, Transformer
from ringlab.ring.flash_ring import scaled_dot_product_attention
from ringlab.ring.layouts import positions as positions_of

CONFIG = Config(vocab=32, layers=0, hidden=24, heads=6, kv_heads=2, feedforward=40, piece=5)


def step(text, mistakes=(), *, targets=None):
    """The loss of the batch, and the gradients. Shards are zigzag.

    Without layers there is no attention, so it is quick: the mistakes are of labels, losses and gradients. The doctor
    seeds its weights.
    """
    rank, P = dist.get_rank(), dist.get_world_size()
    at = positions_of("zigzag", text.shape[1] - 1, rank, P)
    ring = partial(scaled_dot_product_attention, layout="zigzag")
    model = Transformer(CONFIG, ring).double()
    tokens, labels = text[:, :-1][:, at], (text[:, 1:] if targets is None else targets)[:, at]
    if "labels_per_shard" in mistakes and targets is None:
        labels = tokens.roll(-1, dims=1)
    if "no backward pass without labels" in mistakes and not (labels != IGNORED).any():
        raise LookupError("no labels")
    if "a rank that waits" in mistakes and rank == 1:
        dist.recv(torch.empty(1), 0)
    logits = model(tokens, at).flatten(0, 1)
    loss = F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORED, reduction="sum")
    count = (labels != IGNORED).sum()
    if "mean_of_means" in mistakes:
        count = count * P
    else:
        dist.all_reduce(count)
    loss = loss / count
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), torch.inf)  # for a log: it clips nothing
    gradients = {name: weight.grad for name, weight in model.named_parameters()}
    for gradient in gradients.values():
        dist.all_reduce(gradient)
    loss = loss.detach()
    dist.all_reduce(loss)
    return loss * (P if "loss_times_p" in mistakes else 1), gradients


labels_per_shard = partial(step, mistakes=("labels_per_shard",))
means_and_sums = partial(step, mistakes=("mean_of_means", "loss_times_p"))
no_backward_without_labels = partial(step, mistakes=("no backward pass without labels",))
a_rank_that_waits = partial(step, mistakes=("a rank that waits",))


def random_step(text, *, targets=None):
    return torch.tensor(random()), {"weight": torch.ones(2)}


CALLED = []


def another_call(text, *, targets=None):
    """A ring whose second call has what the first one left behind."""
    loss, gradients = one_weight(text, targets=targets)
    CALLED.append(text)
    return loss, {"table": gradients["table"] * (len(CALLED) if dist.get_world_size() > 1 else 1)}


def deaf_step(text, *, targets=None):
    """Takes targets= and does not obey."""
    return one_weight(text)


def without_targets(text):
    return one_weight(text)


def one_weight(text, vocab=32, targets=None):
    """A model of one weight: the vector of a token is a row of it. Without a ring, a module, or an optimizer."""
    at = positions_of("zigzag", text.shape[1] - 1, dist.get_rank(), dist.get_world_size())
    table = torch.arange(vocab * vocab, dtype=torch.float64).sin().view(vocab, vocab).requires_grad_()
    labels = (text[:, 1:] if targets is None else targets)[:, at]
    logits = table[text[:, :-1][:, at]]
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    loss.backward()
    loss = loss.detach()
    for x in (loss, table.grad):
        dist.all_reduce(x)
    return loss, {"table": table.grad}


def of_8_tokens_and_seed_5(text, *, targets=None):
    """Fails unless text and generator are of seed 5."""
    expected = torch.randint(8, (2, 25), generator=torch.Generator().manual_seed(5))
    if torch.initial_seed() != 5 or not torch.equal(text, expected):
        raise LookupError("another seed")
    return one_weight(text, 8, targets)
