"""Hosts on one machine: network namespaces, each with a network card of a set rate on one switch, and a torchrun node.

    10.77.0.1 [ host 0 ] ==== `rate` bytes a second each way ====\\
    10.77.0.2 [ host 1 ] ==== `rate` bytes a second each way ==== [ switch ]
    10.77.0.3 [ host 2 ] ==== `rate` bytes a second each way ====//

A host sees its end of its link and its own loopback, nothing else. The ranks of a host talk over the loopback, which is
as fast as the machine copies. All hosts share the machine's cores and memory.

A host lives as long as its processes. They all end with the process that made them, even if that is killed. The
namespaces and the links end with them; they have no names, so nothing is left behind.

Linux only, as root, with iproute2 and util-linux. Elsewhere `why_not` gives the reason.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import IO, Any

from ringlab.support.processes import join_ring

ROOT = Path(__file__).parents[1]
TOOLS = ("ip", "tc", "unshare", "nsenter", "setpriv", "taskset")
LINK = "eth0"  # what each host calls its end of its link
GRACE = 10  # seconds that a node has to end by itself after another has failed, so that it can print its reason
BURST = 128 * 1024  # bytes that pass at full speed: 1 ms of the rate


def why_no_network() -> str | None:
    """The reason why this process cannot make a network; None if it may try."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "only root, on Linux, may make a network of its own"
    if missing := [tool for tool in TOOLS if not shutil.which(tool)]:
        return f"commands are missing: {', '.join(missing)}; install iproute2 and util-linux"
    return None


def throttle(device: str, rate: int) -> list[str]:
    """The command that limits what leaves through a network device to `rate` bytes a second. Arrivals have no limit."""
    return f"tc qdisc add dev {device} root tbf rate {8 * rate}bit burst {BURST} latency 100ms".split()


@dataclass(frozen=True)
class Host:
    """A network namespace with its end of a link."""

    address: str
    holder: int  # the process that keeps it alive

    def inside(self, *command: str) -> list[str]:
        """The command that runs `command` on this host."""
        return ["nsenter", f"--net=/proc/{self.holder}/ns/net", *command]


@contextmanager
def hosts(count: int, rate: int) -> Iterator[list[Host]]:
    """`count` hosts on one switch, over links of `rate` bytes a second each way. They end with the body.

    Raises OSError with the reason when this machine or this user cannot have them.
    """
    if reason := why_no_network():
        raise OSError(reason)
    with ExitStack() as stack:
        switch, *holders = (stack.enter_context(_namespace()) for _ in range(1 + count))
        joined = [Host(f"10.77.0.{1 + i}", holder) for i, holder in enumerate(holders)]
        middle = Host("", switch)
        for command in ("ip link add switch type bridge", "ip link set switch up"):
            _do(middle.inside(*command.split()))
        for i, host in enumerate(joined):
            _connect((host, LINK), (middle, f"to{i}"), rate)
            _do(middle.inside(*f"ip link set to{i} master switch".split()))
            _do(host.inside(*f"ip address add {host.address}/24 dev {LINK}".split()))
            _do(host.inside("ip", "link", "set", "lo", "up"))
            # Every Linux has reno. bbr, the default of some, measures the link first and is slow meanwhile.
            _do(host.inside("sh", "-c", "echo reno > /proc/sys/net/ipv4/tcp_congestion_control"))
        yield joined


def _connect(one: tuple[Host, str], other: tuple[Host, str], rate: int) -> None:
    """Join two hosts by a wire, (host, the device's name there) at each end, of `rate` bytes a second each way."""
    (here, mine), (there, its) = one, other
    ends = f"ip link add {mine} netns {here.holder} type veth peer name {its} netns {there.holder}"
    _do(ends.split())
    for host, device in (one, other):
        _do(host.inside(*throttle(device, rate)))
        _do(host.inside("ip", "link", "set", device, "up"))


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
    """The reason why there can be no `hosts` here; None if there can."""
    try:
        with hosts(2, rate=100_000_000):
            return None
    except OSError as error:
        return str(error)


def torchrun(hosts: list[Host], *command: str) -> str:
    """Run `torchrun command` as one job with a rank on each host. Each has its own core, if there are enough.

    Rank 0 is on hosts[0]. Returns the standard output of hosts[0]. When a node fails, the others are ended too, and
    RuntimeError carries the standard error of all.
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
            node += [f"--master_addr={hosts[0].address}", "--master_port=29500", "--nproc_per_node=1"]
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


def job(joined: list[Host], work: Callable[..., Any], sizes: dict[str, Any]) -> Any:
    """What work(context, **sizes) returns on rank 0, in a job with a rank on each of these hosts."""
    name = f"{work.__module__}:{work.__name__}"
    return json.loads(torchrun(joined, "-m", "bench.hosts", name, json.dumps(sizes)))


def on_a_rank(name: str, sizes: str) -> None:
    """What each rank of a `job` does."""
    with join_ring("cpu") as context:
        found = resolve_name(name)(context, **json.loads(sizes))
        if context.rank == 0:
            print(json.dumps(found))


def _text(file: IO[str]) -> str:
    file.seek(0)
    return file.read()


def _end(node: subprocess.Popen) -> None:
    node.terminate()  # torchrun then ends its ranks
    node.wait()


if __name__ == "__main__":
    on_a_rank(*sys.argv[1:])
