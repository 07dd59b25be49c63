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
# The devices of a host are joined by fast links. Hosts are joined by network interface cards,
# [NICs](../docs/glossary.md#nic), which are several times slower: 9 times in the hosts of this page. A flat [ring](../docs/glossary.md#ring) is as slow as its
# slowest link. After this chapter you can
#
# - say why one slow [hop](../docs/glossary.md#hop) makes every [round](../docs/glossary.md#round) slow,
# - write the schedule of a [double ring](../docs/glossary.md#double-ring), in which a slow hop has the time of many rounds,
# - say what it gains, and when another way is faster.
#
# Track *plan*. Before it: chapters 9 and 17. 23 minutes to read, 10 for the exercises.

# %% jupyter={"source_hidden": true} tags=["hide-input"]
# %matplotlib inline
from dataclasses import replace
from functools import partial
from statistics import median

import torch

from bench import record
from bench.five_ways_predicted import FORWARD, TRAIN, timed
from figures import double_ring as picture
from figures import measured
from notebooks.source.checks.two_speeds_of_wire import check_block, check_blocks_of_a_nic
from notebooks.source.show import print_source
from ring_planner.presets import gpu_named, model_named
from ring_planner.round_costs import realistic
from ring_planner.seconds import Pass, pass_of
from ring_planner.ways import Cluster, traffic
from ringlab.basics.blockwise_attention import attend
from ringlab.basics.naive_attention import TOKENS, naive_attention
from ringlab.basics.online_softmax import finish, start
from ringlab.ring.cases import chunks_of_cases
from ringlab.ring.flash_ring import ring_flash_attention
from ringlab.ring.layouts import unshard
from ringlab.support.processes import launch
from ringlab.ways import double_ring

# %% [markdown]
# ## The failure
#
# $n = 2$ hosts have $g = 2$ devices each: $P = n \cdot g = 4$ ranks. Ranks 0 and 1 are in the first host. So the hops
# from rank 1 to rank 2 and from rank 3 to rank 0 are slow. Computing on a [block](../docs/glossary.md#block) takes 2 s, a
# fast hop 1 s, a slow hop 4 s.
#
# `begins` simulates such a ring, as in chapter 9. A hop begins when both of its ranks have begun the round. A rank
# begins the next round when it has computed, sent and received:


# %%
def begins(computing, hops):
    """By round: when each rank begins to compute. hops[r] is the time of a hop from rank r to rank r + 1."""
    P, begin = len(hops), [[0.0] * len(hops)]
    for _ in range(P - 1):
        now = begin[-1]
        sent = [max(now[r], now[(r + 1) % P]) + hops[r] for r in range(P)]
        begin.append([max(now[r] + computing, sent[r], sent[r - 1]) for r in range(P)])
    return begin


def duration(computing, hops):
    return max(begins(computing, hops)[-1]) + computing


# %% [markdown]
# In the lanes below, a character is a second: the number of the block in hand, or a dot while a rank waits.

# %%
n, g = 2, 2
P = n * g
COMPUTING, FAST, SLOW = 2, 1, 4  # seconds
for name, hops in (("all hops fast", [FAST] * P), ("two slow hops", [FAST, SLOW, FAST, SLOW])):
    total = round(duration(COMPUTING, hops))
    print(f"{name}: {total} s")
    for rank in range(P):
        lane = ["."] * total
        for t, begin in enumerate(begins(COMPUTING, hops)):
            at = round(begin[rank])
            lane[at : at + COMPUTING] = str((rank - t) % P) * COMPUTING
        print(f"    rank {rank}  {''.join(lane)}")
assert total == COMPUTING + (P - 1) * SLOW

# %% [markdown]
# With two slow hops, every rank waits in every round but the last. A round ends for all ranks when the slowest link has
# carried its block: the fast hops gain nothing. And the flat ring leaves a host at one device only. If each device has a
# NIC, one of them sends all blocks, and the others send nothing.
#
# ## The idea
#
# **The slow link needs a block only once in $g$ rounds.** When a host has a block, its $g$ devices can all use it
# before the next host needs it. So let the blocks go round inside each host. That is a *[turn](../docs/glossary.md#turn)* of
# $g$ rounds. At its beginning every device also sends its block to the same device of the next host. This message has
# the time of the whole turn. And all $g$ devices of a host send at the same time, each on its own NIC. (LoongTrain,
# [Gu et al. 2024](https://arxiv.org/abs/2406.18485), introduced it.)
#
# Here is the whole schedule in one process, with the 8 tokens of the [worked example](03_worked_example.ipynb). The
# outer loop is a ring of hosts. The inner loop is a ring of devices. `attend` folds a block into a running softmax
# (chapter 2):

# %%
x = TOKENS[None, None]  # (B, H, S, D) = (1, 1, 8, 2): queries, keys and values
chunks = x.chunk(P, dim=2)  # by rank, C = 2 tokens each
states = [start(q) for q in chunks]


def hop(blocks, hosts, devices):
    """Each rank sends its block this many hosts and devices on. Returns the blocks that arrive, by rank."""
    came_from = [(rank // g - hosts) % n * g + (rank % g - devices) % g for rank in range(P)]
    return [blocks[rank] for rank in came_from]


schedule = []  # by round: the block in hand, by rank
first = list(range(P))  # each rank begins with its own block
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
# How long does it take? A turn is a ring of $g$ devices. The hosts are a ring of $n$, whose "computing" is a whole
# turn. So we use `duration` twice:


# %%
def double_ring_seconds(n, g, computing, fast, slow):
    turn = duration(computing, [fast] * g)
    return duration(turn, [slow] * n)


print(f"double ring: {double_ring_seconds(n, g, COMPUTING, FAST, SLOW):g} s")
assert double_ring_seconds(n, g, COMPUTING, FAST, SLOW) == P * COMPUTING  # so no rank waits

# %% [markdown]
# A slow hop takes as long as two rounds: it is hidden, and no rank waits. If it took longer than a turn, every rank would
# wait for one slow hop a turn, where the flat ring waits in every round. In the picture (2 hosts of 4) a bar is a slow
# hop, which may take as long as four rounds:

# %%
picture.draw()

# %% [markdown]
# ## In code
#
# A mesh (chapter 11) has the two groups of a rank: `across` joins the same device of all hosts, `inside` joins the
# devices of one host. `arriving_blocks` of chapter 6 hands out the block in hand, and meanwhile the next block travels:
# here from host to host. `turn(u)` is the ring inside this host in turn u. `yield` hands out the round, K, V and what the
# mask leaves to compute (chapter 13):

# %%
print_source(double_ring.DoubleRing.rounds)

# %% [markdown]
# All else is the trainable ring: it asks a schedule for `rounds` and does not know how blocks travel. Four real
# processes, with a causal mask and zigzag chunks:

# %%
d_out = torch.arange(16.0, dtype=torch.float64).view_as(x)
in_hand = launch(double_ring.blocks_in_hand, P, n, device="cpu")
assert [list(blocks) for blocks in zip(*in_hand, strict=True)] == schedule
print("four processes had the blocks in hand that the table above says")

q, k, v = (x.clone().requires_grad_() for _ in "qkv")
right = naive_attention(q, k, v, causal=True)
right.backward(d_out)
exact = right, q.grad, k.grad, v.grad
causal = {"causal": True, "layout": "zigzag"}
attention = partial(ring_flash_attention, schedule=double_ring.DoubleRing)
results = [only for [only] in launch(chunks_of_cases, P, [x, x, x, d_out], [causal], attention, (n, g), device="cpu")]
for name, parts, whole in zip(("out", "dQ", "dK", "dV"), zip(*results, strict=True), exact, strict=True):
    assert torch.allclose(unshard(list(parts), "zigzag"), whole, rtol=0, atol=1e-12)
    print(f"{name:<4} equal to full attention")

# %% [markdown]
# **Where gradients are added.** In the flat ring one sum of dK and dV follows the block from rank to rank. In the
# double ring there are two sums. The sum of a turn travels inside the host, one round behind its block, and comes home
# to the device that began the turn with it. There it is added to the sum from the hosts before, which then goes to the
# next host. After the last turn one fast and one slow hop remain, and nothing is left to compute beside them.
#
# ## Which way to take
#
# Chapter 17 has the other ways. In *hybrid 16 x 8*, the 8 ranks of a row exchange tokens for heads, and rings of 16
# ranks go across the rows. The planner counts each way, forward and backward. Here are 16 hosts of 8
# H100s with a NIC of 50 GB/s for each device, the rates of the planner's preset, a causal layer of Llama 8B, and 1,048,576
# tokens. *Ideal* counts products, and bytes on links. A round costs more: it reads and writes the running output again,
# kernels and messages need time to begin, and messages slow the computing beside them. *With costs* adds these
# ([`round_costs.py`](../ring_planner/round_costs.py)), with FlashAttention 3's 680 TFLOP/s of the 989, and 586 in the
# backward pass:


# %%
h100 = gpu_named("h100")


def h100s(hosts, nics=8):
    return Cluster(hosts, 8, flops=h100.peak["bf16"], bandwidth=h100.link, host_bandwidth=h100.card, nics=nics)


SHARED = [("ring", None), ("double ring", None), ("all-gather", None), *(("hybrid", g) for g in (2, 4, 8, 16, 32))]


def milliseconds(cluster, chunk, mask=None):
    """By way: ms of a layer, forward and backward."""
    return {
        f"{way} {cluster.devices // split} x {split}" if split else way: 1e3
        * sum(pass_of(way, Pass(cluster, layer, chunk, backward, mask), split) for backward in (False, True))
        for way, split in SHARED
        if split is None or split < cluster.devices
    }


kernel = dict(zip(("flops", "backward_flops"), h100.attention["best"], strict=True))
kernel |= {"memory_bandwidth": h100.memory_bandwidth, "multiprocessors": h100.multiprocessors}
layer, chunk = model_named("llama-3.1-8b").attention(), 2**20 / 128
ideal = milliseconds(h100s(16), chunk)
paid = milliseconds(realistic(replace(h100s(16), **kernel)), chunk, mask="causal")
print("                ideal, ms   with costs, ms   GB on a NIC")
for name, (way, split) in zip(ideal, SHARED, strict=True):
    sent = sum(traffic(way, layer, chunk, h100s(16), backward=backward, split=split)[1] for backward in (False, True))
    print(f"{name:<15}{ideal[name]:>10,.1f}{paid[name]:>17,.1f}{sent / 1e9:>14.2f}")
together = milliseconds(h100s(1), 2**20 / 8)["ring"]
print(
    f"16 rings of 8, ideal: 16 sequences at once, {together:,.0f} ms until all are done, {together / 16:.0f} for each"
)
assert min(paid, key=paid.get) == "hybrid 16 x 8"
assert 1.3 < ideal["ring"] / ideal["double ring"] < 1.4
assert max(paid.values()) == paid["ring"]

# %% [markdown]
# - **Ring.** It leaves a host on one NIC, and a slow hop is due every round. It takes a quarter longer than the hybrid.
# - **Double ring.** A slow hop has the time of 8 rounds, and all 8 NICs work. All hops are hidden but two: in the
#   backward pass the first slow hop of K and V, and the last hop of the gradients inside a host. But it has 128 rounds.
# - **Hybrid 16 x 8.** Its exchange stays inside a host. Its hops have the bytes of the double ring's slow hops, and as
#   much time. It has 16 rounds: **few rounds on long blocks win.**
# - **All-to-all** is not possible: 128 ranks cannot share 32 heads.
# - **16 rings of 8.** This is another job: **16 sequences at once**, each in the ring of one host. All 16 are done after
#   the time that is printed, and nothing of them leaves a host.
#
# Others published 105 times of attention, steps and prefills. With these costs the planner's median error is 4 %, and in
# 67 of 71 pairs of ways it names the faster, or one that loses by less than 5 % (`python -m bench.scoreboard`).
#
# ## Measured
#
# Here the five ways of one sequence run between two hosts with one NIC each
# ([the numbers](../bench/results/README.md#five_ways)). Lower is faster:

# %%
measured.crossover()

# %%
rows = record.load("five_ways")["rows"]
for which in (FORWARD, TRAIN):
    wins, most = 0, 0.0
    for row in rows:
        times = {
            way: median(timed(row, way, which)) for way in ("ring", "double ring", "all-gather", "all-to-all", "hybrid")
        }
        wins += min(times, key=times.get) == "hybrid"
        most = max(most, times["hybrid"] / min(times.values()) - 1)
        if (row["rate"], row["seq_len"], which) == (20_000_000, 4096, TRAIN):
            assert all(0.155 < 1 - times[way] / times["ring"] < 0.285 for way in ("double ring", "hybrid"))
    print(f"{which}: hybrid is the fastest in {wins} of {len(rows)} cells; elsewhere it takes up to {most:.0%} longer")

# %% [markdown]
# - **The slower the link, the more the double ring gains.** On the faster links it loses up to 11 %, mostly in training:
#   its last slow hop takes the gradients of all devices of a host through the one NIC, and nothing hides it.
# - **Hybrid** sends few bytes to the other host. In training it wins 5 of 12 cells. On the slowest link and the shortest
#   sequence it takes up to 30 % longer than all-to-all, which sends the fewest.
# - **The lines are predicted from a calibration alone:** `calibrate` measured the hosts just before. 97 % of the times are
#   within 15 % of their prediction.
#
# When links between hosts differ, the slowest one counts, not the sum. So visit the hosts in an order that leaves the
# slowest out. A slow *device* makes all ranks wait, too: give it fewer tokens
# ([`unequal.py`](../ring_planner/unequal.py) has both).
#
# > **One number to remember: the number of NICs of a host.** The double ring hides its slow hops with chunks
# > that many times shorter. Chapter 9 has flops / bandwidth = 312e12 / 12.5e9 = 24,960 tokens for A100s; with 8 NICs it is
# > 24,960 / 8 = 3,120.
#
# ## Questions
#
# <details><summary>Why not begin the slow hop at the end of a turn, with the block in hand then?</summary>
#
# Every rank would still see every block once, so the result would be right. But the next host needs the block in the
# very next round. So the slow hop would have the time of one round, as in the flat ring, and not of $g$ rounds.
# </details>
#
# <details><summary>16 hosts of 8 devices, and each host has only one NIC. Which way is fast, for sequences of a million tokens?</summary>
#
# For one sequence on all GPUs still the hybrid of 8, but no way hides its messages: 16 GB must pass the one NIC of each host,
# and at 50 GB/s that takes 333 ms, where computing takes 249. With 4 NICs in a host the messages are hidden again. For many
# sequences, a ring per host also takes 249 ms for each, and nothing leaves a host; for a whole step `ring-plan --nics 1`
# decides, because memory counts there too, and weights must travel. From 2 million tokens on one NIC is enough: computing grows
# with the square of the length, and the bytes do not.
# </details>

# %%
one_nic = milliseconds(h100s(16, nics=1), chunk)
three = [one_nic[name] for name in ("ring", "double ring", "hybrid 16 x 8")]
assert 333 < min(three) < max(three) < 1.03 * min(three)
assert round(together / 16) == 249
assert min(milliseconds(h100s(16, nics=4), chunk).values()) < 1.01 * together / 16
assert min(milliseconds(h100s(16, nics=1), 2 * chunk).values()) < 4.01 * together / 16
one_nic = milliseconds(realistic(replace(h100s(16, nics=1), **kernel)), chunk, mask="causal")
assert min(one_nic, key=one_nic.get) == "hybrid 16 x 8"

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
