"""Write a Hugging Face model folder from weight buckets, one file at a time."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from miles_core.errors import CheckpointError
from miles_core.types import WeightBucket
from miles_core.weights.buckets import plan_buckets

SHARD_BYTES = 4 * 2**30
"""One safetensors file of a saved folder at most."""

_FOLDER_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "chat_template*",
    "*.py",
)


def write_folder(
    buckets: Iterable[WeightBucket],
    expected: Mapping[str, torch.Tensor],
    directory: Path,
    *,
    model_path: str,
    writes: bool,
) -> None:
    """Write a folder that transformers loads: safetensors, config, tokenizer, chat template.

    Args:
        buckets: A whole weight version; consumed on every rank.
        expected: Every tensor that must come, by name; may be on the meta device.
        model_path: Folder the model came from; its config and tokenizer files are copied.
        writes: Whether this rank writes. The others only take part in gathering.

    Raises:
        CheckpointError: a tensor did not come.
    """
    sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in expected.items()}
    files = plan_buckets(sizes, SHARD_BYTES)
    where = {name: index for index, names in enumerate(files) for name in names}
    if not writes:
        for _ in buckets:
            pass
        return
    directory.mkdir(parents=True, exist_ok=True)
    if lost := sorted(where.keys() - _write_shards(buckets, files, where, directory)):
        raise CheckpointError(
            "the export is incomplete",
            expected=f"all {len(where)} tensors of the checkpoint",
            found=f"{len(lost)} missing: {', '.join(lost[:3])}",
            where=str(directory),
            do="report the backend; the folder is not usable",
        )
    if len(files) > 1:
        listing = {
            "metadata": {"total_size": sum(sizes.values())},
            "weight_map": {name: _file_name(where[name], len(files)) for name in sorted(where)},
        }
        (directory / "model.safetensors.index.json").write_text(json.dumps(listing, indent=2) + "\n", encoding="utf-8")
    _copy_files(Path(model_path), directory, {tensor.dtype for tensor in expected.values()})


def _write_shards(
    buckets: Iterable[WeightBucket], files: Sequence[Sequence[str]], where: Mapping[str, int], directory: Path
) -> set[str]:
    """Write each file once its last tensor has come. Returns the names of the tensors that came."""
    waiting: dict[int, dict[str, torch.Tensor]] = {index: {} for index in range(len(files))}
    came: set[str] = set()
    for bucket in buckets:
        for named in bucket.tensors:
            index = where[named.name]
            came.add(named.name)
            waiting[index][named.name] = named.tensor.cpu()
            if len(waiting[index]) == len(files[index]):
                save_file(waiting.pop(index), directory / _file_name(index, len(files)), metadata={"format": "pt"})
    return came


def _file_name(index: int, count: int) -> str:
    return "model.safetensors" if count == 1 else f"model-{index + 1:05d}-of-{count:05d}.safetensors"


def _copy_files(source: Path, directory: Path, dtypes: set[torch.dtype]) -> None:
    for pattern in _FOLDER_FILES:
        for path in sorted(source.glob(pattern)):
            if path.is_file() and path.resolve() != (directory / path.name).resolve():
                shutil.copyfile(path, directory / path.name)
    config_path = directory / "config.json"
    config = json.loads(config_path.read_text(encoding="utf-8"))
    floating = {dtype for dtype in dtypes if dtype.is_floating_point}
    if len(floating) == 1:  # `dtype="auto"` of a reader trusts this field
        key = "torch_dtype" if "torch_dtype" in config and "dtype" not in config else "dtype"
        name = str(floating.pop()).removeprefix("torch.")
        if config.get(key) != name:
            config_path.write_text(json.dumps({**config, key: name}, indent=2) + "\n", encoding="utf-8")
