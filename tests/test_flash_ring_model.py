"""The trainable ring as the attention of a model, and under DistributedDataParallel."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ringlab.training.flash_ring import scaled_dot_product_attention
from ringlab.training.layouts import positions, unshard
from ringlab.training.rotary import rotary
from tests.attention import SEED

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
