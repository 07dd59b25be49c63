"""Which device a process of a ring drives: a GPU of its own, a GPU that it shares, or a part of the CPU.

Source: the NCCL manual, environment variables (NCCL_HOSTID, NCCL_SOCKET_IFNAME).
"""

import os
import platform

import torch


def choose_device(requested: str, local_world_size: int) -> tuple[str, str, str]:
    """("cuda" or "cpu", "nccl" or "gloo", why) for so many processes of a host. "cuda" without a GPU: ValueError."""
    if requested not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device is {requested!r}; expected 'auto', 'cpu' or 'cuda'")
    gpus = torch.cuda.device_count()
    count = f"{gpus} GPU(s) for {local_world_size} process(es) on this host"
    if requested == "cpu":
        return "cpu", "gloo", "as asked"
    if gpus >= local_world_size:
        return "cuda", "nccl", count
    if requested == "auto":
        return "cpu", "gloo", count + ("; --device cuda shares them" if gpus else "")
    if not gpus:
        raise ValueError(f"--device cuda needs a GPU: {count}; expected --device cpu")
    shared = f"{local_world_size} ranks share {gpus} GPU{'s' if gpus > 1 else ''}"
    return "cuda", "nccl", f"{shared}: NCCL through sockets, slow, for learning and tests"


def share_gpus(number: int | None = None, local_world_size: int | None = None) -> None:
    """Let the processes of this host share its GPUs where these are fewer. To be called before there is a group.

    `join_ring` calls it. Call it where another library forms the group, as accelerate does: without arguments it reads
    torchrun's environment. NCCL refuses two processes of one host on one GPU. So each says that it is a host of its
    own, and messages go through sockets, slowly. NCCL's authors do not support that: it is for learning and tests.
    """
    number = int(os.environ.get("LOCAL_RANK", 0)) if number is None else number
    size = local_world_size or int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if 0 < torch.cuda.device_count() < size:
        os.environ.setdefault("NCCL_HOSTID", f"{platform.node()}-{number}")
        if size >= int(os.environ.get("WORLD_SIZE", size)):
            os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")


def cpu_cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
