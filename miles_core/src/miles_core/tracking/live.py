"""What a run shows while it goes: plain lines here; see `Display` for what the loop reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from miles_core.contracts.report import Report


class Display(Protocol):
    """Told by the recorder; must return at once."""

    def phase(self, name: str) -> None: ...
    def groups_done(self, accepted: int) -> None: ...
    def contracts(self, reports: Sequence[Report]) -> None: ...
    def step(self, step: int, metrics: Mapping[str, float], timings: Mapping[str, float]) -> None: ...
    def say(self, message: str, *, alarm: bool = False) -> None: ...
    def start(self) -> None: ...
    def stop(self) -> None: ...


class PlainDisplay:
    """One line a step; for pipes and logs."""

    def __init__(self, *, steps: int, groups: int) -> None:
        self._steps = steps

    def phase(self, name: str) -> None: ...
    def groups_done(self, accepted: int) -> None: ...
    def contracts(self, reports: Sequence[Report]) -> None: ...
    def step(self, step: int, metrics: Mapping[str, float], timings: Mapping[str, float]) -> None:
        reward = metrics.get("rollout/reward_mean", metrics.get("eval/reward_mean", float("nan")))
        print(f"step {step}/{self._steps} reward {reward:.3f} {timings.get('time/step_s', 0):.1f} s", flush=True)

    def say(self, message: str, *, alarm: bool = False) -> None:
        print(("ALARM " if alarm else "") + message, flush=True)

    def start(self) -> None: ...
    def stop(self) -> None: ...


def make_display(*, steps: int, groups: int, plain: bool) -> Display:
    """The display for this terminal."""
    return PlainDisplay(steps=steps, groups=groups)
