"""FSDP × ring, and tensor parallelism × ring: the loss, every gradient and their norm are those of one process."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_, get_total_norm

from figures import mesh as picture
from ringlab.models.mesh import batch_loss, build_mesh, shard_weights, share_heads
from ringlab.models.transformer import IGNORED, Config, Transformer, shard_text, summed_loss
from ringlab.training.flash_ring import scaled_dot_product_attention
from tests.attention import SEED

CONFIG = Config(vocab=31, layers=2, hidden=24, heads=6, kv_heads=2, feedforward=40, piece=5, checkpointing=True)
S, LENGTHS = 24, torch.tensor([24, 3, 17, 9])  # the ranks have different numbers of labels
CASES = (  # dtype, what rounding allows, whether the weights are on both dimensions (HSDP)
    (torch.float64, 1e-10, False),
    (torch.float32, 1e-5, False),
    (torch.float64, 1e-10, True),
)


def model_of(dtype, group=None):
    torch.manual_seed(SEED)
    model = Transformer(CONFIG, partial(scaled_dot_product_attention, layout="zigzag", group=group))
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.3) if weight.dim() == 2 else torch.nn.init.uniform_(weight, 0.5, 1.5)
    return model.to(dtype)


def text():
    """(4, S + 1): token 0 is padding."""
    tokens = torch.randint(1, CONFIG.vocab, (4, S + 1), generator=torch.Generator().manual_seed(1 + SEED))
    return tokens.masked_fill(torch.arange(S + 1) > LENGTHS[:, None], 0)


def real(labels):
    return labels.masked_fill(labels == 0, IGNORED)


def one_process():
    """The loss and every gradient, in float64, by torch's attention."""
    model = model_of(torch.float64)
    for layer in model.layers:
        layer.attention = torch.nn.functional.scaled_dot_product_attention
    tokens, labels, at = shard_text(text(), "zigzag", 0, 1)
    loss = summed_loss(model(tokens, at), real(labels)) / LENGTHS.sum()
    loss.backward()
    return [loss.detach(), *(weight.grad for weight in model.parameters())]


def full(x):
    return x.full_tensor() if isinstance(x, DTensor) else x


def share(text, layout, mesh):
    """This rank's tokens, labels and positions of text (B, S + 1)."""
    dp, cp = mesh["dp"], mesh["cp"]
    return shard_text(text.chunk(dp.size())[dp.get_local_rank()], layout, cp.get_local_rank(), cp.size())


def errors(results, exact):
    return [((a.double() - b).norm() / b.norm()).item() for a, b in zip(results, exact, strict=True)]


def on_a_mesh(context, dp, cp, dtype, loss_of=batch_loss, hybrid=False):
    """The model after its backward pass, with the loss and every gradient, whole."""
    mesh, line = build_mesh(dp, cp, "cpu")
    model = model_of(dtype, mesh["cp"].get_group())
    shard_weights(model, mesh if hybrid else line)
    tokens, labels, at = share(text(), "zigzag", mesh)
    loss = loss_of(model(tokens, at), real(labels))
    loss.backward()
    dist.all_reduce(mean := loss.detach().clone())
    return model, [mean / dist.get_world_size(), *(full(weight.grad).clone() for weight in model.parameters())]


def every_case(context, dp, cp):
    """For each case: the loss and every gradient, the norm before clipping, and the norm after clipping to 0.1."""
    outcomes = []
    for dtype, _, hybrid in CASES:
        model, results = on_a_mesh(context, dp, cp, dtype, hybrid=hybrid)
        norm = full(clip_grad_norm_(model.parameters(), 0.1)).item()
        clipped = full(get_total_norm([weight.grad for weight in model.parameters()])).item()
        outcomes.append((results, norm, clipped))
    return outcomes


@pytest.mark.parametrize(("dp", "cp"), [(1, 3), (2, 2)])
def test_loss_gradients_and_their_norm_are_those_of_one_process(ranks, dp, cp):
    exact = one_process()
    right = torch.cat([gradient.flatten() for gradient in exact[1:]]).norm().item()
    for outcomes in ranks(dp * cp, every_case, dp, cp):
        for (dtype, allowed, _), (results, norm, clipped) in zip(CASES, outcomes, strict=True):
            assert all(x.dtype == dtype for x in results)
            assert max(errors(results, exact)) <= allowed, dtype
            assert norm == pytest.approx(right, rel=allowed)
            assert clipped == pytest.approx(0.1, rel=1e-4)  # clip_grad_norm_ divides by the norm + 1e-6


def sum_over_count(logits, labels, mesh):
    return batch_loss(logits, labels) / dist.get_world_size()


def own_mean(logits, labels, mesh):
    return summed_loss(logits, labels) / (labels != IGNORED).sum()


def mean_over_tokens(logits, labels, mesh):
    """A mean instead of a sum: padding is counted too."""
    return summed_loss(logits, labels) / labels.numel()


def count_of_the_ring(logits, labels, mesh):
    return batch_loss(logits, labels, mesh["cp"].get_group())


def scaled_by_cp(logits, labels, mesh):
    return batch_loss(logits, labels) / mesh["dp"].size()


WRONG_LOSSES = (sum_over_count, own_mean, mean_over_tokens, count_of_the_ring, scaled_by_cp)


def mistakes(context, dp, cp):
    """The results with each wrong loss, and the norm of this rank's slices with the right one."""
    mesh, _ = build_mesh(dp, cp, "cpu")
    wrong = [on_a_mesh(context, dp, cp, torch.float64, partial(loss, mesh=mesh))[1] for loss in WRONG_LOSSES]
    model, _ = on_a_mesh(context, dp, cp, torch.float64)
    return wrong, get_total_norm([weight.grad.to_local() for weight in model.parameters()]).item()


@pytest.mark.parametrize(("dp", "cp"), [(1, 3), (2, 2)])
def test_mistakes_of_the_wild_are_rejected(ranks, dp, cp):
    exact = one_process()
    right = torch.cat([gradient.flatten() for gradient in exact[1:]]).norm().item()
    outcomes = ranks(dp * cp, mistakes, dp, cp)
    for name, results in zip(WRONG_LOSSES, outcomes[0][0], strict=True):
        one_ring = dp == 1 and name in (count_of_the_ring, scaled_by_cp)  # right there: the ring is the whole job
        assert (max(errors(results, exact)) < 1e-10) == one_ring, name
        assert (min(errors(results, exact)[1:]) < 1e-3) == one_ring, name  # every gradient is wrong, not one
    for gradient, whole in zip(outcomes[0][0][0][1:], exact[1:], strict=True):
        torch.testing.assert_close(gradient * dp * cp, whole)  # every gradient at 1/P of the right one
    norms = torch.tensor([norm for _, norm in outcomes])
    assert norms.max() < 0.9 * right  # no rank's slices have the norm of all
    assert norms.sum() > 1.1 * right  # nor do the norms add up: their squares do
    assert norms.square().sum().sqrt().item() == pytest.approx(right, rel=1e-6)


def refusals(context):
    """What is said of four bad inputs, by the functions that a user calls first."""

    def said(function, *args):
        with pytest.raises(ValueError) as error:  # noqa: PT011 (the caller compares the text)
            function(*args)
        return str(error.value)

    tp = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    return [
        said(build_mesh, 3, 2, "cpu"),
        said(share_heads, model_of(torch.float32), tp),
    ]


def test_what_does_not_fit_is_refused_on_every_rank(ranks):
    for said in ranks(4, refusals):
        assert said[0] == "dp · cp is 3 · 2 on 4 process(es); expected as many processes"
        assert said[1] == "kv_heads is 2 for tp = 4; expected a multiple of tp"


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


def test_padding_alone_gives_no_loss_and_no_nan(ranks):
    assert ranks(2, only_padding) == [0.0, 0.0]


def only_padding(context):
    return batch_loss(torch.zeros(1, 2, 3), torch.full((1, 2), IGNORED)).item()
