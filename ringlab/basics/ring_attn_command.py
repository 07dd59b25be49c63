"""The command `ring_attn.py`: options, inputs, prints, and the check. A reader of the ring may skip this file."""

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable
from dataclasses import asdict

import torch
from torch import Tensor

from ringlab.basics.ranks import gather, scatter
from ringlab.options import Parser, new_file, positive
from ringlab.support import timeline
from ringlab.support.colours import paint
from ringlab.support.devices import choose_device, cpu_cores
from ringlab.support.processes import RankContext, join_ring, launch
from ringlab.support.rounding import exact_attention, report

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]  # chunks of q, k and v (B, H, C, D) -> that of out


def run(context: RankContext, ring: Attention, args: argparse.Namespace) -> int:
    """One rank of the command: make the inputs, run the ring, print what it did, check it. Returns the exit status."""
    whole: list[Tensor] = []
    if context.rank == 0:
        generator = torch.Generator().manual_seed(args.seed % 2**63)
        shape = (args.batch, args.heads, args.seq_len, args.head_dim)
        whole = [torch.randn(shape, generator=generator).to(args.dtype) for _ in "qkv"]
    q, k, v = (scatter(x, context) for x in whole or (None, None, None))

    ring(q[:, :, :1], k[:, :, :1], v[:, :, :1])  # one token a rank: opens the connections
    with timeline.record(k, ring=ring) as events:
        chunk = ring(q, k, v)
    out = gather(chunk, context)
    if out is None:
        return 0

    try:
        return tell(context, args, q, whole, out.cpu(), events)
    except BrokenPipeError:  # `| head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python flushes once more at its end
        return 0


def tell(
    context: RankContext,
    args: argparse.Namespace,
    q: Tensor,
    whole: list[Tensor],
    out: Tensor,
    events: list[timeline.Event],
) -> int:
    """Print what the record says, write the trace, and check `out`, the whole result. Returns the exit status."""
    print_run(context, q, args.seq_len, events)
    if args.trace:
        args.trace.write_text(json.dumps([asdict(event) for event in events], indent=0))
        picture = args.trace.with_suffix(".svg")
        try:
            from ringlab.support import drawing  # the core needs no matplotlib

            figure = drawing.Figure(figsize=(10, 4), layout="constrained")
            drawing.draw_events(events, figure.add_subplot())
            figure.savefig(picture)
            print(f"trace     {args.trace} and its picture {picture}")
        except ModuleNotFoundError as error:
            print(f"trace     {args.trace}, without a picture: {error}")
    return check(out, *whole)


def print_run(context: RankContext, q: Tensor, seq_len: int, events: list[timeline.Event]) -> None:
    """Print the environment and what the record says: who computed on which block when, the time and the bytes.

    q (B, H, C, D) is a chunk that the ring was given.
    """
    P, (B, H, _, D) = context.world_size, q.shape
    chunks = " or ".join(str(C) for C in sorted({seq_len // P, -(-seq_len // P)}))
    system = f"Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    print(f"ring      P = {P} ranks, S = {seq_len} tokens in chunks of {chunks}")
    print(f"tensors   B = {B}, H = {H}, D = {D}, {str(q.dtype).removeprefix('torch.')}")
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
    """Compare with full attention in float64 and print the verdict. Returns the exit status."""
    return 0 if report("against full attention in float64", out, exact_attention(q, k, v)["out"]) else 1


def parse(argv: list[str] | None, world_size: int, local_world_size: int) -> argparse.Namespace:
    """The command's options; ends the process with status 2 and one message when they make no sense."""
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
    about = "Ring Attention on torchrun's processes, or on 4 of its own, checked against full attention."
    parser = Parser(description=about)
    parser.add_argument("--seq-len", type=positive, default=2048, metavar="S", help="tokens, one a rank or more (2048)")
    parser.add_argument("--batch", type=positive, default=1, metavar="B", help="sequences (1)")
    parser.add_argument("--heads", type=positive, default=8, metavar="H", help="heads (8)")
    parser.add_argument(
        "--head-dim", type=positive, default=64, metavar="D", help="numbers in a head's query or key (64)"
    )
    parser.add_argument("--dtype", choices=dtypes, default="float32", help="of q, k, v and the result (float32)")
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="cuda: GPUs, shared if they are few (auto)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the random q, k and v (0)")
    parser.add_argument(
        "--trace", type=new_file(".json"), metavar="FILE", help="write who did what when (.json), and draw it"
    )
    args = parser.parse_args(argv)
    if args.seq_len < world_size:
        parser.error(f"argument --seq-len: {args.seq_len} for {world_size} ranks, expected at least one token a rank")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if 3 * 4 * args.batch * args.heads * args.seq_len * args.head_dim > memory:
        parser.error(f"q, k and v take more than the {memory / 1e9:.0f} GB of this machine, expected smaller sizes")
    try:
        choose_device(args.device, local_world_size)
    except ValueError as error:
        parser.error(str(error))
    args.dtype = dtypes[args.dtype]
    return args


def main(ring: Attention, argv: list[str] | None = None) -> int:
    """Run the command: one rank of it under torchrun, else four processes of this host. Returns the exit status."""
    if "WORLD_SIZE" not in os.environ:  # not started by torchrun
        args = parse(argv, 4, 4)
        try:
            return max(launch(run, 4, ring, args, device=args.device))
        except (ValueError, RuntimeError) as error:
            print(error, file=sys.stderr)
            return 2 if isinstance(error, ValueError) else 1
    sizes = ("WORLD_SIZE", "LOCAL_WORLD_SIZE")
    args = parse(argv, *(int(os.environ.get(name, os.environ["WORLD_SIZE"])) for name in sizes))
    with join_ring(args.device) as context:
        return run(context, ring, args)
