"""Weights under the checkpoint's names, shapes and dtypes: buckets for a transport, or a Hugging Face folder.

transformers stores some tensors differently in memory than in a checkpoint (experts stacked into one, legacy names);
its own conversion is run backwards, so that receivers see what `save_pretrained` would write. Tied tensors appear once.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers.core_model_loading import revert_weight_conversion

from miles_core.errors import CheckpointError, PluginError
from miles_core.types import WeightBucket
from miles_core.weights.buckets import fill_buckets, plan_buckets

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


def write_folder(
    buckets: Iterator[WeightBucket], exporter: Exporter, directory: Path, *, model_path: str, writes: bool
) -> None:
    """Write a folder that transformers loads: safetensors, config, tokenizer, chat template.

    Args:
        buckets: From `Exporter.buckets`; consumed on every rank.
        model_path: Folder the model came from; its config and tokenizer files are copied.
        writes: Whether this rank writes. The others only take part in gathering.

    Raises:
        CheckpointError: a tensor did not come.
    """
    sizes = {name: exported.num_bytes for name, exported in exporter.tensors.items()}
    files = plan_buckets(sizes, SHARD_BYTES)
    where = {name: index for index, names in enumerate(files) for name in names}
    waiting: dict[int, dict[str, Tensor]] = {index: {} for index in range(len(files))}
    written: set[str] = set()
    if writes:
        directory.mkdir(parents=True, exist_ok=True)
    for bucket in buckets:
        if not writes:
            continue
        for named in bucket.tensors:
            index = where[named.name]
            written.add(named.name)
            waiting[index][named.name] = named.tensor.cpu()
            if len(waiting[index]) == len(files[index]):
                save_file(waiting.pop(index), directory / _file_name(index, len(files)), metadata={"format": "pt"})
    if not writes:
        return
    lost = sorted(set(where) - written)
    if lost:
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
    _copy_files(Path(model_path), directory, {exported.dtype for exported in exporter.tensors.values()})


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
