"""Where a run-file picks capabilities, and which short forms it may use; derived from `KINDS` and `RunSpec`."""

from __future__ import annotations

from pydantic import BaseModel

from miles_core.capability import KINDS
from miles_core.config.spec import Pick, RunSpec
from miles_core.config.yaml12 import Path

SECTIONS: dict[str, tuple[str, ...]] = {
    kind.name: tuple(kind.section.split(".")) for kind in KINDS.values() if kind.section is not None
}
"""Kind to the path of its pick, or of its list of picks."""

_SHORT_FIELDS: dict[Path, str] = {("model",): "path", ("data",): "train"}


def kind_at(path: Path) -> str | None:
    """The kind picked at exactly this path."""
    for kind, section in SECTIONS.items():
        if KINDS[kind].many:
            if len(path) == len(section) + 1 and path[:-1] == section and isinstance(path[-1], int):
                return kind
        elif path == section:
            return kind
    return None


def short_key(path: Path) -> str | None:
    """The key a bare text at this path stands for: ``loss: ppo-clip`` means ``loss: {use: ppo-clip}``."""
    return "use" if kind_at(path) else _SHORT_FIELDS.get(path)


def default_pick(kind: str) -> str | None:
    """The name that is picked for a kind if the run-file does not mention it."""
    fields, value = RunSpec.model_fields, None
    for part in SECTIONS[kind]:
        value = fields[part].default
        section = fields[part].annotation  # of a required section there is no default to look into
        fields = section.model_fields if isinstance(section, type) and issubclass(section, BaseModel) else {}
    return value.use if isinstance(value, Pick) else None
