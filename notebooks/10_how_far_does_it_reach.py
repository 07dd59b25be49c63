# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 10 · How far does it reach
#
# A ring is built for sequences that no device can hold. After this chapter you know what each device holds, forwards and
# backwards, can check the paper's tables of memory and context, and can say how long a sequence your own cluster trains.
#
# 20 minutes. The code: [`planning/ring_memory.py`](../planning/ring_memory.py), [`planning/cost_model.py`](../planning/cost_model.py),
# [`bench/max_context.py`](../bench/max_context.py), [`bench/utilisation.py`](../bench/utilisation.py).
# Before: [9 · when is the ring free](09_hidden_communication.ipynb).

# %%
# %matplotlib inline
from statistics import median

from bench import max_context, record
from bench.utilisation import PASSES, utilisations
from figures import max_context as max_context_picture
from figures import ring_memory, utilisation
from notebooks.checks.how_far_does_it_reach import (
    check_devices_needed,
    check_longest_sequence,
    check_peak_memory_of_a_ring,
)
from planning import cost_model
from planning.hidden_communication import LLAMA_7B, Layer, block_flops
from planning.ring_memory import (
    TABLE_1,
    TABLE_3,
    largest_activations,
    longest_context,
    peak_bytes,
    peak_bytes_backward,
    token_bytes,
)
from planning.simulated_ring import duration, simulate_timeline

# %% [markdown]
# ## The failure
#
# Blockwise attention needs no S × S square (chapter 2). But the next layer needs the output of this one for **all** tokens:
# each of its queries meets every key. That grows with S as well. A modest model, h = 1024, and 100 million tokens:

# %%
tokens, hidden = 100_000_000, 1024
for layers in (1, 4, 5):
    print(f"outputs of {layers} layer(s), bf16: {layers * tokens * hidden * 2 / 1e9:6,.0f} GB")
assert tokens * hidden * 2 > 2 * 80e9, "one layer fills two devices of 80 GB"
assert 4 * tokens * hidden * 2 < 1000e9 < 5 * tokens * hidden * 2

# %% [markdown]
# The paper says "over 1000 GB"; that is five layers of them.
#
# ## The idea
#
# A device of a ring holds the outputs of its own C = S/P tokens, and of all others no more than two blocks of K and V at a time.
# The worked example again, 8 tokens on 4 GPUs. GPU 0, while a block travels:

# %%
P, C, D = 4, 2, 2
for t in range(P - 1):
    here, coming = (0 - t) % P, (0 - t - 1) % P
    held = ["q0", "out0", f"k{here}", f"v{here}", f"k{coming}", f"v{coming}"]
    print(f"round {t}:", *held, f"  {len(held)} blocks of {C} x {D} numbers")
    assert len(held) * C * D == peak_bytes("ring", Layer(heads=1, kv_heads=1, head_dim=D, itemsize=1), C, P)

# %% [markdown]
# With H query heads on G, that is **2·H + 4·G heads of C tokens**, however many devices there are. All-gather sends the same
# bytes, but brings every K and V to every device; all-to-all swaps tokens for heads, and so serves G devices at most (or
# copies heads).

# %%
layer, C = Layer(heads=32, kv_heads=8, head_dim=128), 32_768  # bf16
print(f"forward pass of a layer, H = 32, G = 8, D = 128, C = {C:,}: GB held by a device")
print("  P           S    ring  all-gather  all-to-all")
for P in (2, 8, 64, 512):
    ring, gather, swap = (peak_bytes(how, layer, C, P) / 1e9 for how in ("ring", "all-gather", "all-to-all"))
    swapped = f"{swap:10.2f}" if P <= 8 else "  more than G devices"
    print(f"{P:>3}  {P * C:>10,}  {ring:6.2f}  {gather:10.2f}  {swapped}")
    assert ring == peak_bytes("ring", layer, C, 2) / 1e9 <= gather

# %% [markdown]
# Backwards a device holds more: q, k, v, out and its gradient; K and V in two buffers; three gradients of the block in hand; and
# the sums in float32, dQ once, dK and dV in two buffers. With G = H and bf16 that makes 22 blocks, where forwards there are 6.
# (The tests count every tensor of a real ring, and find exactly these bytes.)

# %%
block = LLAMA_7B.hidden * LLAMA_7B.itemsize  # bytes of a token
for name, model in (("G = H", LLAMA_7B), ("G = H / 4", layer)):
    forwards, training = peak_bytes("ring", model, 1, 8) / block, peak_bytes_backward(model, 1) / block
    print(f"{name:<10} forwards {forwards:g} blocks, training {training:g}")
assert peak_bytes("ring", LLAMA_7B, 1, 8) == 6 * block
assert peak_bytes_backward(LLAMA_7B, 1) == 22 * block

# %% [markdown]
# A model has one layer at work, and keeps the input of every layer (the rest is computed again): of 32 layers 32 blocks more. In a
# ring all of it is shared out. All-gather's K and V are not, and in the end they decide:

# %%
ring_memory.draw()

# %% [markdown]
# ## Table 1, recomputed
#
# The paper's largest activations of a layer (n heads, b = 1), as printed and as our code computes them, for 262,144 tokens on 8
# devices:

# %%
n, s, c, h = 32, 262_144, 32_768, 4096
printed_as = {
    "2bns²": 2 * n * s**2, "2bhs²": 2 * h * s**2, "8bsh": 8 * s * h, "2bsh": 2 * s * h,
    "2bsh + 4bch": 2 * s * h + 4 * c * h, "6bch": 6 * c * h, "2bch": 2 * c * h,
}  # fmt: skip
slips = []
print(f"{'formula as printed':>51}{'GB by it':>13}{'ours':>10}")
for method, formulas in TABLE_1.items():
    attention, feedforward = largest_activations(method, LLAMA_7B, s, c)
    parts = {"attention": attention, "feedforward": feedforward, "both": max(attention, feedforward)}
    for (part, ours), formula in zip(parts.items(), formulas, strict=True):
        same = printed_as[formula] == ours
        slips += [] if same else [formula]
        row = f"{method:<18}{part:<14}{formula:>19}{printed_as[formula] / 1e9:>13,.2f}{ours / 1e9:>10,.2f}"
        print(row if same else f"{row}  a slip")
assert slips == ["2bhs²", "6bch", "6bch"]
assert printed_as["2bhs²"] // printed_as["2bns²"] == 128  # D

# %% [markdown]
# Two slips. The scores have n heads and no width: **2bhs² should be 2bns²**, as in the row's own first cell. And **6bch** counts six
# blocks of numbers, where every other cell counts bytes, two for a number: **12bch**. "Independent of the sequence length" is said of
# a fixed c; with P devices given, c = s/P.
#
# ## Table 3, recomputed
#
# The longest context that the paper's clusters trained, one device with blockwise attention beside the ring:

# %%
print(f"{'':<25}{'blockwise':>10}{'ring':>9}{'gain':>7}   tokens on a device of the ring")
for devices, hardware, model, blockwise, ring, gain in TABLE_3:
    assert ring / blockwise == gain
    note = "" if gain == devices else f", half of {blockwise}K"
    print(f"{hardware:<20}{model:>5}{blockwise:>9}K{ring:>8}K{gain:>6}x   {ring // devices}K{note}")
    assert gain == devices or (gain == devices // 2 and model in ("13B", "30B"))

# %% [markdown]
# **Why P?** In eight rows a device of the ring has as many tokens as one device alone; P of them have P times as many. In two rows
# it has half; no reason is given. (TPU v3 and v4 are named by their cores, two a device.)
#
# **What can the print hide?** By the paper's own count one device holds L + 1 blocks for a token, the ring L + 6:

# %%
share = token_bytes(LLAMA_7B, 32, "blockwise") / token_bytes(LLAMA_7B, 32, "forwards")
print(f"32 layers: {share:.2f} of P")
assert share == (32 + 1) / (32 + 6)
for _, _, _, blockwise, ring, _ in TABLE_3:
    assert all(length.bit_count() == 1 for length in (blockwise, ring)), "a power of two"

# %% [markdown]
# All printed lengths are powers of two. If no others were tried, up to twice as much may have fitted, in either column, and a printed
# 8× stands for anything between 4× and 16×. The rows also differ in what is not printed. The same A100 with the same 7B model has 32K tokens in one row and 128K in
# another. Weights shared among 32 devices in place of 8 do not explain it:

# %%
on_a_device = {P: longest_context(80e9, LLAMA_7B, 32, P) // P for P in (8, 32)}
for P, each in on_a_device.items():
    print(f"{P:>2} devices, modelled: {each:,} tokens on each")
assert on_a_device[32] / on_a_device[8] < 1.2
assert (4096 / 32) / (256 / 8) == 4

# %% [markdown]
# **512 devices** (appendix A): a 30B model sharded over 8 of them leaves rings of 512 / 8 = **64**, not 32. A 7B model in one ring:
# 256K tokens on 8 devices are 32K on each, and

# %%
assert 512 // 8 == 64
print(f"{256 // 8 * 512:,}K tokens on 512")

# %% [markdown]
# ## The proof: Table 3 in small
#
# Each device is a process whose memory has a hard limit: one byte more and its allocation fails. What is the longest sequence on
# which a layer's attention completes a training step, with the right results?

# %%
max_context_picture.draw()

# %%
results = record.load("max_context")
print(f"{results['budget'] / 2**20:g} MiB a device")
for row in results["rows"]:
    P = row["world_size"]
    measured, modelled = P * row["chunk"], P * row["counted_chunk"]
    print(f"{row['method']:<10} P = {P}  measured S = {measured:>6,}  modelled {modelled:>6,}")
    assert abs(row["chunk"] / row["counted_chunk"] - 1) < 0.05
assert all(abs(times - 1) < 0.05 for times in max_context.linear(results)), "P devices, P times the context"

# %% [markdown]
# Linear in P. It does not begin at blockwise attention's context: a ring's training step holds 18 chunks in float32 (the 17 of
# `peak_bytes_backward` and a copy that this kernel makes; in bf16 its sums in float32 count twice: 22), fused attention on one device 9. Here attention is all there is. In a model,
# inputs of L layers join both sides:

# %%
for L in (0, 32, 80):
    print(f"{L:>2} layers' inputs: P devices reach {(L + 9) / (L + 18):.2f} · P times the context of one")
ring, alone = (max_context.counted(how, 2**20, heads=8, head_dim=64) for how in ("ring", "blockwise"))
assert 1.95 < ring / alone < 2

# %% [markdown]
# ## At what speed? Table 4 in small
#
# The paper finds the utilisation of a device maintained, at 8 to 128 times the context. (For the 30B model on TPU v4 it compares with
# blockwise attention at 16K, where its Table 3 has 8K as the longest.) Ours is a share of the fastest matrix product that the same
# machine reached in the same run.

# %%
utilisation.draw()

# %%
results = record.load("utilisation")
for which in PASSES:
    for P in results["worlds"]:
        alone, ring = (utilisations(results, of, which, P) for of in ("one device", "ring"))
        assert all(0 < share < 1 for share in alone + ring)
        times = [b / a for a, b in zip(alone, ring, strict=True)]
        spread = f"median {median(times):.2f}, from {min(times):.2f} to {max(times):.2f}"
        print(f"{which:<21} P = {P}: the ring's utilisation / one device's, {spread}")

# %% [markdown]
# More than 1 is no gift of the ring: it has P times as many tokens, and short sequences pay for what every call costs.
#
# **Which FLOPs count?** Those of the model's formulas (model FLOPs, MFU): forwards two products, backwards four. The hardware
# computes more (HFU): backwards the kernel needs the scores again, a fifth product; with checkpoints the whole forward pass runs
# twice. Whoever counts that as work done looks busier, and is not faster.

# %%
forward, backward = block_flops(LLAMA_7B, 1), block_flops(LLAMA_7B, 1, backward=True)
model = 3 * forward  # backwards twice as many
hardware, checkpoints = forward + backward, 2 * forward + backward
print(f"HFU / MFU: {hardware / model:.2f}, with checkpoints {checkpoints / model:.2f}")
assert (6 * hardware, 2 * checkpoints) == (7 * model, 3 * model)

# %% [markdown]
# ## Plan your own
#
# [`cost_model.py`](../planning/cost_model.py) puts chapters 9 and 10 together. Eight H100 in one host (990 TFLOP/s at most, NVLink 450
# GB/s one way):

# %%
model = "--layers 32 --hidden 4096 --kv-heads 8 --dtype bf16"
host = f"--flops 990e12 --bandwidth 450e9 --memory 80e9 --devices 8 {model}"
assert cost_model.main(host.split()) == 0
assert round(199_746 * 128_256 * 2 / 1e9) == 51

# %% [markdown]
# The messages are hidden from S = P · the smallest free chunk on, and that is far less than what fits: memory sets the limit, not the
# link. (At most: with a vocabulary of 128,256 the logits of these 199,746 tokens alone are 51 GB, so compute the loss in pieces.) For F give what
# attention reaches; the peak is the safe side: it asks for longer chunks than are needed.
#
# The same model across hosts, on a network of 12.5 GB/s, with 128 thousand tokens. A ring is as fast as its **slowest** link
# (chapter 9), so that is the bandwidth to give, even if only every eighth hop crosses it:

# %%
even = [[1.0] * 8] * 8  # seconds of computing, by round and rank
one_slow, all_slow = (duration(simulate_timeline(even, hops)) for hops in ([0.1] * 7 + [6.0], [6.0] * 8))
assert one_slow == all_slow

hosts = f"--flops 990e12 --bandwidth 12.5e9 --memory 80e9 --devices 64 {model} --seq-len 131072"
assert cost_model.main(hosts.split()) == 0

# %% [markdown]
# It fits easily, but nearly all of the messages' time is left over: for one sequence, 64 devices are no faster than 16. For many
# sequences, the fewer devices on each, the better, as long as it fits. (Slower devices hide more: half the FLOP/s, half the chunk. So the
# hidden share alone is no measure of speed.) A ring inside one host has a faster link: plan it with that, `--devices 8 --bandwidth 450e9`.
#
# > **One number to remember: P.** What a device holds depends on its own chunk only, so P devices train P times the context of one
# > device of the ring; and of a device without one, in a model of 32 layers, 0.8 to 0.9 of P times.
#
# ## Questions
#
# <details><summary>Table 1 says that the ring's memory is independent of the sequence length. Then why does the plan have a longest context?</summary>
#
# Because c is not free. It is independent of s for a chunk of fixed length: with more devices. For P devices given, c = s/P grows
# with s, and so does everything a device holds.
# </details>
#
# <details><summary>Eight devices can reach more than eight times the context of one. How?</summary>
#
# Weights, gradients and Adam's moments, 16 bytes a weight, are shared out too. The model above needs 90 GB for them: one device of 80
# GB trains no token at all, eight give up 11 GB each.
# </details>
#
# <details><summary>All-gather sends no byte more than the ring. What does it cost?</summary>
#
# Memory: all of K and V on every device, so the context stops growing with P. And time: nothing can be computed on what has not
# arrived, while a ring computes on one block and receives the next.
# </details>
#
# ## Your turn


# %%
# The bytes that a device of a ring holds in the forward pass of a layer, the paper's count
def my_peak(heads, kv_heads, head_dim, chunk, itemsize):
    return ...


print(check_peak_memory_of_a_ring(my_peak))


# %%
# The longest context, in tokens, of P devices of `memory` bytes; `state`: bytes of all weights, gradients and
# moments, shared out; `token`: bytes of activations for a token. All devices have equally many tokens.
def my_longest(memory, state, token, P):
    return ...


print(check_longest_sequence(my_longest))

# %%
# The devices of 80e9 bytes that 4,000,000 tokens need, if the state has 90.2e9 bytes and a token 344_064
my_devices = ...

print(check_devices_needed(my_devices))

# %% [markdown]
# <details><summary>Solutions</summary>
#
# ```python
# def my_peak(heads, kv_heads, head_dim, chunk, itemsize):
#     return (2 * heads + 4 * kv_heads) * chunk * head_dim * itemsize
#
# def my_longest(memory, state, token, P):
#     return P * max(0, int((memory - state / P) / token))
#
# my_devices = math.ceil((90.2e9 + 4_000_000 * 344_064) / 80e9)
# ```
# </details>
#
# Next: [11 · the same ring in JAX](11_ring_in_jax.ipynb).
