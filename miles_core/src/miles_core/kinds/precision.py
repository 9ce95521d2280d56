"""Precision: quantises exported weights exactly as an engine will."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from miles_core.types import NamedTensor


class Precision(Protocol):
    """Created as ``Precision(options)``; pure afterwards."""

    def skips(self, name: str) -> bool:
        """Whether the tensor of that full name stays in its original dtype; both sides use the same answer."""
        ...

    def quantize(self, tensor: NamedTensor) -> Sequence[NamedTensor]:
        """The tensors to send instead, scales included; deterministic."""
        ...

    def dequantize(self, tensors: Sequence[NamedTensor]) -> NamedTensor:
        """Back to one tensor; ``dequantize(quantize(x))`` is within the format's error of x."""
        ...
