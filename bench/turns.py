"""Methods measured in turn, A B A B ..., so that a disturbance of the machine affects all of them."""

import os
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ringlab.support.agreement import agree
from ringlab.support.processes import RankContext, cpu_cores

PAUSE = 0.05  # seconds before each turn, in which the threads of the last turn stop spinning

Method = tuple[bool, Callable[[], Any]]  # (rank 0 only?, the function to time); rank 0 alone uses all the cores


def pin(cores: int) -> None:
    """Limit this process, and those that it starts from now on, to the first `cores` cores, where the system can."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])


def in_turn(
    context: RankContext, methods: dict[str, Method], repetitions: int, *, warm_up: int = 1
) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """Time all methods in turn. Returns the seconds of every repetition by method, and each method's last result.

    The first `warm_up` repetitions do not count. A repetition ends when its last rank is done. Ranks that have nothing
    to do sleep until a message comes.
    """
    together = torch.get_num_threads()
    seconds, results = {name: [] for name in methods}, {}
    for _ in range(warm_up + repetitions):
        for name, (alone, work) in methods.items():
            torch.set_num_threads(cpu_cores() if alone else together)
            time.sleep(PAUSE)
            dist.barrier()
            begin = time.perf_counter()
            if not alone or context.rank == 0:
                results[name] = work()
            mine = time.perf_counter() - begin
            seconds[name].append(max(agree(lambda mine=mine: mine)))  # the others wait here
    torch.set_num_threads(together)
    return {name: each[warm_up:] for name, each in seconds.items()}, results
