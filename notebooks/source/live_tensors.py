"""How many bytes of tensors a function holds at once: what an exercise and the puzzles count."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveTensors(TorchDispatchMode):
    """Counts the bytes of all tensors that a thread has made or used and that are alive, but for the inputs."""

    def __init__(self, inputs: Sequence[Any]) -> None:
        super().__init__()
        self._inputs = [StorageWeakRef(x.untyped_storage()) for x in inputs if isinstance(x, Tensor)]
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.most = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else each rank would import the compiler, for seconds

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for x in tree_leaves((result, args, kwargs)):  # a tensor that was made elsewhere shows when it is used
            if isinstance(x, Tensor):
                storage = StorageWeakRef(x.untyped_storage())
                if storage not in self._inputs:
                    self._alive[storage.cdata] = storage, x.untyped_storage().nbytes()
        return result

    def look(self) -> None:
        """Keep the largest sum so far."""
        self._alive = {key: (it, size) for key, (it, size) in self._alive.items() if not it.expired()}
        self.most = max(self.most, sum(size for _, size in self._alive.values()))
