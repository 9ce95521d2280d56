"""What the served checkpoint says of itself: its tensors, its vocabulary, and the tokens a server would stop at."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from miles_core.config.model_folder import ModelFolderError, read_model_folder, tensor_headers
from miles_core.errors import EngineError
from miles_core.weights.intake import Form

TORCH_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "I64": torch.int64, "I32": torch.int32,
    "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "U16": torch.uint16, "U32": torch.uint32,
    "U64": torch.uint64, "BOOL": torch.bool,
}  # fmt: skip
ROUNDED = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""Dtypes that a chosen precision replaces; quantised ones stay what they are."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    path: Path
    architectures: tuple[str, ...]
    """As config.json names them; empty where it does not."""
    forms: dict[str, Form]
    """Every tensor of a published version, in the precision the server computes in."""
    vocabulary: int
    layers: int
    context_length: int | None
    moe_layers: tuple[int, ...] | None
    """Which decoder layers have experts; None for a dense model."""
    stops: frozenset[int]
    """Ids at which a server stops by itself unless it is told not to."""


def read_checkpoint(path: Path, dtype: str) -> Checkpoint:
    """Read a Hugging Face folder.

    Args:
        dtype: ``checkpoint``, or the name of the precision the server computes in.

    Raises:
        EngineError: a file is missing or unreadable, or says too little.
    """
    try:
        folder = read_model_folder(path)
        headers = tensor_headers(path)
    except ModelFolderError as error:
        raise EngineError("the model folder cannot be served", found=str(error), where=str(path)) from error
    config = _json(path / "config.json")
    inner = config["text_config"] if isinstance(config.get("text_config"), dict) else config
    if folder.vocabulary is None or folder.layers is None:
        raise EngineError(
            "the model folder cannot be served",
            expected="vocab_size and num_hidden_layers in config.json",
            found=", ".join(sorted(inner)),
            where=str(path),
        )
    return Checkpoint(
        path=path,
        architectures=tuple(config.get("architectures") or ()),
        forms={name: Form(_served(TORCH_DTYPES[stored], dtype), shape) for name, (stored, shape) in headers.items()},
        vocabulary=folder.vocabulary,
        layers=folder.layers,
        context_length=folder.context_length,
        moe_layers=_moe_layers(headers, folder.layers) if folder.experts else None,
        stops=_stops(path, config),
    )


def row_limit(wanted: int | None, checkpoint: Checkpoint, where: str, key: str) -> int:
    """Tokens of a row at most: what is wanted, else what the checkpoint was made for.

    Args:
        key: That says what is wanted.

    Raises:
        EngineError: nobody says, or more is wanted than the checkpoint was made for.
    """
    limit = checkpoint.context_length
    found = wanted or limit
    if found is None:
        raise EngineError(
            "nobody says how long the context is",
            expected="max_position_embeddings in config.json, or context_length",
            found="neither",
            where=where,
            do=f"set {key}",
        )
    if limit is not None and found > limit:
        raise EngineError(
            "the context length is longer than the checkpoint was made for",
            expected=f"at most {limit} tokens (max_position_embeddings)",
            found=f"context_length {found}",
            where=where,
            do=f"lower {key}",
        )
    return found


def _served(stored: torch.dtype, wanted: str) -> torch.dtype:
    found: torch.dtype = stored if wanted == "checkpoint" or stored not in ROUNDED else getattr(torch, wanted)
    return found


def _moe_layers(names: Any, layers: int) -> tuple[int, ...]:
    """Layers that store experts; the tensors are the only statement all architectures share."""
    found = {
        int(name.split(".layers.")[1].split(".")[0]) for name in names if ".layers." in name and ".experts" in name
    }
    return tuple(sorted(layer for layer in found if layer < layers))


def _stops(path: Path, config: dict[str, Any]) -> frozenset[int]:
    """End tokens of config, generation config and tokenizer, and the one that SGLang adds where a tokenizer has it."""
    ids: set[int] = set()
    for source in (config, _json(path / "generation_config.json")):
        found = source.get("eos_token_id")
        ids.update(found if isinstance(found, list) else [found] if isinstance(found, int) else [])
    end = _json(path / "tokenizer_config.json").get("eos_token")
    text = end.get("content") if isinstance(end, dict) else end
    for token in _json(path / "tokenizer.json").get("added_tokens", []):
        if token.get("content") in (text, "<|eom_id|>"):
            ids.add(int(token["id"]))
    return frozenset(ids)


def _json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    value = json.loads(file.read_text(encoding="utf-8"))
    return value if isinstance(value, dict) else {}
