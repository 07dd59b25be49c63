"""The memory of a ring: tables 1 and 3 again, models by hand, the peaks of real rings, properties, and wrong models."""

import re
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bench import max_context, memory
from figures import ring_memory as picture
from ringlab.planning import ring_memory
from ringlab.planning.hidden_communication import LLAMA_7B, AttentionLayer
from ringlab.planning.ring_memory import TABLE_1, TABLE_3
from tests.peak_memory import peak_in_a_hop, peak_in_training

SMALL = AttentionLayer(heads=4, kv_heads=2, head_dim=3, itemsize=2)  # h = 12
COLUMNS = ("attention", "feedforward", "both")
SLIPS = {  # cells of table 1 whose formula is not ours, and ours
    ("vanilla", "both"): "2bns²",  # as in its own row: scores have heads, and no width
    ("ring", "attention"): "12bch",  # 6 blocks of bch elements are 12bch bytes; all other cells count bytes
    ("ring", "both"): "12bch",
}


def value(formula, **letters):
    """The number that a formula of table 1 stands for: its terms are a number, letters, and perhaps a square."""
    total = 0
    for term in formula.split(" + "):
        number, names, square = re.fullmatch(r"(\d+)([bcnsh]+)(²?)", term).groups()
        product = int(number)
        for name in names + (names[-1] if square else ""):
            product *= letters[name]
        total += product
    return total


def test_the_reader_of_formulas():
    letters = {"b": 1, "n": 3, "s": 5, "c": 7, "h": 11}
    assert value("2bns²", **letters) == 2 * 3 * 5 * 5
    assert value("2bsh + 4bch", **letters) == 2 * 5 * 11 + 4 * 7 * 11


def check_table_1():
    assert list(TABLE_1) == ["vanilla", "memory efficient", "blockwise", "ring"]
    for layer, s, c in ((LLAMA_7B, 262_144, 32_768), (SMALL, 40, 5)):
        for method, printed in TABLE_1.items():
            attention, feedforward = ring_memory.largest_activations(method, layer, s, c)
            ours = attention, feedforward, max(attention, feedforward)
            for column, formula, mine in zip(COLUMNS, printed, ours, strict=True):
                letters = {"b": 1, "n": layer.heads, "s": s, "c": c, "h": layer.hidden}
                right = SLIPS.get((method, column), formula)
                assert mine == value(right, **letters), (method, column)


def test_table_1_and_its_two_slips():
    check_table_1()
    letters = {"b": 1, "n": 32, "s": 262_144, "c": 32_768, "h": 4096}
    for (method, column), right in SLIPS.items():
        printed = TABLE_1[method][COLUMNS.index(column)]
        assert value(printed, **letters) != value(right, **letters)
    assert value("2bhs²", **letters) == 128 * value("2bns²", **letters)  # the head dim
    assert value("2bns²", **letters) == 4_398_046_511_104
    assert value("12bch", **letters) == 1_610_612_736
    wide = AttentionLayer(heads=4, kv_heads=2, head_dim=3, itemsize=4)  # a number of 4 bytes doubles every cell
    for method in TABLE_1:
        narrow = ring_memory.largest_activations(method, SMALL, 40, 5)
        assert ring_memory.largest_activations(method, wide, 40, 5) == tuple(2 * x for x in narrow)


def check_peaks():
    """By hand: 4 heads on 2, D = 3, 2 bytes, chunks of 5 tokens: a head of a chunk has 30 bytes."""
    for P in (1, 2, 8):
        assert ring_memory.peak_bytes("ring", SMALL, 5, P) == 30 * (4 + 4 + 4 * 2)  # q, out, two K and two V
        assert ring_memory.peak_bytes("all-gather", SMALL, 5, P) == 30 * (4 + 4 + P * 4)  # q, out, P K and V
        assert ring_memory.peak_bytes("all-to-all", SMALL, 5, P) == 30 * 2 * (4 + 2 + 2)  # q, k, v twice
    # q, out, d_out, dq; k, v, two buffers of both, dk, dv; in 4 bytes dQ, and two buffers of dK and dV
    assert ring_memory.peak_bytes_backward(SMALL, 5) == 30 * (4 * 4 + 2 + 2 + 8 + 4) + 60 * (4 + 8)
    assert ring_memory.peak_bytes("ring", LLAMA_7B, 1, 8) == 6 * 2 * 4096  # table 1: 12bch
    assert ring_memory.peak_bytes_backward(LLAMA_7B, 1) == 22 * 2 * 4096
    assert ring_memory.peak_bytes_backward(AttentionLayer(4, 4, 16, 4), 1) == 17 * 4 * 64
    assert ring_memory.peak_bytes_backward(AttentionLayer(4, 4, 16, 8), 1) == 17 * 8 * 64  # float64 sums for float64


def check_params():
    assert ring_memory.param_count(LLAMA_7B, 32) == 32 * 12 * 4096**2 == 6_442_450_944
    assert (
        ring_memory.param_count(AttentionLayer(32, 8, 128), 32)
        == 32 * (10 * 4096**2 + 2 * 4096 * 1024)
        == 5_637_144_576
    )
    assert ring_memory.param_count(SMALL, 3) == 3 * (2 * 144 + 2 * 12 * 6 + 8 * 144)


def check_longest():
    """By hand: a token of SMALL in 3 layers takes 3 · 24 bytes of inputs and 6 · 32 + 12 · 12 at work: 408."""
    assert ring_memory.token_bytes(SMALL, 3, "blockwise") == 72 + 24
    assert ring_memory.token_bytes(SMALL, 3, "forward") == 72 + 6 * 16
    assert ring_memory.token_bytes(SMALL, 3, "training") == 72 + 6 * 32 + 12 * 12 == 408
    state = 16 * 4752  # check_params
    assert ring_memory.longest_context(state / 2 + 5 * 408, SMALL, 3, 2) == 2 * 5
    assert ring_memory.longest_context(state / 2 + 6 * 408 - 1, SMALL, 3, 2) == 2 * 5
    assert ring_memory.longest_context(state / 4 + 5 * 408, SMALL, 3, 4) == 4 * 5
    assert ring_memory.longest_context(state / 2 + 407, SMALL, 3, 2) == 0
    assert ring_memory.longest_context(state / 3, SMALL, 3, 2) == 0


def check_min_devices():
    """By hand, as in `check_longest`: devices of 3 tokens and a fifth of the state, then of less."""
    state = 16 * 4752
    for tokens, devices in ((1, 5), (3, 5), (15, 5), (16, 6)):
        assert ring_memory.min_devices(state / 5 + 3 * 408, SMALL, 3, tokens) == devices
    assert ring_memory.min_devices(10 * state, SMALL, 3, 1) == 1
    assert ring_memory.min_devices(409, SMALL, 3, 1) == state  # a byte of the state on each
    assert ring_memory.min_devices(409, SMALL, 3, state + 1) == state + 1
    for too_little in (408, 100):
        assert ring_memory.min_devices(too_little, SMALL, 3, 1) is None


def test_peak_bytes_by_hand():
    check_peaks()


def test_parameters_by_hand():
    check_params()


def test_longest_context_by_hand():
    check_longest()


def test_min_devices_by_hand():
    check_min_devices()


def test_another_method_is_refused():
    with pytest.raises(ValueError, match="method is 'tree'; expected ring, all-gather, all-to-all"):
        ring_memory.peak_bytes("tree", SMALL, 5, 2)


def test_the_peak_of_a_real_hop_is_modelled(ranks):
    layer, C = AttentionLayer(heads=4, kv_heads=4, head_dim=16, itemsize=4), 64
    for P in (2, 3):
        assert ranks(P, peak_in_a_hop, layer, C) == [ring_memory.peak_bytes("ring", layer, C, P)] * P


def test_the_benches_of_memory_and_context_count_alike():
    layer = AttentionLayer(heads=4, kv_heads=4, head_dim=64, itemsize=4)
    counted = memory.counted("ring", 3 * 4096, heads=4, head_dim=64, world_size=3)  # without q, its own K and V
    assert counted == 5 / 6 * ring_memory.peak_bytes("ring", layer, 4096, 3)
    trained = max_context.counted("ring", 4096, heads=4, head_dim=64) - max_context.counted(
        "ring", 0, heads=4, head_dim=64
    )
    rows, lse = 4 * 4 * 4096 * 64, 2 * 4 * 4 * 4096
    assert (
        trained == ring_memory.peak_bytes_backward(layer, 4096) + rows + lse
    )  # the kernel's copy of the output's gradient


@pytest.mark.slow
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_peak_of_a_real_training_step_is_modelled(ranks, dtype, kv_heads):
    layer = AttentionLayer(heads=4, kv_heads=kv_heads, head_dim=16, itemsize=dtype.itemsize)
    assert ranks(3, peak_in_training, layer, 64, dtype) == [ring_memory.peak_bytes_backward(layer, 64)] * 3


def test_table_3_gains_follow_from_its_contexts_and_are_at_most_the_devices():
    assert len(TABLE_3) == 10
    for devices, hardware, model, blockwise, ring, gain in TABLE_3:
        assert ring == gain * blockwise
        assert gain in (devices, devices / 2)
        assert (gain < devices) == (hardware == "TPUv4-1024" and model in ("13B", "30B"))
        cores = int(re.search(r"^\d+|\d+$", hardware)[0])
        assert cores == devices * (2 if hardware.startswith("TPU") else 1)  # TPU names count cores
        for tokens in (blockwise, ring):
            assert tokens & (tokens - 1) == 0, "a power of two, which hides a factor of up to two"
    share = ring_memory.token_bytes(LLAMA_7B, 32, "blockwise") / ring_memory.token_bytes(LLAMA_7B, 32, "forward")
    assert share == pytest.approx(33 / 38)
    assert 0.5 < share < 1  # so a power of two can hide it


def test_a_wrong_gain_in_table_3_ends_with_1(capsys):
    assert ring_memory.main() == 0
    wrong = [(*TABLE_3[0][:5], 9), *TABLE_3[1:]]
    with mock.patch.object(ring_memory, "TABLE_3", wrong):
        assert ring_memory.main() == 1
    assert "205 GB a layer" in capsys.readouterr().out


def test_the_examples_of_the_paper():
    modest = AttentionLayer(heads=8, kv_heads=8, head_dim=128)
    outputs = ring_memory.largest_activations("blockwise", modest, 100e6, 1)[0]
    assert outputs == 2 * 1024 * 100e6
    assert 4 * outputs < 1000e9 < 5 * outputs  # "over 1000 GB" is five layers
    assert 512 // 8 == 64  # printed 32
    (on_8,) = (ring for devices, _, model, _, ring, _ in TABLE_3 if (devices, model) == (8, "7B"))
    (on_512,) = (ring for devices, _, model, _, ring, _ in TABLE_3 if (devices, model) == (512, "3B"))
    assert on_8 // 8 * 512 == on_512 == 16_384


def test_the_points_of_the_picture_by_hand():
    row = 2 * 4096  # bytes of a token in a block; 32 layers' inputs beside what is at work
    assert picture.full_at("blockwise") == 80e9 // (33 * row)
    assert picture.full_at("ring") == 80e9 // (38 * row / 64)
    assert picture.full_at("all-gather") == 80e9 // (34 * row / 64 + 2 * row)
    S = picture.full_at("vanilla")
    assert 64 * S**2 + 32 * row * S <= 80e9 < 64 * (S + 1) ** 2 + 32 * row * (S + 1)


layers_of_a_model = st.builds(
    lambda group, kv_heads, head_dim, itemsize: AttentionLayer(group * kv_heads, kv_heads, head_dim, itemsize),
    st.integers(1, 16),
    st.integers(1, 16),
    st.integers(1, 256),
    st.sampled_from([1, 2, 4, 8]),
)
cluster = {
    "memory": st.floats(1e6, 1e14),
    "layer": layers_of_a_model,
    "layers": st.integers(1, 200),
    "devices": st.integers(1, 5000),
}


@given(**cluster)
def test_what_fits_fits_and_one_more_token_on_each_device_does_not(memory, layer, layers, devices):
    longest = ring_memory.longest_context(memory, layer, layers, devices)
    each, left_over = divmod(longest, devices)
    assert left_over == 0
    token = layers * layer.itemsize * layer.hidden + ring_memory.peak_bytes_backward(layer, 1)
    state = 16 * ring_memory.param_count(layer, layers) / devices
    if each:
        assert state + each * token <= memory * (1 + 1e-12)
    assert state + (each + 1) * token > memory * (1 - 1e-12)


@given(layer=layers_of_a_model, chunk=st.integers(1, 10**6), P=st.integers(2, 5000))
def test_the_peak_memory_of_a_ring_is_at_most_that_of_all_gather(layer, chunk, P):
    ring, all_gather = (ring_memory.peak_bytes(method, layer, chunk, P) for method in ("ring", "all-gather"))
    assert ring == ring_memory.peak_bytes("ring", layer, chunk, 2)  # however many ranks
    assert ring <= all_gather
    assert (ring == all_gather) == (P == 2)
    assert ring < ring_memory.peak_bytes_backward(layer, chunk)
