"""`miles plan`: memory, weight updates and overlap on paper, before anything is launched."""

from __future__ import annotations

from miles_core.cli.lazy import LazyCommand, LazyGroup

COMMANDS = {
    "memory": LazyCommand("miles_core.cli.plan_memory:command", "Memory of the fullest trainer rank."),
    "sync": LazyCommand("miles_core.cli.plan_sync:command", "Time of a weight update by each transport."),
    "async": LazyCommand("miles_core.cli.plan_async:command", "Step time, idle shares and staleness of a schedule."),
}

command = LazyGroup("plan", lazy=COMMANDS, help="Forecast a run from its architecture, topology and timings.")
