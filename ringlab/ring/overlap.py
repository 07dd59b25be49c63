"""Overlap: a rank computes on the block in hand while it sends that block and receives the next one.

    blocking      a round takes   computing + messages
    overlapped    a round takes   max(computing, messages)

So messages cost time only where they take longer than the computing.

Shapes: K and V of a block, (B, H, C, D) each for C tokens, leave together and arrive in one of two buffers. The ring
reads and sends the block in one buffer while the next block fills the other.

    $ python -m ringlab.ring.overlap
    2 ranks, chunks of 1024 tokens, one hop:
        blocking    computing 0.034 s, messages and waiting 0.0030 s
    ok    blocking: largest error 1.8e-07, rounding allows 7.4e-06 (float32 sums)
        overlapped  computing 0.026 s, messages and waiting 0.0000 s
    ok    overlapped: largest error 1.8e-07, rounding allows 7.4e-06 (float32 sums)
    hidden: 100% of the messages' time

Before: backward.py. After: layouts.py, which tokens a rank has.
Source: Liu et al. 2024, section 3 ("overlapping the communication"), algorithm 1.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work

import ring_attn
from ringlab.basics.blockwise_attention import attend
from ringlab.basics.chunks import agree_on_chunks, check_forward_only
from ringlab.basics.online_softmax import finish, start
from ringlab.basics.ranks import gather, scatter
from ringlab.support import timeline
from ringlab.support.agreement import members
from ringlab.support.processes import RankContext, launch
from ringlab.support.timeline import span


def post(
    sent: Sequence[Tensor], received: Sequence[Tensor], group: ProcessGroup | None = None, *, distance: int = 1
) -> list[Work]:
    """Begin to send tensors to the next rank, and to fill others from the previous rank. Return at once.

    With another `distance` they go to the rank so many on, and come from the rank so many back. An empty tensor
    needs no message.

    No rank waits here, so the ranks need no order of sending. The tensors must be contiguous. Wait for every returned
    work before you write into what is `sent` or read what is `received`.

    Receives come first. gloo sends only what the receiver has asked for. Where two ranks send to each other, asking
    after the own message has begun means asking when it has left: the two messages then take turns on the wire.
    """
    rank, world_size = members(group)
    to, source = (rank + distance) % world_size, (rank - distance) % world_size
    sends = [dist.P2POp(dist.isend, x, group=group, group_peer=to) for x in sent if x.numel()]
    receives = [dist.P2POp(dist.irecv, x, group=group, group_peer=source) for x in received if x.numel()]
    return dist.batch_isend_irecv(receives + sends) if receives + sends else []  # ranks without tokens


def numbers_of_token(k: Tensor, v: Tensor) -> int:
    """How many numbers k (B, G, C, D) and v (B, G, C, Dv) have for a token."""
    return k.shape[0] * k.shape[1] * (k.shape[3] + v.shape[3])


def two_buffers(
    k: Tensor, v: Tensor, lengths: Sequence[int], rank: int, dtype: torch.dtype | None = None
) -> Callable[[int], Tensor]:
    """Two buffers for the blocks of a ring: a function of the round t that gives the place of its block.

    Block j = (r - t) mod P of rank r gets the numbers of K_j and V_j side by side, in the two buffers by turns:
    `keys_and_values` finds both there. k and v (B, H, C, D) are this rank's own, v with a D of its own if it likes,
    `lengths` the chunk length C of every rank, and `dtype` k's unless given.
    """
    of_token = numbers_of_token(k, v)

    @cache  # a buffer takes no room before it is asked for: with two ranks one is enough
    def buffer(turn: int) -> Tensor:
        return torch.empty(of_token * max(lengths), dtype=dtype or k.dtype, device=k.device)

    return lambda t: buffer(t % 2)[: of_token * lengths[(rank - t) % len(lengths)]]


def keys_and_values(block: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """K_j and V_j (B, H, C_j, D), or their gradients, in numbers side by side. k and v (B, H, C, D) have their D."""
    (B, H, _, D), D_v = k.shape, v.shape[-1]
    C_j = block.numel() // numbers_of_token(k, v)
    k_j, v_j = block.split([B * H * C_j * D, B * H * C_j * D_v])
    return k_j.view(B, H, C_j, D), v_j.view(B, H, C_j, D_v)


def arriving_blocks(
    k: Tensor, v: Tensor, *, lengths: Sequence[int], group: ProcessGroup | None = None, hops: int | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield k and v (B, H, C_j, D) of block j = (r - t) mod P on rank r, for t = 0 ... hops (None: P-1).

    Meanwhile the next block travels. Consume each block before advancing: its buffer is reused. Do not write into it:
    it is being sent. `lengths` is the chunk length C of every rank. Liu et al. 2024, algorithm 1.
    """
    rank, world_size = members(group)
    buffer = two_buffers(k, v, lengths, rank)
    here = k.contiguous(), v.contiguous()  # two messages: one message of both would cost a copy
    for t in range(world_size - 1 if hops is None else hops):
        coming = keys_and_values(buffer(t + 1), k, v)
        with span("send", t, *here), span("receive", t, *coming):
            works = post(here, coming, group)
            yield here
            with span("wait", t, *coming):
                for work in works:
                    work.wait()
        here = coming
    yield here


def own_last(blocks: Iterator[Any]) -> Iterator[Any]:
    """The blocks, but a rank's own is the last one. Its gradients stay; those of other ranks come home meanwhile."""
    own_block = next(blocks)
    yield from blocks
    yield own_block


def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, group: ProcessGroup | None = None
) -> Tensor:
    """`ring_attn.ring_attention`, overlapped: the same arguments, shapes, dtypes and errors. Forward only.

    Liu et al. 2024, algorithm 1.
    """
    name = f"{__name__}.ring_attention"
    scale, lengths = agree_on_chunks(q, k, v, scale, group, function=name, check=check_forward_only)
    state = start(q)
    for block in arriving_blocks(k, v, lengths=lengths, group=group):
        state = attend(state, q, *block, scale=scale)
    return finish(state)[0].to(q.dtype)


def seconds(events: list[timeline.Event], *what: str) -> float:
    """The seconds that a rank spent on events of these kinds, on average over the ranks."""
    ranks = 1 + max(event.rank for event in events)
    return sum(event.end - event.start for event in events if event.what in what) / ranks


def record_both(
    context: RankContext, q: Tensor, k: Tensor, v: Tensor
) -> dict[str, tuple[Tensor | None, list[timeline.Event]]]:
    """Run the blocking ring and the overlapped ring on q, k, v (B, H, S, D), given on rank 0.

    Returns for "blocking" and "overlapped" the whole result (on rank 0, else None) and the recorded events.
    """
    q, k, v = (scatter(x if context.rank == 0 else None, context) for x in (q, k, v))
    runs = {}
    for name, ring in (("blocking", ring_attn.ring_attention), ("overlapped", ring_attention)):
        ring(q[:, :, :1], k[:, :, :1], v[:, :, :1])  # opens the connections
        with timeline.record(k, ring=ring) as events:
            out = ring(q, k, v)
        runs[name] = gather(out, context), events
    return runs


def hidden_share(blocking: list[timeline.Event], overlapped: list[timeline.Event]) -> float:
    """The share of the blocking ring's message time for which the overlapped ring does not wait: 1 is all of it."""
    return 1 - seconds(overlapped, "wait") / seconds(blocking, "send", "receive")


def main() -> int:
    from ringlab.support.rounding import exact_attention, report

    q, k, v = torch.randn(3, 1, 4, 2048, 64, generator=torch.Generator().manual_seed(0)).unbind()
    runs = launch(record_both, 2, q, k, v)[0]
    right = exact_attention(q, k, v)["out"]
    ok = True
    print("2 ranks, chunks of 1024 tokens, one hop:")
    for name, (out, events) in runs.items():
        waited = seconds(events, *(("wait",) if name == "overlapped" else ("send", "receive")))
        print(f"    {name:<10}  computing {seconds(events, 'compute'):.3f} s, messages and waiting {waited:.4f} s")
        ok &= report(name, out, right)
    print(f"hidden: {hidden_share(*(events for _, events in runs.values())):.0%} of the messages' time")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
