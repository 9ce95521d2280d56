"""Checks that a run-file is the one with which a run directory was started."""

from __future__ import annotations

from typing import Any

from miles_core.config import yaml12
from miles_core.config.spec import RunSpec
from miles_core.errors import RunError
from miles_core.tracking.run_dir import RunDir

MAY_CHANGE = (
    "schedule.steps",
    "checkpoint",
    "eval",
    "data.eval",
    "backend",
    "placement",
    "engine",
    "executor",
    "transport",
    "tracking",
    "stall_s",
    "weights",
    "check_weight_update_equal",
    "plugins",
)
"""What a resumed run may change: none of it alters the steps that are done, and a checkpoint is read under any layout.
Figures of the steps to come then need not agree bit for bit."""
MUST_STAY = ("backend.use", "engine.use")
"""Within those: another backend cannot read the checkpoint, and another engine is another sampler."""


def check_same_run(directory: RunDir, spec: RunSpec) -> list[str]:
    """Compare the two run-files. Returns the keys that differ and are allowed to.

    Raises:
        RunError: naming every key that differs and may not.
    """
    before = _flat(yaml12.parse((directory.path / "run.yaml").read_text()).value)
    now = _flat(spec.model_dump(mode="json"))
    missing = object()
    changed = [key for key in sorted(before.keys() | now.keys()) if before.get(key, missing) != now.get(key, missing)]
    differing = [key for key in changed if key in MUST_STAY or not _within(key, MAY_CHANGE)]
    if differing:
        raise RunError(
            "this run directory belongs to a different run-file",
            expected=", ".join(f"{key}: {before.get(key)!r}" for key in differing[:5]),
            found=", ".join(f"{key}: {now.get(key)!r}" for key in differing[:5]),
            where=str(directory.path / "run.yaml"),
            do="resume with the same values, or give this run another `name`",
        )
    return changed


def _within(key: str, sections: tuple[str, ...]) -> bool:
    return any(key == section or key.startswith(section + ".") for section in sections)


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(value, dict) and value:
        flat: dict[str, Any] = {}
        for key, item in value.items():
            flat |= _flat(item, f"{prefix}.{key}" if prefix else str(key))
        return flat
    return {prefix: list(value) if isinstance(value, tuple) else value}
