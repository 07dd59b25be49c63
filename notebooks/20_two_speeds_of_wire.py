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
# [NICs](../docs/glossary.md#nic), which are 9 to 40 times slower. A flat [ring](../docs/glossary.md#ring) is as slow as its
# slowest link. After this chapter you can
#
# - say why one slow [hop](../docs/glossary.md#hop) makes every [round](../docs/glossary.md#round) slow,
# - write the schedule of a [double ring](../docs/glossary.md#double-ring), in which a slow hop has the time of many rounds,
# - ask the planner which way to share a sequence is the fastest on a cluster, and say why,
# - say what to do with 16 hosts of 8 devices that have one card each.
#
# Track *plan*. Before it: chapters 9 and 19. 30 minutes to read, 20 for the exercises.

# %%
# %matplotlib inline
from dataclasses import replace
from itertools import permutations
from statistics import median

import torch

from bench import record
from bench.five_ways_predicted import FORWARD, TRAIN, predicted, timed
from figures import crossover
from figures import double_ring as picture
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
from ringlab.planning.hidden_communication import AttentionLayer
from ringlab.planning.host_order import best_order
from ringlab.planning.ranking import computing_seconds, rank_ways
from ringlab.planning.round_costs import realistic
from ringlab.planning.ways import Cluster
from ringlab.support.processes import launch
from ringlab.training import double_ring
from ringlab.training.layouts import unshard

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
# carried its block.
#
# Real numbers are worse. Here are 8 A100s (312 TFLOP/s): 300 GB/s inside a host, 12.5 GB/s between hosts. A chunk has
# $C$ = 4,096 tokens in bfloat16, and the model is 4,096 wide:

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
    seconds[name] = duration(computing, hops)
    print(f"{name}: {1e3 * seconds[name]:5.2f} ms, {seconds[name] / seconds['1 host of 8']:.2f} x one host")
assert abs(seconds["2 hosts of 4"] - seconds["8 hosts of 1"]) < 1e-12

# %% [markdown]
# Two hosts of 4 are as slow as 8 hosts of one device each: the six fast hops of each round gain nothing. And the flat
# ring leaves a host at one device only. If each device has a NIC, one of them sends all 7 blocks, and three send nothing.
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
double, flat = double_ring_seconds(2, 4, computing, fast, slow), seconds["2 hosts of 4"]
print(f"2 hosts of 4 A100s: {1e3 * double:.2f} ms; the flat ring took {1e3 * flat:.2f} ms")

# %% [markdown]
# In the small example a slow hop takes as long as two rounds: it is hidden, and no rank waits. On the A100s it takes
# longer than four rounds. But every rank waits for one slow hop, not for 7. In the picture (2 hosts of 4) a bar is a
# slow hop, which may take as long as four rounds:

# %%
picture.draw()

# %% [markdown]
# ## In code
#
# A mesh (chapter 13) has the two groups of a rank: `across` joins the same device of all hosts, `inside` joins the
# devices of one host. `arriving_blocks` of chapter 6 hands out the block in hand, and meanwhile the next block travels:
# here from host to host. `turn(u)` is the ring inside this host in turn u: what it does with the blocks that came from u
# hosts back. `yield` hands out the round, K, V and what the mask leaves to compute (chapter 15):

# %%
print_source(double_ring.DoubleRing.turn)
print_source(double_ring.DoubleRing.rounds)

# %% [markdown]
# `self.inside` is the schedule inside a host. On CPUs it may be shared memory, so that only the slow hops are messages:
# that is all of `TwoLevels` in [`shared_memory.py`](../ringlab/training/shared_memory.py).
#
# All else is the trainable ring: it asks a schedule for `rounds` and does not know how blocks travel. Four real
# processes, with a causal mask and zigzag chunks:

# %%
d_out = torch.arange(16.0, dtype=torch.float64).view_as(x)
in_hand, results = zip(*launch(double_ring.on_rank, P, n, [x, x, x, d_out], device="cpu"), strict=True)
assert [list(blocks) for blocks in zip(*in_hand, strict=True)] == schedule
print("four processes had the blocks in hand that the table above says")

q, k, v = (x.clone().requires_grad_() for _ in "qkv")
right = naive_attention(q, k, v, causal=True)
right.backward(d_out)
exact = right, q.grad, k.grad, v.grad
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
# Chapter 19 has the other ways. In *hybrid 16 x 8*, the 8 ranks of a row exchange tokens for heads, and rings of 16
# ranks go across the rows. The planner simulates each way step by step. Messages that use a link at the same time share
# its bytes/s. Here are 16 hosts of 8 H100s, with a NIC for each device, and a sequence of 1,048,576 tokens:


# %%
def show_ways(cluster, layer, S, **options):
    """The planner's table, the fastest first: a layer of a causal model, forward and backward."""
    rows = [
        row for row in rank_ways(cluster, layer, 32, S / cluster.devices, 80e9, **options) if row.seconds < float("inf")
    ]
    print(f"computing alone{1e3 * computing_seconds(cluster, layer, S / cluster.devices):>9,.1f} ms    GB on a NIC")
    for row in rows:
        print(f"{row.name:<15}{1e3 * row.seconds:>9,.1f}{row.between_hosts / 1e9:>18.2f}")
    return {row.name: row for row in rows}


def h100s(hosts, nics=8):
    return Cluster(hosts, 8, flops=990e12, bandwidth=450e9, host_bandwidth=12.5e9, nics=nics)


grouped = AttentionLayer(heads=32, kv_heads=8, head_dim=128, itemsize=2)
ways = show_ways(h100s(16), grouped, S=2**20)
assert ways["ring"].seconds > 5 * ways["double ring"].seconds

# %% [markdown]
# - **Double ring.** A slow hop has the time of 8 rounds, and all 8 NICs work. All hops are hidden but the last two of
#   the gradients.
# - **Hybrid 16 x 8.** Its exchange stays inside a host. Its hops have the bytes of the double ring's slow hops, and as
#   much time. In 8 x 16 and 4 x 32 the exchange leaves the host; 32 x 4 and 64 x 2 leave a host on 4 NICs or on 2.
# - **All-gather.** All NICs work. The first K and V come before the computing, and the last sum of gradients after it.
# - **Ring.** It leaves a host on one NIC, and a slow hop is due every round.
# - **16 rings of 8.** This is another job: **16 sequences at once**, each in the ring of one host. All 16 are done after
#   3,983 ms. That is 249 ms for each, and nothing of them leaves a host.
#
# All of this is ideal: products, and bytes on links. A round costs more. It reads and writes the running output again;
# kernels and messages need time to begin; messages slow the computing beside them; the blocks of a short chunk do not
# fill a GPU. `realistic` adds these costs ([`round_costs.py`](../ringlab/planning/round_costs.py)), and FlashAttention 3
# reaches 680 TFLOP/s of the 990, backward 586:

# %%
kernel = {"flops": 680e12, "backward_flops": 586e12, "memory_bandwidth": 3.35e12, "multiprocessors": 132}
paid = show_ways(realistic(replace(h100s(16), **kernel)), grouped, S=2**20, mask="causal")
assert next(iter(paid)) == "hybrid 16 x 8"

# %% [markdown]
# **Few rounds on long blocks win.** The double ring has 128 rounds, hybrid 16 x 8 has 16. Others published 28 measured
# times on one host. With these costs the planner's median error is 5 %, and it names the faster in 22 of 23 pairs
# (`python -m ringlab.planning.scoreboard`). A ring came last there. The rest of this page is ideal again.
#
# All-to-all is not possible here: 128 ranks cannot share 32 heads. On 4 such hosts, with 32 K/V heads and a short sequence, it
# is the fastest. A device has 1,024 tokens, too few to hide anything. So the fewest bytes between hosts win:

# %%
ways = show_ways(h100s(4), AttentionLayer(heads=32, kv_heads=32, head_dim=128), S=2**15)
assert next(iter(ways)) == "all-to-all"
assert ways["4 rings of 8"].seconds < ways["all-to-all"].seconds

# %% [markdown]
# The last row says more: so short a sequence should stay in one host. Four of them, each in the ring of a host, are done
# as soon as one that is shared by all hosts.
#
# ## 16 hosts of 8, with one card each
#
# **The gain of the double ring comes from the NICs.** It sends $(n - 1) \cdot g$ blocks from a host, the flat ring
# $P - 1$: that is hardly less. What if all 8 devices of a host share one NIC?

# %%
print("                     the fastest way, one sequence       16 sequences at once")
for S, cards in ((2**20, 8), (2**20, 4), (2**20, 1), (2**22, 1), (2**23, 1)):
    chunk = S / 128
    best, *_, many = rank_ways(h100s(16, cards), grouped, 32, chunk, 80e9)
    alone, room = computing_seconds(h100s(16), grouped, chunk), f"{many.held / 1e9:.0f} GB a device"
    times = f"{1e3 * best.seconds:>6,.0f} ms, {best.seconds / alone:.2f} x computing"
    fits = f"{1e3 * many.each:,.0f} ms each, {room}" if many.held < 80e9 else f"do not fit: {room}"
    print(f"S = {S:>9,}, {cards} card{' ' if cards == 1 else 's'} {best.name:<12}{times}    {fits}")
    if (S, cards) == (2**20, 1):
        assert best.seconds > 1.3 > 5 * many.each  # seconds
best, *_ = rank_ways(h100s(4, nics=1), grouped, 32, 2**22 / 32, 80e9)
print(f"S = {2**22:>9,}, on 4 of the hosts: {best.name}, {1e3 * best.seconds / 4:,.0f} ms each for 4 sequences at once")

# %% [markdown]
# In plain words:
#
# 1. **You train on many sequences of a million tokens, and one fits a host.** Give each host a sequence of its own. A
#    sequence takes 249 ms a layer instead of 1,336. Only weights and their gradients use the card. The price is waiting:
#    no sequence is done before 3,983 ms, and a step has at least 16 sequences.
# 2. **One sequence must be done as soon as possible.** Then no way is fast. 16.6 GB must pass the card, and that takes
#    1,328 ms. The plan sees the double ring and a hybrid 2.5 % ahead of the ring. Below the ring was faster in training,
#    measured between two hosts with one card each: stay with the ring. Buy cards: 4 of them bring it to 343 ms.
# 3. **A sequence does not fit a host.** Give it as few hosts as can hold it. 4 million tokens need 4 hosts: 4 sequences at
#    once take 4,002 ms each, and a single one on all 16 hosts takes 5,489. Longer sequences need no care: computing grows
#    with the square of the length, and the bytes do not. At 8 million tokens one card hides all messages of the flat ring.
#
# ## Measured
#
# Here the five ways of one sequence run between two hosts with one NIC each
# ([the numbers](../bench/results/README.md#five_ways)). Lower is faster:

# %%
crossover.draw()

# %%
results = record.load("five_ways")
for which in (FORWARD, TRAIN):
    cells = [[median(timed(row, way, which)) for way in ("ring", "double ring")] for row in results["rows"]]
    planned = [[predicted(results, row, way, which) for way in ("ring", "double ring")] for row in results["rows"]]
    (slower, most), (by_plan, most_by_plan) = (
        (sum(b > a for a, b in each), max(b / a - 1 for a, b in each)) for each in (cells, planned)
    )
    print(f"{which}: the double ring is slower than the ring in {slower} of {len(cells)} cells, by {most:.0%} at most")
    print(f"    by the planner in {by_plan}, by {max(0, most_by_plan):.0%} at most")

# %% [markdown]
# - **Hybrid is the fastest way in 16 of 24 cells, and never far behind.** It exchanges heads inside the host and sends few
#   bytes to the other host. In training on a slow link, all-to-all sends the fewest, and wins on the short sequence.
# - **The slower the link, the more the double ring gains.** At 20 MB/s it takes up to 39 % less time than the ring. On the
#   faster links it loses up to 11 %, mostly in training: its last slow hop takes the gradients of all devices of a host
#   through the one card, and nothing hides it. The planner knows that.
# - **All-gather is the slowest way in training.** It gathers a head at a time, and gloo's reduce-scatter sends the
#   gradients twice. The predictions count both.
# - **The lines are predicted from a calibration alone:** `calibrate` measured the hosts just before. 97 % of the times are
#   within 15 % of their prediction. In 22 of 24 cells the predicted winner wins, or takes at most 5 % longer.
#
# ## Unequal links
#
# Of the links between four hosts one is slow. A ring of four uses four of the six pairs. So choose an order that leaves
# the slow pair out:

# %%
between = [[0, 5, 25, 25], [5, 0, 25, 25], [25, 25, 0, 25], [25, 25, 25, 0]]  # GB/s from host to host
for rest in permutations(range(1, 4)):
    order = (0, *rest)
    links = [between[i][j] for i, j in zip(order, (*rest, 0), strict=True)]  # the last one sends to 0
    if rest[0] < rest[-1]:  # the other way round it is the same ring
        print(f"ring {' '.join(map(str, order))}: links of {links}, slowest {min(links)} GB/s")
assert best_order(between) == (0, 2, 1, 3)

# %% [markdown]
# The slowest link counts, not the sum. `best_order` of [`ringlab/planning/host_order.py`](../ringlab/planning/host_order.py)
# does this for many hosts. A slow *device* makes all ranks wait, too: give it fewer tokens, in proportion to its speed
# ([`ringlab/planning/unequal.py`](../ringlab/planning/unequal.py)).
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
# <details><summary>16 hosts of 8 devices, and each host has only one NIC. Which way is fast?</summary>
#
# For one sequence of a million tokens, none. For many sequences, a ring per host, if a host can hold a sequence. For much
# longer sequences, the flat ring: computing then hides its hops.
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
# Open [`double_ring.py`](../ringlab/training/double_ring.py) now: the double ring, on processes. [`two_speeds.py`](../ringlab/planning/two_speeds.py)
# has the simulated hosts. To plan a cluster of your own: `ring-plan --help`.
