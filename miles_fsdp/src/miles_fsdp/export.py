"""Weights under the checkpoint's names, shapes and dtypes, as buckets.

transformers stores some tensors differently in memory than in a checkpoint (experts stacked into one, legacy names);
its own conversion is run backwards, so that receivers see what `save_pretrained` would write. Tied tensors appear once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers.core_model_loading import revert_weight_conversion

from miles_core.errors import PluginError
from miles_core.types import WeightBucket
from miles_core.weights.buckets import fill_buckets, plan_buckets


@dataclass(frozen=True, slots=True)
class Exported:
    """One tensor of the checkpoint."""

    source: str
    """Name in the module whose tensor it is made of."""
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class Exporter:
    """Knows every exported tensor from the start; gathers them one at a time, in one order on every rank."""

    def __init__(self, module: Any, dtype: torch.dtype | None) -> None:
        """Take names, shapes and dtypes from a freshly loaded, unsharded module.

        Args:
            dtype: Of exported floating-point tensors; None keeps each one's own.
        """
        self._module = module
        self.tensors: dict[str, Exported] = {}
        for source, tensor in _kept(module).items():
            target = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
            meta = torch.empty(tensor.shape, dtype=target, device="meta")
            for name, made in self._revert(source, meta).items():
                if name in self.tensors:
                    raise PluginError(
                        "two tensors of the module make one tensor of the checkpoint",
                        expected="checkpoint tensors that come from one tensor each",
                        found=f"{name} from {self.tensors[name].source} and {source}",
                        do="use another backend for this architecture",
                    )
                self.tensors[name] = Exported(source, tuple(made.shape), made.dtype)

    def described(self) -> dict[str, Tensor]:
        """Shape and dtype of every exported tensor by name, on the meta device."""
        return {n: torch.empty(e.shape, dtype=e.dtype, device="meta") for n, e in self.tensors.items()}

    def buckets(self, live: Mapping[str, Tensor], *, version: int, bucket_bytes: int) -> Iterator[WeightBucket]:
        """Every tensor once, as a copy; a collective when `live` holds DTensors.

        Args:
            live: Current parameters and buffers by module name.
        """
        sizes = {name: exported.num_bytes for name, exported in self.tensors.items()}
        return fill_buckets(plan_buckets(sizes, bucket_bytes), self._fetch(live), version)

    def _fetch(self, live: Mapping[str, Tensor]) -> Callable[[str], Tensor]:
        pending: dict[str, Tensor] = {}  # made from a source that several tensors share, not yet asked for

        def fetch(name: str) -> Tensor:
            if name not in pending:
                exported = self.tensors[name]
                pending.update(self._revert(exported.source, _whole(live[exported.source], exported.dtype)))
            return pending.pop(name)

        return fetch

    def _revert(self, source: str, tensor: Tensor) -> dict[str, Tensor]:
        reverted: dict[str, Tensor] = revert_weight_conversion(self._module, {source: tensor})
        return reverted


def _kept(module: Any) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name; of tied ones the name that `save_pretrained` keeps."""
    state: dict[str, Tensor] = module.state_dict(keep_vars=True)
    ignored = set(module._keys_to_ignore_on_save or ())
    targets = set(module.all_tied_weights_keys)
    kept: dict[str, Tensor] = {}
    seen: dict[int, str] = {}
    for name in sorted(state, key=lambda n: n in targets):  # stable: sources before the targets tied to them
        if name not in ignored and id(state[name]) not in seen:
            seen[id(state[name])] = name
    for name, tensor in state.items():
        if seen.get(id(tensor)) == name:
            kept[name] = tensor
    return kept


def _whole(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The full tensor in `dtype`, never the live one: an engine in this process must not see the next update early."""
    full = tensor.detach()
    full = full.full_tensor() if isinstance(full, DTensor) else full
    return full.to(dtype, copy=True).contiguous()
