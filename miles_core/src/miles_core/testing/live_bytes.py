"""Peak of live tensor bytes on any device, exact and repeatable, where a CPU offers no allocator statistics."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the storages that operators return while they live; what an operator uses inside itself is not seen.

    Example:
        with LiveBytes() as seen:
            model(tokens).sum().backward()
        seen.peak
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = 0
        self.peak = 0
        self._known: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.add(leaf)
        return result

    def add(self, tensor: torch.Tensor) -> None:
        """Count a tensor made elsewhere, such as a parameter; nothing is counted twice."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        self._known[key] = storage.nbytes()
        self.live += storage.nbytes()
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._gone, key)

    def _gone(self, key: int) -> None:
        self.live -= self._known.pop(key, 0)
