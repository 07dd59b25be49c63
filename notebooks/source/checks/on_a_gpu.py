"""Checks of chapter 8b: when a stream is done, the speed of a kernel."""

from collections.abc import Callable

from notebooks.source.checks.answers import compare_formula, exercise


@exercise
def check_end(answer: Callable[[float, float, int], float]) -> str | None:
    """(seconds of a launch, seconds of a kernel, how many) -> when the last of them is done, on one stream."""
    compare_formula(
        answer,
        lambda launch, work, n: launch + work + (n - 1) * max(launch, work),
        {
            "the host does not wait: while a kernel computes, it launches the next": lambda launch, work, n: (
                n * (launch + work)
            ),
            "a kernel begins when it has been launched: nothing computes during the first launch": (
                lambda launch, work, n: n * work
            ),
            "so it is where kernels are longer than launches; a short one ends before the next is launched": (
                lambda launch, work, n: launch + n * work
            ),
            "then the host has launched all of them; the last one still computes": lambda launch, work, n: n * launch,
            "so it is where launches are longer; long kernels wait for each other, in one stream": (
                lambda launch, work, n: n * launch + work
            ),
            "nothing computes during the first launch, and nothing is launched during the last kernel": (
                lambda launch, work, n: n * max(launch, work)
            ),
            "a stream runs one kernel after the other, not all at once": lambda launch, work, n: launch + work,
        },
        [(82.0, 10.0, 8), (82.0, 3400.0, 8), (5.0, 5.0, 3), (2.0, 7.0, 1), (9.0, 4.0, 20)],
        "the first launch, n - 1 times the longer of the two, and the last kernel",
        lambda random: (random.uniform(1, 99), random.uniform(1, 99), random.randint(1, 30)),
    )
    return "a kernel shorter than its launch is free: the host is what takes the time"


def _flops(heads: int, seq_len: int, head_dim: int, share: float = 0.5, passes: float = 1.0) -> float:
    return 4 * heads * seq_len**2 * head_dim * share * passes


@exercise
def check_tflops(answer: Callable[[int, int, int, bool, float], float]) -> str | None:
    """(H, S, D, backward?, seconds) of causal attention -> TFLOP/s."""

    def speed(flops: float, seconds: float) -> float:
        return flops / seconds / 1e12

    compare_formula(
        answer,
        lambda H, S, D, backward, seconds: speed(_flops(H, S, D, passes=2.5 if backward else 1.0), seconds),
        {
            "a causal kernel computes half of the pairs": lambda H, S, D, backward, seconds: speed(
                _flops(H, S, D, 1.0, 2.5 if backward else 1.0), seconds
            ),
            "q kᵀ and p v: two products, each with 2 FLOPs for each pair and number": (
                lambda H, S, D, backward, seconds: speed(_flops(H, S, D, 0.25, 2.5 if backward else 1.0), seconds)
            ),
            "the backward pass has five products where the forward pass has two": lambda H, S, D, backward, seconds: (
                speed(_flops(H, S, D), seconds)
            ),
            "the scores come once more in the backward pass: five products, not four": (
                lambda H, S, D, backward, seconds: speed(_flops(H, S, D, passes=2 if backward else 1.0), seconds)
            ),
            "3.5 times is both passes; asked is the backward pass alone": lambda H, S, D, backward, seconds: speed(
                _flops(H, S, D, passes=3.5 if backward else 1.0), seconds
            ),
            "in TFLOP/s: divide by 1e12": lambda H, S, D, backward, seconds: (
                speed(_flops(H, S, D, passes=2.5 if backward else 1.0), seconds) * 1e12
            ),
            "a pair is a query and a key: S² of them": lambda H, S, D, backward, seconds: (
                speed(_flops(H, S, D, passes=2.5 if backward else 1.0), seconds) / S
            ),
        },
        [(32, 16384, 128, False, 3.43e-3), (32, 16384, 128, True, 9.68e-3), (16, 4096, 64, False, 1e-3)],
        "4 H S² D, half of it, 2.5 times in the backward pass, over the seconds",
        lambda random: (
            random.randint(1, 64),
            random.randint(99, 9999),
            64,
            random.random() < 0.5,
            random.random() + 0.1,
        ),
    )
    return "the first case is 641 TFLOP/s: cuDNN. At half of that, ask which kernel ran"
