"""Is this run-file the one that the run directory was started with?"""

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
    "tracking",
    "stall_s",
    "weights",
    "check_weight_update_equal",
    "plugins",
)
"""What a resumed run may change: none of it alters the steps that are done."""


def check_same_run(directory: RunDir, spec: RunSpec) -> None:
    """Raise RunError naming every key that differs, unless a resumed run may change it."""
    before = _flat(yaml12.parse((directory.path / "run.yaml").read_text()).value)
    now = _flat(spec.model_dump(mode="json"))
    missing = object()
    differing = [
        key
        for key in sorted(before.keys() | now.keys())
        if before.get(key, missing) != now.get(key, missing)
        and not any(key == free or key.startswith(free + ".") for free in MAY_CHANGE)
    ]
    if differing:
        raise RunError(
            "this run directory belongs to a different run-file",
            expected=", ".join(f"{key}: {before.get(key)!r}" for key in differing[:5]),
            found=", ".join(f"{key}: {now.get(key)!r}" for key in differing[:5]),
            where=str(directory.path / "run.yaml"),
            do="resume with the same values, or give this run another `name`",
        )


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(value, dict) and value:
        flat: dict[str, Any] = {}
        for key, item in value.items():
            flat |= _flat(item, f"{prefix}.{key}" if prefix else str(key))
        return flat
    return {prefix: list(value) if isinstance(value, tuple) else value}
