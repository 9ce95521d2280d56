"""What lets Megatron Core run where there is no CUDA: for tests and small machines, never on a GPU.

Megatron names CUDA outright in places that a process without it cannot pass. `accommodated` answers them for the time
of one call of the backend and takes everything back afterwards:

    torch.cuda.current_device()              the CPU device
    device="cuda" in tensor constructors     the CPU device
    torch.cuda random state, seed            the CPU generator's
    torch.cuda streams, events, synchronize  objects that do nothing: a CPU has one order of execution
    Tensor.type() asked by Megatron          "torch.cuda.…", by which its optimizer recognises its own tensors
    all-to-all split sizes                   numbers, as `maybe_move_tensor_to_cpu` makes them of CUDA tensors

On a machine with CUDA this module changes nothing.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class _Nothing:
    """A stream or event of a device that has only one."""

    cuda_stream = 0

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_stream(self, *_: Any) -> None: ...

    def wait_event(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self, event: Any = None) -> Any:
        return event if event is not None else self

    def record(self, *_: Any) -> None: ...

    def wait(self, *_: Any) -> None: ...

    def query(self) -> bool:
        return True


class _Stream(_Nothing):
    """A class of its own: libraries annotate with ``torch.cuda.Stream | None``."""


class _Event(_Nothing):
    pass


@contextlib.contextmanager
def _in_stream(_: Any) -> Iterator[None]:
    yield


def _is_cuda(device: Any) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.startswith("cuda")


class _CudaMeansCpu(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _is_cuda(kwargs.get("device")):
            kwargs = {**kwargs, "device": "cpu"}
        if func is Tensor.cuda:
            return args[0]
        if func is Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], "cpu", *args[2:])
        if func is Tensor.type and len(args) == 1 and not kwargs and _asked_by_megatron():
            return func(*args).replace("torch.", "torch.cuda.", 1)
        return func(*args, **kwargs)


def _asked_by_megatron() -> bool:
    return "/megatron/core/" in sys._getframe(2).f_code.co_filename.replace("\\", "/")


def _set_rng_state(state: Tensor, device: Any = -1, graph_safe: bool = False) -> None:
    torch.set_rng_state(state)


def _split_sizes(original: Callable[..., Any]) -> Callable[..., Any]:
    def to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        if as_numpy and torch.is_tensor(tensor):
            return tensor.numpy()
        return original(tensor, as_numpy, record_stream)

    return to_cpu


@contextlib.contextmanager
def accommodated(device: torch.device) -> Iterator[None]:
    """Run a block of Megatron on `device`; a no-op for CUDA. May be nested."""
    if device.type != "cpu":
        yield
        return
    from megatron.core.tensor_parallel import random as megatron_random
    from megatron.core.transformer.moe import token_dispatcher

    def current_device() -> str:
        return "cpu"

    answers: list[tuple[Any, str, Any]] = [
        (torch.cuda, "current_device", current_device),
        (torch.cuda, "get_rng_state", lambda device="cpu": torch.get_rng_state()),
        (torch.cuda.random, "get_rng_state", lambda device="cpu": torch.get_rng_state()),
        (torch.cuda, "set_rng_state", lambda state, device="cpu": torch.set_rng_state(state)),
        (torch.cuda, "manual_seed", torch.manual_seed),
        (torch.cuda, "current_stream", lambda *_: _Stream()),
        (torch.cuda, "stream", _in_stream),
        (torch.cuda, "Stream", _Stream),
        (torch.cuda, "Event", _Event),
        (torch.cuda, "synchronize", lambda *_: None),
        (megatron_random, "_set_cuda_rng_state", _set_rng_state),
        (token_dispatcher, "maybe_move_tensor_to_cpu", _split_sizes(token_dispatcher.maybe_move_tensor_to_cpu)),
    ]
    with contextlib.ExitStack() as stack:
        for owner, name, answer in answers:
            stack.enter_context(mock.patch.object(owner, name, answer))
        stack.enter_context(_CudaMeansCpu())
        yield
