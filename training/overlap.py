"""Overlap: send the block in hand and receive the next one while computing; what computing does not cover costs time.

    blocking      a round takes   computing + messages
    overlapped    a round takes   max(computing, messages)

Shapes: a block's K and V, (B, H, C, D) each, leave in one batch and arrive in one of two buffers: while one is read and
sent, the other is filled.

    $ python -m training.overlap
    2 ranks, chunks of 1024 tokens, one hop:
        blocking    computing 0.034 s, messages and waiting 0.0030 s
    ok    blocking: largest error 2.2e-07, rounding allows 3.6e-05
        overlapped  computing 0.026 s, messages and waiting 0.0000 s
    ok    overlapped: largest error 2.2e-07, rounding allows 3.6e-05
    hidden: 100% of the messages' time

Before: backward.py. After: causal.py, which tokens a rank should hold; flash_ring.py uses `arriving_blocks`.
Source: Liu et al. 2024, section 3 ("overlapping the communication"), algorithm 1.
"""

import sys
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work

import ring_attn
from basics.blockwise_attention import attend
from basics.naive_attention import naive_attention, report, rounding_tolerance
from basics.online_softmax import finish, start
from basics.ranks import gather, neighbours, scatter
from support import timeline
from support.agreement import agree_on_chunks, check_forward_only
from support.processes import RankContext, launch
from support.timeline import span


def post(sent: Sequence[Tensor], received: Sequence[Tensor], group: ProcessGroup | None = None) -> list[Work]:
    """Begin to send tensors to the next rank and to fill others from the previous one, as one batch; return at once.

    No order of ranks is needed: nobody waits here. Until every returned work was waited for, what is `sent` must not be
    written, and what is `received` not be read. All tensors must be contiguous.
    """
    _, _, next_rank, prev_rank = neighbours(group)
    sends = [dist.P2POp(dist.isend, x, group=group, group_peer=next_rank) for x in sent]
    receives = [dist.P2POp(dist.irecv, x, group=group, group_peer=prev_rank) for x in received]
    return dist.batch_isend_irecv(sends + receives)


def two_buffers(k: Tensor, lengths: list[int], rank: int, dtype: torch.dtype | None = None) -> Callable[[int], Tensor]:
    """A function of t: the room (2, B, H, C_j, D) of block j = (r - t) mod P, in the two buffers by turns.

    k (B, H, C, D) is this rank's own; `lengths` is the chunk length of every rank.
    """
    B, H, _, D = k.shape
    size = 2 * B * H * max(lengths) * D
    buffers = [torch.empty(size, dtype=dtype or k.dtype, device=k.device) for _ in range(2)]

    def block(t: int) -> Tensor:
        length = lengths[(rank - t) % len(lengths)]
        return buffers[t % 2][: 2 * B * H * length * D].view(2, B, H, length, D)

    return block


def arriving_blocks(
    k: Tensor, v: Tensor, *, lengths: list[int], group: ProcessGroup | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield k and v (B, H, C_j, D) of block j = (r - t) mod P for t = 0 ... P-1; the next one travels meanwhile.

    `lengths` is the chunk length of every rank. Whoever iterates computes on a block before asking for the next one,
    and must not write into it or keep it: its buffer is filled again. Liu et al. 2024, algorithm 1.
    """
    rank, world_size, _, _ = neighbours(group)
    room = two_buffers(k, lengths, rank)
    here = k.contiguous(), v.contiguous()  # sent from where they are: to pack them first would cost a copy
    for t in range(world_size - 1):
        coming = room(t + 1).unbind()
        with span("send", t, *here), span("receive", t, *coming):
            works = post(here, coming, group)
            yield here
            with span("wait", t, *coming):
                for work in works:
                    work.wait()
        here = coming
    yield here


def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, group: ProcessGroup | None = None
) -> Tensor:
    """`ring_attn.ring_attention`, overlapped: the same arguments, result, dtypes and errors. Forward only."""
    scale, lengths = agree_on_chunks(q, k, v, scale, group, check=check_forward_only)
    state = start(q)
    for block in arriving_blocks(k, v, lengths=lengths, group=group):
        state = attend(state, q, *block, scale=scale)
    return finish(state)[0].to(q.dtype)


def seconds(events: list[timeline.Event], *what: str) -> float:
    """The time that a rank spent on these things, on average over the ranks."""
    ranks = 1 + max(event.rank for event in events)
    return sum(event.end - event.start for event in events if event.what in what) / ranks


def record_both(
    context: RankContext, q: Tensor, k: Tensor, v: Tensor
) -> dict[str, tuple[Tensor | None, list[timeline.Event]]]:
    """Run the blocking ring and the overlapped one: the whole result, on rank 0, and the record of each."""
    q, k, v = (scatter(x if context.rank == 0 else None, context) for x in (q, k, v))
    runs = {}
    for name, ring in (("blocking", ring_attn.ring_attention), ("overlapped", ring_attention)):
        ring(q[:, :, :1], k[:, :, :1], v[:, :, :1])  # opens the connections
        with timeline.record(k, ring=ring) as events:
            out = ring(q, k, v)
        runs[name] = gather(out, context), events
    return runs


def hidden_share(blocking: list[timeline.Event], overlapped: list[timeline.Event]) -> float:
    """Of the time that the messages of the blocking ring take, the share in which the overlapped one does not wait."""
    return 1 - seconds(overlapped, "wait") / seconds(blocking, "send", "receive")


def main() -> int:
    q, k, v = torch.randn(3, 1, 4, 2048, 64, generator=torch.Generator().manual_seed(0)).unbind()
    runs = launch(record_both, 2, q, k, v, device="cpu")[0]
    exact = naive_attention(q.double(), k.double(), v.double())
    ok = True
    print("2 ranks, chunks of 1024 tokens, one hop:")
    for name, (out, events) in runs.items():
        waited = seconds(events, *(("wait",) if name == "overlapped" else ("send", "receive")))
        print(f"    {name:<10}  computing {seconds(events, 'compute'):.3f} s, messages and waiting {waited:.4f} s")
        ok &= report(name, out, exact, rounding_tolerance(q, k, v, exact))
    print(f"hidden: {hidden_share(*(events for _, events in runs.values())):.0%} of the messages' time")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
