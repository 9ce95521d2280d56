"""The table that maps an architecture: one row for each Megatron parameter.

A row names the parameter, the checkpoint tensors it is made of, and their layout. ``{layer}`` is the layer's number
from 0 and ``{expert}`` the expert's, both counted over the whole model. A row whose tensors carry ``{expert}`` fills
one slice of its parameter. Rows whose tensors the checkpoint lacks (a bias, a dense layer's MLP in a sparse one) do not
apply; a checkpoint tensor that no row names is an error, unless the table says that it is left out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from miles_megatron.layouts import TensorLayout


@dataclass(frozen=True, slots=True)
class Row:
    """One Megatron parameter and what it is made of."""

    param: str
    """Name in Megatron's GPTModel, such as ``decoder.layers.{layer}.self_attention.linear_proj.weight``."""
    tensors: tuple[str, ...]
    """Names in the checkpoint, in the order that the layout takes them."""
    layout: TensorLayout
    trained: bool = True
    """False for a buffer, which has no gradient and is exported as it was loaded."""

    @property
    def routed(self) -> bool:
        """Whether it holds routed experts, which are cut over other ranks than the rest."""
        return "{expert}" in self.tensors[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """What an architecture's `describe` reads from config.json."""

    layers: int
    hidden: int
    heads: int
    key_value_heads: int
    vocab: int
    max_positions: int
    tied: bool
    """Output and input embedding are one tensor."""
    padding_token: int | None = None
    """Token whose row of the input embedding the checkpoint's own code never trains (torch's `padding_idx`)."""
    rotary_dim: int
    """Dimensions of a head that positions rotate."""
    experts: int = 0
    """Routed experts of a sparse layer; 0 for a dense model."""
    experts_per_token: int = 0
    sparse_layers: frozenset[int] = frozenset()
    """Numbers of the layers with experts, from 0."""
    mla: bool = False
    """Multi-head latent attention."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of Megatron's TransformerConfig (MLATransformerConfig with `mla`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """One family of checkpoints.

    Example:
        Architecture(model_types=("llama",), rows=(*ENDS, *ATTENTION, *MLP), describe=describe_llama)
    """

    model_types: tuple[str, ...]
    """``model_type`` of config.json."""
    rows: tuple[Row, ...]
    describe: Callable[[Mapping[str, Any]], ModelShape]
    """``config.json`` as transformers completes it -> shape. Raises ConfigError for what Megatron cannot compute."""
    left_out: tuple[str, ...] = ()
    """Regular expressions of checkpoint tensors that are neither trained nor exported."""


@dataclass(frozen=True, slots=True, order=True)
class Piece:
    """Tensors of the checkpoint that one row makes into one parameter, or into one slice of it."""

    row: int
    layer: int | None
    expert: int | None


class Table:
    """An architecture's rows, ready to look names up in both directions."""

    def __init__(self, architecture: Architecture) -> None:
        self.architecture = architecture
        self.rows = architecture.rows
        self._tensors = [
            (re.compile(_pattern(name)), index, place)
            for index, row in enumerate(architecture.rows)
            for place, name in enumerate(row.tensors)
        ]
        self._params = [(re.compile(_pattern(row.param)), index) for index, row in enumerate(architecture.rows)]
        self._left_out = [re.compile(pattern) for pattern in architecture.left_out]

    def find(self, tensor: str) -> Piece | None:
        """The piece that a checkpoint tensor belongs to, or None."""
        for pattern, row, _ in self._tensors:
            match = pattern.fullmatch(tensor)
            if match:
                numbers = {key: int(value) for key, value in match.groupdict().items()}
                return Piece(row, numbers.get("layer"), numbers.get("expert"))
        return None

    def leaves_out(self, tensor: str) -> bool:
        return any(pattern.fullmatch(tensor) for pattern in self._left_out)

    def rows_of(self, param: str) -> list[tuple[int, int | None]]:
        """Row and layer of every row that may make a Megatron parameter."""
        found = []
        for pattern, row in self._params:
            match = pattern.fullmatch(param)
            if match:
                layer = match.groupdict().get("layer")
                found.append((row, None if layer is None else int(layer)))
        return found

    def tensors(self, piece: Piece) -> tuple[str, ...]:
        """Names in the checkpoint."""
        numbers = {"layer": piece.layer, "expert": piece.expert}
        return tuple(_fill(name, numbers) for name in self.rows[piece.row].tensors)


def _pattern(name: str) -> str:
    escaped = re.escape(name)
    for key in ("layer", "expert"):
        escaped = escaped.replace(re.escape("{" + key + "}"), rf"(?P<{key}>\d+)", 1)
    return escaped


def _fill(name: str, numbers: Mapping[str, int | None]) -> str:
    for key, number in numbers.items():
        name = name.replace("{" + key + "}", str(number))
    return name


def layer_rows(
    prefix: str, checkpoint: str, rows: Iterable[tuple[str, str | tuple[str, ...], TensorLayout]]
) -> tuple[Row, ...]:
    """Rows of ``decoder.layers.{layer}.<prefix>`` made of ``model.layers.{layer}.<checkpoint>``."""
    made = []
    for param, tensors, layout in rows:
        names = (tensors,) if isinstance(tensors, str) else tensors
        made.append(
            Row(
                f"decoder.layers.{{layer}}.{prefix}{param}",
                tuple(f"model.layers.{{layer}}.{checkpoint}{name}" for name in names),
                layout,
            )
        )
    return tuple(made)
