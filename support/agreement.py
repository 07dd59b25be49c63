"""Agree before you send: every rank checks its input, and all raise the same ValueError or none does.

A rank that raised alone would leave its neighbours waiting for a message that never comes. So the ranks exchange one
small message each before the large ones.

A reader of the ring may skip this file.
"""

import pickle
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from basics.naive_attention import resolve_scale

MESSAGE = 512  # bytes, enough for what a ring has to agree on


def members(group: ProcessGroup | None = None) -> tuple[int, int]:
    """(rank, world_size) inside `group` (None: the whole job).

    Raises ValueError when no process group exists or this process is not in `group`.
    """
    if not dist.is_initialized():
        raise ValueError("no process group here; start the ring with torchrun, or with support.processes.launch")
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    if rank < 0:
        raise ValueError(f"global rank {dist.get_rank()} is not in the group; expected only its members to call")
    return rank, world_size


def agree(check: Callable[[], Any], group: ProcessGroup | None = None) -> list[Any]:
    """Run `check` on every rank and give each rank the results of all, in order of rank.

    When it raises ValueError on some rank, the same ValueError is raised on all of them, so that no rank is left
    waiting for a message from one that has given up. Every rank of the group must call this.
    """
    _, world_size = members(group)
    try:
        mine = (check(), None)
    except ValueError as error:
        mine = (None, str(error))
    everyone = _exchange_messages(mine, world_size, group)
    wrong = [f"rank {rank}: {error}" for rank, (_, error) in enumerate(everyone) if error]
    if wrong:
        raise ValueError("\n".join(wrong))
    return [facts for facts, _ in everyone]


def _exchange_messages(mine: Any, world_size: int, group: ProcessGroup | None) -> list[Any]:
    """all_gather_object, which sends sizes first and goes round step by step: here, if every object fits into MESSAGE
    bytes, each rank sends its own to all the others at once.
    """
    text = pickle.dumps(mine)
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    message = torch.zeros(MESSAGE, dtype=torch.uint8, device=device)
    if len(text) <= MESSAGE:  # else a message of zeros, which no pickle begins with
        message[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    copies = message.repeat(world_size, 1)  # (P, MESSAGE), one for each rank
    messages = torch.empty_like(copies)
    dist.all_to_all_single(messages, copies, group=group)
    if messages[:, 0].all():
        return [pickle.loads(received.numpy().tobytes()) for received in messages.cpu()]
    everyone = [None] * world_size
    dist.all_gather_object(everyone, mine, group=group)
    return everyone


def agree_on_lengths(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
    group: ProcessGroup | None,
    *,
    check: Callable[[Tensor, Tensor, Tensor], None],
    **settings: Any,
) -> list[int]:
    """The chunk length C of every rank, or the same ValueError on all: one small message before the large ones.

    `check` raises ValueError for wrong input; `settings` are what else must be alike on all ranks.
    """

    def facts() -> tuple[int, str]:
        check(q, k, v)
        B, H, C, D = q.shape
        alike = {"B": B, "H": H, "G": k.shape[1], "D": D, "dtype": q.dtype, "scale": f"{resolve_scale(scale, D):.9g}"}
        return C, ", ".join(f"{name}={value}" for name, value in {**alike, **settings}.items())

    everyone = agree(facts, group)
    if len({alike for _, alike in everyone}) > 1:
        each = "\n".join(f"rank {rank}: {alike}" for rank, (_, alike) in enumerate(everyone))
        raise ValueError(f"the ranks disagree; expected the same of all this on each of them\n{each}")
    return [length for length, _ in everyone]
