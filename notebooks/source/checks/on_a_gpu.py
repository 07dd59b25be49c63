"""Checks of chapter 8b: when a stream is done, the speed of a kernel."""

from notebooks.source.checks.answers import Exercise

check_end = Exercise(  # seconds of a launch, of a kernel, and how many -> when the last is done, on one stream
    right=lambda launch, work, n: launch + work + (n - 1) * max(launch, work),
    wrong={
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
    cases={
        "the first launch, n - 1 times the longer of the two, and the last kernel": [
            (82.0, 10.0, 8),
            (82.0, 3400.0, 8),
            (5.0, 5.0, 3),
            (2.0, 7.0, 1),
            (9.0, 4.0, 20),
        ]
    },
    draw=lambda random: (random.uniform(1, 99), random.uniform(1, 99), random.randint(1, 30)),
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
    cases={
        "4 H S² D, half of it, 2.5 times in the backward pass, over the seconds": [
            (32, 16384, 128, False, 3.43e-3),
            (32, 16384, 128, True, 9.68e-3),
            (16, 4096, 64, False, 1e-3),
        ]
    },
    draw=lambda r: (r.randint(1, 64), r.randint(99, 9999), 64, r.random() < 0.5, r.random() + 0.1),
    remark="the first case is 641 TFLOP/s: cuDNN. At half of that, ask which kernel ran",
)
