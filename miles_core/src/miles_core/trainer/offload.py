"""Moving state out of accelerator memory and back, without anybody who holds a tensor noticing.

FSDP2, the optimizer and autograd keep views of the same storages, so tensors cannot be replaced. Storages are emptied
and refilled in place instead; a pinned copy on the host holds their bytes meanwhile and is kept for the next cycle.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


class Offloader:
    """Holds the bytes of emptied storages on the host."""

    def __init__(self) -> None:
        self._host: dict[int, tuple[torch.UntypedStorage, Tensor]] = {}
        self.away = False

    def offload(self, tensors: Iterable[Tensor]) -> None:
        """Copy every CUDA storage behind `tensors` to pinned memory and free it. Idempotent."""
        if self.away:
            return
        for storage in _storages(tensors):
            key = id(storage)
            view = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            if key not in self._host or self._host[key][1].numel() != view.numel():
                self._host[key] = (storage, torch.empty(view.numel(), dtype=torch.uint8, pin_memory=True))
            self._host[key][1].copy_(view, non_blocking=True)
        torch.cuda.synchronize()
        for storage, _ in self._host.values():
            storage.resize_(0)
        torch.cuda.empty_cache()
        self.away = True

    def onload(self) -> None:
        """Refill what `offload` emptied. Idempotent."""
        if not self.away:
            return
        for storage, host in self._host.values():
            storage.resize_(host.numel())
            view = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            view.copy_(host, non_blocking=True)
        torch.cuda.synchronize()
        self.away = False


def _storages(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    """Each non-empty CUDA storage once."""
    found: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        storage = local.untyped_storage()
        if local.is_cuda and storage.nbytes():
            found.setdefault(storage.data_ptr(), storage)
    return list(found.values())
