"""A target rank's layout, held on the source's side: Hugging Face tensors go in, the rank's own parameters come out.

Engines fuse (queries, keys and values in one matrix) and shard (columns here, rows there). The source does it for them,
so that what travels is exactly what that rank stores. A fused parameter is sent once, when its last part has come.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
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

    def axis_of(self, name: str) -> int | None:
        """`axis` of a tensor by its Hugging Face name."""
        return self.axis(*_split(name)[1:])

    def axis(self, module: str, kind: str) -> int | None:
        """Along which a tensor is divided, or None where every rank holds it whole."""
        if module in self.columns:
            return 0
        return 1 if module in self.rows and kind == "weight" else None


HUGGING_FACE = Rules()
"""One rank, every tensor as the checkpoint stores it."""

FUSED = Rules(
    fused={"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")},
    columns=frozenset({"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"}),
    rows=frozenset({"o_proj", "down_proj"}),
)
"""What most inference engines do with Llama-like models."""

_NAME = re.compile(r"^(?P<front>(?:.*\.)?)(?P<module>[^.]+)\.(?P<kind>weight|bias)$")


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter as a target rank stores it."""

    name: str
    tensor: torch.Tensor
    rows: tuple[int, ...] = ()
    """Of each part, where it is fused."""


class Replica:
    """The parameters of one rank as they fill up. `load` may be called with tensors in any order."""

    def __init__(self, rules: Rules, rank: int, size: int) -> None:
        self._rules, self._rank, self._size = rules, rank, size
        self._whole = {part: name for name, parts in rules.fused.items() for part in parts}
        self._waiting: dict[str, dict[str, torch.Tensor]] = {}

    def load(self, tensors: Iterable[NamedTensor]) -> Iterator[Parameter]:
        """Yield the target's parameters that became complete.

        Raises:
            TransportError: a dimension does not divide among the ranks, or a part comes twice.
        """
        for named in tensors:
            front, module, kind = _split(named.name)
            shard = self._shard(named, self._rules.axis(module, kind))
            if module not in self._whole:
                yield Parameter(named.name, shard)
                continue
            fused = self._whole[module]
            name = f"{front}{fused}.{kind}"
            parts = self._waiting.setdefault(name, {})
            if module in parts:
                raise TransportError(f"a part of {name} came twice", found=named.name)
            parts[module] = shard.clone()  # kept beyond this call, while the trainer's tensor may change
            order = self._rules.fused[fused]
            if len(parts) == len(order):
                del self._waiting[name]
                whole = [parts[part] for part in order]
                yield Parameter(name, torch.cat(whole), tuple(part.shape[0] for part in whole))

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

    def _shard(self, named: NamedTensor, axis: int | None) -> torch.Tensor:
        if self._size == 1 or axis is None:
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


def restore(rules: Rules, ranks: Sequence[Sequence[Parameter]]) -> Iterator[NamedTensor]:
    """The inverse on the engine's side, for engines that take Hugging Face tensors.

    Args:
        ranks: What each rank was sent, rank by rank; the same parameters in the same order.
    """
    for same in zip(*ranks, strict=True):
        first, shards = same[0], [each.tensor for each in same]
        front, module, kind = _split(first.name)
        if first.rows:
            split = [shard.split(list(first.rows)) for shard in shards]
            for index, part in enumerate(rules.fused[module]):
                yield NamedTensor(name=f"{front}{part}.{kind}", tensor=torch.cat([each[index] for each in split]))
        elif (axis := rules.axis(module, kind)) is not None and len(shards) > 1:
            yield NamedTensor(name=first.name, tensor=torch.cat(shards, dim=axis))
        else:
            yield NamedTensor(name=first.name, tensor=shards[0])


def _split(name: str) -> tuple[str, str, str]:
    """``model.layers.0.self_attn.`` + ``q_proj`` + ``weight``; without a module where there is none."""
    found = _NAME.match(name)
    return (found["front"], found["module"], found["kind"]) if found else (name, "", "")
