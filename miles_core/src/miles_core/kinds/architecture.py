"""Architecture: how the tensors of one family of checkpoints become the parameters of backend `megatron`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol


class Architecture(Protocol):
    """What `load` names is an object with these, such as a `miles_megatron.tables.Architecture`; it is data only."""

    @property
    def model_types(self) -> Sequence[str]:
        """``model_type`` of config.json, of every checkpoint it maps."""
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
