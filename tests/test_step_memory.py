"""The memory of a training step, counted: what autograd keeps, the weights, the peak by hand, the longest chunk."""

import pytest
import torch

from ringlab.basics.naive_attention import naive_attention
from ringlab.models.transformer import Config, Transformer, summed_loss
from ringlab.planning import step_memory
from ringlab.planning.step_memory import kept_by_a_layer, kept_bytes, longest_chunk, parameters, peak_bytes

MiB = 2**20


def bytes_in_the_graph(config, chunk, **attention):
    """Bytes that autograd keeps for the backward pass of a model on one process, without the weights."""
    model, tokens = Transformer(config, **attention), torch.zeros(1, chunk, dtype=torch.int64)
    return kept_bytes(model, lambda: summed_loss(model(tokens, torch.arange(chunk)), tokens))


SIZES = [
    {"hidden": 32, "heads": 4, "kv_heads": 2, "feedforward": 80, "vocab": 50},
    {"hidden": 48, "heads": 2, "kv_heads": 1, "feedforward": 48, "vocab": 100},
]


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_a_layer_keeps_what_autograd_keeps(size, checkpointing):
    C = 512
    one, three = (Config(layers=n, checkpointing=checkpointing, **size) for n in (1, 3))
    inputs, attention, feedforward = kept_by_a_layer("blockwise", one, C)
    expected = 4 * (inputs if checkpointing else inputs + attention + feedforward)
    seen = (bytes_in_the_graph(three, C) - bytes_in_the_graph(one, C)) / 2 / C
    assert expected <= seen <= expected + 4 * 2 + 0.1  # and 1/rms, a number for each of two norms


def test_naive_attention_keeps_two_squares_a_head_and_a_mask():
    C, naive = 256, lambda q, k, v, is_causal, enable_gqa: naive_attention(q, k, v, causal=True)
    size = {"hidden": 32, "heads": 4, "kv_heads": 4, "feedforward": 80}
    two, one = (bytes_in_the_graph(Config(layers=n, **size), C, attention=naive) for n in (2, 1))
    seen = two - one
    expected = 4 * C * sum(kept_by_a_layer("naive", Config(**size), C))
    assert expected > 2 * 4 * 4 * C * C
    assert expected <= seen <= expected + 16 * 4 * C  # 1/rms, and which rows see nothing


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_parameters_are_those_of_the_model(size, tied):
    config = Config(layers=3, tied=tied, **size)
    layer, outside = parameters(config)
    assert 3 * layer + outside == sum(weight.numel() for weight in Transformer(config).parameters())


def test_peaks_by_hand():
    """h = 8, H = G = 2, D = 4, F = 16, a vocabulary of 4, 2 layers, 10 tokens: numbers of 4 bytes."""
    size = {"layers": 2, "hidden": 8, "heads": 2, "kv_heads": 2, "feedforward": 16, "vocab": 4}
    layer, outside = 4 * 64 + 3 * 8 * 16 + 16, 2 * 4 * 8 + 8
    state, gathered = 3 * (2 * layer + outside), 2 * (layer + outside)
    plain, again = Config(**size), Config(**size, checkpointing=True)
    attention = 2 * 8 + 3 * 8 + 8 + 8 + (8 + 2)  # x/rms, n; q, k, v; cos and sin; out for W_o; out and lse
    whole = 2 * 8 + attention + (2 * 8 + 4 * 16)
    loss = 3 * 8 + 3 * 4
    assert peak_bytes("blockwise", plain, 10, 1) == 4 * (10 * (2 * whole + loss) + state + gathered)
    assert peak_bytes("ring", plain, 10, 4) == 4 * (10 * (2 * whole + max(loss, 14 * 8 - 80)) + state // 4 + gathered)
    at_work = 3 * 8 + 8  # dq, dk, dv, a copy of d_out
    assert peak_bytes("blockwise", again, 10, 1) == 4 * (10 * (2 * 16 + attention + at_work) + state + gathered)
    at_work += 8 + 4 * 8 + 4 * 8 + 8  # dQ, two buffers of K and V, two of dK and dV, a copy of v
    assert peak_bytes("ring", again, 10, 2) == 4 * (10 * (2 * 16 + attention + at_work) + state // 2 + gathered)
    naive = attention - (8 + 2) + 2 * 2 * 10 + 10 // 4  # two squares, a mask
    at_work = 2 * 10 + 8  # a square, dv
    assert peak_bytes("naive", again, 10, 1) == 4 * (10 * (2 * 16 + naive + at_work) + state + gathered)


def test_the_longest_chunk_fits_and_the_next_does_not():
    config = Config(layers=3, hidden=64, checkpointing=True)
    for method, P in (("naive", 1), ("blockwise", 1), ("ring", 4)):
        for grain in (1, 16):
            C = longest_chunk(method, config, P, 16 * MiB, grain)
            assert C % grain == 0
            assert peak_bytes(method, config, C, P) <= 16 * MiB < peak_bytes(method, config, C + grain, P)
    assert longest_chunk("ring", config, 1, 1000) == 0


def test_more_ranks_and_checkpointing_never_shorten_a_chunk():
    for checkpointing in (False, True):
        config = Config(layers=4, checkpointing=checkpointing)
        chunks = [longest_chunk("ring", config, P, 16 * MiB) for P in (1, 2, 4, 8)]
        assert chunks == sorted(chunks)
    plain, again = (Config(layers=4, checkpointing=it) for it in (False, True))
    assert longest_chunk("ring", plain, 2, 16 * MiB) < longest_chunk("ring", again, 2, 16 * MiB)


def test_another_method_is_refused():
    with pytest.raises(ValueError, match="method is 'tree'; expected one of naive, blockwise, ring"):
        peak_bytes("tree", Config(), 16, 1)


def test_the_loss_keeps_its_last_rows_and_log_softmax():
    """x, x/rms and n, and log-softmax; the two gradients of it come later."""
    config, C = Config(layers=1, **SIZES[0]), 512
    layer = 4 * sum(kept_by_a_layer("blockwise", config, C))
    assert 0 <= bytes_in_the_graph(config, C) / C - layer - 4 * (3 * 32 + 50) <= 4 * 5 + 8 + 0.1  # 1/rms; token, label


def test_a_wrong_count_ends_with_1(monkeypatch, capsys):
    monkeypatch.setattr(step_memory, "longest_chunk", lambda *args: 16)
    assert step_memory.main() == 1
    assert "WRONG" in capsys.readouterr().out
