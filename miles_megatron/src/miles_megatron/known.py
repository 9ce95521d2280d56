"""Find the table of a checkpoint's architecture."""

from __future__ import annotations

from miles_core.errors import ConfigError
from miles_core.registry import load_target
from miles_megatron.architectures.dense import LLAMA, QWEN2, QWEN3
from miles_megatron.architectures.sparse import DEEPSEEK_V3, GLM4_MOE, QWEN3_MOE
from miles_megatron.checkpoint_folder import ModelFolder
from miles_megatron.tables import Architecture, Table

BUILT_IN: tuple[Architecture, ...] = (LLAMA, QWEN2, QWEN3, QWEN3_MOE, GLM4_MOE, DEEPSEEK_V3)


def table_for(folder: ModelFolder, named: str | None = None) -> Table:
    """The table whose `model_types` name the folder's.

    Args:
        named: ``module:attribute`` of the table that a plugin brings; it goes before the built-in ones.

    Raises:
        ConfigError: there is none, or the named one is of other checkpoints.
        PluginError: the named one cannot be loaded.
    """
    model_type = folder.config.model_type
    if named is not None:
        architecture = load_target(named)
        if not isinstance(architecture, Architecture) or model_type not in architecture.model_types:
            raise ConfigError(
                "the plugin's table does not map this checkpoint",
                expected=f"an Architecture for {model_type!r}",
                found=f"{type(architecture).__name__} for {getattr(architecture, 'model_types', ())}",
                where=named,
                do="mend model_types of the table, or the name under which its plugin offers it",
            )
        return Table(architecture)
    for architecture in BUILT_IN:
        if model_type in architecture.model_types:
            return Table(architecture)
    raise ConfigError(
        f"no table maps the architecture {model_type!r}",
        expected="one of " + ", ".join(sorted(name for each in BUILT_IN for name in each.model_types)),
        found=model_type,
        where=str(folder.path),
        do="use backend fsdp, or write a table: miles plugins new architecture NAME",
    )
