"""The planner's memory: peaks by hand, those of real rings, what autograd keeps; docs/memory.md."""

import gc
import re
from dataclasses import replace
from unittest import mock

import pytest
import torch

import ring_attn
from bench.memory import kept_bytes
from ring_attn import hop, ring_attention
from ring_planner import memory as planned
from ring_planner.hidden_communication import LLAMA_7B, AttentionLayer
from ring_planner.memory import kept_at_the_loss, kept_at_work, peak_bytes_backward
from ringlab.models.transformer import Config, Transformer, summed_loss
from ringlab.ring import flash_ring
from ringlab.ring.flash_ring import ring_flash_attention
from ringlab.ring.fused_block import fused_backward
from tests.commands import ROOT

SMALL = AttentionLayer(heads=4, kv_heads=2, head_dim=3, itemsize=2)  # h = 12


def test_peaks_of_attention_by_hand():
    """4 heads on 2, D = 3, 2 bytes, chunks of 5 tokens: a head of a chunk has 30 bytes."""
    assert planned.peak_bytes(SMALL, 5) == 30 * (4 + 4 + 4 * 2)  # q, out, two K and two V
    # q, out, d_out, dq; k, v, two buffers of both, dk, dv; in 4 bytes dQ, and two buffers of dK and dV
    assert peak_bytes_backward(SMALL, 5) == 30 * (4 * 4 + 2 + 2 + 8 + 4) + 60 * (4 + 8)
    assert planned.peak_bytes(LLAMA_7B, 1) == 6 * 2 * 4096  # table 1: 12bch
    assert peak_bytes_backward(LLAMA_7B, 1) == 22 * 2 * 4096
    assert peak_bytes_backward(AttentionLayer(4, 4, 16, 4), 1) == 17 * 4 * 64
    assert peak_bytes_backward(AttentionLayer(4, 4, 16, 8), 1) == 17 * 8 * 64  # float64 sums for float64


def test_the_peak_of_a_real_hop_is_modelled(ranks):
    layer, C = AttentionLayer(heads=4, kv_heads=4, head_dim=16, itemsize=4), 64
    assert ranks(3, peak_in_a_hop, layer, C) == [planned.peak_bytes(layer, C)] * 3


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "kv_heads"), [(torch.float32, 4), (torch.bfloat16, 2)])
def test_the_peak_of_a_real_training_step_is_modelled(ranks, dtype, kv_heads):
    layer = AttentionLayer(heads=4, kv_heads=kv_heads, head_dim=16, itemsize=dtype.itemsize)
    assert ranks(3, peak_in_training, layer, 64, dtype) == [peak_bytes_backward(layer, 64)] * 3


# What autograd keeps of a model in float32 ---------------------------------------------------------------------------


def bytes_in_the_graph(config, chunk):
    """Bytes that autograd keeps for the backward pass of a model on one process, without the weights."""
    model, tokens = Transformer(config), torch.zeros(1, chunk, dtype=torch.int64)
    return kept_bytes(model, lambda: summed_loss(model(tokens, torch.arange(chunk)), tokens))


SIZES = [
    {"hidden": 32, "heads": 4, "kv_heads": 2, "feedforward": 80, "vocab": 50},
    {"hidden": 48, "heads": 2, "kv_heads": 1, "feedforward": 48, "vocab": 100},
]


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_a_layer_keeps_what_autograd_keeps(size, checkpointing):
    """And the loss its last x, x/rms and n, and log-softmax; two gradients of it come later."""
    N, h, H = 512, size["hidden"], size["heads"]
    one, three = (Config(layers=n, checkpointing=checkpointing, **size) for n in (1, 3))
    inputs, parts = 2 * h, kept_at_work(AttentionLayer(H, size["kv_heads"], h // H, 4), h, size["feedforward"])
    layer = 4 * (inputs if checkpointing else inputs + sum(parts))
    of_one, of_three = (bytes_in_the_graph(config, N) / N for config in (one, three))
    assert 0 <= (of_three - of_one) / 2 - layer <= 4 * 2 + 0.1  # and 1/rms, a number for each of two norms
    rows, words = kept_at_the_loss(h, size["vocab"])
    assert 0 <= of_one - layer - 4 * (rows + words / 3) <= 4 * 5 + 8 + 0.1  # 1/rms; token, label


def alive():
    """Bytes of the memory behind all tensors, each part of it counted once."""
    tensors = (x for x in gc.get_objects() if type(x) in (torch.Tensor, torch.nn.Parameter))  # others have no memory
    parts = (x.untyped_storage() for x in tensors if x.layout == torch.strided and not x.is_meta)
    return sum({part.data_ptr(): part.nbytes() for part in parts}.values())


def most_alive(module, name, real, work):
    """How many more bytes than now are alive at most when `real`, which `module` knows by `name`, returns in `work`."""
    work()  # once before: it may free what an earlier test left
    gc.collect()
    before, seen = alive(), []

    def watched(*args, **options):
        results = real(*args, **options)
        seen.append(alive() - before)
        return results

    with mock.patch.object(module, name, watched):
        work()
    return max(seen)


def ones(heads, chunk, head_dim, dtype):
    return torch.ones(1, heads, chunk, head_dim, dtype=dtype)


def peak_in_a_hop(context, layer, chunk):
    """Bytes that the ring of ring_attn.py holds in a hop, in float32: its statistics and its own K and V left out."""
    H, D = layer.heads, layer.head_dim
    most = most_alive(ring_attn, "hop", hop, lambda: ring_attention(*(ones(H, chunk, D, None) for _ in "qkv")))
    return most - 4 * (2 * H * chunk + 2 * H * chunk * D)


def peak_in_training(context, layer, chunk, dtype):
    """Bytes that the flash ring holds in its backward pass when a block is computed, but for the lse of the chunk."""

    def step():
        q, d_out = (ones(layer.heads, chunk, layer.head_dim, dtype).requires_grad_() for _ in "qd")
        k, v = (ones(layer.kv_heads, chunk, layer.head_dim, dtype).requires_grad_() for _ in "kv")
        ring_flash_attention(q, k, v).backward(d_out.detach())

    return most_alive(flash_ring, "fused_backward", fused_backward, step) - 4 * layer.heads * chunk


# The page of all counts: its columns add up, its sums are those of the code ------------------------------------------


PAGE = (ROOT / "docs/memory.md").read_text()
SINGLE, HALF = (AttentionLayer(heads=8, kv_heads=8, head_dim=64, itemsize=itemsize) for itemsize in (4, 2))
C = 2**16  # tokens of a chunk: so many that a tile of scores is nothing beside it
CHUNK = C * 8 * 64  # numbers


def columns(page: str) -> dict[str, dict[str, int]]:
    """The first table: by column, by row, how many chunks."""
    table = re.search(r"\| a rank holds.*?\n\n", page, re.S)[0]
    head, _, *rows = ([cell.strip(" *") for cell in line.split("|")[1:-1]] for line in table.split("\n") if line)
    return {name: {row[0]: int(row[i] or 0) for row in rows} for i, name in enumerate(head[1:], 1)}


def wrong_sums(page: str) -> set[str]:
    """The columns whose numbers do not add up to their last one."""
    return {name for name, column in columns(page).items() if sum(column.values()) != 2 * column["sum"]}


def test_the_page_counts_as_the_code_does():
    """Its columns add up to the sums of the code. One example: grouped queries in bfloat16, each row in bytes."""
    assert (wrong_sums(PAGE), wrong_sums(PAGE.replace("| q | 1 |", "| q | 2 |"))) == (set(), {"forward"})
    assert {name: column["sum"] for name, column in columns(PAGE).items()} == {
        "forward": planned.peak_bytes(HALF, C) / (2 * CHUNK),
        "training, float32": peak_bytes_backward(SINGLE, C) / (4 * CHUNK),
        "training, 16 bits": peak_bytes_backward(HALF, C) / (2 * CHUNK),
    }
    llama = AttentionLayer(heads=32, kv_heads=8, head_dim=128, itemsize=2)
    example = PAGE.partition("## One example")[2].partition("## What was")[0]
    *parts, total = (int(it.replace(",", "")) for it in re.findall(r"^\| .*\| \**([\d,]+)\** \|$", example, re.M))
    assert sum(parts) == total == peak_bytes_backward(llama, 131072 // 8) / 2**20
    assert peak_bytes_backward(replace(llama, kv_heads=32), 131072 // 8) / 2**30 == 2.75
