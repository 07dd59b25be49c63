"""A training pass over slow links, with P - 1 messages of gradients and with the P messages of other rings, in turn.

    now            a rank's own share of dK and dV stays at home: P - 1 messages (ringlab/ring/schedule.py)
    P messages     the own share travels too, and the message home comes after all computing: so it was here before
    torch's loop   PyTorch's own context-parallel loop: P messages
    to learn from  backward.py: P - 1 messages, for which every rank waits, and no mask

Each rank is on a host of its own (hosts.py). The bytes are those that leave its network card, headers too.

Linux only, as root, with iproute2. Elsewhere it gives the reason and measures nothing. It takes about 2 minutes.

    $ sudo .venv/bin/python -m bench.gradients_home
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bench import record
from bench.against_peers import passes, torch_loop
from bench.hosts import LINK, command, hosts, row_of
from bench.record import in_turn
from ringlab.ring import schedule
from ringlab.ring.backward import ring_attention
from ringlab.ring.flash_ring import ring_flash_attention
from ringlab.ring.schedule import Ring, TravellingSums
from ringlab.support.processes import RankContext

NOW, BEFORE, TORCH, LEARN = "now", "P messages", "torch's loop", "to learn from"
RATE = 12_500_000  # bytes a second of a link: 100 Mbit/s
SIZE = {"worlds": [2, 4], "lengths": [1024], "heads": 8, "head_dim": 64, "repetitions": 3}


class CircleSums(TravellingSums):
    """The sums begin on the rank of their block, and make a closed circle of P messages."""

    def of_round(self, t: int) -> tuple[Tensor, Tensor]:
        self.wait()
        return self.sums_in(self.buffer(t).zero_() if t == 0 else self.buffer(t))

    def send_on(self, t: int) -> None:
        self.wait()
        if t < self.hops:
            self.arriving = schedule.post([self.buffer(t)], [self.buffer(t + 1)], self.group)
        elif t > 0:
            self.coming = torch.empty_like(self.at_home)
            self.arriving = schedule.post([self.buffer(t)], [self.coming], self.group, distance=-t)
        else:
            self.coming = self.buffer(0)

    def home(self) -> tuple[Tensor, Tensor]:
        self.wait()
        return self.sums_in(self.coming)


class Circle(Ring):
    """The ring with these sums. The own block is the first one, and has a piece in every round."""

    rounds_back = Ring.rounds

    def sums(self, k: Tensor, v: Tensor, dtype: torch.dtype) -> CircleSums:
        return CircleSums(k, v, dtype, lengths=self.partition.lengths, group=self.group, hops=self.partition.hops)


OPTIONS: dict[str, Any] = {"causal": True, "layout": "zigzag"}
METHODS: dict[str, Callable[..., Tensor]] = {
    NOW: partial(ring_flash_attention, schedule=Ring, **OPTIONS),
    BEFORE: partial(ring_flash_attention, schedule=Circle, **OPTIONS),
    TORCH: partial(torch_loop, **OPTIONS),
    LEARN: ring_attention,
}


def sent() -> int:
    """The bytes that have left this host."""
    (line,) = (line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith(LINK))
    return int(line.partition(":")[2].split()[8])


def measured(context: RankContext, chunk: int, heads: int, head_dim: int, repetitions: int) -> dict[str, Any]:
    """By method: seconds of a forward and backward pass, and the bytes that this rank sends in each of them."""
    generator = torch.Generator().manual_seed(context.rank)
    inputs = torch.randn(4, 1, heads, chunk, head_dim, generator=generator).bfloat16().unbind()
    of_method = {name: passes(attention, *inputs) for name, attention in METHODS.items()}
    methods = {name: (False, lambda there=there, back=back: back(there())) for name, (there, back) in of_method.items()}
    seconds, results = in_turn(context, methods, repetitions)
    for mine, before in zip(results[NOW], results[BEFORE], strict=True):  # the sums have another order
        assert (mine - before).abs().max() <= 2**-6 * before.abs().max()
    bytes_sent = {}
    for name, (there, back) in of_method.items():
        counts = [sent()]
        out = there()
        dist.barrier()  # what others wait for is there, so all has left
        counts.append(sent())
        back(out)
        dist.barrier()
        counts.append(sent())
        bytes_sent[name] = [counts[1] - counts[0], counts[2] - counts[1]]
    return {"seconds": seconds, "sent": bytes_sent}


def measure(worlds: list[int], lengths: list[int], heads: int, head_dim: int, repetitions: int) -> record.Results:
    """The whole bench: a row for each P and S. Raises OSError where it cannot run."""
    made = record.made("gradients_home", "bfloat16")
    size, rows = {"heads": heads, "head_dim": head_dim, "repetitions": repetitions}, []
    for P in worlds:
        for S in lengths:
            with hosts(P, RATE) as joined:
                row = row_of(joined, "gradients_home", {"chunk": S // P, **size})
            rows.append({"world_size": P, "seq_len": S, **row})
    return {**made, "reference": NOW, "lengths": lengths, **size, "rows": rows}


def table(results: record.Results) -> str:
    """The results as markdown."""
    rows = []
    for row in results["rows"]:
        for name, (forward, backward) in row["sent"].items():
            seconds = median(row["seconds"][name])
            counts = [f"{forward / 1e6:.2f}", f"{backward / 1e6:.2f}", f"{seconds:.3f}"]
            times = f"{seconds / median(row['seconds'][NOW]):.2f} x"
            rows.append([row["world_size"], f"{row['seq_len']:,}", name, *counts, times])
    return record.page(
        "Gradients home in P − 1 messages",
        results,
        f"A training pass: causal, zigzag, B = 1, H = G = {results['heads']}, D = {results['head_dim']}. P hosts: "
        f"network namespaces, one rank each, on links of {RATE / 1e6:g} MB/s each way. MB: what leaves the network "
        "card of a rank, headers too. K and V travel in bfloat16, sums in float32. "
        f"Medians of {results['repetitions']} repetitions, in turn.",
        record.grid("P | S | <gradients | MB forward | MB backward | seconds | now is faster by", rows),
    )


if __name__ == "__main__":
    command("gradients_home", measured, lambda: measure(**SIZE), table)
