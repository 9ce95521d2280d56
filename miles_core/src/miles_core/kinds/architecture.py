"""Architecture: how the tensors of checkpoints of one architecture become the parameters of backend `megatron`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol


class Architecture(Protocol):
    """Data only. `load` names an object with these attributes, usually a `miles_megatron.tables.Architecture`."""

    @property
    def model_types(self) -> Sequence[str]:
        """The values of ``model_type`` in config.json of the checkpoints that it maps."""
        ...

    @property
    def rows(self) -> Sequence[Any]:
        """One `miles_megatron.tables.Row` for each Megatron parameter: its checkpoint tensors and their layout."""
        ...

    @property
    def describe(self) -> Callable[[Mapping[str, Any]], Any]:
        """``config.json -> miles_megatron.tables.ModelShape``; raises ConfigError for what cannot be computed."""
        ...

    @property
    def left_out(self) -> Sequence[str]:
        """Regular expressions of tensors that are neither trained nor exported."""
        ...
