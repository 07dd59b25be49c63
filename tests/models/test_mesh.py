"""FSDP × ring, and tensor parallelism × ring: the loss, every gradient and their norm are those of one process."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_, get_total_norm

from figures import mesh as picture
from ringlab.models.mesh import batch_loss, build_mesh, shard_weights, share_heads
from ringlab.models.transformer import IGNORED, Config, Transformer, shard_text, summed_loss
from ringlab.ring.flash_ring import scaled_dot_product_attention
from ringlab.support.expect import attempt
from tests.attention import SEED
from tests.models.test_transformer import CHECKPOINTED, HYBRID, SMALL, S, errors, model_of

LENGTHS = torch.tensor([24, 3, 17, 9])  # the ranks have different numbers of labels


def text():
    """(4, S + 1): token 0 is padding."""
    tokens = torch.randint(1, SMALL.vocab, (4, S + 1), generator=torch.Generator().manual_seed(1 + SEED))
    return tokens.masked_fill(torch.arange(S + 1) > LENGTHS[:, None], 0)


def real(labels):
    return labels.masked_fill(labels == 0, IGNORED)


def one_process(device="cpu"):
    """The loss and every gradient, in float64, by torch's attention."""
    model = model_of(CHECKPOINTED).to(device)
    tokens, labels, at = (x.to(device) for x in shard_text(text(), "zigzag", 0, 1))
    loss = summed_loss(model(tokens, at), real(labels)) / LENGTHS.sum().to(device)
    loss.backward()
    return [loss.detach().cpu(), *(weight.grad.cpu() for weight in model.parameters())]


def full(x):
    return x.full_tensor() if isinstance(x, DTensor) else x


def share(text, layout, mesh):
    """This rank's tokens, labels and positions of text (B, S + 1)."""
    dp, cp = mesh["dp"], mesh["cp"]
    return shard_text(text.chunk(dp.size())[dp.get_local_rank()], layout, cp.get_local_rank(), cp.size())


def on_a_mesh(context):
    """The loss and every gradient, whole, and their norm; with the weights on the line, and on both dimensions (HSDP).

    And the norm after clipping to 0.1.
    """
    outcomes = []
    for hybrid in (False, True):
        mesh, line = build_mesh(2, 2, context.device.type)
        ring = partial(scaled_dot_product_attention, layout="zigzag", group=mesh["cp"].get_group())
        model = model_of(CHECKPOINTED, attention=ring).to(context.device)
        shard_weights(model, mesh if hybrid else line)
        assert all(isinstance(layer, FSDPModule) for layer in model.layers)  # else all weights are gathered at once
        tokens, labels, at = (x.to(context.device) for x in share(text(), "zigzag", mesh))
        loss = batch_loss(model(tokens, at), real(labels))
        loss.backward()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        results = [mean / dist.get_world_size(), *(full(weight.grad).clone() for weight in model.parameters())]
        results = [x.cpu() for x in results]
        norm = full(clip_grad_norm_(model.parameters(), 0.1)).item()
        outcomes.append((results, norm, full(get_total_norm([weight.grad for weight in model.parameters()])).item()))
    return outcomes


def test_loss_gradients_and_their_norm_are_those_of_one_process(ranks):
    exact = one_process()
    right = torch.cat([gradient.flatten() for gradient in exact[1:]]).norm().item()
    for outcomes in ranks(4, on_a_mesh):
        for results, norm, clipped in outcomes:
            assert max(errors(results, exact)) <= 1e-10
            assert norm == pytest.approx(right, rel=1e-10)
            assert clipped == pytest.approx(0.1, rel=1e-4)  # clip_grad_norm_ divides by the norm + 1e-6


def refusals(context):
    """What is said of bad inputs, by the functions that a user calls first."""
    tp = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    two = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))["tp"]
    calls = (build_mesh, 3, 2, "cpu"), (share_heads, model_of(SMALL), tp)
    return [attempt(*call) for call in (*calls, (share_heads, model_of(replace(HYBRID, kv_heads=6)), two))]


def test_what_does_not_fit_is_refused_on_every_rank(ranks):
    said = [
        "dp · cp is 3 · 2 on 4 process(es); expected as many processes",
        "kv_heads is 2 for tp = 4; expected a multiple of tp",
        "linear is 1; expected 0: tp shares out no heads of linear layers",
    ]
    assert ranks(4, refusals) == [said] * 4


def held(context):
    """What this rank of the picture's mesh holds, in the picture's words."""
    mesh, line = build_mesh(picture.DP, picture.CP, "cpu")
    model = Transformer(Config(vocab=8, layers=1, hidden=picture.ROWS, heads=2, kv_heads=2, feedforward=8))
    for weight in model.parameters():
        weight.data = torch.arange(float(len(weight))).reshape(-1, *[1] * (weight.dim() - 1)).expand_as(weight).clone()
    shard_weights(model, line)
    sequences = torch.arange(picture.DP)[:, None].expand(-1, picture.S + 1)
    tokens, _, at = share(sequences, picture.LAYOUT, mesh)
    rows = {
        tuple(weight.to_local().flatten(1)[:, 0].int().tolist()) for weight in model.parameters() if weight.dim() == 2
    }
    (rows,) = rows  # the same of each weight
    return picture.Held(context.rank, int(tokens.unique()), at.tolist(), list(rows))


def test_picture_shows_what_real_ranks_hold(ranks):
    assert ranks(picture.DP * picture.CP, held) == picture.placement()


def loss_in_parts(context):
    """Groups at the same time, which are not the first ranks: of 6 logits of zeros each label costs log 6.

    The last one has only padding. In bfloat16: the loss is float32."""
    groups, labelled = [dist.new_group(members) for members in ([1, 3], [0, 2, 4], [5])], [0, 5, 3, 1, 1, 0]
    labels = torch.full((1, 5), IGNORED)
    labels[0, : labelled[context.rank]] = 2
    logits = torch.zeros(1, 5, 6, dtype=torch.bfloat16)
    group = groups[(1, 0, 1, 0, 1, 2)[context.rank]]
    return batch_loss(logits, labels, group).item() / math.log(6)


def test_the_loss_of_a_part_of_a_job_by_hand(ranks):
    assert ranks(6, loss_in_parts) == pytest.approx([0, 5 / 6 * 2, 3 / 4 * 3, 1 / 6 * 2, 1 / 4 * 3, 0])
