"""Main memory that is used again: on a page that the kernel has just made, a copy takes twice its time.

A receiver hands its buckets over for good, so it cannot keep two blocks of its own. It can notice, though, when the
last tensor over a block is gone, and take the next bucket there. What it holds is never more than its caller held at
once. On GPUs torch's allocator does the same.
"""

from __future__ import annotations

import mmap
import weakref

import numpy as np
import numpy.typing as npt
import torch

ROOMY = 2
"""Memory up to so many times as large as what is asked for is used again for it."""
HUGE_PAGE_BYTES = 2**21

Bytes = npt.NDArray[np.uint8]


class Recycled:
    """Blocks of bytes; `take` is called by one thread, tensors may end in any."""

    def __init__(self) -> None:
        self._free: list[Bytes] = []

    def take(self, num_bytes: int, device: torch.device) -> torch.Tensor:
        """u8[num_bytes] on `device`, with whatever lay there. The memory comes back when nothing views it any more."""
        if device.type != "cpu" or num_bytes == 0:
            return torch.empty(num_bytes, dtype=torch.uint8, device=device)
        memory = self._fitting(num_bytes)
        view = memory[:num_bytes]
        weakref.finalize(view, self._free.append, memory).atexit = False
        return torch.from_numpy(view)

    def _fitting(self, num_bytes: int) -> Bytes:
        sizes = [memory.size for memory in self._free]  # others only append
        fits = [index for index, size in enumerate(sizes) if num_bytes <= size <= ROOMY * num_bytes]
        if fits:
            return self._free.pop(min(fits, key=sizes.__getitem__))
        if sizes:
            self._free.pop(0)  # a bucket of another size takes the place of this one
        return fresh(num_bytes)


def fresh(num_bytes: int) -> Bytes:
    """u8[num_bytes] of zeros, on huge pages where the kernel has them: making those costs a fraction."""
    block = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if num_bytes >= HUGE_PAGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        block.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(block, dtype=np.uint8, count=num_bytes)
