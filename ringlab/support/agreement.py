"""Agree before you send: every rank checks its input, and all raise the same ValueError or none does.

A rank that raised alone would leave its neighbours waiting for a message that never comes. So the ranks exchange one
small message each before the large ones: on one host through pipes, else by a collective. `Said` is what is in it. The
pipes go to every rank of the host: so there ranks in other groups or meshes notice it too. Between hosts a group is the
only way to its ranks, and that all give the same one is not checked. A GPU has no part in it: beside a group of NCCL
there is one of gloo.

    facts = agree(check)                        what `check` returns on each rank, by rank
    agree_same(check)                           `check` returns what may differ, and a dictionary of what may not
"""

import pickle
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from ringlab.support.pipes import FACTS, Inbox, inbox_of_job, time_limit

LONG = 200  # letters of a fact in an error
WRONG = -1  # in place of the call: this rank cannot go on, so no rank may
SOON = timedelta(seconds=3)  # for the messages of ranks that may never come, once it is clear that none can go on
NEW_GROUP = "an error ended a pass in this group, and its messages may still be under way; expected a new process group"
Group = ProcessGroup | DeviceMesh | None  # of ranks; None: the whole job


def members(group: ProcessGroup | None = None) -> tuple[int, int]:
    """(rank, world_size) inside `group` (None: the whole job).

    Raises ValueError when no process group exists or this process is not in `group`.
    """
    if not dist.is_initialized():
        raise ValueError(
            "no process group here; start the script with torchrun and join its ranks with ringlab.join_ring, or start "
            "it with ringlab.support.processes.launch"
        )
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    if rank < 0:
        raise ValueError(f"global rank {dist.get_rank()} is not in the group; expected only its members to call")
    return rank, world_size


def check_mesh(mesh: Any, expected: str = 'hosts x devices, as init_device_mesh("cpu", (2, 4))', ndim: int = 2) -> None:
    """Raise ValueError unless `mesh` is a mesh of two dimensions, with this process in it. `expected` is for humans.

    Raises ValueError also where a rank is smaller than one before it in its row or column: torch's process groups put
    ranks in rising order, so a ring would turn in another order than the mesh says.
    """
    if not isinstance(mesh, DeviceMesh) or mesh.ndim != ndim:
        given = f"a mesh of shape {tuple(mesh.shape)}" if isinstance(mesh, DeviceMesh) else repr(mesh)
        raise ValueError(f"mesh is {given}; expected {expected}")
    if any((mesh.mesh.diff(dim=dim) < 0).any() for dim in range(ndim)):
        raise ValueError(f"mesh is {mesh.mesh.tolist()}; expected ranks that rise in each row and in each column")
    if mesh.get_coordinate() is None:
        raise ValueError(f"this process is not in the mesh {mesh.mesh.tolist()}; expected only its members to call")


def flat_group(group: Group) -> ProcessGroup | None:
    """The process group of a mesh of one dimension, checked as `check_mesh` does; other groups as they are."""
    if not isinstance(group, DeviceMesh):
        return group
    check_mesh(group, "a group or a mesh of one dimension: a double ring and a hybrid take a mesh of two", ndim=1)
    return group.get_group()


class Said(NamedTuple):
    """What a rank says in an agreement."""

    ranks: tuple[int, ...]  # of the job, which agree; () if this rank is in no group
    groups: dict[tuple[int, ...], str]  # this rank's groups: the name of each, by its ranks
    mesh: Any  # the rows of a mesh of more dimensions than one
    function: str  # which was called; in a backward pass, of which call
    number: int  # of this agreement, as this rank counts: the largest is taken
    wrong: str  # why this rank cannot go on, or nothing
    facts: Any  # what the function wants to know of every rank


def groups_of(group: Group) -> list[ProcessGroup]:
    """The process groups in which this rank's messages travel: one, or those of a mesh. Raises ValueError for none."""
    if isinstance(group, DeviceMesh):
        check_mesh(group, ndim=group.ndim)
        return group.get_all_groups()
    if group is not None and group is not dist.GroupMember.NON_GROUP_MEMBER and not isinstance(group, ProcessGroup):
        raise ValueError(f"group is {group!r}; expected a process group, a mesh, or None for the whole job")
    members(group)
    return [group or dist.group.WORLD]  # type: ignore[list-item]  # there is one


class Agreed(list[Any]):
    """What each rank said, by rank; and the number of this agreement, the same on all of them and of no other one."""

    number: int


def agree(check: Callable[[], Any], group: Group = None, *, function: str = "") -> Agreed:
    """Run `check` on every rank and give each rank the results of all, in order of rank.

    When `check` raises an error on one rank, every rank raises the same ValueError. So no rank waits for a message from
    a rank that has given up. They raise it, too, when one is in another `function` (unless given, the one in which
    `check` is defined), when an error has ended a pass in the group, and on one host when one is in another group.
    Every rank of the group must call this. A mesh counts its ranks through row by row.
    """
    if not dist.is_initialized():
        members()
    inbox, cause, function = inbox_of_job(), None, function or home_of(check)
    mine, groups = Said((), {}, None, function, inbox.agreements + 1, "", None), []
    try:
        groups = groups_of(group)
        names = {tuple(dist.get_process_group_ranks(one)): str(one.group_name) for one in groups}
        mesh = group.mesh if isinstance(group, DeviceMesh) and group.ndim > 1 else None
        ranks = next(iter(names)) if mesh is None else tuple(mesh.flatten().tolist())
        mine = mine._replace(ranks=ranks, groups=names, mesh=None if mesh is None else mesh.tolist())
        if any(one in _ended for one in groups):
            raise ValueError(NEW_GROUP)
        mine = mine._replace(facts=check())
    except Exception as error:
        cause = error
        mine = mine._replace(wrong=str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}")
    if mine.ranks and inbox.why_not(mine.ranks):
        heard = [mine._replace(ranks=(), groups={}, mesh=None)]  # these are long, and the same on all
        for of_row in reversed(groups):
            row = tuple(dist.get_process_group_ranks(of_row))
            if inbox.why_not(row):
                parts: list[Any] = [None] * len(row)
                dist.all_gather_object(parts, heard, group=without_gpus(of_row))
            else:
                answers = _through_pipes(inbox, mine._replace(ranks=row, facts=heard), time_limit(of_row))
                parts = [answers[rank].facts for rank in row]
            heard = [word for part in parts for word in part]
        whole = {"ranks": mine.ranks, "groups": mine.groups, "mesh": mine.mesh}
        said = {rank: word._replace(**whole) for rank, word in zip(mine.ranks, heard, strict=True)}
    else:
        said = _through_pipes(inbox, mine, min(map(time_limit, groups), default=SOON))
    inbox.agreements = max(word.number for word in said.values())
    if reason := _refusal(said):
        raise ValueError(reason) from cause
    agreed = Agreed(said[rank].facts for rank in mine.ranks)
    agreed.number = inbox.agreements
    return agreed


def agree_same(
    check: Callable[[], tuple[Any, dict[str, Any]]],
    group: Group = None,
    *,
    function: str = "",
    expected: str = "the same on each of them",
) -> Agreed:
    """`agree` on the first of what `check` returns. The second, facts by their names, must be the same on all ranks.

    Else every rank raises the same ValueError, which names what differs. `expected` is for humans.
    """
    agreed = agree(check, group, function=function)
    facts = [same for _, same in agreed]
    names = dict.fromkeys(name for same in facts for name in same)
    if differ := [name for name in names if any(same.get(name) != facts[0].get(name) for same in facts)]:
        lines = [", ".join(f"{name}={same.get(name)!s:.{LONG}}" for name in differ) for same in facts]
        by_rank = "\n".join(f"rank {rank}: {line}" for rank, line in enumerate(lines))
        raise ValueError(f"the ranks disagree about {', '.join(differ)}; expected {expected}\n{by_rank}")
    agreed[:] = [mine for mine, _ in agreed]
    return agreed


def home_of(check: Callable[..., Any]) -> str:
    """The function in which a check is defined, or which it is."""
    while isinstance(check, partial):
        check = check.func
    return f"{check.__module__}.{check.__qualname__}".partition(".<locals>")[0]


def without_gpus(group: ProcessGroup) -> ProcessGroup:
    """The group; or beside one whose messages go through GPUs, as NCCL's, one of gloo with the same ranks, made once.

    All ranks must ask for it. Through a GPU a few bytes would wait until it has computed what it was given before.
    """
    if any(device.type == "cpu" for device in group._device_types):
        return group
    if group not in _beside:
        store = dist.PrefixStore("agreements of ringlab", group.get_group_store())
        gloo = dist.ProcessGroupGloo(store, group.rank(), group.size(), time_limit(group))
        _beside[group] = dist.ProcessGroup(store, group.rank(), group.size())
        _beside[group]._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    return _beside[group]


_beside: "weakref.WeakKeyDictionary[ProcessGroup, ProcessGroup]" = weakref.WeakKeyDictionary()


def _refusal(said: dict[int, Said]) -> str:
    """Why no rank may go on, the same words on all of them; or nothing."""
    first, pairs = next(iter(said.values())), {pair for word in said.values() for pair in word.groups.items()}
    apart = not first.ranks or len(dict(pairs)) < len(pairs)  # two groups of the same ranks
    apart |= any((word.ranks, word.mesh) != (first.ranks, first.mesh) for word in said.values())
    ranks = dict(sorted(said.items())) if apart else {i: said[rank] for i, rank in enumerate(first.ranks)}
    if wrong := {rank: word.wrong for rank, word in ranks.items() if word.wrong}:
        if len(wrong) == len(ranks) and len({*wrong.values()}) == 1:  # what all refuse alike is said once
            return wrong[min(wrong)]
        return "\n".join(f"rank {rank}: {line}" for rank, line in wrong.items())
    if apart:
        problem = "groups; expected the same group or mesh on each of them"
        words = {rank: _where(word) for rank, word in ranks.items()}
    elif any(word.function != first.function for word in ranks.values()):
        problem = "functions; expected the same calls in the same order on each"
        words = {rank: word.function for rank, word in ranks.items()}
    else:
        return ""
    return "\n".join(
        [f"the ranks are in different {problem}", *(f"rank {rank}: {line}" for rank, line in words.items())]
    )


def _where(it: Said) -> str:
    """The group or mesh of a rank, in words."""
    names = " and ".join(f"{name!r} of ranks {ranks}" for ranks, name in it.groups.items())
    return f"group {names}" if it.mesh is None else f"mesh {it.mesh} of groups {names}"


def _through_pipes(inbox: Inbox, mine: Said, limit: timedelta) -> dict[int, Said]:
    """What the ranks say, by their number in the job. Where they name different ranks: all that one of them names."""
    text, heard = pickle.dumps(mine), {inbox.rank: mine}
    asked: list[int] = []

    def ask(ranks: Iterable[int]) -> None:
        for rank in ranks:
            if rank not in asked and rank != inbox.rank:
                asked.append(rank)
                inbox.send(FACTS, rank, text)

    ask(mine.ranks or inbox.within_reach(SOON))
    apart = not mine.ranks
    for rank in asked:  # `ask` adds to them
        try:
            heard[rank] = pickle.loads(inbox.wait(FACTS, rank, SOON if apart else limit))
            while not (heard[rank].ranks or apart):
                heard[rank] = pickle.loads(inbox.wait(FACTS, rank, SOON / 3))
        except RuntimeError:
            if not apart and rank not in heard:
                raise
        if rank in heard and heard[rank].ranks != mine.ranks:
            apart = True
            ask(sorted({*heard[rank].ranks}.intersection(inbox.within_reach(SOON))))
    return heard


def of_every_rank(mine: Tensor, group: ProcessGroup | None = None, call: int = 0) -> Tensor:
    """The tensors `mine` (...) of all ranks, in order of rank: (P, ...), the same bits on every rank.

    Raises the same ValueError on every rank if one is in another call, gives other bytes, or says that it is WRONG."""

    def give() -> Any:
        if call == WRONG:
            raise ValueError("other input than agreed; expected the same call on every rank")
        return mine.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()

    given = agree(give, group, function=f"of_every_rank, call {call} with {mine.nbytes} bytes")
    return torch.from_numpy(np.stack(given)).view(mine.dtype).view(len(given), *mine.shape).to(mine.device)


_ended: "weakref.WeakSet[ProcessGroup]" = weakref.WeakSet()  # the groups in which an error has ended a pass


@contextmanager
def one_pass(group: Group, give_up: Callable[[], None]) -> Iterator[None]:
    """A pass of messages. After an error, `agree` refuses the group: the next pass would take what it has left."""
    try:
        yield
    except BaseException:
        _ended.update(groups_of(group))
        give_up()
        raise
