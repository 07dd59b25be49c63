"""Ring Attention: every rank keeps its queries, the K/V blocks go round, and after P rounds all queries met all keys.

    in round t, rank r computes on block j = (r - t) mod P:   (m, l, o) = update((m, l, o), Q_r K_jᵀ / √D, V_j)
    then passes it to rank r+1 and receives the next one from rank r-1: P rounds, P - 1 hops

Shapes: on each rank q, k, v and out are one chunk, (B, H, C, D), of C = S/P tokens, rounded up on the first S mod P.
m, l (B, H, C) and o (B, H, C, D) stay, in float32 at least; K and V of one block, 2·B·H·C·D numbers, move.

    $ torchrun --nproc_per_node=4 ring_attn.py
    ...
    the K/V block that each rank computed on, as recorded:
    round    rank 0  rank 1  rank 2  rank 3
        0       KV0     KV1     KV2     KV3
        1       KV3     KV0     KV1     KV2
        2       KV2     KV3     KV0     KV1
        3       KV1     KV2     KV3     KV0
    ...
    ok    against full attention in float64: largest error 3.1e-07, rounding allows 3.6e-05
    ...

Before: worked_example.py, the same by hand, and basics/ranks.py. After: training/backward.py, its gradients.
Source: Liu et al. 2024, algorithm 1, whose 'count = 1 to N - 1' counts the hops: there are N blocks to compute.
"""

import argparse
import contextlib
import io
import os
import platform
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from basics.blocking_messages import sends_first
from basics.blockwise_attention import attend
from basics.naive_attention import check_qkv, naive_attention, report, resolve_scale, rounding_tolerance
from basics.online_softmax import State, finish, start
from basics.ranks import gather, neighbours, scatter
from support import timeline
from support.agreement import agree_on_lengths
from support.colours import paint
from support.processes import RankContext, choose_device, cpu_cores, join_ring, launch
from support.timeline import span

TILE = 256  # tokens; one tile of scores is B·H·256·256 numbers, small enough for the cache


def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, group: ProcessGroup | None = None
) -> Tensor:
    """This rank's rows of full attention over the whole sequence.

    q, k, v: the local chunks (B, H, C, D), in order of rank; C may differ between ranks, B, H, D, dtype and scale may
    not. Returns out (B, H, C, D) in q's dtype; statistics and sums are float32 at least. Every rank of `group`
    (None: the whole job) must call it. Forward only. Raises the same ValueError on every rank, before any block
    travels, when the input of some rank is wrong or the ranks disagree. Liu et al. 2024, algorithm 1.
    """
    lengths = agree_on_lengths(q, k, v, scale, group, check=forward_only)
    return ring_forward(q, k, v, scale=resolve_scale(scale, q.shape[-1]), lengths=lengths, group=group)[0]


def ring_forward(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, lengths: list[int], group: ProcessGroup | None = None
) -> tuple[Tensor, Tensor]:
    """The ring itself: chunks (B, H, C, D) of checked input -> out (B, H, C, D) and lse (B, H, C).

    `lengths` is the chunk length of every rank. Liu et al. 2024, algorithm 1.
    """
    rank, world_size, _, _ = neighbours(group)
    k, v = k.contiguous(), v.contiguous()
    q_tiles = q.split(TILE, dim=2)
    states = [start(q_tile) for q_tile in q_tiles]  # m, l, o: these stay
    for t in range(world_size):
        with span("compute", t, k):
            states = attend_block(states, q_tiles, k, v, scale=scale)
        if t < world_size - 1:  # after the last round nobody needs another block
            k, v = hop(k, v, t, length=lengths[(rank - t - 1) % world_size], group=group)
    return finish_tiles(states, q.dtype)


def attend_block(
    states: list[State], q_tiles: tuple[Tensor, ...], k: Tensor, v: Tensor, *, scale: float
) -> list[State]:
    """Fold one block, k and v (B, H, Sk, D), into the (m, l, o) of all tiles of queries, a tile of scores at a time."""
    tiles = list(zip(k.split(TILE, dim=2), v.split(TILE, dim=2), strict=True))
    for i, q_tile in enumerate(q_tiles):
        for k_tile, v_tile in tiles:
            states[i] = attend(states[i], q_tile, k_tile, v_tile, scale=scale)
    return states


def finish_tiles(states: list[State], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The (m, l, o) of all tiles -> out (B, H, C, D) in `dtype`, and lse (B, H, C)."""
    outs, lses = zip(*[finish(state) for state in states], strict=True)
    return torch.cat([out.to(dtype) for out in outs], dim=2), torch.cat(lses, dim=2)


def hop(k: Tensor, v: Tensor, t: int, *, length: int, group: ProcessGroup | None = None) -> tuple[Tensor, Tensor]:
    """Pass the block in hand to the next rank and return the previous rank's, k and v (B, H, length, D)."""
    B, H, _, D = k.shape
    k_next, v_next = k.new_empty(B, H, length, D), v.new_empty(B, H, length, D)
    exchange([k, v], [k_next, v_next], t, group)
    return k_next, v_next


def exchange(sent: list[Tensor], received: list[Tensor], t: int, group: ProcessGroup | None = None) -> None:
    """Send tensors to the next rank and fill others from the previous one; round t names it in the record."""
    rank, _, next_rank, prev_rank = neighbours(group)

    def send() -> None:
        with span("send", t, *sent):
            for x in sent:
                dist.send(x, group_dst=next_rank, group=group)

    def receive() -> None:
        with span("receive", t, *received):
            for x in received:
                dist.recv(x, group_src=prev_rank, group=group)

    if sends_first(rank):  # if all ranks sent first, all would wait: basics/blocking_messages.py
        send()
        receive()
    else:
        receive()
        send()


def check_chunks(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise ValueError unless q, k and v are chunks (B, H, C, D) of the same tokens, and fit as `check_qkv` says."""
    check_qkv(q, k, v)
    if q.shape != k.shape:
        raise ValueError(
            f"q has shape {tuple(q.shape)} and k {tuple(k.shape)}; expected chunks of the same tokens, so one shape"
        )


def needs_gradients(*inputs: Tensor) -> bool:
    """Whether autograd expects a backward pass for any of the inputs."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in inputs)


def forward_only(q: Tensor, k: Tensor, v: Tensor) -> None:
    """`check_chunks`, and ValueError when a backward pass is expected too."""
    check_chunks(q, k, v)
    if needs_gradients(q, k, v):
        raise ValueError("the input requires gradients; this ring is forward only: call it under torch.no_grad()")


def run(context: RankContext, args: argparse.Namespace) -> int:
    """One rank of the command: make the inputs, run the ring, print what it did, check it. Returns the exit status."""
    whole = [None] * 3
    if context.rank == 0:
        generator = torch.Generator().manual_seed(args.seed % 2**63)
        shape = (args.batch, args.heads, args.seq_len, args.head_dim)
        whole = [torch.randn(shape, generator=generator).to(args.dtype) for _ in "qkv"]
    q, k, v = (scatter(x, context) for x in whole)

    ring_attention(q[:, :, :1], k[:, :, :1], v[:, :, :1])  # one token a rank: opens the connections
    with timeline.record(k) as events:
        out = ring_attention(q, k, v)
    out = gather(out, context)
    if out is None:
        return 0

    print_run(context, args, events)
    if args.trace:
        timeline.save(events, args.trace)
        timeline.save_picture(events, args.trace.with_suffix(".svg"))
        print(f"trace     {args.trace} and its picture {args.trace.with_suffix('.svg')}")
    return check(out.cpu(), *whole)


def print_run(context: RankContext, args: argparse.Namespace, events: list[timeline.Event]) -> None:
    """The environment, who computed on which block when, the time and the bytes: what the record of the run says."""
    P, dtype = context.world_size, str(args.dtype).removeprefix("torch.")
    chunks = " or ".join(str(C) for C in sorted({args.seq_len // P, -(-args.seq_len // P)}))
    system = f"Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    print(f"ring      P = {P} ranks, S = {args.seq_len} tokens in chunks of {chunks}")
    print(f"tensors   B = {args.batch}, H = {args.heads}, D = {args.head_dim}, {dtype}")
    print(f"device    {context.why}")
    cores = f"{cpu_cores()} cores, {torch.get_num_threads()} thread(s) a rank"
    print(f"machine   torch {torch.__version__}, {system}, {cores}")

    print("\nthe K/V block that each rank computed on, as recorded:")
    print("round  " + "".join(f"{f'rank {rank}':>8}" for rank in range(P)))
    computed = {(event.round, event.rank): event.block for event in events if event.what == "compute"}
    for t in range(P):
        print(f"{t:>5}  " + "".join(paint(computed[t, rank], f"{f'KV{computed[t, rank]}':>8}") for rank in range(P)))

    def most(*what: str) -> float:
        return max(sum(e.end - e.start for e in events if e.what in what and e.rank == rank) for rank in range(P))

    sent = max(sum(e.bytes for e in events if e.what == "send" and e.rank == rank) for rank in range(P))
    total = max(event.end for event in events) - min(event.start for event in events)
    print(f"\ntime      {total:.3f} s from the first start to the last end; of it a rank spent at most")
    print(f"          {most('compute'):.3f} s computing, and {most('send', 'receive'):.3f} s on messages and waiting")
    print(f"sent      at most {sent:,} bytes by a rank, in {P - 1} hop(s) of a K and a V block")


def check(out: Tensor, q: Tensor, k: Tensor, v: Tensor) -> int:
    """Compare with full attention in float64, some rows at a time, and print the verdict. Returns the exit status."""
    exact = torch.cat([naive_attention(rows, k.double(), v.double()) for rows in q.double().split(TILE, dim=2)], dim=2)
    ok = report("against full attention in float64", out, exact, rounding_tolerance(q, k, v, exact))
    print("      (scores up to |q||k|/sqrt(D) are rounded before exp, and the result is stored in the input's dtype)")
    return 0 if ok else 1


def parse(argv: list[str] | None, world_size: int, local_world_size: int) -> argparse.Namespace:
    """The command's options; ends the process with status 2 and one message when they make no sense."""

    def size(text: str) -> int:
        if not text.isdecimal() or int(text) < 1:
            raise argparse.ArgumentTypeError(f"{text!r} given, expected a whole number of 1 or more")
        return int(text)

    def trace(text: str) -> Path:
        if not text.endswith(".json") or Path(text).is_dir() or not Path(text).resolve().parent.is_dir():
            raise argparse.ArgumentTypeError(f"{text!r} given, expected a name ending in .json in a folder that exists")
        return Path(text)

    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
    parser = argparse.ArgumentParser(
        usage="%(prog)s [options]; --help lists them",
        description="Ring Attention on torchrun's processes, or on 4 of its own, checked against full attention.",
    )
    parser.add_argument("--seq-len", type=size, default=2048, metavar="S", help="tokens, one a rank or more (2048)")
    parser.add_argument("--batch", type=size, default=1, metavar="B", help="sequences (1)")
    parser.add_argument("--heads", type=size, default=8, metavar="H", help="heads (8)")
    parser.add_argument("--head-dim", type=size, default=64, metavar="D", help="numbers in a head's query or key (64)")
    parser.add_argument("--dtype", choices=dtypes, default="float32", help="of q, k, v and the result (float32)")
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="cuda: a GPU a process (auto)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the random q, k and v (0)")
    parser.add_argument("--trace", type=trace, metavar="FILE", help="write who did what when (.json), and draw it")
    args = parser.parse_args(argv)
    if args.seq_len < world_size:
        parser.error(f"argument --seq-len: {args.seq_len} for {world_size} ranks, expected at least one token a rank")
    try:
        choose_device(args.device, local_world_size)
    except ValueError as error:
        parser.error(str(error))
    args.dtype = dtypes[args.dtype]
    return args


def main(argv: list[str] | None = None) -> int:
    if "WORLD_SIZE" not in os.environ:  # not started by torchrun
        args = parse(argv, 4, 4)
        try:
            return max(launch(run, 4, args, device=args.device))
        except (ValueError, RuntimeError) as error:
            print(error, file=sys.stderr)
            return 2 if isinstance(error, ValueError) else 1
    quiet = sys.stderr if os.environ["RANK"] == "0" else io.StringIO()  # one complaint, not P of them
    sizes = ("WORLD_SIZE", "LOCAL_WORLD_SIZE")
    with contextlib.redirect_stderr(quiet):
        args = parse(argv, *(int(os.environ.get(name, os.environ["WORLD_SIZE"])) for name in sizes))
    with join_ring(args.device) as context:
        return run(context, args)


if __name__ == "__main__":
    sys.exit(main())
