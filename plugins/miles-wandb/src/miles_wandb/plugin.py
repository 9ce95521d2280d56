"""Tracker `wandb`: every step's figures to Weights & Biases."""

from __future__ import annotations

from collections.abc import Iterable

from miles_core.plugin import Capability, hookimpl

MILES_API = 1


@hookimpl
def miles_trackers() -> Iterable[Capability]:
    return [
        Capability(
            name="wandb",
            summary="every step's figures to Weights & Biases; online, offline or off",
            load="miles_wandb.tracker:WandbTracker",
            options="miles_wandb.options:WandbOptions",
            needs=("wandb>=0.17",),
        )
    ]
