"""Agree before you send: every rank checks its input, and all raise the same ValueError or none does.

A rank that raised alone would leave its neighbours waiting for a message that never comes. So the ranks exchange one
small message each before the large ones: on one host through pipes, else by a collective. Where all that a rank has to
say is a few numbers, they are in that message: `of_every_rank`.

A reader of the ring may skip this file.
"""

import pickle
import struct
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from ringlab.support.pipes import LONGEST, Pipes, pipes_of

MESSAGE = 512  # bytes between hosts, enough for what a ring has to agree on
HEAD = struct.Struct("<8sqq")  # of a message of numbers: NUMBERS, which call it belongs to, how many bytes follow
NUMBERS = b"numbers:"
WRONG = -1  # in place of the call: this rank cannot go on, so no rank may


def members(group: ProcessGroup | None = None) -> tuple[int, int]:
    """(rank, world_size) inside `group` (None: the whole job).

    Raises ValueError when no process group exists or this process is not in `group`.
    """
    if not dist.is_initialized():
        raise ValueError(
            "no process group here; start the script with torchrun and join its ranks with "
            "ringlab.support.processes.join_ring, or start it with ringlab.support.processes.launch"
        )
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    if rank < 0:
        raise ValueError(f"global rank {dist.get_rank()} is not in the group; expected only its members to call")
    return rank, world_size


def check_mesh(mesh: Any, expected: str = 'hosts x devices, as init_device_mesh("cpu", (2, 4))') -> None:
    """Raise ValueError unless `mesh` is a mesh of two dimensions, with this process in it. `expected` is for humans.

    Raises ValueError also where a rank is smaller than one before it in its row or column: torch's process groups put
    ranks in rising order, so a ring would turn in another order than the mesh says.
    """
    if not isinstance(mesh, DeviceMesh) or mesh.ndim != 2:
        given = f"a mesh of shape {tuple(mesh.shape)}" if isinstance(mesh, DeviceMesh) else repr(mesh)
        raise ValueError(f"mesh is {given}; expected {expected}")
    if any((mesh.mesh.diff(dim=dim) < 0).any() for dim in range(2)):
        raise ValueError(f"mesh is {mesh.mesh.tolist()}; expected ranks that rise in each row and in each column")
    if mesh.get_coordinate() is None:
        raise ValueError(f"this process is not in the mesh {mesh.mesh.tolist()}; expected only its members to call")


def flat_group(group: ProcessGroup | DeviceMesh | None) -> ProcessGroup | None:
    """The process group of a mesh of one dimension; a process group, or None for the whole job, as it is.

    Raises ValueError for other meshes, for ranks that do not rise, and on a rank that is not in the mesh.
    """
    if not isinstance(group, DeviceMesh):
        return group
    if group.ndim != 1:
        raise ValueError(
            f"group is a mesh of shape {tuple(group.shape)}; expected a process group, a mesh of one dimension, or "
            f"None: a double ring and a hybrid take a mesh of two"
        )
    if (group.mesh.diff() < 0).any():
        raise ValueError(f"mesh is {group.mesh.tolist()}; expected ranks that rise")
    if group.get_coordinate() is None:
        raise ValueError(f"this process is not in the mesh {group.mesh.tolist()}; expected only its members to call")
    return group.get_group()


def agree(check: Callable[[], Any], group: ProcessGroup | DeviceMesh | None = None) -> list[Any]:
    """Run `check` on every rank and give each rank the results of all, in order of rank.

    When `check` raises ValueError on one rank, every rank raises the same ValueError. So no rank waits for a message
    from a rank that has given up. Every rank of the group must call this. A mesh of hosts x devices agrees inside each
    host first. Its ranks count through host by host.
    """
    everyone: list[tuple[Any, str | None]]
    try:
        everyone = [(check(), None)]
    except ValueError as error:
        everyone = [(None, str(error))]
    for each in reversed(group.get_all_groups()) if isinstance(group, DeviceMesh) else [group]:
        everyone = [one for some in _exchange(everyone, each) for one in some]
    wrong = [f"rank {rank}: {error}" for rank, (_, error) in enumerate(everyone) if error is not None]
    if wrong:
        raise ValueError("\n".join(wrong))
    return [facts for facts, _ in everyone]


def of_every_rank(mine: Tensor, group: ProcessGroup | None = None, call: int = 0) -> Tensor:
    """The tensors `mine` (...) of all ranks, in order of rank: (P, ...), the same bits on every rank.

    It is for few numbers, for which every rank must wait. All ranks give the same shape and dtype, and count their
    calls: 0 or more, or WRONG. Raises the same ValueError on every rank if one says WRONG, is in another call, or gives
    another number of bytes, for which gloo ends the job between hosts.
    """
    _, world_size = members(group)
    pipes, device = pipes_of(group), "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    head = torch.frombuffer(bytearray(HEAD.pack(NUMBERS, call, mine.nbytes)), dtype=torch.uint8)
    message = torch.cat([head.to(device), mine.to(device).contiguous().flatten().view(torch.uint8)])
    if isinstance(pipes, Pipes) and device == "cpu":
        text = message.numpy().tobytes()
        texts = pipes.exchange(text[:LONGEST])
        _check_heads(texts)
        for begin in range(LONGEST, len(text), LONGEST):
            texts = [a + b for a, b in zip(texts, pipes.exchange(text[begin : begin + LONGEST]), strict=True)]
        messages = torch.frombuffer(bytearray(b"".join(texts)), dtype=torch.uint8).view(world_size, -1)
    else:
        messages = _swap(message, group)
        _check_heads([each.tobytes() for each in messages[:, : HEAD.size].cpu().numpy()])
    return messages[:, HEAD.size :].contiguous().view(mine.dtype).view(world_size, *mine.shape).to(mine.device)


def _check_heads(texts: list[bytes]) -> None:
    """Raise ValueError unless all ranks are in the same call, with as many bytes. `texts` begin with their heads."""
    heads = [HEAD.unpack(text[: HEAD.size].ljust(HEAD.size)) for text in texts]
    if len(set(heads)) == 1 and heads[0][0] == NUMBERS and heads[0][1] != WRONG:
        return
    said = []
    for rank, (kind, call, size) in enumerate(heads):
        known = "other input than agreed" if call == WRONG else f"call {call} with {size} bytes"
        said.append(f"rank {rank}: {known if kind == NUMBERS else 'another function'}")
    raise ValueError(f"{'; '.join(said)}; expected the same call on every rank, with what the ranks agreed on")


def _exchange(mine: list[Any], group: ProcessGroup | None) -> list[Any]:
    """A faster all_gather_object for what a ring has to agree on. Longer messages use all_gather_object."""
    _, world_size = members(group)
    text, pipes = pickle.dumps(mine), pipes_of(group)
    if isinstance(pipes, Pipes):
        texts = pipes.exchange(text if len(text) <= LONGEST else b"")
        if any(each.startswith(NUMBERS) for each in texts):  # a rank is in `of_every_rank`
            _check_heads(texts)
    else:
        texts = _all_to_all(text if len(text) <= MESSAGE * len(mine) else b"", MESSAGE * len(mine), group)
    if all(texts):
        return [pickle.loads(each) for each in texts]
    everyone = [None] * world_size
    dist.all_gather_object(everyone, mine, group=group)
    return everyone


def _all_to_all(text: bytes, size: int, group: ProcessGroup | None) -> list[bytes]:
    """What every rank gives here, in order of rank: `size` bytes at most. Where the first byte is 0, nothing."""
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    message = torch.zeros(size, dtype=torch.uint8, device=device)
    if text:
        message[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    messages = _swap(message, group).cpu()
    return [each.numpy().tobytes() if each[0] else b"" for each in messages]  # no pickle begins with a zero


def _swap(message: Tensor, group: ProcessGroup | None) -> Tensor:
    """The messages (n,) of all ranks, (P, n). With gloo this takes half the time of an all-gather."""
    copies = message.repeat(dist.get_world_size(group), 1)  # one for each rank
    messages = torch.empty_like(copies)
    dist.all_to_all_single(messages, copies, group=group)
    return messages
