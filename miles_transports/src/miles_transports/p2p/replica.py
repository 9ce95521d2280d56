"""A target rank's layout, held on the source's side: Hugging Face tensors go in, the rank's own parameters come out.

Engines fuse (queries, keys and values in one matrix) and shard (columns here, rows there). The source does it for them,
so that what travels is exactly what that rank stores. A fused parameter is sent once, when its last part has come.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch

from miles_core.errors import TransportError
from miles_core.types import NamedTensor
from miles_core.weights.digests import name_some


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """How an engine lays out the tensors of one architecture family. Modules are the last but one part of a name."""

    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Fused module -> its parts in order, joined along the rows."""
    columns: frozenset[str] = frozenset()
    """Modules whose rows (output features) are divided among ranks."""
    rows: frozenset[str] = frozenset()
    """Modules whose columns (input features) are divided; a bias is whole on every rank."""


HUGGING_FACE = Rules()
"""One rank, every tensor as the checkpoint stores it."""

FUSED = Rules(
    fused={"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")},
    columns=frozenset({"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"}),
    rows=frozenset({"o_proj", "down_proj"}),
)
"""What most inference engines do with Llama-like models."""

_NAME = re.compile(r"^(?P<front>(?:.*\.)?)(?P<module>[^.]+)\.(?P<kind>weight|bias)$")


class Replica:
    """The parameters of one rank as they fill up. `load` may be called with tensors in any order."""

    def __init__(self, rules: Rules, rank: int, size: int) -> None:
        self._rules, self._rank, self._size = rules, rank, size
        self._whole = {part: name for name, parts in rules.fused.items() for part in parts}
        self._waiting: dict[str, dict[str, torch.Tensor]] = {}

    def load(self, tensors: Iterable[NamedTensor]) -> Iterator[NamedTensor]:
        """Yield the target's parameters that became complete.

        Raises:
            TransportError: a dimension does not divide among the ranks, or a part comes twice.
        """
        for named in tensors:
            found = _NAME.match(named.name)
            module = found["module"] if found else ""
            shard = self._shard(named, module, found["kind"] if found else "")
            if found is None or module not in self._whole:
                yield NamedTensor(name=named.name, tensor=shard)
                continue
            fused = self._whole[module]
            name = f"{found['front']}{fused}.{found['kind']}"
            parts = self._waiting.setdefault(name, {})
            if module in parts:
                raise TransportError(f"a part of {name} came twice", found=named.name)
            # Kept beyond this call, while the trainer's tensor may change.
            parts[module] = shard.clone()
            order = self._rules.fused[fused]
            if len(parts) == len(order):
                del self._waiting[name]
                yield NamedTensor(name=name, tensor=torch.cat([parts[part] for part in order]))

    def finish(self) -> None:
        """
        Raises:
            TransportError: a fused parameter still waits for a part.
        """
        waiting, self._waiting = self._waiting, {}
        if waiting:
            raise TransportError(
                "fused parameters are incomplete at the end of the version",
                expected="; ".join(f"{name}: all parts" for name in list(waiting)[:3]),
                found=name_some(f"{name} has only {', '.join(parts)}" for name, parts in waiting.items()),
            )

    def _shard(self, named: NamedTensor, module: str, kind: str) -> torch.Tensor:
        if self._size == 1:
            return named.tensor
        if module in self._rules.columns:
            axis = 0
        elif module in self._rules.rows and kind == "weight":
            axis = 1
        else:
            return named.tensor
        length = named.tensor.shape[axis]
        if length % self._size:
            raise TransportError(
                f"{named.name} cannot be divided among the engine's ranks",
                expected=f"a multiple of {self._size}",
                found=f"{length} along axis {axis}",
                do="set transport.engine_ranks to a divisor",
            )
        step = length // self._size
        return named.tensor.narrow(axis, self._rank * step, step)


class Assembly:
    """The inverse on the engine's side, for engines that take Hugging Face tensors: shards of all ranks become whole."""

    def __init__(self, rules: Rules, size: int, shapes: Mapping[str, tuple[int, ...]] | None = None) -> None:
        self._rules, self._size = rules, size

    def restore(self, ranks: list[list[NamedTensor]], rows: Mapping[str, tuple[int, ...]]) -> list[NamedTensor]:
        """Tensors of one bucket, in the order of rank 0.

        Args:
            ranks: What each rank was sent; the same names everywhere.
            rows: Fused parameter -> rows of each part on one rank.
        """
        return [
            tensor
            for same in zip(*ranks, strict=True)
            for tensor in self._parts(same[0].name, [each.tensor for each in same], rows)
        ]

    def _parts(
        self, name: str, shards: list[torch.Tensor], rows: Mapping[str, tuple[int, ...]]
    ) -> Iterator[NamedTensor]:
        found = _NAME.match(name)
        module, kind = (found["module"], found["kind"]) if found else ("", "")
        if found and module in self._rules.fused:
            split = [shard.split(list(rows[name])) for shard in shards]
            for index, part in enumerate(self._rules.fused[module]):
                yield NamedTensor(
                    name=f"{found['front']}{part}.{kind}", tensor=torch.cat([each[index] for each in split])
                )
        elif self._size > 1 and module in self._rules.columns:
            yield NamedTensor(name=name, tensor=torch.cat(shards))
        elif self._size > 1 and module in self._rules.rows and kind == "weight":
            yield NamedTensor(name=name, tensor=torch.cat(shards, dim=1))
        else:
            yield NamedTensor(name=name, tensor=shards[0])
