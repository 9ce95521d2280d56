"""Reads what a Hugging Face folder says about its model, from config.json and safetensors headers. No tensor is
loaded."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from miles_core.numerics.rotary import unreadable

DTYPE_BYTES = {
    "F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip
MAX_HEADER_BYTES = 100_000_000
"""The safetensors format allows no longer header."""


class ModelFolderError(Exception):
    """A file of the folder is absent or unreadable; the message names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFolder:
    """The figures that validation and the memory estimate use. A figure that the checkpoint does not state is None."""

    path: Path
    parameters: int
    """Stored elements; a tied output head is stored once."""
    dtypes: Mapping[str, int] = field(default_factory=dict)
    """Parameters per safetensors dtype."""
    architecture: str = "unknown"
    context_length: int | None = None
    layers: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    vocabulary: int | None = None
    experts: int | None = None
    """Routed experts of an MoE layer; None for a dense model."""
    config: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """config.json as it is."""

    @property
    def stored_bytes(self) -> int:
        return sum(count * DTYPE_BYTES[dtype] for dtype, count in self.dtypes.items())

    @property
    def narrowest_bytes(self) -> int:
        """Bytes of an element of the narrowest floating-point dtype, which rounds most; 4 if there is none."""
        return min((DTYPE_BYTES[dtype] for dtype in self.dtypes if dtype.startswith(("F", "BF"))), default=4)

    def kv_bytes_per_token(self, element_bytes: int) -> int | None:
        """Bytes of the keys and values of one token in all layers; None for other layouts than plain attention."""
        if self.layers is None or self.kv_heads is None or self.head_dim is None:
            return None
        return 2 * self.layers * self.kv_heads * self.head_dim * element_bytes


EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""What architectures call it: Qwen3-MoE; Mixtral and gpt-oss; DeepSeek and GLM."""


def read_model_folder(path: Path) -> ModelFolder:
    """Read a folder.

    Raises:
        ModelFolderError: naming the file that is missing or broken.
    """
    config = _json_object(path / "config.json")
    inner = read_config(path)
    if problem := unreadable(inner):
        raise ModelFolderError(f"config.json: {problem}")
    dtypes: dict[str, int] = {}
    for file in _weight_files(path):
        for dtype, shape in _header(file).values():
            dtypes[dtype] = dtypes.get(dtype, 0) + math.prod(shape)
    heads = _number(inner, "num_attention_heads")
    hidden = _number(inner, "hidden_size")
    architectures = config.get("architectures")
    return ModelFolder(
        path=path,
        parameters=sum(dtypes.values()),
        dtypes=dtypes,
        architecture=str(architectures[0]) if isinstance(architectures, list) and architectures else "unknown",
        context_length=_number(inner, "max_position_embeddings"),
        layers=_number(inner, "num_hidden_layers"),
        kv_heads=_number(inner, "num_key_value_heads") or heads,
        head_dim=_number(inner, "head_dim") or (hidden // heads if hidden and heads else None),
        vocabulary=_number(inner, "vocab_size"),
        experts=next((n for key in EXPERT_COUNTS if (n := _number(inner, key))), None),
        config=config,
    )


def read_config(path: Path) -> Mapping[str, Any]:
    """Read the config.json of a folder. If the model is multi-modal, this is the part that describes the language
    model.

    Raises:
        ModelFolderError: it is missing or broken.
    """
    return language_part(_json_object(path / "config.json"))


def language_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config.json that describes the language model."""
    text = config.get("text_config")
    return text if isinstance(text, dict) else config


def tensor_headers(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Dtype (as safetensors spells it) and shape of every stored tensor.

    Raises:
        ModelFolderError: naming the file that is missing or broken.
    """
    headers: dict[str, tuple[str, tuple[int, ...]]] = {}
    for file in _weight_files(path):
        headers |= _header(file)
    return headers


def tensor_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Shape of every stored tensor, by name.

    Raises:
        ModelFolderError: naming the file that is missing or broken.
    """
    return {name: shape for file in _weight_files(path) for name, (_, shape) in _header(file).items()}


def _number(config: Mapping[str, Any], key: str) -> int | None:
    value = config.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _json_object(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelFolderError(f"{file.name} is missing") from error
    except (OSError, ValueError, RecursionError) as error:
        raise ModelFolderError(f"{file.name} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ModelFolderError(f"{file.name} is not a JSON object")
    return value


def _weight_files(path: Path) -> list[Path]:
    """The safetensors files that belong to the model: those that the index names, or all if there is no index."""
    index = path / "model.safetensors.index.json"
    if index.exists():
        weight_map = _json_object(index).get("weight_map")
        names = sorted({str(name) for name in weight_map.values()}) if isinstance(weight_map, dict) else []
        # An index is data from elsewhere: it may only name files of its own folder.
        files = [path / Path(name).name for name in names]
        if missing := [file.name for file in files if not file.is_file()]:
            raise ModelFolderError(f"{missing[0]} is missing; model.safetensors.index.json names it")
    else:
        files = sorted(path.glob("*.safetensors"))
    if not files:
        raise ModelFolderError("no *.safetensors file")
    return files


def _header(file: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Dtype and shape per tensor (huggingface.co/docs/safetensors, "Format": u64 length, then JSON)."""
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > MAX_HEADER_BYTES:
                raise ValueError(f"a header of {length} bytes")
            header = json.loads(stream.read(length))
        tensors = {
            name: (entry["dtype"], tuple(map(int, entry["shape"])))
            for name, entry in header.items()
            if name != "__metadata__"
        }
        if unknown := {dtype for dtype, _ in tensors.values()} - set(DTYPE_BYTES):
            raise ValueError(f"unknown dtype {min(unknown)}")
        return tensors
    except (OSError, struct.error, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelFolderError(f"{file.name} is not a safetensors file: {error}") from error
