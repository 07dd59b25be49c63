"""Agree before you send: every rank checks its input, and all raise the same ValueError or none does.

A rank that raised alone would leave its neighbours waiting for a message that never comes. So the ranks exchange one
small message each before the large ones: exchange.py. `Where` and `Said` are what is in it. On one host ranks in other
groups or meshes notice it too. Between hosts a group is the only way to its ranks: that all give the same one is not
checked.

    facts = agree(check)                        what `check` returns on each rank, by rank
    agree_same(check)                           `check` returns what may differ, and a dictionary of what may not
"""

import hashlib
import pickle
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from ringlab.support.exchange import SOON, all_expect, all_gather, in_full
from ringlab.support.pipes import Inbox, inbox_of_job, time_limit

LONG = 200  # letters of a fact in an error
WRONG = -1  # in place of the call: this rank cannot go on, so no rank may
MANY, LONG_FACTS = 64, 2**16  # what ranks said and may say again: so many things, of so many bytes on all ranks
NEW_GROUP = "an error ended a pass in this group, and its messages may still be under way; expected a new process group"
WENT_ALONE = (
    "an earlier call of this rank was in no group of its own, and others may have gone on, so their calls may be other "
    "ones; expected a group or mesh with this rank in it, and after this error a new job"
)
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


class Where(NamedTuple):
    """Between which ranks an agreement is, as one of them sees it."""

    ranks: tuple[int, ...] = ()  # of the job, which agree; () if this rank is in no group
    groups: tuple[tuple[tuple[int, ...], str], ...] = ()  # those of this rank: the ranks of each, and its name
    mesh: Any = None  # the rows of a mesh of more dimensions than one


class Said(NamedTuple):
    """What a rank says in an agreement."""

    function: str  # which was called; in a backward pass, of which call
    wrong: str = ""  # why this rank cannot go on, or nothing
    facts: Any = None  # what the function wants to know of every rank


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
    A rank that called in no group of its own may be a call behind the others: unless all did, it agrees no more.
    Every rank of the group must call this. A mesh counts its ranks through row by row.
    """
    if not dist.is_initialized():
        members()
    inbox, where, mine, limit, cause = inbox_of_job(), Where(), Said(function or home_of(check)), SOON, None
    try:
        groups = groups_of(group)
        limit = min(map(time_limit, groups))
        where = where_of(group, groups)
        if any(one in _ended for one in groups):
            raise ValueError(NEW_GROUP)
        if inbox.went_alone:
            limit = SOON  # the others may be a call ahead, and have no more to say
            raise ValueError(WENT_ALONE)
        mine = mine._replace(facts=check())
    except Exception as error:
        cause = error
        mine = mine._replace(wrong=str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}")
    texts = pickle.dumps(where), pickle.dumps(mine)
    keys = [fingerprint(texts[0]), fingerprint(*texts)]  # what was said in another group says nothing here
    known = [inbox.known.get(key) for key in keys]
    expected = fingerprint(*(then[0] if then else fingerprint(x) for x, then in zip(texts, known, strict=True)))
    if where.ranks and all_expect(inbox, where.ranks, int.from_bytes(expected, "little"), limit):
        facts = known[1][1] if known[1] else dict.fromkeys(where.ranks, mine.facts)
        reason = mine.wrong
    else:
        heard = in_full(inbox, where.ranks, pickle.dumps(texts), limit)
        of_ranks = {rank: pickle.loads(text) for rank, (_, text) in sorted(heard.items())}
        said = {rank: (pickle.loads(its_place), pickle.loads(word)) for rank, (its_place, word) in of_ranks.items()}
        reason, facts = _refusal(said), {rank: word.facts for rank, (_, word) in said.items()}
        together = len(said) == dist.get_world_size() and not any(place.ranks for place, _ in said.values())
        inbox.went_alone |= not where.ranks and not together
        if not reason:
            remember(inbox, keys, list(of_ranks.values()), facts)
    if reason:
        raise ValueError(reason) from cause
    agreed = Agreed(facts[rank] for rank in where.ranks)
    agreed.number = inbox.agreements
    return agreed


def where_of(group: Group, groups: Sequence[ProcessGroup]) -> Where:
    """Between which ranks it is. A mesh counts its ranks through row by row."""
    names = tuple((tuple(dist.get_process_group_ranks(one)), str(one.group_name)) for one in groups)
    if not isinstance(group, DeviceMesh) or group.ndim == 1:
        return Where(names[0][0], names)
    return Where(tuple(group.mesh.flatten().tolist()), names, group.mesh.tolist())


def fingerprint(*texts: bytes) -> bytes:
    """8 bytes in place of some texts, the same for the same. They are a number below 2^63."""
    hashed = hashlib.blake2b(digest_size=8)
    for text in texts:
        hashed.update(text)
    return hashed.digest()[:-1] + bytes([hashed.digest()[-1] & 0x7F])


def remember(inbox: Inbox, keys: Sequence[bytes], texts: Sequence[Sequence[bytes]], facts: dict[int, Any]) -> None:
    """When this rank says the same once more, it expects that all do: then none needs to say it in full.

    `texts` are where each rank is and what it says. What only this rank remembers, or no more, is no mistake: then
    the ranks expect different things, and say all in full.
    """
    if len(inbox.known) > MANY:
        inbox.known.clear()
    for key, of_ranks, then in zip(keys, zip(*texts, strict=True), ({}, facts), strict=True):
        if sum(map(len, of_ranks)) < LONG_FACTS:
            inbox.known[key] = fingerprint(*of_ranks), then


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
    if any(same != facts[0] for same in facts):
        names = dict.fromkeys(name for same in facts for name in same)
        differ = [name for name in names if any(same.get(name) != facts[0].get(name) for same in facts)]
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


def _refusal(said: dict[int, tuple[Where, Said]]) -> str:
    """Why no rank may go on, the same words on all of them; or nothing."""
    there, first = next(iter(said.values()))
    pairs = {pair for it, _ in said.values() for pair in it.groups}
    apart = not there.ranks or len(dict(pairs)) < len(pairs)  # two groups of the same ranks
    apart |= any((it.ranks, it.mesh) != (there.ranks, there.mesh) for it, _ in said.values())
    ranks = said if apart else {i: said[rank] for i, rank in enumerate(there.ranks)}
    if wrong := {rank: word.wrong for rank, (_, word) in ranks.items() if word.wrong}:
        if len(wrong) == len(ranks) and len({*wrong.values()}) == 1:  # what all refuse alike is said once
            return wrong[min(wrong)]
        return "\n".join(f"rank {rank}: {line}" for rank, line in wrong.items())
    if apart:
        problem = "groups; expected the same group or mesh on each of them"
        words = {rank: _in_words(it) for rank, (it, _) in ranks.items()}
    elif any(word.function != first.function for _, word in ranks.values()):
        problem = "functions; expected the same calls in the same order on each"
        words = {rank: word.function for rank, (_, word) in ranks.items()}
    else:
        return ""
    return "\n".join(
        [f"the ranks are in different {problem}", *(f"rank {rank}: {line}" for rank, line in words.items())]
    )


def _in_words(it: Where) -> str:
    """The group or mesh of a rank."""
    names = " and ".join(f"{name!r} of ranks {ranks}" for ranks, name in it.groups)
    return f"group {names}" if it.mesh is None else f"mesh {it.mesh} of groups {names}"


def of_every_rank(mine: Tensor, group: ProcessGroup | None = None, call: int = 0) -> Tensor:
    """The tensors `mine` (...) of all ranks, in order of rank: (P, ...), the same bits on every rank.

    The ranks agree on the host, and the numbers stay on their device: no host waits for them.
    Raises the same ValueError on every rank if one is in another call, gives other bytes, or says that it is WRONG."""

    def check() -> None:
        if call == WRONG:
            raise ValueError("other input than agreed; expected the same call on every rank")

    agree(check, group, function=f"of_every_rank, call {call} with {mine.nbytes} bytes")
    everyone = mine.new_empty(members(group)[1], *mine.shape)
    if mine.numel():
        all_gather(everyone.flatten(), mine.detach().contiguous().flatten(), group=group)
    return everyone


_ended: "weakref.WeakSet[ProcessGroup]" = weakref.WeakSet()  # the groups in which an error has ended a pass


@contextmanager
def one_pass(group: Group) -> Iterator[None]:
    """A pass of messages. After an error, `agree` refuses the group: the next pass would take what it has left."""
    try:
        yield
    except BaseException:
        _ended.update(groups_of(group))
        raise
