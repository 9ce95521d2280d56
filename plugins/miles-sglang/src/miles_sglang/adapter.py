"""LoRA adapters: read from a folder as PEFT writes it, loaded into a server beside its weights, and let go."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles_core.errors import EngineError
from miles_sglang.client import Client

_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class Adapter:
    folder: Path
    rank: int
    modules: tuple[str, ...]
    """Of the model's layers it adds to, such as ``q_proj``."""


def read_adapter(folder: Path) -> Adapter:
    """Read a folder with adapter_config.json and adapter_model.safetensors.

    Raises:
        EngineError: a file is missing, or it is no adapter that SGLang computes.
    """
    config: Any = None
    try:
        config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
        found = Adapter(folder, int(config["r"]), tuple(sorted(config["target_modules"])))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise EngineError(
            "the LoRA adapter cannot be read",
            expected="adapter_config.json with r and a list of target_modules",
            found=f"{type(error).__name__}: {error}",
            where=str(folder),
        ) from error
    wrong = [name for name in ("use_dora", "use_rslora", "modules_to_save", "rank_pattern") if config.get(name)]
    if isinstance(config["target_modules"], str) or config.get("bias", "none") != "none" or wrong:
        raise EngineError(
            "the LoRA adapter is of a kind that SGLang does not compute",
            expected="plain LoRA: a list of target_modules, no bias, one rank",
            found=", ".join(wrong) or f"target_modules {config['target_modules']!r}, bias {config.get('bias')!r}",
            where=str(folder),
            do="merge it into the weights",
        )
    if not (folder / "adapter_model.safetensors").is_file():
        raise EngineError("the LoRA adapter has no weights", expected="adapter_model.safetensors", where=str(folder))
    return found


async def load(client: Client, adapter: Adapter) -> str:
    """Load an adapter; requests that give the name returned are sampled through it.

    Raises:
        EngineError: the server was not started for adapters, or not for one of this rank or these modules.
    """
    name = f"miles-{next(_numbers)}"
    await client.post("/load_lora_adapter", {"lora_name": name, "lora_path": str(adapter.folder)})
    return name


async def unload(client: Client, name: str) -> None:
    """Let an adapter go; the server waits for requests that use it."""
    await client.post("/unload_lora_adapter", {"lora_name": name})
