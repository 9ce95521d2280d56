"""Describes what a run ran on, in enough detail to explain a difference between two runs later."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from typing import Any

from miles_core.registry import Registry

PACKAGES = ("torch", "transformers", "numpy", "ray", "sglang", "megatron-core", "tokenizers", "safetensors")


def describe_environment(registry: Registry) -> dict[str, Any]:
    """Versions, machine and plugins as JSON values."""
    return {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
        "plugins": sorted({f"{entry.distribution} {entry.version}" for entry in registry.entries()}),
    }


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
