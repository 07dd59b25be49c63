"""The trainable ring under DistributedDataParallel, which averages gradients. Whole models: test_models_transformer."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ringlab.training.flash_ring import scaled_dot_product_attention
from ringlab.training.layouts import positions
from tests.attention import SEED


class Layer(nn.Module):
    """Causal attention with 4 query heads on 2, and its projections."""

    def __init__(self):
        super().__init__()
        self.qkv, self.proj = nn.Linear(16, (4 + 2 + 2) * 4), nn.Linear(16, 16)

    def forward(self, x, attention):
        q, k, v = self.qkv(x).unflatten(2, (8, 4)).transpose(1, 2).split([4, 2, 2], dim=1)
        return self.proj(attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(2))


def gradients_of_weights(x, d_out, attention, wrap=lambda model: model):
    torch.manual_seed(SEED)
    model = Layer().double()
    wrapped = wrap(model)  # must live until the backward pass is over
    wrapped(x, attention).backward(d_out)
    return [weight.grad for weight in model.parameters()]


def on_rank(context, x, d_out):
    at = positions("zigzag", x.shape[1], context.rank, context.world_size)
    attention = partial(scaled_dot_product_attention, layout="zigzag")
    return gradients_of_weights(x[:, at], d_out[:, at], attention, nn.parallel.DistributedDataParallel)


@pytest.mark.parametrize("size", [2, 3])
def test_ddp_averages_so_the_loss_times_p_gives_the_right_gradients(ranks, size):
    """Without the factor P every gradient comes out at 1/P, as the docstring of flash_ring.py says."""
    x, d_out = torch.randn(2, 2, 8 * size, 16, dtype=torch.float64).unbind()
    exact = gradients_of_weights(x, d_out, F.scaled_dot_product_attention)
    for times, share in ((1, 1 / size), (size, 1)):
        for gradients in ranks(size, on_rank, x, times * d_out):
            for mine, right in zip(gradients, exact, strict=True):
                torch.testing.assert_close(mine, share * right, rtol=1e-10, atol=1e-10)
