"""A Hugging Face folder read tensor by tensor: names, shapes and dtypes at once, values when asked for."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from miles_core.errors import ConfigError
from miles_core.model_config import read_model_config, refuse_quantised

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


class Fields(Mapping[str, Any]):
    """A transformers config as a mapping, under every name that its class knows a field by."""

    def __init__(self, config: Any) -> None:
        self._config = config

    def __getitem__(self, name: str) -> Any:
        try:
            return getattr(self._config, name)
        except AttributeError:
            raise KeyError(name) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._config.to_dict())

    def __len__(self) -> int:
        return len(self._config.to_dict())


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """What a folder holds."""

    path: Path
    config: Any
    """transformers' config of the language model."""
    tensors: Mapping[str, Tensor]
    """Shape and dtype by name, on the meta device, in the files' order."""
    files: Mapping[str, Path]

    @contextlib.contextmanager
    def reader(self) -> Iterator[Callable[[str], Tensor]]:
        """A function that reads a tensor to the CPU by name; files stay open until the block ends.

        Opening a file reads the names of all its tensors: for each of some thousands, that would be most of the time.

        Raises:
            ConfigError: from the function, when the tensor cannot be read.
        """
        opened: dict[Path, Any] = {}
        with contextlib.ExitStack() as stack:

            def read(name: str) -> Tensor:
                file = self.files[name]
                try:
                    if file not in opened:
                        opened[file] = stack.enter_context(safe_open(file, framework="pt"))
                    tensor: Tensor = opened[file].get_tensor(name)
                    return tensor
                except (OSError, SafetensorError) as error:
                    raise _unusable(self.path, f"{name}: {error}") from error

            yield read

    @property
    def dtype(self) -> torch.dtype:
        """What the config says it is in; float32 where it says nothing."""
        found: torch.dtype = getattr(self.config, "dtype", None) or torch.float32
        return found


def open_folder(path: str) -> ModelFolder:
    """Read config and headers.

    Raises:
        ConfigError: no such folder, not a known model, quantised, or a file is missing or damaged.
    """
    folder = Path(path)
    config = read_model_config(folder)
    refuse_quantised(config, folder)
    tensors: dict[str, Tensor] = {}
    files: dict[str, Path] = {}
    for file in _weight_files(folder):
        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - not a mapping
                    part = opened.get_slice(name)
                    dtype = _DTYPES.get(part.get_dtype())
                    if dtype is None:
                        raise _unusable(folder, f"{name} is {part.get_dtype()}")
                    tensors[name] = torch.empty(part.get_shape(), dtype=dtype, device="meta")
                    files[name] = file
        except (OSError, SafetensorError) as error:
            raise _unusable(folder, f"{file.name}: {error}") from error
    return ModelFolder(folder, config.get_text_config(), tensors, files)


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        return [folder / name for name in names]
    return [folder / "model.safetensors"]


def _unusable(folder: Path, found: str) -> ConfigError:
    return ConfigError(
        "the model cannot be loaded",
        expected="complete safetensors in float32, bfloat16 or float16",
        found=found,
        where=str(folder),
        do="check model.path",
    )
