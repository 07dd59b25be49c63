"""How what each rank says gets to all of them: through pipes inside a host, and between hosts by one rank of each.

    inside a host     every rank tells every other one; so ranks that are in other groups notice it, too
    between hosts     the first rank of each host tells those of the other hosts, and its own host what it heard

What ranks say is long, and nearly always what it was the time before. So each says first, in 16 bytes, what it expects
all of them to say: `all_expect`. Only where that differs they say it in full: `in_full`.

No GPU has a part in it: between hosts there is a group of gloo of our own, with those first ranks, made when it is
first needed. (Through a GPU a few bytes would wait until it has computed what it was given before.)
"""

import pickle
import struct
from collections.abc import Iterable, Sequence
from contextlib import nullcontext, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import AllgatherOptions

from ringlab.support.pipes import FACTS, REPLY, Inbox

WORD = struct.Struct("<qq")  # the fingerprint of what a rank expects; how many agreements it counts with this one
DIFFER = -1  # no fingerprint
SOON = timedelta(seconds=3)  # for the messages of ranks that may never come, once it is clear that none can go on

# torch 2.13 gave it another name; older releases are supported too.
all_gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor

Ranks = tuple[int, ...]  # of the job
Heard = dict[int, tuple[Ranks, bytes]]  # of each rank: with whom it agrees, and what it says


def all_expect(inbox: Inbox, ranks: Ranks, expected: int, limit: timedelta) -> bool:
    """Whether all these ranks expect the same, by its fingerprint, 0 or more. They count: `inbox.agreements`."""
    here, speakers = inbox.hosts_of(ranks)
    others = [rank for rank in here if rank != inbox.rank]
    words = [(expected, inbox.agreements + 1)]
    for rank in others:
        inbox.send(FACTS, rank, WORD.pack(*words[0]))
    for rank in others:
        message = _hear(inbox, rank, limit)
        if len(message) == WORD.size:
            words.append(WORD.unpack(message))
        else:  # it has found already that the ranks differ, and says in full what it says
            inbox.arrived[FACTS][rank].appendleft(message)
            words.append((DIFFER, 0))
    if len(speakers) > 1:
        if inbox.rank == here[0]:
            of_hosts = between_hosts(inbox, speakers, torch.tensor(_one_word(words)), limit)
            words = [(int(fingerprint), int(number)) for fingerprint, number in of_hosts]
            for rank in others:
                inbox.send(REPLY, rank, WORD.pack(*_one_word(words)))
        else:
            words = [WORD.unpack(inbox.wait(REPLY, here[0], limit))]
    fingerprint, inbox.agreements = _one_word(words)
    return fingerprint == expected


def _one_word(words: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """What all of them expect, or DIFFER; and the largest number."""
    fingerprints, numbers = zip(*words, strict=True)
    return fingerprints[0] if len(set(fingerprints)) == 1 else DIFFER, max(numbers)


def in_full(inbox: Inbox, ranks: Ranks, text: bytes, limit: timedelta) -> Heard:
    """What the ranks say, by rank. Where they are in other groups: also what others say that one of them named.

    A rank in no group, with () for `ranks`, tells all that it can reach.
    """
    here, speakers = inbox.hosts_of(ranks)
    heard = _on_this_host(inbox, ranks, here, text, limit)
    apart = any(named != ranks for named, _ in heard.values())
    if len(speakers) > 1:
        with suppress(RuntimeError) if apart else nullcontext():  # then those of other hosts may never come
            limit = SOON if apart else limit
            if inbox.rank == here[0]:
                mine = torch.frombuffer(bytearray(pickle.dumps(heard)), dtype=torch.uint8)
                sizes = [int(size) for (size,) in between_hosts(inbox, speakers, torch.tensor([len(mine)]), limit)]
                padded = torch.nn.functional.pad(mine, (0, max(sizes) - len(mine)))
                for size, of_host in zip(sizes, between_hosts(inbox, speakers, padded, limit), strict=True):
                    heard |= pickle.loads(of_host[:size].numpy().tobytes())
                for rank in here[1:]:
                    inbox.send(REPLY, rank, pickle.dumps(heard))
            else:
                heard = pickle.loads(inbox.wait(REPLY, here[0], limit))
    return heard


def _on_this_host(inbox: Inbox, ranks: Ranks, here: Sequence[int], text: bytes, limit: timedelta) -> Heard:
    heard: Heard = {inbox.rank: (ranks, text)}
    message, asked = pickle.dumps(heard[inbox.rank]), list[int]()

    def ask(others: Iterable[int]) -> None:
        for rank in others:
            if rank not in asked and rank != inbox.rank:
                asked.append(rank)
                inbox.send(FACTS, rank, message)

    ask(here or inbox.within_reach(SOON))
    apart = not ranks
    for rank in asked:  # `ask` adds to them
        try:
            heard[rank] = pickle.loads(_hear(inbox, rank, SOON if apart else limit, full=True))
        except RuntimeError:
            if not apart:
                raise
            continue
        if heard[rank][0] != ranks:
            apart = True
            ask(sorted({*heard[rank][0]}.intersection(inbox.within_reach(SOON))))
    return heard


def _hear(inbox: Inbox, rank: int, limit: timedelta, *, full: bool = False) -> bytes:
    """The next message of a rank. With `full`, the next one in full."""
    while True:
        message = inbox.wait(FACTS, rank, limit)
        if not full or len(message) != WORD.size:
            return message


def between_hosts(inbox: Inbox, ranks: Ranks, mine: Tensor, limit: timedelta) -> list[Tensor]:
    """What each of these ranks gives, in their order. The ranks must give as many numbers."""
    if ranks not in inbox.speakers:
        store = dist.PrefixStore(f"speakers {ranks}", inbox.store)
        inbox.speakers[ranks] = dist.ProcessGroupGloo(store, ranks.index(inbox.rank), len(ranks), limit)
    options, parts = AllgatherOptions(), [torch.empty_like(mine) for _ in ranks]
    options.timeout = limit
    # The group itself is asked, not torch.distributed: that knows groups of its own only, and with
    # TORCH_DISTRIBUTED_DEBUG=DETAIL it refuses others.
    group: Any = inbox.speakers[ranks]
    group.allgather([parts], [mine], options).wait()
    return parts
