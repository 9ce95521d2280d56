"""A model folder's config.json as transformers completes it, or an error that says what is wrong with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from miles_core.errors import ConfigError
from miles_core.numerics.rotary import unreadable


def read_model_config(path: str | Path) -> Any:
    """transformers' config of a folder.

    Raises:
        ConfigError: no such folder, no model that transformers knows, or a field that nothing can be computed from.
    """
    folder = Path(path)
    if not (folder / "config.json").is_file():
        raise ConfigError(
            "the model folder does not exist" if not folder.is_dir() else "the model folder has no config.json",
            expected="a Hugging Face folder with config.json, safetensors and tokenizer",
            found="a folder without config.json" if folder.is_dir() else "nothing",
            where=str(folder),
            do="check model.path; a model id of a hub is not a folder",
        )
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, StrictDataclassError) as error:
        raise _undescribed(folder, " ".join(str(error).split())[:300]) from error
    if problem := unreadable(config.get_text_config().to_dict()):
        raise _undescribed(folder, problem)
    return config


def refuse_quantised(config: Any, path: str | Path) -> None:
    """Raise ConfigError for a checkpoint that no gradient can be taken of."""
    if getattr(config, "quantization_config", None) is not None:
        raise ConfigError(
            "the checkpoint is quantised",
            expected="weights in float32, bfloat16 or float16",
            found="a quantization_config in config.json",
            where=str(path),
            do="train from the unquantised checkpoint",
        )


def _undescribed(folder: Path, found: str) -> ConfigError:
    return ConfigError(
        "config.json does not describe a known model",
        expected="a model_type that transformers knows, with complete fields",
        found=found,
        where=str(folder),
        do="check model.path, or install a newer transformers",
    )
