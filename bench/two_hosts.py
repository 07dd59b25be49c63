"""Two hosts on one machine: network namespaces joined by a link of a set rate, with a torchrun node in each.

    10.77.0.1 [ host 0 ] ==== `rate` bytes a second each way ==== [ host 1 ] 10.77.0.2

A host sees its end of the link and its own loopback, nothing else. Both hosts share the machine's cores and memory.

A host lives as long as its processes. They all end with the process that made them, even if that is killed. The
namespaces and the link end with them; they have no names, so nothing is left behind.

Linux only, as root, with iproute2 and util-linux. Elsewhere `why_not` gives the reason.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from bench.overlap import throttle, why_no_network

ROOT = Path(__file__).parents[1]
TOOLS = ("ip", "tc", "unshare", "nsenter", "setpriv", "taskset")
LINK = "eth0"  # what each host calls its end
GRACE = 10  # seconds that a node has to end by itself after the other has failed, so that it can print its reason


@dataclass(frozen=True)
class Host:
    """A network namespace with one end of the link."""

    address: str
    holder: int  # the process that keeps it alive

    def inside(self, *command: str) -> list[str]:
        """The command that runs `command` on this host."""
        return ["nsenter", f"--net=/proc/{self.holder}/ns/net", *command]


@contextmanager
def two_hosts(rate: int) -> Iterator[list[Host]]:
    """Two hosts, joined by a link that carries `rate` bytes a second each way. They end with the body.

    Raises OSError with the reason when this machine or this user cannot have them.
    """
    if reason := why_no_network(*TOOLS):
        raise OSError(reason)
    with ExitStack() as stack:
        hosts = [Host(f"10.77.0.{1 + i}", stack.enter_context(_namespace())) for i in range(2)]
        one, other = (str(host.holder) for host in hosts)
        _do(["ip", "link", "add", LINK, "netns", one, "type", "veth", "peer", "name", LINK, "netns", other])
        for host in hosts:
            _do(host.inside(*throttle(LINK, rate)))
            _do(host.inside("ip", "address", "add", f"{host.address}/24", "dev", LINK))
            for device in (LINK, "lo"):
                _do(host.inside("ip", "link", "set", device, "up"))
            # Every Linux has reno. bbr, the default of some, measures the link first and is slow meanwhile.
            _do(host.inside("sh", "-c", "echo reno > /proc/sys/net/ipv4/tcp_congestion_control"))
        yield hosts


@contextmanager
def _namespace() -> Iterator[int]:
    """A new network namespace, as the id of a process that holds it. It ends when its input closes, or we end."""
    pipe = subprocess.PIPE
    command = ["unshare", "--net", "sh", "-c", "echo inside; exec cat"]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as holder:
        try:
            if not holder.stdout.readline():
                raise OSError(f"the system allows no network of its own: {holder.stderr.read().strip()}")
            yield holder.pid
        finally:
            holder.kill()


def _do(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{' '.join(command)!r} failed: {done.stderr.strip()}")


def why_not() -> str | None:
    """The reason why there can be no `two_hosts` here; None if there can."""
    try:
        with two_hosts(rate=100_000_000):
            return None
    except OSError as error:
        return str(error)


def torchrun(hosts: list[Host], *command: str, processes: Sequence[int] = (1, 1)) -> str:
    """Run `torchrun command` as one job with a node on each host. Each node has its own core, if there are enough.

    `processes` is the number of ranks of each node; rank 0 is on hosts[0]. Returns the standard output of hosts[0].
    When a node fails, the other is ended too, and RuntimeError carries the standard error of both.
    """
    cores = sorted(os.sched_getaffinity(0))
    # These hosts have no names, so gloo is told its interface, and torch need not mention the missing name.
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": LINK, "TORCH_CPP_LOG_LEVEL": "ERROR", "OMP_NUM_THREADS": "1"}
    with ExitStack() as stack:
        nodes = []
        outs = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in hosts]
        errors = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in hosts]
        for i, host in enumerate(hosts):
            node = ["setpriv", "--pdeathsig", "TERM", "taskset", "--cpu-list", str(cores[i % len(cores)])]
            node += [sys.executable, "-m", "torch.distributed.run", f"--nnodes={len(hosts)}", f"--node_rank={i}"]
            node += [f"--master_addr={hosts[0].address}", "--master_port=29500", f"--nproc_per_node={processes[i]}"]
            node = host.inside(*node, *command)
            nodes.append(subprocess.Popen(node, cwd=ROOT, env=environment, stdout=outs[i], stderr=errors[i]))
            stack.callback(_end, nodes[i])
        deadline = float("inf")
        while None in (ends := [node.poll() for node in nodes]) and time.monotonic() < deadline:
            if any(ends):
                deadline = min(deadline, time.monotonic() + GRACE)
            time.sleep(0.05)
        if any(ends):
            reasons = [
                f"host {i}: status {end} (None: had to be ended)\n{_text(errors[i])}" for i, end in enumerate(ends)
            ]
            raise RuntimeError("\n".join(reasons))
        return _text(outs[0])


def _text(file: IO[str]) -> str:
    file.seek(0)
    return file.read()


def _end(node: subprocess.Popen) -> None:
    node.terminate()  # torchrun then ends its ranks
    node.wait()
