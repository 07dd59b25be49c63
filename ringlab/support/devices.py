"""Which device a process of a ring drives: a GPU of its own, a GPU that it shares, or a part of the CPU.

Source: the NCCL manual, environment variables (NCCL_HOSTID, NCCL_SOCKET_IFNAME).
"""

import os
import platform

import torch
from torch.distributed import Store

# The number of this process on its host, and how many there are: torchrun's names, Slurm's, Open MPI's, others' of MPI.
NUMBER = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")
COUNT = ("LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")


def on_this_host(names: tuple[str, ...], otherwise: int) -> int:
    """The first of the environment's variables `NUMBER` or `COUNT` that is set."""
    return next((int(os.environ[name]) for name in names if name in os.environ), otherwise)


def sees_its_own(number: int, local_world_size: int, store: Store) -> bool:
    """Whether each process of this host sees one GPU, and each another one, as srun's --gpus-per-task=1 gives them.

    Every process of the host must ask. They compare the GPUs' names through `store`.
    """
    names = [f"GPU of process {i} of {platform.node()}" for i in range(local_world_size)]
    store.set(names[number], str(torch.cuda.get_device_properties(0).uuid))
    return len({store.get(name) for name in names}) == local_world_size


def choose_device(requested: str, local_world_size: int, gpus: int | None = None) -> tuple[str, str, str]:
    """("cuda" or "cpu", "nccl" or "gloo", why) for so many processes of a host. "cuda" without a GPU: ValueError.

    `gpus` is how many they have together: those that this process sees, unless given.
    """
    if requested not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device is {requested!r}; expected 'auto', 'cpu' or 'cuda'")
    gpus = torch.cuda.device_count() if gpus is None else gpus
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
    own, and messages go through sockets, slowly. NCCL's authors do not support that: it is for learning and tests. For
    processes that see one GPU each, and another one, do not call it.
    """
    number = on_this_host(NUMBER, 0) if number is None else number
    size = local_world_size or on_this_host(COUNT, 1)
    if 0 < torch.cuda.device_count() < size:
        os.environ.setdefault("NCCL_HOSTID", f"{platform.node()}-{number}")
        if size >= int(os.environ.get("WORLD_SIZE", size)):
            os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")


def cpu_cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
