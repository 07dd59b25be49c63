# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 18 · Two speeds of wire
#
# Fast links join the devices of a host. [NICs](../docs/glossary.md#nic) join the hosts, and on this page a NIC is 9 times slower than
# a link. A flat [ring](../docs/glossary.md#ring) is as slow as its slowest wire. After this chapter you can
#
# - write the schedule of a [double ring](../docs/glossary.md#double-ring), in which a slow [hop](../docs/glossary.md#hop) has the time
#   of many [rounds](../docs/glossary.md#round),
# - say which way is the fastest between hosts, and why,
# - derive the seconds of a whole training step and its bytes on one rank, as the planner does.
#
# Track *plan*. Before it: chapters 9 and 17. 23 minutes to read, 10 for the exercises.

# %% jupyter={"source_hidden": true} tags=["hide-input"]
# %matplotlib inline
from statistics import median

import torch

from bench import record
from bench.wires import TRAIN, timed
from figures import double_ring as picture
from figures import measured
from notebooks.source.checks.two_speeds_of_wire import check_block, check_blocks_of_a_nic
from notebooks.source.show import print_source
from ring_planner import command
from ring_planner.hidden_communication import block_flops, hop_bytes, ring_seconds
from ring_planner.plan import Plan
from ring_planner.presets import GIB, gpu_named, model_named
from ring_planner.seconds import Pass, pass_of
from ring_planner.step import Step
from ring_planner.ways import WAYS, Cluster, traffic
from ringlab.basics.blockwise_attention import attend
from ringlab.basics.naive_attention import TOKENS, naive_attention
from ringlab.basics.online_softmax import finish, start
from ringlab.support.processes import launch
from ringlab.ways import double_ring

# %% [markdown]
# ## The failure
#
# Llama 8B trains on 1M tokens, on $n = 16$ hosts of $g = 8$ H100s each: $P = n \cdot g = 128$ ranks of 8,192 tokens. Take a
# [block](../docs/glossary.md#block) and its hops as in chapter 9, where the slowest hop rules. Does the flat ring wait? That depends on two
# numbers of which a data sheet knows neither: the FLOP/s that the kernel *reaches*, and the share of a NIC that messages reach. One H100
# reached 641 TFLOP/s (chapter 8b); one machine reached 0.566 of its NICs:

# %%
h100, llama = gpu_named("h100"), model_named("llama-3.1-8b")
layer, chunk = llama.attention(), 2**20 / 128
fast, waits = hop_bytes(layer, chunk) / h100.link, {}
print(f"a hop inside a host {1e3 * fast:.2f} ms; of a layer's forward pass in the flat ring, waiting is")
for kernel, flops in (("data sheet", h100.peak["bf16"]), ("reached", 641e12)):
    computing = block_flops(layer, chunk**2 / 2) / flops  # causal: half of the pairs
    for share in (1, 0.7, 0.566):
        slow = hop_bytes(layer, chunk) / (share * h100.card)
        waits[kernel, share] = 1 - 128 * computing / ring_seconds(128, computing, slow)
        print(
            f"{waits[kernel, share]:4.0%}  block {1e3 * computing:.2f} ms ({kernel}), hop {1e3 * slow:.2f} ms ({share} of a NIC)"
        )
assert waits["data sheet", 1] > 0.1 > waits["reached", 1] == 0
assert waits["reached", 0.566] > 0.2

# %% [markdown]
# **The same cluster waits not at all or for more than a quarter of its time.** So measure both numbers (`python -m ring_planner.calibrate`) before you
# choose a way. Where the ring waits, all ranks wait, although seven of eight hops are fast. And only one device of a host sends to the
# next host, so one NIC carries all blocks, and seven NICs carry nothing. Where a host has one NIC only, there is no doubt: by the planner
# a whole step takes 145 s with the flat ring, and 19.1 s with the best way of this page.
#
# ## The idea
#
# **The slow link needs a block only once in $g$ rounds.** When a host has a block, its $g$ devices can all use it
# before the next host needs it. So let the blocks go round inside each host, in a *[turn](../docs/glossary.md#turn)* of
# $g$ rounds. At its beginning every device also sends its block to the same device of the next host, and this message has
# the time of the whole turn. All $g$ devices do so at once, each on its own NIC. (LoongTrain,
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
def double_ring_seconds(n, g, computing, fast, slow):
    turn = ring_seconds(g, computing, fast)
    return ring_seconds(n, turn, slow)


print(f"the double ring: {1e3 * double_ring_seconds(16, 8, computing, fast, slow):.1f} ms")
assert double_ring_seconds(16, 8, computing, fast, slow) == 128 * computing  # so no rank waits
assert 5 < 8 * computing / slow < 6

# %% [markdown]
# At 0.566 of a NIC a turn lasts 6.86 ms and a slow hop 1.18 ms, so the hop is hidden more than five times over. In the picture (2 hosts of 4) a bar is a
# slow hop, which may take as long as four rounds:

# %%
picture.draw()

# %% [markdown]
# ## In code
#
# The two loops are two generators. `firsts` is the ring among the same devices of all hosts (`across`), by `arriving_blocks` of
# chapter 6. `rounds_of` is the ring inside this host, `turn(u)`. It yields the round, K, V, and what the mask leaves to compute:

# %%
print_source(double_ring.DoubleRing.firsts, double_ring.DoubleRing.rounds_of)

# %% [markdown]
# Everything else is the trainable ring. Do four real processes follow the schedule above?

# %%
in_hand = launch(double_ring.blocks_in_hand, P, n, device="cpu")
assert [list(blocks) for blocks in zip(*in_hand, strict=True)] == schedule
print("four processes had the blocks in hand that the table above says")

# %% [markdown]
# ## Which way to take
#
# A double ring hides its slow hops. Is it the fastest way? In the *hybrid of 8* a row is a host: its 8 ranks exchange tokens for heads,
# and rings of 16 ranks go from host to host. Here is a layer, forward and backward, *ideal* and *with costs* as in chapter 17:


# %%
def h100s(hosts, nics=8):
    return Cluster(hosts, 8, flops=h100.peak["bf16"], bandwidth=h100.link, host_bandwidth=h100.card, nics=nics)


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
paid = milliseconds(Step(llama, h100, 16, 8, 2**20, cp=128, kernels="cudnn").ring, chunk, mask="causal")
print("                ideal, ms   with costs, ms   GB on a NIC")
for name, (way, split) in zip(ideal, SHARED, strict=True):
    sent = sum(traffic(way, layer, chunk, h100s(16), backward=backward, split=split)[1] for backward in (False, True))
    print(f"{name:<15}{ideal[name]:>10,.1f}{paid[name]:>17,.1f}{sent / 1e9:>14.2f}")
assert min(ideal, key=ideal.get) == "double ring"
assert min(paid, key=paid.get) == "hybrid of 8" and max(paid, key=paid.get) == "ring"
assert 1.3 < ideal["ring"] / ideal["double ring"] < 1.4
assert paid["ring"] > 1.2 * paid["hybrid of 8"]

# %% [markdown]
# The double ring has the best ideal time, because it exposes only two hops, both in the backward pass: the first hop of K and V, and
# inside a host the last hop of the gradients, when all is computed. But each of its 128 rounds has costs (chapter 17), and the hybrid
# of 8 has only 16 rounds. Each of these computes as much as eight blocks, which hides the slow hop too. So **few rounds on long blocks
# win**: the hybrid takes a fifth less time than the flat ring.
#
# Is that so when measured? We never ran hosts with GPUs. But one machine played two hosts: two network namespaces, each with one core
# for its 2 or 4 ranks, and a link of a set rate ([the numbers](../bench/results/README.md#five_ways)).

# %%
measured.crossover()

# %%
rows = record.load("five_ways")["rows"]
taken = [{way: median(timed(row, way, TRAIN)) for way in WAYS} for row in rows]
fastest = [min(times, key=times.get) for times in taken]
near = sum(round(times["hybrid"] / min(times.values()), 2) <= 1.02 for times in taken)
first = {way: fastest.count(way) for way in ("hybrid", "ring")}
assert [max(times, key=times.get) for times in taken].count("all-gather") == 11
print(
    f"of {len(rows)} cases the fastest: hybrid in {first['hybrid']}, ring in {first['ring']}; hybrid within 2 %: {near}"
)
for row, times in zip(rows, taken, strict=True):
    short, rate, gain = row["seq_len"] == 4096, row["rate"], 1 - times["double ring"] / times["ring"]
    assert (short and rate == 20_000_000) == (times["hybrid"] > 1.2 * times["all-to-all"])
    assert 0.1 < gain < 0.285 if short and rate < 125_000_000 else gain > -0.11

# %% [markdown]
# The flat ring is the fastest where a fast link or long chunks hide its messages too. The hybrid is far behind in two cases only, on
# the slowest link with 4,096 tokens: no way hides its messages there, and the all-to-all sends the fewest bytes. With 4,096 tokens on
# the two slower links the double ring takes 10 to 28 % less time than the flat ring, and elsewhere up to 11 % more. The all-gather is
# the slowest in 11 cases, because gloo's reduce-scatter sends the gradients twice. So these cases say little of a gather on GPUs.
#
# ## A whole step
#
# How long does a whole training step take, and what does a GPU hold? Take 128K tokens on one host
# again, so $C = 16{,}384$. There is no room to keep what the backward pass needs from the forward pass. So each
# layer keeps only its input, and computes the rest again (*recompute full*): it goes forward twice and backward once.
#
# **Attention.** By the all-gather of chapter 17 a layer takes $2 \cdot 29.1 + 78.3 = 136.5$ ms, and a framework takes 1.15 times as
# long as its kernels. So 32 layers take 5.023 s.
#
# **Products.** The layers have 6.98 billion weights, and a token needs 2 FLOPs for each. A backward pass is as much work as
# two forward passes, so there are four passes in all: $4 \cdot 2C \cdot 6.98 \cdot 10^9$ FLOPs, at 65 % of the peak 1.423 s.
#
# **The rest** is small: 0.080 s for the head, which gives the logits, and by the planner 0.493 s for norms, activations, loss and
# optimizer, which only read and write memory. FSDP's messages are hidden. The step takes 7.02 s. (The 1.15 and the 65 % are fitted
# to published times.)
#
# **Memory.** The worst moment is the loss, when the logits of all tokens are there:
#
# | | bytes on a GPU | GiB |
# | --- | --- | ---: |
# | state | 14 for each of 8.03 billion parameters, shared by 8 GPUs: the weight, and Adam's copy and moments in float32 | 13.09 |
# | gathered | 2 for each parameter that FSDP has collected: of the embedding, a layer and the head; and as much for the head's gradient | 3.34 |
# | activations | 2 for each of 4,096 numbers of a token, in 32 layers: their inputs | 4 |
# | loss | for each token, 14 for each of 128,256 words (the logit, and log-softmax and two gradients in float32), and 6 for each of 4,096 numbers at the last norm (its input, the input over its size, its output) | 27.77 |
#
# Add 1.5 GiB for CUDA and NCCL, and a *reserve* of 7.3 % of the table, because ten published peaks were above their counts by that
# much at most. The sum is 53.2 GiB of 79.1. Does the planner say the same?

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
# None of this memory is attention's. In a ring the backward pass of a layer holds 1.25 GiB (chapter 9), but then the
# logits are gone. So the loss limits a sequence, and not the ring.
#
# **And 1M tokens on the 16 hosts?** A GPU has half as many tokens, and 128 GPUs share the state. So there is room to keep
# everything, and a layer goes forward only once. By the hybrid of 8 attention takes $32 \cdot 1.15 \cdot 0.4475 = 16.5$ s. The
# products are three passes over half as many tokens, 0.53 s:

# %%
options = "--model llama-3.1-8b --gpu h100 --hosts 16 --seq-len 1048576 --cp 128 --tp 1"
assert command.main(options.split()) == 0
assert round(paid["hybrid of 8"], 1) == 447.5 and round(32 * 1.15 * 0.4475, 1) == 16.5
assert round(ours["products"] / 2 * 3 / 4, 2) == 0.53

# %% [markdown]
# A step takes 17.2 s by the hybrid of 8, and 21.2 s by the flat ring. Without `--cp 128 --tp 1` the planner may use *tensor
# parallelism*, or two sequences at once. For one sequence it then finds a simpler way than the all-gather, also 17.5 s: a ring between
# hosts, with tensor parallelism inside (in the line *one sequence on all*). [Which way for which
# wires](../docs/which_way.md#which-way-for-which-wires) has a rule of three lines, and what was measured.
#
# How far off may this be? Half of 105 times that others published are within 4.3 % of the planner's, and half of the 52 on
# which nothing was fitted within 5.0 %. In 67 of 71 pairs of ways the planner names the faster way, or one that loses by less than
# 5 % ([the scoreboard](../bench/README.md#published-times)). 29 of them compare two ways and differ by more: it names 25. The
# interval in the line *evidence* comes from its errors on 17 published steps of
# this kind. Made without a publisher's own times, such intervals held for 70 of 81.
#
# > **One number to remember: the number of NICs of a host.** With 8 of them the double ring and the hybrid of 8 hide slow hops with
# > chunks 8 times shorter: in the forward pass of Llama 8B on H100s $9{,}890 / 8 = 1{,}236$ tokens, where the flat ring needs 9,890.
#
# ## Questions
#
# <details><summary>Why not begin the slow hop at the end of a turn, with the block in hand then?</summary>
#
# Every rank would still see every block once, so the result would be right. But the next host needs the block in the
# very next round. So the slow hop would have the time of one round, as in the flat ring, in place of $g$ rounds.
# </details>
#
# <details><summary>16 hosts of 8 devices, and each host has only one NIC. Which way is the fastest for 1M tokens?</summary>
#
# The hybrid of 8 again. The one NIC carries 16.1 GB for a layer, eight times the 2.01 of the table. That takes 322 ms, where computing takes
# 249. A few rounds compute longer than their message takes, so the ideal time is 334 ms. With costs a step takes 19.1 s in place of 17.2.
# </details>
#
# <details><summary>You have one host of 8 H100s, and sequences of 1M tokens. What do you change first?</summary>
#
# The loss. A step needs 292 GiB of each GPU, and 222 of them are the loss. With `--loss pieces` the loss needs almost nothing.
# Then the backward pass of a layer (37 GiB) is the worst moment, and a step needs 94 GiB. That is still more than 79.1, so rent a second host.
# </details>

# %%
assert round(milliseconds(h100s(16, nics=1), chunk)["hybrid of 8"]) == 334
ideal_block = block_flops(layer, chunk**2 / 2) / h100.peak["bf16"]
assert round(1e3 * 3.5 * 128 * ideal_block) == 249  # the backward pass has 2.5 times the FLOPs
plans = [Plan(Step(llama, h100, 1, 8, 2**20, cp=8, loss=it)) for it in ("whole", "pieces")]
assert [round(plan.held / GIB) for plan in plans] == [292, 94]
assert [round(plans[0].memory["loss"] / GIB), round(plans[1].memory["a layer at work"] / GIB)] == [222, 37]

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
