"""A file that describes a machine: what `calibrate` measured, and what the planner reads.

    format, version   what the file is; another version is refused by name
    cluster           the numbers that the planner takes:
        hosts, per_host, nics       devices of a host, and network cards (NICs) that they share
        flops, backward_flops       FLOP/s of attention on a device, of a long block, while all devices compute
        causal                      times as long does a call with a causal mask take for each pair
        launch                      seconds that a call of the kernel takes beside its FLOPs
        memory_bandwidth            bytes/s that a device reads and writes in its memory
        bandwidth, latency          of a message inside a host: bytes/s while all devices send, seconds of the shortest
        host_bandwidth, host_latency    of a message to another host: bytes/s of a NIC; null: there is no such wire
        slowdown                    times as long does computing take while messages travel
    computing         FLOP/s by pass, mask and block length; messages: seconds by kind, place and bytes: the tables

Shapes: numbers only.

A reader of the ring may skip this file.
"""

import json
import math
from dataclasses import fields
from pathlib import Path
from typing import Any

from ringlab.planning.ways import Cluster

FORMAT, VERSION = "machine of ringlab.planning", 1
MAKE = "make it with `python -m ringlab.planning.calibrate --out FILE`"
WIRES = ("bandwidth", "host_bandwidth")  # null where there is no such wire
COUNTS = ("hosts", "per_host", "nics")
FIELDS = [field.name for field in fields(Cluster) if field.name != "multiprocessors"]  # of them nothing is measured
RATES = ("flops", "backward_flops", "bandwidth", "host_bandwidth", "memory_bandwidth")  # a second


def write_machine(path: Path, cluster: Cluster, **tables: Any) -> None:
    """Write the numbers of a cluster, and the tables that they come from."""
    numbers = {name: None if getattr(cluster, name) == math.inf else getattr(cluster, name) for name in FIELDS}
    text = json.dumps({"format": FORMAT, "version": VERSION, "cluster": numbers, **tables}, indent=1)
    path.write_text(text + "\n")


def read_machine(path: str | Path) -> Cluster:
    """The cluster that a file of `write_machine` describes.

    Raises ValueError that names the file for one that is missing, is no JSON, has another format or version, lacks a
    field or has one more, and for a number that no cluster has.
    """
    try:
        content = json.loads(Path(path).read_text())
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}; {MAKE}") from None
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError too
        raise ValueError(f"{path} is no JSON: {error}; {MAKE}") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        given = f"format {content.get('format')!r}" if isinstance(content, dict) else type(content).__name__
        raise ValueError(f"{path} has {given}; expected format {FORMAT!r}: {MAKE}")
    if content.get("version") != VERSION:
        raise ValueError(f"{path} has version {content.get('version')!r}; expected {VERSION}: measure again, {MAKE}")
    return cluster_of(content.get("cluster"), str(path))


def cluster_of(numbers: Any, path: str) -> Cluster:
    """The cluster of a file's field "cluster". Raises ValueError as `read_machine` does."""
    if not isinstance(numbers, dict) or set(numbers) != set(FIELDS):
        given = sorted(numbers) if isinstance(numbers, dict) else numbers
        raise ValueError(f"{path}: cluster has {given}; expected the fields {FIELDS}")
    for name, value in numbers.items():
        if value is None and name in WIRES:
            continue
        right = type(value) is int if name in COUNTS else type(value) in (int, float) and -math.inf < value < math.inf
        if not right:
            expected = "a whole number" if name in COUNTS else "a number" + " or null" * (name in WIRES)
            raise ValueError(f"{path}: {name} is {value!r}; expected {expected}")
        least, most = (1e3, 1e20) if name in RATES else (0, 1e3)
        if value > most or 0 < value < least:
            raise ValueError(f"{path}: {name} is {value!r}; expected {least:g} to {most:g}")
    try:
        known: dict[str, Any] = {name: math.inf if value is None else value for name, value in numbers.items()}
        return Cluster(**known)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
