# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 20 · Two speeds of wire
#
# The devices of a host are joined by fast links. Hosts are joined by network interface cards,
# [NICs](../GLOSSARY.md#nic), which are 10 to 40 times slower. A flat [ring](../GLOSSARY.md#ring) is as slow as its
# slowest link. After this chapter you can
#
# - say why one slow [hop](../GLOSSARY.md#hop) makes every [round](../GLOSSARY.md#round) slow, and how long a ring then
#   takes,
# - write the schedule of a [double ring](../GLOSSARY.md#double-ring), in which a slow hop has the time of many rounds,
# - ask the planner which way to share a sequence is the fastest on a cluster, and say why,
# - order hosts whose links differ, and share out tokens when devices differ.
#
# 30 minutes to read, 20 for the exercises. The code: [`ringlab/training/double_ring.py`](../ringlab/training/double_ring.py),
# [`ringlab/planning/ways.py`](../ringlab/planning/ways.py), [`ringlab/planning/shared_links.py`](../ringlab/planning/shared_links.py),
# [`ringlab/planning/two_speeds.py`](../ringlab/planning/two_speeds.py), [`ringlab/planning/host_order.py`](../ringlab/planning/host_order.py),
# [`ringlab/planning/unequal.py`](../ringlab/planning/unequal.py), [`ringlab/planning/ranking.py`](../ringlab/planning/ranking.py). Before:
# [19 · the other ways round](19_the_other_ways_round.ipynb).

# %%
# %matplotlib inline
from dataclasses import replace
from itertools import permutations

import torch

from figures import crossover
from figures import double_ring as picture
from notebooks import workers
from notebooks.checks.two_speeds_of_wire import (
    check_block,
    check_blocks_of_a_nic,
    check_order,
    check_seconds,
)
from notebooks.show import print_source
from ringlab.basics.blockwise_attention import attend
from ringlab.basics.naive_attention import TOKENS, naive_attention
from ringlab.basics.online_softmax import finish, start
from ringlab.planning import two_speeds
from ringlab.planning.hidden_communication import AttentionLayer
from ringlab.planning.host_order import best_order
from ringlab.planning.simulated_ring import duration, simulate_timeline
from ringlab.planning.unequal import proportional_chunks
from ringlab.planning.ways import WAYS, Cluster, traffic
from ringlab.support.processes import launch
from ringlab.training import double_ring
from ringlab.training.layouts import unshard

# %% [markdown]
# ## The failure
#
# Chapter 9 simulated a ring with one slow link. Here is the function that did it, without its checks. A hop begins when
# both of its ranks have begun the round. A rank begins the next round when it has computed, sent and received:

# %%
print_source(simulate_timeline, last=14)

# %% [markdown]
# Now $n = 2$ hosts with $g = 2$ devices each: $P = n \cdot g = 4$ ranks. Ranks 0 and 1 are in the first host. So the
# hops from rank 1 to rank 2 and from rank 3 to rank 0 are slow. Computing on a [block](../GLOSSARY.md#block) takes 2
# s, a fast hop 1 s, a slow hop 4 s. In the lanes below, a character is a second: the number of the block in hand
# while a rank computes, or a dot while it waits.

# %%
n, g = 2, 2
P = n * g
COMPUTING, FAST, SLOW = 2, 1, 4  # seconds


def show_lanes(events):
    for rank in range(P):
        lane = ["."] * round(duration(events))
        for event in events:
            if event.rank == rank and event.what == "compute":
                begin, end = round(event.start), round(event.end)
                lane[begin:end] = [str(event.block)] * (end - begin)
        print(f"    rank {rank}  {''.join(lane)}")


even = [[COMPUTING] * P] * P  # by round and rank
for name, hops in (("all hops fast", [FAST] * P), ("two slow hops", [FAST, SLOW, FAST, SLOW])):
    events = simulate_timeline(even, hops)
    print(f"{name}: {duration(events):g} s")
    show_lanes(events)
assert duration(events) == COMPUTING + (P - 1) * SLOW

# %% [markdown]
# With two slow hops, every rank waits in every round but the last. A round ends for all ranks when the slowest link has
# carried its block. The formula of chapter 9 stands in the last line of the cell.
#
# Real numbers are worse. Here are 8 A100s (312 TFLOP/s) in two hosts: 300 GB/s inside a host, 12.5 GB/s between hosts.
# A chunk has $C$ = 4,096 tokens in bfloat16, and the model is 4,096 wide:

# %%
C, width = 4096, 4096
computing = 4 * C**2 * width / 312e12  # 4·C²·H·D FLOPs
fast, slow = (2 * C * width * 2 / bandwidth for bandwidth in (300e9, 12.5e9))  # K and V, 2 bytes a number
print(f"a block: computing {1e3 * computing:.2f} ms, hops {1e3 * fast:.2f} and {1e3 * slow:.2f} ms")
seconds = {}
for name, hops in (
    ("1 host of 8", [fast] * 8),
    ("2 hosts of 4", ([fast] * 3 + [slow]) * 2),
    ("8 hosts of 1", [slow] * 8),
):
    took = seconds[name] = duration(simulate_timeline([[computing] * 8] * 8, hops))
    print(f"{name}: {1e3 * took:5.2f} ms, {took / seconds['1 host of 8']:.2f} x one host")
assert abs(seconds["2 hosts of 4"] - seconds["8 hosts of 1"]) < 1e-12

# %% [markdown]
# Two hosts of 4 are as slow as 8 hosts of one device each. The six fast hops of each round gain nothing. And look at
# the NICs. Hosts for training often have one for each device, so there are 4 here. The flat ring leaves a host
# at one device only. So one NIC sends all 7 blocks, one after the other, and three NICs send nothing.
#
# ## The idea
#
# **The slow link needs a block only once in $g$ rounds.** When a host has a block, its $g$ devices can all use it
# before the next host needs it. So let the blocks go round inside each host. That is a *turn* of $g$ rounds. At its
# beginning every device also sends its block to the same device of the next host. This message has the time of the
# whole turn. And all $g$ devices of a host send at the same time, each on its own NIC.
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
print("round  turn   block in hand of rank 0 1   2 3")
for u in range(n):
    in_hand = first
    for s in range(g):
        schedule.append(in_hand)
        print(f"{u * g + s:>5}{u:>6}{'':>26}{in_hand[0]} {in_hand[1]}   {in_hand[2]} {in_hand[3]}")
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
# The host part changes once a turn, the device part every round. Each part by itself is the ring of chapter 3.
#
# How long does it take? A turn is a ring of $g$ devices. The hosts are a ring of $n$, whose "computing" is a whole
# turn. So we use the same simulation twice:


# %%
def double_ring_seconds(n, g, computing, fast, slow):
    turn = duration(simulate_timeline([[computing] * g] * g, [fast] * g))
    return duration(simulate_timeline([[turn] * n] * n, [slow] * n))


print(f"double ring: {double_ring_seconds(n, g, COMPUTING, FAST, SLOW):g} s")
for rank in range(P):
    print(f"    rank {rank}  {''.join(COMPUTING * str(in_hand[rank]) for in_hand in schedule)}")
assert double_ring_seconds(n, g, COMPUTING, FAST, SLOW) == P * COMPUTING  # so no rank waits

double, flat = double_ring_seconds(2, 4, computing, fast, slow), seconds["2 hosts of 4"]
print(f"2 hosts of 4 A100s: {1e3 * double:.2f} ms; the flat ring took {1e3 * flat:.2f} ms")

# %% [markdown]
# In the lanes a slow hop takes 4 s, and so do two rounds. It is hidden, and no rank waits. On the A100s it takes longer
# than four rounds, so it is not quite hidden. But every rank waits for one slow hop, not for 7.
#
# The slow hop is hidden when it takes no longer than a turn. A turn computes $g$ blocks, so the shortest chunk that
# hides the slow hop is $g$ times shorter than in the flat ring. With the numbers of chapter 9:

# %%
knee = 312e12 / 12.5e9  # flops / bandwidth: bfloat16, as many heads of K and V as of Q, no mask
for devices in (1, 2, 4, 8):
    print(f"hosts of {devices}: chunks from {knee / devices:>6,.0f} tokens on hide the slow hop")

# %% [markdown]
# ## The picture
#
# 2 hosts of 4 devices, drawn from what the code did. A bar is a slow hop, and it may take as long as four rounds:

# %%
picture.draw()

# %% [markdown]
# ## In code
#
# Chapter 6 has `arriving_blocks`: it hands out the block in hand, and meanwhile the next block travels. The double ring
# calls it twice, one call inside the other. A mesh (chapter 13) has the two groups of a rank: `across` joins the same
# device of all hosts, `inside` joins the devices of one host.

# %%
print_source(double_ring.DoubleRing.rounds)

# %% [markdown]
# `lengths` are the numbers of tokens of the chunks, and `pieces` is what the mask leaves to compute (chapter 15). All
# else is the trainable ring: it asks a schedule for `rounds` and does not know how blocks travel. Now four real
# processes, on the same 8 tokens, with a causal mask and zigzag chunks:

# %%
print_source(double_ring.on_rank)

# %%
d_out = torch.arange(16.0, dtype=torch.float64).view_as(x)
in_hand, results = zip(*launch(double_ring.on_rank, P, n, [x, x, x, d_out], device="cpu"), strict=True)
assert [list(blocks) for blocks in zip(*in_hand, strict=True)] == schedule
print("four processes had the blocks in hand that the table above says")

q, k, v = (x.clone().requires_grad_() for _ in "qkv")
right = naive_attention(q, k, v, causal=True)
right.backward(d_out)
for name, parts, exact in zip(
    ("out", "dQ", "dK", "dV"), zip(*results, strict=True), (right, q.grad, k.grad, v.grad), strict=True
):
    assert torch.allclose(unshard(list(parts), "zigzag"), exact, rtol=0, atol=1e-12)
    print(f"{name:<4} equal to full attention")

# %% [markdown]
# ## Where gradients are added
#
# Every rank that computes on a block adds to its dK and dV. In the flat ring one sum follows the block from rank to
# rank. In the double ring that sum would have to reach the next host between the last round of a turn and the first
# round of the next. So there are **two sums**:
#
# - The sum of a turn travels inside the host, one round behind its block. It begins at 0 in every turn. During the
#   first round of the next turn it comes home, to the device that began the turn with this block.
# - There it is added to the sum from the hosts before. That one then goes to the same device of the next host, with the
#   time of a turn. After the last turn one fast and one slow hop remain. Nothing is left to compute beside them.
#
# In the next run rank $r$ adds $10^r$ instead of a gradient, so a sum says who has added. Columns are ranks. Each shows
# its block in hand, and the sum of the turn as it arrives:

# %%
print_source(workers.turning_sums, last=9)

# %%
*rounds, home = zip(*launch(workers.turning_sums, P, n, device="cpu"), strict=True)
for t, seen in enumerate(rounds):
    print(f"round {t}   " + "   ".join(f"block {j} + {total:<5}" for j, total in seen).rstrip())
assert [[j for j, _ in seen] for seen in rounds] == schedule
print("home      " + "".join(f"block {j}: {total:<9}" for j, total in home).rstrip())
assert home == tuple((rank, 1111) for rank in range(P))

# %% [markdown]
# Follow block 0. In turn 0 rank 0 adds 1, and rank 1 gets this 1 and adds 10. In turn 1, in the other host, the sum
# begins at 0 again with rank 2. At home the two sums of two hosts are one: 11 + 1100.
#
# ## What NICs do
#
# Count the blocks that leave a host in the forward pass. The flat ring sends $P - 1$, all on one NIC. The double
# ring sends $(n - 1) \cdot g$, shared among all NICs of the host. With many hosts that is hardly less. **The gain
# comes from the NICs.** With fewer NICs than devices, several devices share one, and a slow hop takes longer. Here
# are 16 hosts of 8 A100s, and a sequence of 1,048,576 tokens, so $C$ = 8,192:

# %%
C, P = 8192, 128
computing, fast, slow = 4 * computing, 2 * fast, 2 * slow  # twice the tokens of the chunks above
flat = duration(simulate_timeline([[computing] * P] * P, ([fast] * 7 + [slow]) * 16))
print(f"computing alone {1e3 * P * computing:.0f} ms")
print(f"flat ring: {1e3 * flat:.0f} ms, one NIC sends {P - 1} blocks")
for nics in (1, 2, 4, 8):
    took = double_ring_seconds(16, 8, computing, fast, slow * 8 / nics)
    blocks = 15 * 8 // nics
    print(f"double ring, NICs of a host: {nics}; {1e3 * took:>5.0f} ms, a NIC sends {blocks:>3} blocks")
assert took < 1.01 * P * computing

# %% [markdown]
# With one NIC a host the double ring gains almost nothing. With 4 or 8 NICs all messages are hidden. (NCCL
# lays its own collectives out as several rings, which leave a host on different NICs. The ring of chapter 8 is one
# ring.)
#
# ## Which way to take
#
# Chapter 19 has the other ways. *All-gather* collects K and V of all ranks. *All-to-all* exchanges tokens for heads.
# *Hybrid 16 x 8* takes a mesh of 16 rows x 8 ranks. The 8 ranks of a row exchange tokens for heads, and rings of 16 ranks
# go across the rows. `simulate` makes the steps of a way, as its file in `ringlab/training/` makes them. A step waits for other
# steps, and messages that use a link at the same time share its bytes/s. `traffic` counts the bytes of the device and
# of the NIC that send most:

# %%
print_source(two_speeds.simulate)


# %%
def rank_ways(cluster, layer, S):
    """Print the ways, the fastest first: a layer of a causal model, forward and backward, in a balanced layout."""
    seconds, sent, C = {}, {}, S / cluster.devices
    splits = [split for split in (2, 4, 8, 16, 32) if split < cluster.devices]
    for way, split in [(way, None) for way in WAYS if way != "hybrid"] + [("hybrid", each) for each in splits]:
        name = f"hybrid {cluster.devices // split} x {split}" if split else way
        passes = [{"backward": False, "split": split}, {"backward": True, "split": split}]
        try:
            seconds[name] = sum(two_speeds.simulate(way, cluster, layer, C, **each) for each in passes)
        except ValueError:
            print(f"{name} is not possible: more ranks than heads")
        else:
            sent[name] = sum(traffic(way, layer, C, cluster, **each)[1] for each in passes)
    products = 14 * S**2 / 2 * layer.heads * layer.head_dim  # FLOPs of both passes, for half of the pairs
    print(f"computing alone{1e3 * products / cluster.devices / cluster.flops:>9,.1f} ms    GB on a NIC")
    for name in sorted(seconds, key=seconds.get):
        print(f"{name:<15}{1e3 * seconds[name]:>9,.1f}{sent[name] / 1e9:>18.2f}")
    return seconds


H100 = {"flops": 990e12, "bandwidth": 450e9, "host_bandwidth": 12.5e9}  # and a NIC for each device
grouped = AttentionLayer(heads=32, kv_heads=8, head_dim=128, itemsize=2)
seconds = rank_ways(Cluster(hosts=16, per_host=8, **H100), grouped, S=2**20)
assert seconds["ring"] > 5 * seconds["double ring"]

# %% [markdown]
# Why does each way take its time?
#
# - **Double ring.** A slow hop has the time of 8 rounds, and all 8 NICs work. All hops are hidden but the last two of
#   the gradients.
# - **Hybrid 16 x 8.** Its exchange of heads stays inside a host. Then there is a ring of 16 hosts. A hop brings 8 times
#   the tokens and an eighth of the heads, so it has the bytes of a slow hop of the double ring, and as much time.
# - **All-gather.** All NICs work. The first K and V come before most of the computing, and the last sum of gradients
#   comes after it. Both are exposed.
# - **Hybrid 8 x 16 and 4 x 32.** Their exchange leaves the host, and no rank computes meanwhile. And 16 ranks cannot
#   share 8 heads of K and V without copies. The copies are more bytes and more memory.
# - **Hybrid 32 x 4 and 64 x 2.** They leave a host on 4 NICs or on 2.
# - **Ring.** It leaves a host on one NIC, and a slow hop is due every round.
# - **All-to-all.** 128 ranks cannot share 32 heads, so it is not in the table.
#
# No way is the best everywhere. Now 4 such hosts, a short sequence of 32,768 tokens, and 32 heads of K and V:

# %%
seconds = rank_ways(Cluster(hosts=4, per_host=8, **H100), replace(grouped, kv_heads=32), S=2**15)
assert min(seconds, key=seconds.get) == "all-to-all"

# %% [markdown]
# A device has 1,024 tokens. There is too little computing to hide anything, so the fewest bytes between hosts win. In
# all-to-all each number leaves its device once. In a ring K and V visit all hosts.
#
# Does the planner say what happens? Here all five ways run between two hosts with one slow link, that is, with one
# NIC each. ([The numbers](../bench/results/five_ways.md), made by
# [`bench/five_ways.py`](../bench/five_ways.py).) Lower is faster, and 1 is computing alone:

# %%
crossover.draw()

# %% [markdown]
# The lines cross: no way is the fastest everywhere. On a slow link and a short sequence, all-to-all wins, because it
# sends the fewest bytes to the other host. On the long sequence computing takes most of the time, and all ways are
# nearer to each other. With one NIC the double ring gains little here: it sends 2 blocks of a device pair where the
# ring sends 3, and its last slow hop is exposed for all devices of the host at once. All-gather lies above its line.
# One reason: the reduce-scatter of gloo sends the gradients twice, and the simulation counts them once.
#
# `python -m ringlab.planning.cost_model --hosts 16 --per-host 8 ...` prints such a table for your cluster and your model, with
# the memory of each way and the reason for its time.
#
# ## Unequal links, unequal devices
#
# **Links.** Of the links between four hosts one is slow. A ring of four uses four of the six pairs. So choose an order
# that leaves the slow pair out:

# %%
between = [[0, 5, 25, 25], [5, 0, 25, 25], [25, 25, 0, 25], [25, 25, 25, 0]]  # GB/s from host to host

for rest in permutations(range(1, 4)):
    order = (0, *rest)
    links = [between[i][j] for i, j in zip(order, (*rest, 0), strict=True)]  # the last one sends to 0
    if rest[0] < rest[-1]:  # the other way round it is the same ring
        print(f"ring {' '.join(map(str, order))}: links of {links}, slowest {min(links)} GB/s")
assert best_order(between) == (0, 2, 1, 3)

# %% [markdown]
# The slowest link counts, not the sum. `best_order` of [`ringlab/planning/host_order.py`](../ringlab/planning/host_order.py) tries all
# orders up to 9 hosts, as this loop does. For more hosts it improves a good order step by step.
#
# **Devices.** A slow device makes all ranks wait, and no chunk length hides that (chapter 9). But chunks may differ
# in length. Without a mask, rank $r$ computes $C_r \cdot S$ pairs in all rounds. So give it tokens in proportion to
# its speed. Four devices, one of them at half speed, and 28 tokens:


# %%
def ring_of_chunks(chunks, speeds):
    """Seconds, if speeds[r] pairs of a query and a key take one second on rank r, and messages take none."""
    P = len(chunks)
    times = [[chunks[r] * chunks[(r - t) % P] / speeds[r] for r in range(P)] for t in range(P)]
    return duration(simulate_timeline(times, [0] * P))


speeds = [2, 2, 2, 1]
for chunks in ([7, 7, 7, 7], [8, 8, 8, 4]):
    print(f"chunks of {chunks} tokens: {ring_of_chunks(chunks, speeds):g} s")
assert ring_of_chunks([8, 8, 8, 4], speeds) == 28**2 / sum(speeds)  # nobody waits
assert proportional_chunks(28, speeds) == [8, 8, 8, 4]

# %% [markdown]
# With equal chunks it takes as long as with four slow devices. In proportion nobody waits. The trainable ring takes
# contiguous chunks of any lengths. Under a causal mask these are not balanced, and balanced layouts need equal chunks.
# And a host with a slow NIC can cost more time than it saves: `python -m ringlab.planning.unequal` counts how many hosts of a
# mixed cluster are worth having.
#
# > **One number to remember: the number of NICs of a host.** The double ring hides its slow hops with chunks
# > that many times shorter. For hosts of 8 A100s with 8 NICs: 24,960 / 8 = 3,120 tokens.
#
# ## Questions
#
# <details><summary>Your chunks are so long that the flat ring hides its slow hops. Does the double ring help?</summary>
#
# No. Both then take about as long as computing alone. The flat ring needs less memory, because the double ring has
# buffers for its slow hops, too.
# </details>
#
# <details><summary>Why not begin the slow hop at the end of a turn, with the block in hand then?</summary>
#
# Every rank would still see every block once, so the result would be right. But the next host needs the block in the
# very next round. So the slow hop would have the time of one round, as in the flat ring, and not of $g$ rounds.
# </details>
#
# <details><summary>16 hosts of 8 devices, and each host has only one NIC. Which way is fast?</summary>
#
# With 8 K/V heads, none: try `nics=1`. The K and V of a host must leave through its NIC, in whatever order. With more
# NICs the same bytes take less time. With longer chunks there is more computing beside them: it grows with the square
# of the length, and the bytes do not.
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


# %%
# Seconds of the forward pass of the double ring, with a NIC for each device. Computing on a block
# takes `computing` seconds, a hop inside a host `fast`, a hop between hosts `slow`.
# Messages travel while devices compute
def my_seconds(n, g, computing, fast, slow):
    return ...


print(check_seconds(my_seconds))

# %%
# GB/s between five hosts, the same both ways. In which order should a ring visit them? Begin with host 0
between = [
    [0, 80, 40, 20, 10],
    [80, 0, 80, 20, 40],
    [40, 80, 0, 80, 20],
    [20, 20, 80, 0, 80],
    [10, 40, 20, 80, 0],
]
my_order = ...  # five numbers: [0, ...]
print(check_order(my_order))

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
#
# def my_seconds(n, g, computing, fast, slow):
#     turn = computing + (g - 1) * max(computing, fast)
#     return turn + (n - 1) * max(turn, slow)
#
# my_order = [0, 2, 3, 4, 1]
# ```
# </details>
#
# Read [`ringlab/training/double_ring.py`](../ringlab/training/double_ring.py) and [`ringlab/planning/two_speeds.py`](../ringlab/planning/two_speeds.py)
# now. To plan a cluster of your own: `python -m ringlab.planning.cost_model --help`.
