"""What a ring sends: every message and every collective of torch.distributed, with its bytes, in any library.

PyTorch's communication calls are operations of its dispatcher, so a dispatch mode sees them all:

    with Watch() as watch:
        out = ring_attention(q, k, v)
    watch.messages    ->    [Message("send", peer=1, bytes=384), Message("recv", peer=2, bytes=384), ...]

The workshop counts with it what a reader's ring sends, tests and benchmarks what ours send.

Source: the PyTorch manual, torch.distributed; CommDebugMode of torch.distributed.tensor.debug counts in the same way.
"""

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

LOCAL = ("wait_tensor", "_wrap_tensor_autograd", "barrier")  # operations that send no data


@dataclass(frozen=True)
class Message:
    """A message or a collective of one rank."""

    kind: str  # "send", "recv", or the name of a collective
    peer: int | None  # the rank of the whole job that receives or sends the message; None: a collective
    bytes: int  # of the tensors of a message; of the largest tensor of a collective


class Watch(TorchDispatchMode):
    """Notes what this rank sends and receives while it is active, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[Message] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here; else each rank would import the compiler, for seconds

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = function.overloadpacket.__name__
        if function.namespace in ("c10d", "_c10d_functional") and name not in LOCAL:
            sizes = [x.nbytes for arg in args for x in _tensors(arg)]
            single = name in ("send", "recv_")
            size = sum(sizes) if single else max(sizes, default=0)
            peer = dist.get_global_rank(dist.ProcessGroup.unbox(args[1]), args[2]) if single else None
            self.messages.append(Message(name.strip("_"), peer, size))
        return function(*args, **(kwargs or {}))


def _tensors(x: Any) -> list[Tensor]:
    if isinstance(x, Tensor):
        return [x]
    return [tensor for part in x for tensor in _tensors(part)] if isinstance(x, list | tuple) else []
