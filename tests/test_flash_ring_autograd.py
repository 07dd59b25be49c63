"""The trainable ring as an operation of autograd, alone and as the attention of a model."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ringlab.training.flash_ring import ring_flash_attention, scaled_dot_product_attention
from ringlab.training.layouts import LAYOUTS, positions, unshard
from ringlab.training.rotary import rotary
from tests.attention import SEED
from tests.flash_rings import cut, ring_gradients, whole
from tests.gradients import gradcheck_on_ranks
from tests.grouped_queries import grouped_inputs


def repeated_calls(context, q, k, v, d_out, options):
    """Whether the same forward and backward pass gives the same bits again."""
    q, k, v, d_out = cut(context, options["layout"], None, q, k, v, d_out)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    outs = [ring_flash_attention(*inputs, **options) for _ in range(2)]
    first = torch.autograd.grad(outs[0], inputs, d_out, retain_graph=True)
    again = torch.autograd.grad(outs[0], inputs, d_out)
    other = torch.autograd.grad(outs[1], inputs, d_out)
    same = [torch.equal(x, y) and torch.equal(x, z) for x, y, z in zip(first, again, other, strict=True)]
    return torch.equal(*outs) and all(same)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_same_again_gives_the_same_bits(ranks, world_size, layout):
    four = grouped_inputs(1, 4, 2, 12 * world_size, 16)
    assert ranks(world_size, repeated_calls, *four, {"causal": True, "layout": layout}) == [True] * world_size


def what_autograd_may_ask(context, q, k, v, d_out):
    """dk alone; whether no_grad leaves a graph; and the error that a second derivative raises."""
    q, k, v, d_out = cut(context, "zigzag", None, q, k, v, d_out)
    ring = functools.partial(ring_flash_attention, causal=True, layout="zigzag")
    k.requires_grad_()
    with torch.no_grad():
        graph = ring(q, k, v).requires_grad
    out = ring(q, k, v)
    out.backward(d_out, retain_graph=True)
    d_k = torch.autograd.grad(out, k, d_out.requires_grad_(), create_graph=True)[0]
    try:
        d_k.sum().backward()
    except RuntimeError as error:
        return k.grad, q.grad, graph, str(error)


def test_one_gradient_none_or_a_second_derivative(ranks):
    four = grouped_inputs(1, 4, 2, 24, 8)
    d_k, d_q, graph, refusal = zip(*ranks(3, what_autograd_may_ask, *four), strict=True)
    both = whole(ranks(3, ring_gradients, *four, {"causal": True, "layout": "zigzag"}), "zigzag")
    assert torch.equal(unshard(list(d_k), "zigzag"), both[2])
    assert d_q == (None,) * 3
    assert graph == (False,) * 3
    assert all("once_differentiable" in message for message in refusal)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_gradcheck(ranks, size):
    ring = functools.partial(ring_flash_attention, causal=True, layout="zigzag")
    inputs = grouped_inputs(1, 2, 1, 2 * size, 2, torch.float64)[:3]
    assert ranks(size, gradcheck_on_ranks, ring, "zigzag", *inputs) == [True] * size


# In a model -----------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """A causal transformer block with 4 query heads on 2 and rotary positions."""

    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.proj = nn.RMSNorm(16), nn.Linear(16, (4 + 2 + 2) * 4), nn.Linear(16, 16)
        self.mlp = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))

    def forward(self, x, at, attention):
        q, k, v = self.qkv(self.norm(x)).unflatten(2, (8, 4)).transpose(1, 2).split([4, 2, 2], dim=1)
        out = attention(rotary(q, at), rotary(k, at), v, is_causal=True, enable_gqa=True)
        x = x + self.proj(out.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class Model(nn.Module):
    """Two blocks."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x, at, attention):
        for block in self.blocks:
            x = block(x, at, attention)
        return x


def model_and_gradients(x, d_out, at, attention, wrap=None):
    """The output (B, C, 16) of the model, and the gradients of all its weights."""
    torch.manual_seed(SEED)
    model = Model().double()
    wrapped = wrap(model) if wrap else model  # must live until the backward pass is over
    y = wrapped(x, at, attention)
    y.backward(d_out)
    return y.detach(), [weight.grad for weight in model.parameters()]


def model_on_ranks(context, x, d_out, layout, where, wrap=None):
    """The same on this rank's tokens, with rotary positions of the layout `where`."""
    at, turned = (positions(it, x.shape[1], context.rank, context.world_size) for it in (layout, where))
    attention = functools.partial(scaled_dot_product_attention, layout=layout)
    return model_and_gradients(x[:, at], d_out[:, at], turned, attention, wrap)


def model_inputs(world_size):
    """x and d_out (2, S, 16) for 8 tokens on each rank."""
    generator = torch.Generator().manual_seed(3 + SEED)
    return torch.randn(2, 2, 8 * world_size, 16, generator=generator, dtype=torch.float64).unbind()


def assert_model(ranks, world_size, layout, where):
    x, d_out = model_inputs(world_size)
    S = x.shape[1]
    outs, gradients_of_ranks = zip(*ranks(world_size, model_on_ranks, x, d_out, layout, where), strict=True)
    exact, exact_gradients = model_and_gradients(x, d_out, torch.arange(S), F.scaled_dot_product_attention)
    mine = unshard([out[:, None] for out in outs], layout)[:, 0]
    torch.testing.assert_close(mine, exact, rtol=1e-10, atol=1e-10)
    for of_ranks, of_whole in zip(zip(*gradients_of_ranks, strict=True), exact_gradients, strict=True):
        torch.testing.assert_close(sum(of_ranks), of_whole, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("layout", ["zigzag", "striped"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_model_on_ranks_is_the_model_on_one_device(ranks, size, layout):
    assert_model(ranks, size, layout, layout)
    if size > 1:
        with pytest.raises(AssertionError, match="not close"):
            assert_model(ranks, size, layout, "contiguous")


@pytest.mark.parametrize("size", [2, 3])
def test_ddp_averages_so_the_loss_times_p_gives_the_right_gradients(ranks, size):
    """Without the factor P every gradient comes out at 1/P, as the docstring of flash_ring.py says."""
    x, d_out = model_inputs(size)
    _, exact = model_and_gradients(x, d_out, torch.arange(x.shape[1]), F.scaled_dot_product_attention)
    for times, share in ((1, 1 / size), (size, 1)):
        options = "zigzag", "zigzag", nn.parallel.DistributedDataParallel
        for _, gradients in ranks(size, model_on_ranks, x, times * d_out, *options):
            for mine, right in zip(gradients, exact, strict=True):
                torch.testing.assert_close(mine, share * right, rtol=1e-10, atol=1e-10)
