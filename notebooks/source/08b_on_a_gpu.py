# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 8b · On a GPU
#
# The ring of chapter 8 is written for GPUs, too. It ran on one, once: what that run found is fixed, and the fixed code has not
# run on a GPU ([what was run](../docs/cluster.md#what-was-run-on-a-gpu)). Three things differ there: which
# [kernel](../docs/glossary.md#fused-kernel) computes a [block](../docs/glossary.md#block), who waits for whom, and how
# messages travel. After this chapter you can
#
# - find out whether your ring runs at full speed,
# - read a clock at the right moment,
# - say which lines of a ring make the host wait.
#
# Track *train*. You need chapters 1 to 8, and no GPU; next comes [10 · a model in the
# ring](10_a_model_in_the_ring.ipynb). 13 minutes to read, 10 for the exercises.

# %% jupyter={"source_hidden": true} tags=["hide-input"]
# %matplotlib inline
import time

import torch

from notebooks.source.checks.kernels_and_wires import check_end, check_tflops
from ringlab.basics.blockwise_attention import blockwise_attention
from ringlab.basics.naive_attention import naive_attention

# %% [markdown]
# ## The failure
#
# This project wrote its ring on CPUs. Then it ran on one H100, for the first time. 3,240 results were compared with float64, and
# all were right. (Other calls then found two mistakes: the page above lists them.) But the ring was about half as fast as
# PyTorch's own attention on the same GPU, and no test had noticed. These speeds were **measured once, by hand, on one H100**.
# They are TFLOP/s of one attention call:

# %%
KERNELS = [  # H, S, D, mask; TFLOP/s forward of FlashAttention 2, which the ring took, and of cuDNN. Causal counts half
    ("32", 4_096, 128, "causal", 260, 491),
    ("32", 4_096, 128, "full", 343, 623),
    ("32", 16_384, 128, "causal", 338, 641),
    ("32", 16_384, 128, "full", 352, 647),
    ("32 on 8", 16_384, 128, "causal", 312, 628),
    ("16", 16_384, 64, "causal", 271, 449),
    ("16", 16_384, 64, "full", 302, 433),
]
print("H         S       D   mask     ring's kernel   PyTorch's choice   share")
for H, S, D, mask, ours, theirs in KERNELS:
    print(f"{H:<8}{S:>6,}{D:>6}   {mask:<8}{ours:>10}{theirs:>18}{ours / theirs:>13.2f}")
    assert ours / theirs < 0.75

# %% [markdown]
# Why did no test notice? A test asks whether the numbers are right, and two kernels give the same numbers, up to rounding. See
# it on your machine, with the fused kernel of chapter 8a and the plain blocks of chapter 2:

# %%
q, k, v = torch.randn(3, 1, 4, 1024, 64, generator=torch.Generator().manual_seed(0)).unbind()
flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
kernels = {"fused": lambda: flash(q, k, v)[0], "plain blocks": lambda: blockwise_attention(q, k, v, block_size=64)[0]}
exact = naive_attention(*(x.double() for x in (q, k, v)))
for name, kernel in kernels.items():
    kernel()  # the first call warms up
    begin = time.perf_counter()
    out = kernel()
    seconds = time.perf_counter() - begin
    assert (out - exact).abs().max() < 1e-5
    print(f"{name:<14}right   {seconds:.4f} s")

# %% [markdown]
# ## The idea: ask PyTorch
#
# `scaled_dot_product_attention` has several kernels and chooses one, because which is the fastest depends on the GPU. Others
# measured (transformers, pull request 48163): cuDNN's kernel is about twice as fast as FlashAttention 2 on an H100, and
# slower than it on an A100. The choice also changes from version to version of PyTorch, so a table of your own gets old.
#
# So the ring must not choose. It asks the function that PyTorch's attention asks, with the same q, k and v:

# %%
from torch.nn.attention import SDPBackend

choice = torch._fused_sdp_choice(q, k, v, None, 0.0, True)  # no mask, no dropout, causal
print("PyTorch would take:", SDPBackend(choice).name)
assert choice == SDPBackend.FLASH_ATTENTION.value  # on a CPU; on an H100 it is CUDNN_ATTENTION

# %% [markdown]
# Then the ring calls the kernel of this name, because only there it gets the [lse](../docs/glossary.md#log-sum-exp). It
# refuses a kernel where PyTorch's own is wrong, and takes the plain block instead. Here is a causal
# [zigzag](../docs/glossary.md#zigzag-layout) ring with both kernels (S = 131,072, H = 8, D = 128, both passes). Each rank computed in
# turn on the one GPU, without messages:

# %%
for P, ours, right in ((2, 0.557, 0.977), (4, 0.548, 0.928), (8, 0.531, 0.871)):  # the share of PyTorch's attention
    print(f"{P} ranks: {ours:.2f} of the speed of PyTorch's attention; with its choice of kernel {right:.2f}")

# %% [markdown]
# Even with the right kernel some speed is missing, and more with more ranks. Blocks get shorter, and the results of
# each must be [merged](../docs/glossary.md#merge) and its gradients added up, which passes over memory once more.
#
# ## Who waits for whom
#
# On a CPU a call returns when its result is there. On a GPU it returns at once, because the host only **launches** a kernel: it
# puts it into a queue, a **stream**, which the GPU works off in order. So there are several clocks: that of the host, and one
# for each stream.


# %%
class Stream:
    """Each kernel begins when it has been launched, what it needs is there, and the one before it is done."""

    done = 0.0

    def launch(self, host, seconds, needs=0.0):
        self.done = max(self.done, host, needs) + seconds
        return self.done


LAUNCH = 82e-6  # seconds of the host for one attention call, measured by hand on the same machine
KERNEL = 4 * 32 * 16_384**2 * 128 / 2 / 641e12  # FLOPs of the third line above, over its FLOP/s
stream, host = Stream(), LAUNCH
stream.launch(host, KERNEL)
print(f"a clock that is read at once says        {1e3 * host:.2f} ms")
print(f"a clock that is read when the GPU is done {1e3 * stream.done:.2f} ms")
assert stream.done > 40 * host

# %% [markdown]
# So call `torch.cuda.synchronize()` before you read a clock, or you measure launches.
#
# **Messages** run in a stream of their own. NCCL's `wait()` does not stop the host: it makes the computing stream wait for the
# message, and returns. So the host can launch the next [rounds](../docs/glossary.md#round) while the GPU still computes the
# first one. Compare a host that runs ahead with one that waits for the GPU in each round:


# %%
def ring(computing, message, waits, P=8):
    host, compute, messages, block = 0.0, Stream(), Stream(), 0.0
    for t in range(P):
        if t < P - 1:  # the message of the next block is launched first
            host += LAUNCH
            arrives = messages.launch(host, message, needs=block)
        host += LAUNCH
        compute.launch(host, computing, needs=block)
        if waits:
            host = max(host, compute.done)
        block = arrives
    return max(host, compute.done)


print("computing a block   host runs ahead   host waits")
for computing in (5e-5, 5e-4, KERNEL):
    ahead, waiting = (ring(computing, computing / 2, waits) for waits in (False, True))
    print(
        f"{1e3 * computing:>13.2f} ms{1e3 * ahead:>15.2f} ms{1e3 * waiting:>10.2f} ms   {waiting / ahead:.2f} times as long"
    )
    assert waiting > ahead

# %% [markdown]
# Each round of the waiting host adds its launches to the time. With long blocks you hardly notice. With short blocks it is
# much, and then even the host that runs ahead is too slow: the GPU waits for launches.
#
# What makes a host wait? `.item()`, `print` of a tensor, `.cpu()`, an `if` on a tensor's value, and a check before each call
# that sends its facts through the GPU. The ranks of our ring do compare shapes and options before each call. But on one host
# they do so through pipes, and the GPU has no part in it.
#
# | | gloo, CPUs | NCCL, GPUs |
# |---|---|---|
# | a message runs | in threads | as a kernel, in a stream of its own |
# | `wait()` | stops the process | stops a stream |
# | the first message | connects, in milliseconds | makes a communicator, in up to seconds: warm up |
# | blocking `send`, `recv` | wait for each other | block a stream, one after the other |
#
# [The whole table](../docs/cluster.md#what-changes-against-gloo) is longer.
#
# **One GPU is enough** to try all of this. `torchrun --nproc_per_node=4 ring_attn.py --device cuda` lets four ranks
# share it. Their messages go through sockets and are slow: this is for learning and for tests.
#
# > **One number to remember: 2.** The wrong kernel took about twice the time on an H100, and every number was right. So time
# > your ring with one rank beside `scaled_dot_product_attention`: both must take the same time.
#
# ## Questions
#
# <details><summary>A bench says that attention takes 0.08 ms, whatever S is. What did it measure?</summary>
#
# The launch. The host put the kernel into a stream and read the clock. It must call `torch.cuda.synchronize()` first.
# </details>
#
# <details><summary>The ring with 8 ranks reaches 0.87 of PyTorch's speed with the same kernel. Where is the rest?</summary>
#
# In shorter blocks, on which a kernel is slower, and in what lies between the kernels. Each block's result is merged and
# its gradients are added up, in float32. These pass over memory; they compute little.
# </details>
#
# ## Your turn


# %%
# The host launches n equal kernels into one stream and never waits. A launch takes `launch` seconds of the host, and a
# kernel takes `work` seconds of the GPU. When is the last kernel done? The first launch begins at 0
def my_end(launch, work, n):
    return ...


print(check_end(my_end))


# %%
# The speed of a causal attention call in TFLOP/s: H heads, S tokens, head dim D. A product of matrices takes 2 FLOPs for
# each pair of a query and a key and each of the D numbers. The forward pass has 2 of these products, the backward 5
def my_tflops(H, S, D, backward, seconds):
    return ...


print(check_tflops(my_tflops))

# %% [markdown]
# <details><summary>Solutions</summary>
#
# ```python
# def my_end(launch, work, n):
#     return launch + work + (n - 1) * max(launch, work)
#
# def my_tflops(H, S, D, backward, seconds):
#     products = 5 if backward else 2
#     return products * 2 * H * D * S**2 / 2 / seconds / 1e12
# ```
# </details>
#
# Open [`fused_block.py`](../ringlab/ring/fused_block.py) now: `choose_kernel` asks PyTorch. `python -m bench.gpu` checks and
# measures [your GPU](../docs/cluster.md#one-command-three-minutes), in three minutes.
