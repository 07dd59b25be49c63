"""Steps of a tiny transformer in a ring, right or with real mistakes, which the doctor must tell apart."""

import math
from dataclasses import replace
from pathlib import Path
from random import random

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.nn.parallel import DistributedDataParallel

from ringlab.models.transformer import IGNORED, Config, Transformer
from ringlab.ring.flash_ring import scaled_dot_product_attention
from ringlab.ring.layouts import positions as positions_of
from ringlab.ring.layouts import rotary
from tests.attention import SEED

ROOT = Path(__file__).parents[2]
CONFIG = Config(vocab=32, layers=1, hidden=24, heads=6, kv_heads=2, feedforward=40, piece=5)


def step(
    text,
    mistakes=(),
    layout="zigzag",
    dtype=torch.float64,
    per_token=False,
    clip=None,
    layers=CONFIG.layers,
    *,
    positions=None,
    targets=None,
):
    """The loss of the batch, or with per_token that of each token of this rank, and the gradients.

    Without layers there is no attention, so it is quick: for mistakes of labels, losses and gradients.
    """
    rank, P = dist.get_rank(), dist.get_world_size()
    at = positions_of(layout, text.shape[1] - 1, rank, P)
    torch.manual_seed(SEED)
    model = Transformer(replace(CONFIG, layers=layers), attention(mistakes if P > 1 else (), layout, at))
    for weight in model.parameters():  # scores of size 1, so that positions matter
        torch.nn.init.normal_(weight, std=0.3) if weight.dim() == 2 else torch.nn.init.uniform_(weight, 0.5, 1.5)
    model = model.to(dtype)

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
    if "divided by all tokens" in mistakes and P > 1:
        count = torch.tensor(text[:, 1:].numel())
    loss = losses.sum() / count
    if "no backward pass without labels" in mistakes and not (labels != IGNORED).any():
        raise LookupError("no labels")
    loss.backward()
    for weight in model.parameters():
        if "gradients_not_reduced" not in mistakes and "DDP" not in mistakes:
            dist.all_reduce(weight.grad)
    if clip:
        clip_gradients(model, clip, mistakes, P)
    gradients = {name: weight.grad for name, weight in model.named_parameters()}
    if P > 1:
        damage(gradients, mistakes)
    if per_token:
        return losses.detach().view(labels.shape), gradients
    loss = loss.detach()
    if "loss_not_reduced" not in mistakes:
        dist.all_reduce(loss)
    if "loss_times_p" in mistakes:
        loss *= P
    return loss, gradients


def attention(mistakes, layout, at):
    """The ring, or a ring with a mistake of rotation, of the mask, of the scale or of the backward pass."""
    if "ring_not_called" in mistakes:
        return F.scaled_dot_product_attention

    def wrong_ring(q, k, v, **options):
        if "positions_missing" in mistakes:
            q, k = rotary(q, -at), rotary(k, -at)
        if "rotated_twice" in mistakes:
            q, k = rotary(q, at), rotary(k, at)
        if "rotated after the ring" in mistakes:
            return rotated_after_the_ring(q, k, v, layout, at)
        return scaled_dot_product_attention(q, k, v, layout=layout, **options)

    return wrong_ring


def rotated_after_the_ring(q, k, v, layout, at):
    """Keys are gathered, and each rank rotates all of them with the positions of its own."""
    P = dist.get_world_size()
    keys, values = (
        torch.cat(all_gather_tensor_autograd(x.contiguous(), 0, dist.group.WORLD).chunk(P), dim=2)
        for x in (rotary(k, -at), v)
    )
    keys = rotary(keys, at.repeat(P))
    where = torch.cat([positions_of(layout, P * len(at), rank, P) for rank in range(P)])
    return F.scaled_dot_product_attention(q, keys, values, attn_mask=where <= at[:, None], enable_gqa=True)


def clip_gradients(model, largest, mistakes, P):
    """By the norm of all gradients; or by the norm of the rows that a rank would hold, or of P copies."""
    if "clipped_per_rank, its rows" in mistakes:
        for rank in range(P):
            rows = [parts[rank] for x in model.parameters() if len(parts := x.grad.chunk(P)) > rank]  # as fully_shard
            norm = torch.stack([part.norm() for part in rows]).norm()
            for part in rows:
                part *= (largest / (norm + 1e-6)).clamp(max=1.0)
    else:
        norm = torch.nn.utils.get_total_norm([x.grad for x in model.parameters()])
        copies = math.sqrt(P) if "gradients_over_root_p" in mistakes else 1.0
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), largest, copies * norm)


def damage(gradients, mistakes):
    """Mistakes without a name."""
    first, head = gradients["embedding.weight"], gradients["head.weight"]
    if "a row" in mistakes:
        first[0] *= -1
    if "a little" in mistakes:
        head *= 1 + 1e-7
    if "race" in mistakes:
        first[0] *= 1 + random()


def blind_step(text, mistakes=(), layout="contiguous"):
    """Without positions= and targets=."""
    return step(text, mistakes, layout)


def unknown_mistake(text, *, positions=None, targets=None):
    return step(text, ("a row",), layers=0, positions=positions, targets=targets)


def random_step(text, *, positions=None, targets=None):
    return torch.tensor(random()), {"weight": torch.ones(2)}


def wrong_result(text):
    return 1.0


def wrong_shape(text):
    return torch.zeros(len(text), text.shape[1]), {"weight": torch.ones(2)}


def deaf_step(text, *, targets=None):
    """Takes targets= and does not obey."""
    return one_weight(text)


def failing_step(text, *, positions=None, targets=None):
    if dist.get_world_size() == 3:
        raise OverflowError("three are too many")
    return one_weight(text, targets=targets)


def one_weight(text, change=None, vocab=32, dtype=torch.float64, targets=None):
    """A model of one weight: the vector of a token is a row of it. Quick, and without a ring. Its shards are zigzag."""
    at = positions_of("zigzag", text.shape[1] - 1, dist.get_rank(), dist.get_world_size())
    table = torch.arange(vocab * vocab, dtype=torch.float64).sin().view(vocab, vocab).to(dtype).requires_grad_()
    logits = table[text[:, :-1][:, at]]
    labels = (text[:, 1:] if targets is None else targets)[:, at]
    loss = F.cross_entropy((change or torch.clone)(logits).flatten(0, 1), labels.flatten(), reduction="sum")
    loss.backward()
    loss = loss.detach()
    for x in (loss, table.grad):
        dist.all_reduce(x)
    return loss, {"table": table.grad}


def with_dropout(text, *, targets=None):
    return one_weight(text, F.dropout, targets=targets)


def of_8_tokens_and_seed_5(text, *, targets=None):
    """Fails unless text and generator are of seed 5."""
    if torch.initial_seed() != 5 or not torch.equal(
        text, torch.randint(8, (2, 25), generator=torch.Generator().manual_seed(5))
    ):
        raise LookupError("another seed")
    return one_weight(text, vocab=8, targets=targets)


def other_positions_fail(text, *, positions=None, targets=None):
    """As step with wrong labels, but a table of positions ends with the text."""
    if positions is not None and positions.max() >= text.shape[1] - 1:
        raise IndexError("no such position")
    return step(text, ("labels_per_shard",), layers=0, positions=positions, targets=targets)
