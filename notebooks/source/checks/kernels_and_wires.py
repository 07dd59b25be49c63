"""Checks of chapters 8a, 8b, 9 and 17."""

import math
from functools import partial

import torch

from notebooks.source.checks.answers import Exercise, as_tensor

# Chapter 8a: the share of a merge, a kernel's lse made natural -------------------------------------------------------


def plain_kernel(q, k, v, scale=1.0, causal=False, base=math.e):
    """Attention of q (Sq, D) over k and v (Sk, D): out (Sq, D) and lse (Sq,), the logarithm to this base."""
    q, k, v = (as_tensor(x) for x in (q, k, v))  # of numpy, too
    scores = scale * (q @ k.T) / q.shape[1] ** 0.5
    if causal:  # the last query sees all keys
        scores = scores.masked_fill(torch.ones_like(scores).tril(max(0, len(k) - len(q))) == 0, -math.inf)
    return torch.softmax(scores, dim=1) @ v, scores.logsumexp(dim=1) / math.log(base)


LSE, LSE_J = torch.tensor([0.0, 1.0, -2.0]).double(), torch.tensor([0.0, 3.0, -2.5]).double()
MANY = torch.linspace(-5, 5, 7)
DEPENDS = "the share depends on the difference of the two only"
check_merging_share = Exercise(  # (lse, lse_j), both (Sq,) -> the share that the second has of the merged result
    right=lambda lse, lse_j: torch.sigmoid(lse_j - lse),
    wrong={
        "that is the share of what was merged before; lerp wants that of the new block": "torch.sigmoid(lse - lse_j)",
        "divide by the sum of both, e^lse + e^lse_j": "lse_j.exp()",
        "that is e^lse_j / e^lse; divide by the sum of both, e^lse + e^lse_j": "(lse_j - lse).exp()",
    },
    cases={
        "it is e^lse_j / (e^lse + e^lse_j)": [(LSE, LSE_J)],
        f"lse near 1000: e^1000 overflows; {DEPENDS}": [(LSE + 1000, LSE_J + 1000)],
        f"lse near -1000: e^-1000 is 0; {DEPENDS}": [(LSE - 1000, LSE_J - 1000)],
        "with 7 queries": [(MANY, -MANY)],
    },
)


GENERATOR = torch.Generator().manual_seed(0)


def _named(kernel, q, k, v):
    """out, and the natural lse, whatever the kernel's base."""
    return dict(zip(("out", "lse"), plain_kernel(q, k, v, causal=kernel.keywords["causal"]), strict=True))


def _of(S, D, base, generator, causal=False):
    return partial(plain_kernel, causal=causal, base=base), *torch.randn(3, S, D, generator=generator)


NATURAL = "it was natural already; ask the kernel before you change its lse"
check_natural_lse = Exercise(  # kernel, q, k, v -> (out, natural lse), for a kernel whose lse is natural or in base 2
    right=_named,
    wrong={
        NATURAL: "{'lse': kernel(q, k, v)[1] * math.log(2)}",
        "you return it as it came; ask the kernel, with one key of score 1": "{'lse': kernel(q, k, v)[1]}",
        "multiply by log 2, do not divide": "{'lse': kernel(q, k, v)[1] / math.log(kernel.keywords['base'])}",
        "this is not what the kernel returns, whose causal mask is its own": "{'out': plain_kernel(q, k, v)[0]}",
    },
    cases={
        "a kernel whose lse is natural": [_of(*size, math.e, GENERATOR) for size in ((6, 4), (3, 2), (5, 9))],
        "a kernel whose lse is in base 2; the base is a matter of lse only, out is right as it is": [
            _of(*size, 2, GENERATOR) for size in ((6, 4), (3, 2), (5, 9))
        ],
        "a kernel with a causal mask": [_of(4, 3, base, GENERATOR, causal=True) for base in (2, math.e)],
    },
)


# Chapter 8b: when a stream is done, the speed of a kernel ------------------------------------------------------------

check_end = Exercise(  # seconds of a launch, of a kernel, and how many -> when the last is done, on one stream
    right=lambda launch, work, n: launch + work + (n - 1) * max(launch, work),
    wrong={
        "the host does not wait: while a kernel computes, it launches the next": "n * (launch + work)",
        "a kernel begins when it has been launched: nothing computes during the first launch": "n * work",
        "so it is for long kernels; a short one ends before the next is launched": "launch + n * work",
        "then the host has launched all of them; the last one still computes": "n * launch",
        "so it is where launches are longer; long kernels wait for each other, in one stream": "n * launch + work",
        "nothing computes in the first launch, and nothing is launched in the last kernel": "n * max(launch, work)",
        "a stream runs one kernel after the other, not all at once": "launch + work",
    },
    said="the first launch, n - 1 times the longer of the two, and the last kernel",
    cases=[(82.0, 10.0, 8), (82.0, 3400.0, 8), (5.0, 5.0, 3), (2.0, 7.0, 1), (9.0, 4.0, 20)],
    remark="a kernel shorter than its launch is free: the host is what takes the time",
)


def _tflops(share=0.5, passes=2.5, per=1e12):
    """With this share of the pairs, and so many times the forward pass in the backward one."""
    return lambda H, S, D, backward, seconds: 4 * H * S**2 * D * share * (passes if backward else 1) / seconds / per


check_tflops = Exercise(  # of causal attention
    right=_tflops(),
    wrong={
        "a causal kernel computes half of the pairs": _tflops(share=1),
        "q kᵀ and p v: two products, each with 2 FLOPs for each pair and number": _tflops(share=0.25),
        "the backward pass has five products where the forward pass has two": _tflops(passes=1),
        "the scores come once more in the backward pass: five products, not four": _tflops(passes=2),
        "3.5 times is both passes; asked is the backward pass alone": _tflops(passes=3.5),
        "in TFLOP/s: divide by 1e12": _tflops(per=1),
        "a pair is a query and a key: S² of them": lambda H, S, *rest: _tflops()(H, S, *rest) / S,
    },
    said="4 H S² D, half of it, 2.5 times in the backward pass, over the seconds",
    cases=[(32, 16384, 128, False, 3.43e-3), (32, 16384, 128, True, 9.68e-3), (16, 4096, 64, False, 1e-3)],
    remark="the first case is 641 TFLOP/s: cuDNN. At half of that, ask which kernel ran",
)


# Chapter 9: the chunk that hides its messages, peak memory -----------------------------------------------------------


check_smallest_chunk = Exercise(  # that hides its messages, in tokens
    right=lambda flops, bandwidth, H, G, itemsize: itemsize / 2 * G / H * flops / bandwidth,
    wrong={
        "that holds in bfloat16 with G = H only": lambda f, b, H, G, w: f / b,
        "only G of H heads travel": lambda f, b, H, G, w: w / 2 * f / b,
        "fewer heads travel than compute, so a shorter chunk is enough": lambda f, b, H, G, w: w / 2 * H / G * f / b,
        "a number has itemsize bytes": lambda f, b, H, G, w: G / H * f / b,
        "K and V travel, not one of them": lambda f, b, H, G, w: w / 4 * G / H * f / b,
        "a multiplication and an addition are two FLOPs": lambda f, b, H, G, w: w * G / H * f / b,
        "turned over: a fast link needs shorter chunks": lambda f, b, H, G, w: w / 2 * G / H * b / f,
    },
    said="4 C C H D / flops seconds of computing, 2 C G D itemsize / bandwidth seconds of messages",
    cases=[(312e12, 12.5e9, 32, 32, 4), (312e12, 25e9, 32, 8, 2), (1e12, 1e9, 6, 3, 8), (2e12, 1e9, 9, 1, 4)],
    remark="with 312 TFLOP/s, 25 GB/s, 32 heads on 8 and bfloat16 that is 3,120 tokens",
)


def _peak(tensors, sums, wide=None):
    """So many times H and so many times G heads, in the dtype and as sums of `wide` bytes."""
    (a, b), (c, d) = tensors, sums
    return lambda H, G, C, D, itemsize: (
        ((a * H + b * G) * itemsize + (c * H + d * G) * (wide or max(itemsize, 4))) * C * D
    )


check_peak_memory_backward = Exercise(  # bytes that a device of the full ring holds in the backward pass
    right=_peak((4, 8), (1, 4)),
    wrong={
        "the sums are float32 at least: 4 bytes, or 8": lambda H, G, C, D, w: (5 * H + 12 * G) * w * C * D,
        "sums of float64 are float64: 8 bytes": _peak((4, 8), (1, 4), wide=4),
        "these are numbers, not bytes": lambda H, G, C, D, w: (5 * H + 12 * G) * C * D,
        "K and V have G heads, not H": _peak((12, 0), (5, 0)),
        "K and V travel in two buffers, beside the rank's own k and v": _peak((4, 6), (1, 4)),
        "the sums of dK and dV travel in two buffers": _peak((4, 8), (1, 2)),
        "the sum of dQ takes room too": _peak((4, 8), (0, 4)),
        "dq, dk and dv of the block in hand take room too": _peak((3, 6), (1, 4)),
        "the gradient of out takes room too": _peak((3, 8), (1, 4)),
        "that is the forward pass": _peak((2, 4), (0, 0)),
    },
    said="count the list: heads of q, out, d_out, dq; heads of k, v, dk, dv, in buffers; then the sums in float32",
    cases=[(32, 8, 1000, 128, 2), (6, 3, 7, 64, 4), (5, 5, 10, 8, 8), (9, 1, 33, 16, 2)],
    remark="with G = H and bfloat16 that is 22 chunks",
)


# Chapter 17: the block in hand, the blocks on a NIC ------------------------------------------------------------------


def _block(host, device):
    """host(a, i, u, s, n, g) and device(...) of the block, of rank a·g + i in round u·g + s."""

    def answer(rank, t, n, g):
        numbers = *divmod(rank, g), *divmod(t, g), n, g
        return host(*numbers) % n * g + device(*numbers) % g

    return answer


def _turn(a, i, u, s, n, g):
    return a - u


def _inside(a, i, u, s, n, g):
    return i - s


check_block = Exercise(  # rank, round, hosts, devices of a host -> the block in hand
    right=_block(_turn, _inside),
    wrong={
        "that is the flat ring, whose blocks leave the host in every round": lambda rank, t, n, g: (rank - t) % (n * g),
        "the host changes once a turn, not in every round": _block(lambda a, i, u, s, n, g: a - u * g - s, _inside),
        "that never leaves the host: after a turn other blocks are due": _block(lambda a, *_: a, _inside),
        "the blocks must turn inside the host, too": _block(_turn, lambda a, i, *_: i),
        "the first block of a host has the number host * g": "(rank // g - t // g) % n + (rank % g - t) % g",
        "blocks come from the rank before: minus": _block(lambda a, i, u, *_: a + u, lambda a, i, u, s, n, g: i + s),
        "the turns go the wrong way: blocks come from the host before": _block(lambda a, i, u, *_: a + u, _inside),
        "a turn has g rounds, not n": _block(lambda a, i, u, s, n, g: a - (u * g + s) // n, _inside),
        "the next host's blocks come a round early": _block(lambda a, i, u, s, n, g: a - (u * g + s + 1) // g, _inside),
        "there the slow hop has the time of one round": _block(_turn, lambda a, i, u, s, n, g: i - s - u * (g - 1)),
        "the host of a rank is rank // g, not rank % n": "(rank % n - t // g) % n * g + (rank // n - t) % g",
    },
    said="(host - turn) % n * g + (device - round of the turn) % g",
    cases=[(rank, t, n, g) for n, g in ((2, 4), (3, 2), (1, 3), (4, 1)) for t in range(n * g) for rank in range(n * g)],
    remark="every rank has every block in hand once, and each block of another host at the right time",
)


check_blocks_of_a_nic = Exercise(  # hosts, devices of a host, NICs of a host -> blocks that a NIC sends forward
    right=lambda n, g, nics: (n - 1) * g / nics,
    wrong={
        "that is the flat ring, all of whose blocks leave the host at one device": "n * g - 1",
        "a ring of n hosts has n - 1 slow hops: after the last turn nobody needs another block": "n * g / nics",
        "that is one NIC for each device; with fewer NICs several devices share one": "n - 1",
        "that is the whole host; it has several NICs": "(n - 1) * g",
        "most hops stay inside the host: only the slow hops use a NIC": "(n * g - 1) / nics",
        "that is a slow hop; a pass has n - 1 of them": "g / nics",
        "fewer NICs have more to send, not less": "(n - 1) * nics / g",
    },
    said="n - 1 slow hops, in each of which g devices share the NICs",
    cases=[(16, 8, 8), (16, 8, 4), (2, 4, 1), (5, 6, 3), (1, 8, 2)],
    remark="16 hosts of 8 with a NIC for each device: 15 blocks; the one NIC that a flat ring uses sends 127",
)
