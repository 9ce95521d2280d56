"""Precision: quantises exported weights exactly as an engine does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from miles_core.types import NamedTensor


class Precision(Protocol):
    """Created as ``Precision(options)``. Its methods are pure."""

    def skips(self, name: str) -> bool:
        """Whether the tensor of that name is sent in its original dtype. Trainer and engine use the same answer."""
        ...

    def quantize(self, tensor: NamedTensor) -> Sequence[NamedTensor]:
        """The tensors to send instead, scales included. Equal inputs give equal bits."""
        ...

    def dequantize(self, tensors: Sequence[NamedTensor]) -> NamedTensor:
        """The way back. ``dequantize(quantize(x))`` differs from x by no more than the format's rounding."""
        ...
