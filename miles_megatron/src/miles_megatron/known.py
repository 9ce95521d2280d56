"""Find the table of a checkpoint's architecture."""

from __future__ import annotations

from miles_core.errors import ConfigError
from miles_megatron.architectures.dense import LLAMA, QWEN2, QWEN3
from miles_megatron.architectures.sparse import DEEPSEEK_V3, GLM4_MOE, QWEN3_MOE
from miles_megatron.checkpoint_folder import ModelFolder
from miles_megatron.tables import Architecture, Table

BUILT_IN: tuple[Architecture, ...] = (LLAMA, QWEN2, QWEN3, QWEN3_MOE, GLM4_MOE, DEEPSEEK_V3)


def table_for(folder: ModelFolder) -> Table:
    """The table whose `model_types` name the folder's.

    Raises:
        ConfigError: there is none.
    """
    model_type = folder.config.model_type
    for architecture in BUILT_IN:
        if model_type in architecture.model_types:
            return Table(architecture)
    raise ConfigError(
        f"no table maps the architecture {model_type!r}",
        expected="one of " + ", ".join(sorted(name for each in BUILT_IN for name in each.model_types)),
        found=model_type,
        where=str(folder.path),
        do="use backend fsdp, or install a plugin with a table for it",
    )
