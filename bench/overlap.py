"""The share of the messages' time that the overlapped ring hides over a slow link, and the share that it should hide.

On one machine the cores that compute also copy the messages, so hiding them saves little time. Here the processes get
a loopback of their own that carries 1 Gbit/s for the messages of all ranks together. So messages take time on the
wire, as in a cluster.

    a round takes       blocking: computing + messages        overlapped: max(computing, messages)
    so of the messages  min(1, computing / messages) should be hidden

Linux only, as root, with iproute2. Elsewhere it gives the reason and measures nothing.

    $ sudo .venv/bin/python -m bench.overlap
"""

import ctypes
import os
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from statistics import median

import torch

from bench import record
from ringlab.ring.overlap import hidden_share, record_both, seconds
from ringlab.support.processes import RankContext, launch
from ringlab.support.rounding import exact_attention
from ringlab.support.timeline import Event

CHUNKS = [256, 512, 1024, 2048, 4096]  # tokens a rank
SIZE = {
    "heads": 8,
    "head_dim": 64,
    "world_size": 2,
    "repetitions": 7,
}  # a core for each rank; more ranks would share cores
RATE = 125_000_000  # bytes a second
BURST = 128 * 1024  # bytes that pass at full speed: two packets of the loopback, 1 ms of the rate
SEND_BUFFER = 256 * 1024  # bytes; with Linux's default, 4 MiB, a send returns long before its message has arrived
TRACED = 2048  # tokens: at this chunk messages take about as long as computing
CLONE_NEWNET = 0x40000000  # from sched.h
Rings = dict[str, list[Event]]  # the events of all ranks of the "blocking" and of the "overlapped" ring


def why_no_network(*tools: str) -> str | None:
    """The reason why this process cannot make a network with the commands `tools`; None if it may try."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "only root, on Linux, may make a network of its own"
    if missing := [tool for tool in tools if not shutil.which(tool)]:
        return f"commands are missing: {', '.join(missing)}; install iproute2 and util-linux"
    return None


def throttle(device: str, rate: int) -> list[str]:
    """The command that limits what leaves through a network device to `rate` bytes a second. Arrivals have no limit."""
    return f"tc qdisc add dev {device} root tbf rate {8 * rate}bit burst {BURST} latency 100ms".split()


def slow_loopback(rate: int) -> str | None:
    """Give this process, and those it will start, a network of its own: a loopback that carries `rate` bytes a second.

    Returns None, or the reason why it failed. Call it before the first `launch`, because processes that run already
    stay outside. Nothing is left behind: the network ends with its last process.
    """
    if why_not := why_no_network("ip", "tc"):
        return why_not
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET):
        return f"the system allows no network of its own: {os.strerror(ctypes.get_errno())}"
    Path("/proc/sys/net/ipv4/tcp_wmem").write_text(f"4096 16384 {SEND_BUFFER}")  # of the new network only
    for command in (throttle("lo", rate), ["ip", "link", "set", "lo", "up"]):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            return f"{' '.join(command)!r} failed: {done.stderr.strip()}"
    return None


def rings_in_turn(context: RankContext, chunk: int, heads: int, head_dim: int, repetitions: int) -> list[Rings]:
    """Run the blocking ring, the overlapped one, the blocking one, ... in float32, and return the record of each pair.

    Raises RuntimeError when a result differs from full attention by more than rounding explains.
    """
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, heads, chunk * context.world_size, head_dim, generator=generator).unbind()
    right = exact_attention(q, k, v)["out"] if context.rank == 0 else None
    pairs = []
    for _ in range(1 + repetitions):  # the first warms up
        both = record_both(context, q, k, v)
        pairs.append({name: events for name, (_, events) in both.items()})
        for name, (out, _) in both.items():
            if right and not right.accepts(out):
                raise RuntimeError(f"the {name} ring differs from full attention")
    return pairs[1:]


def duration(events: list[Event]) -> float:
    """Seconds from the first start to the last end."""
    return max(event.end for event in events) - min(event.start for event in events)


def summary(pairs: list[Rings], world_size: int) -> dict[str, float]:
    """Medians over the repetitions, in seconds: of a whole ring; of a round's computing; of a hop's messages and wait.

    Also the share of the messages' time that is hidden, and the share that should be.
    """
    seen = {
        "blocking": [duration(pair["blocking"]) for pair in pairs],
        "overlapped": [duration(pair["overlapped"]) for pair in pairs],
        "computing": [seconds(pair["blocking"], "compute") / world_size for pair in pairs],
        "messages": [seconds(pair["blocking"], "send", "receive") / (world_size - 1) for pair in pairs],
        "waiting": [seconds(pair["overlapped"], "wait") / (world_size - 1) for pair in pairs],
        "hidden": [hidden_share(pair["blocking"], pair["overlapped"]) for pair in pairs],
    }
    medians = {name: median(each) for name, each in seen.items()}
    return {**medians, "predicted": min(1.0, medians["computing"] / medians["messages"])}


def measure(
    chunks: list[int], traced: int, *, heads: int, head_dim: int, world_size: int, repetitions: int, rate: int | None
) -> record.Results:
    """The whole bench: a row for each chunk length, and for the length `traced` the events of its median repetition.

    `rate` is the bytes a second of the loopback, None without a limit. It is recorded here, not set.
    """
    rows, events, made = [], {}, record.made("overlap", "float32")
    size = {"heads": heads, "head_dim": head_dim, "world_size": world_size, "repetitions": repetitions}
    for chunk in chunks:
        pairs = launch(rings_in_turn, world_size, chunk, heads, head_dim, repetitions)[0]
        rows.append({"chunk": chunk, **summary(pairs, world_size)})
        if chunk == traced:
            by_share = sorted(pairs, key=lambda pair: hidden_share(pair["blocking"], pair["overlapped"]))
            events = {name: [asdict(each) for each in ring] for name, ring in by_share[len(pairs) // 2].items()}
    return {**made, "rate": rate, **size, "rows": rows, "traced": events}


def table(results: record.Results) -> str:
    """The results as markdown, times in milliseconds."""
    rate, rows = results["rate"], []
    link = f"limited to {rate / 1e6:g} MB/s, which the messages of all ranks share" if rate else "as fast as it can be"
    for row in results["rows"]:
        times = [row[name] for name in ("blocking", "overlapped", "computing", "messages", "waiting")]
        shares = [f"{row[name]:.0%}" for name in ("hidden", "predicted")]
        rows.append([f"{row['chunk']:,}", *(f"{1e3 * time:.1f}" for time in times), *shares])
    return record.page(
        "Overlap: the messages that a ring hides behind its computing",
        results,
        f"B = 1, H = {results['heads']}, D = {results['head_dim']}; P = {results['world_size']} ranks, a thread each. "
        f"The link is this machine's loopback, {link}. The two rings ran in turn; medians of {results['repetitions']} "
        "repetitions. Times in ms: of the whole ring; of a round's computing; of a hop's messages in the blocking "
        "ring; and of the wait for them that is left in the overlapped ring. Hidden: 1 - wait / messages. It should be "
        "min(1, computing / messages).",
        record.grid("C | blocking | overlapped | computing | messages | wait | hidden | should be", rows),
    )


def main() -> int:
    if why_not := slow_loopback(RATE):
        print(f"nothing measured: {why_not}")
        return 0
    os.environ.setdefault(
        "TORCH_CPP_LOG_LEVEL", "ERROR"
    )  # else torch mentions that the new network has no names of hosts
    record.save("overlap", measure(CHUNKS, TRACED, **SIZE, rate=RATE), table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
