"""A file that describes a machine: what `calibrate` measured, and what the planner reads.

    format, version   what the file is; another version is refused by name
    cluster           the fields of a Cluster of ways.py, which says what they mean; null: there is no such wire
    computing         FLOP/s by pass, mask and block length; messages: seconds by place and bytes: the tables

A reader of the ring may skip this file.
"""

import json
import math
from dataclasses import fields
from pathlib import Path
from typing import Any

from ring_planner.ways import Cluster

FORMAT, VERSION = "machine of ringlab.planning", 1
MAKE = "make it with `python -m ring_planner.calibrate --out FILE`"
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
    except (OSError, ValueError, RecursionError) as reason:  # UnicodeDecodeError too
        raise ValueError(f"{path} cannot be read: {reason}; {MAKE}") from None
    about = (content.get("format"), content.get("version")) if isinstance(content, dict) else type(content).__name__
    if about != (FORMAT, VERSION):
        raise ValueError(f"{path} has format and version {about}; expected {(FORMAT, VERSION)}: measure again, {MAKE}")
    numbers = content.get("cluster")
    if not isinstance(numbers, dict) or set(numbers) != set(FIELDS):
        raise ValueError(f"{path}: cluster has {numbers}; expected the fields {FIELDS}")
    for name, value in numbers.items():
        kinds = (int,) if name in COUNTS else (int, float)
        least, most = (1e3, 1e20) if name in RATES else (0, 1e3)
        usual = type(value) in kinds and (value == 0 or least <= value <= most)
        if not usual and not (value is None and name in WIRES):
            expected = f"{'a whole number' if name in COUNTS else 'a number'}, 0 or {least:g} to {most:g}"
            if name in WIRES:
                expected += ", or null"
            raise ValueError(f"{path}: {name} is {value!r}; expected {expected}")
    try:
        known: dict[str, Any] = {name: math.inf if value is None else value for name, value in numbers.items()}
        return Cluster(**known)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
