# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 17 · Two speeds of wire
#
# Fast links join the devices of a host. [NICs](../docs/glossary.md#nic) join the hosts, and are ten times slower. A flat
# [ring](../docs/glossary.md#ring) is as slow as its slowest wire. After this chapter you can
#
# - write the schedule of a [double ring](../docs/glossary.md#double-ring), in which a slow [hop](../docs/glossary.md#hop) has the time
#   of many [rounds](../docs/glossary.md#round),
# - say which way is the fastest between hosts, and why,
# - say what a whole training step spends its seconds and its bytes on.
#
# Track *plan*. Before it: chapters 9 and 16. 22 minutes to read, 10 for the exercises.

# %% jupyter={"source_hidden": true} tags=["hide-input"]
# %matplotlib inline
from dataclasses import replace

import torch

from figures import double_ring as picture
from figures.planned import flat_ring
from notebooks.source.checks.kernels_and_wires import check_block, check_blocks_of_a_nic
from notebooks.source.show import print_source
from ring_planner import command
from ring_planner.hidden_communication import block_flops, hop_bytes, ring_seconds
from ring_planner.plan import Plan
from ring_planner.presets import GIB, gpu_named, model_named
from ring_planner.seconds import Pass, pass_of
from ring_planner.step import Step
from ring_planner.ways import Cluster, traffic
from ringlab.basics.blockwise_attention import attend
from ringlab.basics.naive_attention import TOKENS, naive_attention
from ringlab.basics.online_softmax import finish, start
from ringlab.support.processes import launch
from ringlab.ways import double_ring

# %% [markdown]
# ## The failure
#
# Llama 8B trains on 1M tokens, on $n = 16$ hosts of $g = 8$ H100s each: $P = n \cdot g = 128$ ranks of 8,192 tokens. A hop carries the
# [block](../docs/glossary.md#block) of chapter 9, and the slowest hop rules. Does the flat ring wait? That depends on the FLOP/s that the kernel
# *reaches*, and on the share of a NIC that messages reach. The planner takes 652 TFLOP/s and 0.7. Meta's
# hosts reached 0.566 ([Yang et al. 2024](https://arxiv.org/abs/2411.01783), table 5).
# For how much of a layer's forward pass does each rank wait?

# %%
yours = None  # your point: (FLOP/s that attention reaches, the share of a NIC that messages reach)
flat_ring(yours)

# %% [markdown]
# **The same ring waits not at all, or for half of its time.** So measure both numbers before you
# choose a way. Where the ring waits, all ranks wait, although seven of eight hops are fast. Only one device of a host sends to the
# next host, so one NIC carries all blocks and seven carry nothing.
#
# ## The idea
#
# **The slow link needs a block only once in $g$ rounds.** When a host has a block, its $g$ devices can all use it
# before the next host needs it. So let the blocks go round inside each host, in an inner ring of
# $g$ rounds (here a *[turn](../docs/glossary.md#turn)*). At its beginning every device also sends its block to the same device of the next
# host, and this message has the time of the whole turn. All $g$ devices do so at once, each on its own NIC. (LoongTrain,
# [Gu et al. 2024](https://arxiv.org/abs/2406.18485), introduced it.)
#
# Here is the whole schedule in one process, for 2 hosts of 2 and the 8 tokens of the [worked
# example](03_worked_example.ipynb). The outer loop is a ring of hosts, the inner loop a ring of devices. `attend` folds a block
# into a running softmax (chapter 2):

# %%
n, g = 2, 2
P = n * g
x = TOKENS[None, None]  # (B, H, S, D) = (1, 1, 8, 2): queries, keys and values
chunks = x.chunk(P, dim=2)  # by rank, C = 2 tokens each
states = [start(q) for q in chunks]


def hop(blocks, hosts, devices):
    """Each rank sends its block this many hosts and devices on: the blocks that arrive, by rank."""
    came_from = [(rank // g - hosts) % n * g + (rank % g - devices) % g for rank in range(P)]
    return [blocks[rank] for rank in came_from]


schedule, first = [], list(range(P))  # by round: the block in hand, by rank; each rank begins with its own
for u in range(n):
    in_hand = first
    for s in range(g):
        schedule.append(in_hand)
        print(f"round {u * g + s}, turn {u}: blocks in hand of ranks 0 to 3:", *in_hand)
        for rank, j in enumerate(in_hand):
            states[rank] = attend(states[rank], chunks[rank], chunks[j], chunks[j], scale=2**-0.5)
        in_hand = hop(in_hand, hosts=0, devices=1)  # fast; after the last round of a turn nobody needs it
    first = hop(first, hosts=1, devices=0)  # slow: it has the time of the whole turn

out = torch.cat([finish(state)[0] for state in states], dim=2)
assert torch.allclose(out, naive_attention(x, x, x), rtol=0, atol=1e-14)
assert all(sorted(blocks) == list(range(P)) for blocks in zip(*schedule, strict=True))
print("each rank has seen each block once: full attention")

# %% [markdown]
# Rank $r = a \cdot g + i$ is device $i$ of host $a$. In round $t = u \cdot g + s$ it has in hand
#
# $$\text{block } \; j \;=\; \underbrace{(a - u) \bmod n}_{\text{host}} \cdot\, g \;+\; \underbrace{(i - s) \bmod g}_{\text{device}} .$$
#
# A turn is a ring of $g$ devices. The hosts are a ring of $n$, and what it computes in a round is a whole turn. So use the
# formula of chapter 9 twice:


# %%
h100, llama = gpu_named("h100"), model_named("llama-3.1-8b")
real = Step(llama, h100, 16, 8, 2**20, cp=128, kernels="cudnn").ring  # what the planner takes for these GPUs
layer, chunk = llama.attention(), 2**20 / 128
computing = block_flops(layer, chunk**2 / 2) / real.flops  # causal: half of the pairs
fast, slow = (hop_bytes(layer, chunk) / rate for rate in (real.bandwidth, real.host_bandwidth))


def double_ring_seconds(n, g, computing, fast, slow):
    turn = ring_seconds(g, computing, fast)
    return ring_seconds(n, turn, slow)


print(f"the flat ring: {1e3 * ring_seconds(128, computing, slow):.1f} ms")
print(f"the double ring: {1e3 * double_ring_seconds(16, 8, computing, fast, slow):.1f} ms")
assert double_ring_seconds(16, 8, computing, fast, slow) == 128 * computing  # so no rank waits
assert 7 < 8 * computing / slow < 7.1

# %% [markdown]
# At 0.7 of a NIC a turn lasts seven times as long as a slow hop, which is hidden. In the picture (2 hosts of 4) a bar is a
# slow hop, which may take as long as four rounds:

# %%
picture.draw()

# %% [markdown]
# ## In code
#
# The two loops are two generators. `firsts` is the ring among the same devices of all hosts (`across`, by `arriving_blocks` of
# chapter 6), `rounds_of` the ring inside this host:

# %%
print_source(double_ring.DoubleRing.firsts, double_ring.DoubleRing.rounds_of)

# %% [markdown]
# Do four real processes follow the schedule above?

# %%
in_hand = launch(double_ring.blocks_in_hand, P, n, device="cpu")
assert [list(blocks) for blocks in zip(*in_hand, strict=True)] == schedule
print("four processes had the blocks in hand that the table above says")

# %% [markdown]
# ## Which way to take
#
# Is the double ring the fastest way? In the *hybrid of 8* a row is a host: its 8 ranks exchange tokens for heads,
# and rings of 16 ranks go from host to host. Here is a layer, forward and backward, as in chapter 16 at the rates that are reached, without
# and *with costs* of each round:


# %%
def h100s(hosts, nics=8):
    rates = {"bandwidth": real.bandwidth, "host_bandwidth": real.host_bandwidth, "backward_flops": real.backward_flops}
    return Cluster(hosts, 8, flops=real.flops, nics=nics, **rates)


SHARED = [("ring", None), ("double ring", None), ("all-gather", None), *(("hybrid", g) for g in (2, 4, 8, 16, 32))]


def milliseconds(cluster, chunk, mask=None):
    """By way: ms of a layer, forward and backward."""
    return {
        f"{way} of {split}" if split else way: 1e3
        * sum(pass_of(way, Pass(cluster, layer, chunk, backward, mask), split) for backward in (False, True))
        for way, split in SHARED
        if split is None or split < cluster.devices
    }


ideal = milliseconds(h100s(16), chunk)
paid = milliseconds(real, chunk, mask="causal")
print("                without, ms   with costs, ms   GB on a NIC")
for name, (way, split) in zip(ideal, SHARED, strict=True):
    sent = sum(traffic(way, layer, chunk, h100s(16), backward=backward, split=split)[1] for backward in (False, True))
    print(f"{name:<15}{ideal[name]:>12,.1f}{paid[name]:>17,.1f}{sent / 1e9:>14.2f}")
assert min(ideal, key=ideal.get) == "double ring"
assert min(paid, key=paid.get) == "hybrid of 8" and max(paid, key=paid.get) == "ring"
assert 1.2 < ideal["ring"] / ideal["double ring"] < 1.25
assert paid["ring"] > 1.2 * paid["hybrid of 8"]

# %% [markdown]
# Without costs the double ring is the fastest: it exposes only two hops, both in the backward pass. But each of its 128 rounds has costs,
# and the hybrid of 8 has only 16 rounds. Each of these computes as much as eight blocks, which hides the slow hop too. So **few rounds on
# long blocks win**: the hybrid takes a fifth less time than the flat ring.
#
# We never ran hosts with GPUs. But one machine played two hosts: two network namespaces, each with one core for its 2 or 4 ranks, and a
# link of a set rate ([the numbers](../bench/results/README.md#five_ways)). In 10 of 12 cases the hybrid is the fastest, or at most 2 %
# slower. The flat ring is the fastest where a fast link or long chunks hide its messages too. The hybrid is far behind in two cases only,
# on the slowest link with 4,096 tokens: no way hides its messages there, and the all-to-all sends the fewest bytes. With 4,096 tokens on
# the two slower links the double ring takes 10 to 28 % less time than the flat ring. The all-gather is the slowest in 11 of 12 cases, up to
# 2.30 times the fastest: every head has its own K and V here ($H = G = 8$), and gloo's messages take time of the two cores. In Llama 8B
# four query heads share them, so four times as much work hides a byte: in the plan below it ties with the fastest.
#
# ## A whole step
#
# 128K tokens on one host: $C = 16{,}384$. A GPU has no room for all that the backward pass needs. So each layer keeps only its input and
# goes forward twice and backward once (*recompute full*). Where do the seconds and the bytes go?
#
# | | what | s |
# | --- | --- | ---: |
# | attention | 32 layers of two forward passes and a backward one, by the gather of chapter 16, times 1.15 for the framework | 5.02 |
# | products | four passes of 2 FLOPs a token for each of 6.98 billion weights, at 643 TFLOP/s reached | 1.42 |
# | the rest | the head 0.08; norms, activations, loss and optimizer, which only read and write memory, 0.49; FSDP's messages are hidden | 0.57 |
# | **a step** | | **7.02** |
#
# The 1.15 and the 643 are fitted to published times. Memory is fullest at the loss, when the logits of all tokens are there:
#
# | | bytes on a GPU | GiB |
# | --- | --- | ---: |
# | state | 14 for each of 8.03 billion parameters, shared by 8 GPUs: the weight, and Adam's copy and moments in float32 | 13.1 |
# | gathered | 2 for each parameter that FSDP has collected: of the embedding, a layer and the head; and as much for the head's gradient | 3.3 |
# | activations | 2 for each of 4,096 numbers of a token, in 32 layers: their inputs | 4.0 |
# | loss | for each token, 2 + 4 + 4 + 4 for each of 128,256 words (the logit; in float32 log-softmax and two gradients), and 2 + 2 + 2 for each of 4,096 numbers at the last norm | 27.8 |
# | CUDA, NCCL, reserve | 1.5 GiB, and 7.3 % of the rows above: ten published peaks were above their counts by that much at most | 5.0 |
# | **a GPU** | of 79.1 | **53.2** |

# %%
C = 2**17 / 8
host = Step(llama, h100, 1, 8, 2**17, cp=8, way="all-gather", recompute="full", kernels="cudnn")
forward, backward = (pass_of("all-gather", Pass(host.ring, layer, C, each, "causal")) for each in (False, True))
rate, head = 0.65 * h100.peak["bf16"], 4096 * 128_256
ours = {
    "attention": 32 * 1.15 * (2 * forward + backward),
    "products": 4 * 2 * C * llama.matrices / rate,
    "head": 3 * 2 * C * head / rate,
    "state": 14 * llama.parameters() / 8,
    "gathered": 2 * (3 * head + llama.matrices / 32),
    "activations": 2 * 32 * C * 4096,
    "loss": C * (14 * 128_256 + 6 * 4096),
}
planned = Plan(host)
for name, value in ours.items():
    assert abs(value / (planned.terms | planned.memory)[name] - 1) < 1e-4, name
assert round(planned.terms["passes"], 3) == 0.493
print(f"the planner: {planned.seconds:.3g} s, {planned.held / GIB:.3g} GiB; each number above is the planner's too")

# %% [markdown]
# None of this memory is attention's: when the backward pass of a layer needs its 1.25 GiB (chapter 9), the
# logits are gone. So the loss limits a sequence, and not the ring.
#
# **And 1M tokens on the 16 hosts?** A GPU has half as many tokens, and 128 GPUs share the state. So there is room to keep
# everything, and a layer goes forward only once:

# %%
options = "--model llama-3.1-8b --gpu h100 --hosts 16 --seq-len 1048576 --cp 128 --tp 1"
assert command.main(options.split()) == 0
assert round(paid["hybrid of 8"], 1) == 447.5

# %% [markdown]
# A step takes 17.2 s by the hybrid of 8, and 21.2 s by the flat ring. Without `--cp 128 --tp 1` the
# planner may use *tensor parallelism*, and finds a ring between hosts with tensor parallelism inside, as fast and simpler.
# [Which way for which wires](../docs/which_way.md#which-way-for-which-wires) has three rules and what was measured, and
# [the scoreboard](../bench/README.md#published-times) says how far off the planner is.
#
# > **One number to remember: the number of NICs of a host.** With 8 of them the double ring and the hybrid of 8 hide slow hops with
# > chunks 8 times shorter: in the forward pass of Llama 8B on H100s 1,160 tokens, where the flat ring needs 9,310.
#
# ## Questions
#
# <details><summary>Why not begin the slow hop at the end of a turn, with the block in hand then?</summary>
#
# The next host needs the block in the very next round. So the result would be right, but the slow hop would have the time of one round,
# as in the flat ring.
# </details>
#
# <details><summary>16 hosts of 8 devices, and each host has only one NIC. Which way is the fastest for 1M tokens?</summary>
#
# The hybrid of 8 again. The one NIC carries 16.1 GB for a layer, eight times the 2.01 of the table. That takes 460 ms, where computing takes
# 406. With costs a layer takes 499 ms (the hybrid of 4: 501.5, the flat ring: 554), and a step 19.1 s in place of 17.2.
# </details>
#

# %% jupyter={"source_hidden": true} tags=["hide-input"]
# the numbers of the answers
one_nic = replace(h100, host_bandwidth=h100.host_bandwidth / 8, nics=1)
one = Step(llama, one_nic, 16, 8, 2**20, cp=128, recompute="none", kernels="cudnn", way="hybrid", split=8)
times = milliseconds(one.ring, chunk, mask="causal")
assert sorted(times, key=times.get)[:2] == ["hybrid of 8", "hybrid of 4"]
assert [round(times[way], 1) for way in ("hybrid of 8", "hybrid of 4", "ring")] == [499.1, 501.5, 554.3]
assert (round(Plan(one).seconds, 1), round(Plan(replace(one, gpu=h100)).seconds, 1)) == (19.1, 17.2)
block = 128e3 * block_flops(layer, chunk**2 / 2)
assert round(block / real.flops + 2.5 * block / real.backward_flops) == 406  # 2.5 times the FLOPs in the backward pass

# %% [markdown]
# ## Your turn


# %%
# The double ring on n hosts of g devices: which block does this rank have in hand in round t?
# Rank = host * g + device. Rounds count through: t = 0 ... n * g - 1
def my_block(rank, t, n, g):
    return ...


print(check_block(my_block))


# %%
# How many blocks does a NIC of a host send in the forward pass of the double ring?
# A host has g devices and `nics` NICs, which divide g; each device uses one of them
def my_blocks_of_a_nic(n, g, nics):
    return ...


print(check_blocks_of_a_nic(my_blocks_of_a_nic))


# %% [markdown]
# <details><summary>Solutions</summary>
#
# ```python
# def my_block(rank, t, n, g):
#     host, device = divmod(rank, g)
#     u, s = divmod(t, g)
#     return (host - u) % n * g + (device - s) % g
#
# def my_blocks_of_a_nic(n, g, nics):
#     return (n - 1) * g // nics
# ```
# </details>
#
# Open [`double_ring.py`](../ringlab/ways/double_ring.py) now: the double ring, on processes. [`seconds.py`](../ring_planner/seconds.py)
# has the times of all ways. To plan a cluster of your own: `ring-plan --help`.
