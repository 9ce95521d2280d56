"""A process group of the transport's own: neither torch's default group nor a member of it.

The trainer's ranks have their default group, engines may have one too, and `torch.distributed.new_group` cannot span
both. So the backends are built directly over the meeting point's store and registered nowhere.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Literal, NamedTuple, Protocol, cast

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # public, but torch lists no exports

from miles_core.errors import TransportError
from miles_transports.meeting import Address, Meeting, Pauses, own_address

Wire = Literal["gloo", "nccl"]


class _Broadcasts(Protocol):
    """The part of torch's C++ backends that is used here; their stubs leave it out."""

    def broadcast(self, tensors: list[torch.Tensor], options: dist.BroadcastOptions) -> dist.Work: ...
    def abort(self) -> None: ...


class Travelling(NamedTuple):
    """A block on its way."""

    block: torch.Tensor
    work: dist.Work


class BroadcastGroup:
    """Rank 0 sends, all others receive.

    Args:
        device: Where blocks lie; a GPU of this party's own is reached through NCCL, the CPU through gloo.
        generation: Groups of one meeting are told apart by it; a broken one is replaced by the next.
        check: Called while waiting for the others to come together; raises when that has become pointless.
    """

    def __init__(
        self,
        meeting: Meeting,
        address: Address,
        *,
        rank: int,
        device: torch.device,
        generation: int,
        check: Callable[[], None],
    ) -> None:
        self.generation = generation
        self.device = device
        timeout = timedelta(seconds=address.timeout_s)
        size = address.num_engines + 1

        # NCCL asks the store from threads of its own. torch does not keep a Python object behind a store alive.
        self._asked = meeting.store if device.type == "cuda" else _Store(meeting, check)
        store = PrefixStore(f"group/{generation}", self._asked)
        try:
            self._backend: _Broadcasts | None = cast(_Broadcasts, _make(store, rank, size, device, timeout, address))
        except RuntimeError as error:
            raise TransportError(
                f"the {device.type} group of {size} parties did not come together", found=str(error).splitlines()[0]
            ) from error

    def broadcast(self, block: torch.Tensor, check: Callable[[], None]) -> None:
        """Move `block` (uint8, on `device`) from rank 0 into everybody's; see `start` and `finish`."""
        self.finish(self.start(block), check)

    def start(self, block: torch.Tensor) -> Travelling:
        """Begin to move `block`; it must stay as it is until `finish`."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        try:
            if block.is_cuda:
                torch.cuda.set_device(self.device)  # NCCL works on the calling thread's current device
            assert self._backend is not None, "the group was abandoned"
            return Travelling(block, self._backend.broadcast([block], options))
        except RuntimeError as error:
            raise self._vanished(error) from error

    def finish(self, travelling: Travelling, check: Callable[[], None]) -> None:
        """Wait until a block has arrived.

        Args:
            check: Called while waiting; raises `TransportError` when waiting has become pointless.

        Raises:
            TransportError: a party vanished. The group is of no use any more.
        """
        block, work = travelling
        pauses = Pauses(check)
        try:
            while not work.is_completed():
                pauses.next()
            work.wait()
            if block.is_cuda:
                torch.cuda.current_stream(block.device).synchronize()  # the reader may use another stream
        except RuntimeError as error:
            raise self._vanished(error) from error
        except TransportError:
            self.abandon()
            raise

    def _vanished(self, error: RuntimeError) -> TransportError:
        self.abandon()
        return TransportError("a party of the broadcast vanished", found=str(error).splitlines()[0])

    def abandon(self) -> None:
        """Close the connections, so that the others notice; the group is of no use any more. Idempotent.

        Not in this thread: gloo first waits for what is under way, and that may be a block for somebody who has left
        and whose own connections close a moment later.
        """
        doomed = [self._backend]
        self._backend = None

        def end() -> None:
            if (backend := doomed.pop()) is not None:
                backend.abort()

        threading.Thread(target=end, name="broadcast-group-end").start()


class _Store(dist.Store):  # type: ignore[misc, name-defined]  # public, but torch lists no exports
    """The meeting's store as gloo asks it while a group is made. The store's own wait hears nothing of a publish that
    is over, and parties that have left for it never come."""

    def __init__(self, meeting: Meeting, check: Callable[[], None]) -> None:
        super().__init__()
        self._store, self._check = meeting.store, check

    def set(self, key: str, value: str) -> None:
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._store.get(key)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        pauses = Pauses(self._check)
        while not self._store.check(list(keys)):
            pauses.next()


def _make(
    store: PrefixStore, rank: int, size: int, device: torch.device, timeout: timedelta, address: Address
) -> object:
    if device.type == "cuda":
        torch.cuda.set_device(device)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(store, rank, size, options)
    gloo = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # the stub calls it Options, the module _Options
    gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=own_address(address.host, address.port))]
    gloo._timeout = timeout
    return dist.ProcessGroupGloo(store, rank, size, gloo)
