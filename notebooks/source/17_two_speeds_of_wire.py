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
# - read a plan: what a whole training step spends its seconds and its bytes on.
#
# Track *plan*. You need chapters 9 and 16; the track ends here. 18 minutes to read, 10 for the exercises.

# %% jupyter={"source_hidden": true} tags=["hide-input"]
# %matplotlib inline
import torch

from figures import double_ring as picture
from notebooks.source.checks.kernels_and_wires import check_block, check_blocks_of_a_nic
from notebooks.source.show import print_source
from ring_planner import command
from ring_planner.hidden_communication import block_flops, hop_bytes, ring_seconds
from ring_planner.presets import gpu_named, model_named
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
# *reaches*, and on the share of a NIC's bytes/s that messages reach. The planner takes 652 TFLOP/s, of cuDNN's [fused kernel](../docs/glossary.md#fused-kernel), and 0.7. Meta's
# hosts reached 0.566 ([Yang et al. 2024](https://arxiv.org/abs/2411.01783), table 5).
# For how much of a layer's forward pass does each rank wait?

# %%
h100, llama = gpu_named("h100"), model_named("llama-3.1-8b")
layer, chunk = llama.attention(), 2**20 / 128
block = block_flops(layer, chunk**2 / 2)  # causal: half of the pairs


def waiting(flops, share):
    """The share of the pass in which a rank of the flat ring waits."""
    hop = hop_bytes(layer, chunk) / (share * h100.host_bandwidth)
    return 1 - 128 * block / flops / ring_seconds(128, block / flops, hop)


fa2, cudnn = (h100.attention[kernel][0] for kernel in ("fa2", "cudnn"))
REACHED = {"FlashAttention 2": (fa2, 0.7), "cuDNN": (cudnn, 0.7), "cuDNN, Meta's hosts": (cudnn, 0.566)}
for name, (flops, share) in REACHED.items():  # add a row: the two numbers that you measured
    print(f"{name:<22}{flops / 1e12:.0f} TFLOP/s, {share} of a NIC: each rank waits for {waiting(flops, share):.0%}")
assert [round(waiting(*rates), 2) for rates in REACHED.values()] == [0, 0.12, 0.29]

# %% [markdown]
# **The same ring waits not at all, or for 29 % of its time.** So measure both numbers before you
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
real = Step(llama, h100, hosts=16, per_host=8, seq_len=2**20, cp=128, kernels="cudnn").ring  # as the planner takes it
computing = block / real.flops
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
# and rings of 16 ranks go from host to host. How long does attention of one layer take on these 128 GPUs, forward and backward?
# The second column has the time of the products, and of the messages that nothing hides. The third adds the costs that each round has besides:
# a kernel starts and leaves a part of the GPU idle at its end, the output is rewritten, messages slow the products. The last has what a NIC sends.


# %%
rates = {"bandwidth": real.bandwidth, "host_bandwidth": real.host_bandwidth, "backward_flops": real.backward_flops}
free = Cluster(16, 8, flops=real.flops, nics=8, **rates)  # a round costs nothing but its products
SHARED = [("ring", None), ("double ring", None), ("all-gather", None), *(("hybrid", g) for g in (2, 4, 8, 16, 32))]


def milliseconds(cluster, chunk, mask=None):
    """By way: ms of a layer, forward and backward."""
    return {
        f"{way} of {split}" if split else way: 1e3
        * sum(pass_of(way, Pass(cluster, layer, chunk, backward, mask), split) for backward in (False, True))
        for way, split in SHARED
        if split is None or split < cluster.devices
    }


ideal = milliseconds(free, chunk)
paid = milliseconds(real, chunk, mask="causal")
print("way             products + waits, ms   + costs of rounds, ms   GB from a NIC")
for name, (way, split) in zip(ideal, SHARED, strict=True):
    sent = sum(traffic(way, layer, chunk, free, backward=backward, split=split)[1] for backward in (False, True))
    print(f"{name:<15}{ideal[name]:>21,.1f}{paid[name]:>24,.1f}{sent / 1e9:>16.2f}")
assert min(ideal, key=ideal.get) == "double ring"
assert min(paid, key=paid.get) == "hybrid of 8" and max(paid, key=paid.get) == "ring"
assert 1.2 < ideal["ring"] / ideal["double ring"] < 1.25
assert paid["ring"] > 1.2 * paid["hybrid of 8"]

# %% [markdown]
# By products and waits alone the double ring is the fastest: it exposes only two hops, both in the backward pass. But each of its 128 rounds has costs,
# and the hybrid of 8 has only 16 rounds. Each of these computes as much as eight blocks, which hides the slow hop too. So **few rounds on
# long blocks win**: the hybrid takes a fifth less time than the flat ring.
#
# We never ran hosts with GPUs. But one machine played two hosts: two network namespaces, each with one core for its 2 or 4 ranks, and a
# link of a set rate ([the numbers](../bench/results/README.md#five_ways)). In 10 of 12 cases the hybrid is the fastest, or at most 2 %
# slower. The flat ring is the fastest where a fast link or long chunks hide its messages too. The hybrid is far behind in two cases only,
# on the slowest link with 4,096 tokens: no way hides its messages there, and the all-to-all sends the fewest bytes. The all-gather is the slowest in 11 of 12 cases, up to
# 2.30 times the fastest: every head has its own K and V here ($H = G = 8$), and gloo's messages take time of the two cores. In Llama 8B
# four query heads share them, so four times as much work hides a byte: in the plan below it ties with the fastest.
#
# ## A whole step
#
# The command plans it:

# %%
options = "--model llama-3.1-8b --gpu h100 --hosts 16 --seq-len 1048576 --cp 128 --tp 1"
assert command.main(options.split()) == 0
assert round(paid["hybrid of 8"], 1) == 447.5

# %% [markdown]
# A row is a way to share the step, the fastest first. `advice` names the simplest within 7 %; the lines from `seconds` to `evidence` are of it.
# A step takes 17.2 s by the hybrid of 8, and 21.2 s by the flat ring: nearly all of it is attention. Attention takes none of the peak memory: when the
# backward pass of a layer needs its buffers (chapter 9), the logits are gone. With `--recompute full`, which keeps only the inputs of
# each layer and goes forward twice, 2 GiB of activations are left. Then
# [the logits at the loss](../docs/memory.md#a-models-longest-sequence) limit a sequence, and not the ring.
#
# Without `--cp 128 --tp 1` the planner may use *tensor parallelism*, and finds a ring between hosts with tensor parallelism inside, as
# fast and simpler. [Which way for which wires](../docs/which_way.md#which-way-for-which-wires) has three rules and what was measured,
# and [the scoreboard](../bench/README.md#published-times) says how far off the planner is.
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
# The hybrid of 8 again. The one NIC carries eight times the bytes of the table, and the hybrid of 8 sends the fewest. [A step takes
# 19.1 s](../docs/which_way.md#whole-steps-by-the-planner) in place of 17.2. The flat ring takes 21.2 s as before, because it uses one NIC.
# </details>
#
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
