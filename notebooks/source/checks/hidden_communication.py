"""Checks of chapter 9: the chunk that hides its messages, peak memory."""

from notebooks.source.checks.answers import Exercise


def _heads(random):
    """H heads of queries, G of K and V."""
    G = random.randint(1, 16)
    return random.randint(1, 8) * G, G


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
    cases={
        "4 C C H D / flops seconds of computing, 2 C G D itemsize / bandwidth seconds of messages": [
            (312e12, 12.5e9, 32, 32, 4),
            (312e12, 25e9, 32, 8, 2),
            (1e12, 1e9, 6, 3, 8),
            (2e12, 1e9, 9, 1, 4),
        ]
    },
    draw=lambda r: (r.uniform(1e12, 1e15), r.uniform(1e9, 1e11), *_heads(r), r.choice((2, 4, 8))),
    remark="with 312 TFLOP/s, 25 GB/s, 32 heads on 8 and bfloat16 that is 3,120 tokens",
)


def _peak(tensors, sums, wide=None):
    """So many times H and so many times G heads, in the dtype and as sums of `wide` bytes."""
    (a, b), (c, d) = tensors, sums
    return lambda H, G, C, D, itemsize: (
        ((a * H + b * G) * itemsize + (c * H + d * G) * (wide or max(itemsize, 4))) * C * D
    )


check_peak_memory_backward = Exercise(  # bytes that a device of the trainable ring holds in the backward pass
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
    cases={
        "count the list: heads of q, out, d_out, dq; heads of k, v, dk, dv, in buffers; then the sums in float32": [
            (32, 8, 1000, 128, 2),
            (6, 3, 7, 64, 4),
            (5, 5, 10, 8, 8),
            (9, 1, 33, 16, 2),
        ]
    },
    draw=lambda r: (*_heads(r), r.randint(1, 5000), r.randint(1, 128), r.choice((2, 4, 8))),
    remark="with G = H and bfloat16 that is 22 chunks",
)
