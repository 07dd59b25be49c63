"""Checks of chapter 9: the chunk that hides its messages, the same for training, one slow hop."""

from collections.abc import Callable
from random import Random

from notebooks.checks.answers import compare_formula, exercise


def _heads(random: Random) -> tuple[int, int, int]:
    """H heads of queries, G of K and V, bytes of a number."""
    G = random.randint(1, 16)
    return random.randint(1, 8) * G, G, random.choice((2, 4, 8))


@exercise
def check_smallest_chunk(answer: Callable[..., float]) -> str | None:
    """(flops, bandwidth, H, G, bytes of a number) -> the smallest chunk that hides its messages, in tokens."""
    compare_formula(
        answer,
        lambda flops, bandwidth, H, G, itemsize: itemsize / 2 * G / H * flops / bandwidth,
        {
            "that holds in bfloat16 with G = H only": lambda f, b, H, G, w: f / b,
            "only G of H heads travel": lambda f, b, H, G, w: w / 2 * f / b,
            "fewer heads travel than compute, so a shorter chunk is enough": lambda f, b, H, G, w: (
                w / 2 * H / G * f / b
            ),
            "a number has itemsize bytes": lambda f, b, H, G, w: G / H * f / b,
            "K and V travel, not one of them": lambda f, b, H, G, w: w / 4 * G / H * f / b,
            "a multiplication and an addition are two FLOPs": lambda f, b, H, G, w: w * G / H * f / b,
            "turned over: a fast link needs shorter chunks": lambda f, b, H, G, w: w / 2 * G / H * b / f,
        },
        [(312e12, 12.5e9, 32, 32, 4), (312e12, 25e9, 32, 8, 2), (1e12, 1e9, 6, 3, 8), (2e12, 1e9, 9, 1, 4)],
        "4 C C H D / flops seconds of computing, 2 C G D itemsize / bandwidth seconds of messages",
        lambda random: (random.uniform(1e12, 1e15), random.uniform(1e9, 1e11), *_heads(random)),
    )
    return "with 312 TFLOP/s, 25 GB/s, 32 heads on 8 and bfloat16 that is 3,120 tokens"


@exercise
def check_training_chunk(answer: Callable[..., float]) -> str | None:
    """(flops / bandwidth, H, G, bytes of a number) -> the smallest chunk for training, causal, in zigzag."""

    def backward(w: float) -> float:
        return (w + 4) / 5

    compare_formula(
        answer,
        lambda ratio, H, G, itemsize: 2 * max(itemsize / 2, backward(itemsize)) * G / H * ratio,
        {
            "that is the forward pass without a mask": lambda r, H, G, w: w / 2 * G / H * r,
            "that is both passes without a mask; under a mask half is computed, and all is sent": lambda r, H, G, w: (
                max(w / 2, backward(w)) * G / H * r
            ),
            "half of each block is hidden by the mask, its bytes are not: more tokens, not fewer": lambda r, H, G, w: (
                max(w / 2, backward(w)) / 2 * G / H * r
            ),
            "that is enough for the forward pass only": lambda r, H, G, w: w * G / H * r,
            "that is enough for the backward pass only": lambda r, H, G, w: 2 * backward(w) * G / H * r,
            "only G of H heads travel": lambda r, H, G, w: 2 * max(w / 2, backward(w)) * r,
            "the backward pass has five products, 10 C C H D FLOPs, not 4": lambda r, H, G, w: (w + 4) * G / H * r,
            "each pass by itself must hide its messages: the larger one, not the sum": lambda r, H, G, w: (
                2 * (w / 2 + backward(w)) * G / H * r
            ),
        },
        [(24_960, 32, 8, 2), (1_000, 32, 32, 4), (1_001, 9, 3, 2), (500, 7, 1, 4), (700, 5, 5, 3)],
        "2 for the mask, G/H, and the larger of w/2 and (w + 4)/5, times flops / bandwidth",
        lambda random: (random.uniform(100, 50_000), *_heads(random)),
    )
    return "in bfloat16 the backward pass needs 6/5 of the forward pass, in float32 4/5"


@exercise
def check_unlike_links(answer: Callable[[float, list[float]], float]) -> str | None:
    """(seconds of computing on a block, seconds of each hop) -> seconds of the overlapped ring."""
    cases = [
        (2.0, [1.0, 1.0, 1.0, 1.0]),
        (2.0, [1.0, 7.0, 1.0, 1.0]),
        (2.0, [9.0, 1.0, 3.0]),
        (1.0, [2.0, 2.0, 2.0, 2.0, 5.0]),
        (2.0, [1.0]),
    ]
    wrong = {
        "P rounds, but P - 1 hops: the last round only computes": lambda c, hops: len(hops) * max(c, *hops),
        "it overlaps: the longer of the two, not their sum": lambda c, hops: c + (len(hops) - 1) * (c + max(hops)),
        "not the average: in the end all ranks wait for the slowest hop": lambda c, hops: (
            c + (len(hops) - 1) * max(c, sum(hops) / len(hops))
        ),
        "the slow link is used in every round, not in one": lambda c, hops: c + sum(max(c, hop) for hop in hops[1:]),
        "that is computing alone; a hop can take longer": lambda c, hops: len(hops) * c,
        "the slowest hop rules, not the fastest": lambda c, hops: c + (len(hops) - 1) * max(c, min(hops)),
    }

    def right(computing: float, hops: list[float]) -> float:
        return computing + (len(hops) - 1) * max(computing, *hops)

    compare_formula(
        answer,
        right,
        wrong,
        cases,
        "the last round only computes; each round before it takes the longer of computing and the slowest hop",
        lambda random: (random.uniform(0.1, 5), [random.uniform(0.1, 5) for _ in range(random.randint(1, 9))]),
    )
    return "one slow hop, and all rounds but the last take as long as it does"
