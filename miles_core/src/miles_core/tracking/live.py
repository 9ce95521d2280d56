"""What a run shows while it goes: a live panel in a terminal, one line a step elsewhere."""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from miles_core.contracts.logprobs import MAX_MEAN_ABS_DIFF
from miles_core.contracts.report import Report, Verdict
from miles_core.tracking.verdict import Outlook, State, judge

NOT_PROVEN = "with weights.verify off and no weights.probes, what engines serve is what they say"
"""Of versions, in place of a reason that each engine would give."""
CONTRACTS = ("tokens", "routes", "logprobs", "versions")
BLOCKS = "▁▂▃▄▅▆▇█"
STYLES = {
    Verdict.OK: ("✓", "green"),
    Verdict.BROKEN: ("✗", "bold red"),
    Verdict.UNAVAILABLE: ("–", "dim"),
    Verdict.NOT_APPLICABLE: ("·", "dim"),
}


class Display(Protocol):
    """Told by the recorder; must return at once."""

    def phase(self, name: str) -> None: ...
    def groups_done(self, accepted: int) -> None: ...
    def contracts(self, reports: Sequence[Report]) -> None: ...
    def step(self, step: int, metrics: Mapping[str, float], timings: Mapping[str, float]) -> None: ...
    def evaluated(self, step: int, figures: Mapping[str, float]) -> None: ...
    def say(self, message: str, *, alarm: bool = False) -> None: ...
    def start(self) -> None: ...
    def stop(self) -> None: ...


def make_display(*, steps: int, groups: int, plain: bool) -> Display:
    """The display for this terminal: live when stdout is one that can redraw, plain lines otherwise."""
    console = Console()
    if plain or not console.is_terminal or console.is_dumb_terminal:
        return PlainDisplay(steps=steps, groups=groups)
    return LiveDisplay(steps=steps, groups=groups, console=console)


class PlainDisplay:
    """One line a step; for pipes and logs."""

    def __init__(self, *, steps: int, groups: int) -> None:
        self._steps = steps
        self._pace = Pace(steps)
        self._reports: Sequence[Report] = ()

    def phase(self, name: str) -> None: ...
    def groups_done(self, accepted: int) -> None: ...

    def contracts(self, reports: Sequence[Report]) -> None:
        self._reports = reports

    def step(self, step: int, metrics: Mapping[str, float], timings: Mapping[str, float]) -> None:
        self._pace.step(step, timings)
        parts = [f"step {step}/{self._steps}"]
        if "rollout/reward_mean" in metrics:
            parts.append(f"reward {metrics['rollout/reward_mean']:.3f}")
        if "eval/reward_mean" in metrics:
            parts.append(f"eval {metrics['eval/reward_mean']:.3f}")
        if "throughput/rollout_tokens_per_s" in timings:
            parts.append(f"{timings['throughput/rollout_tokens_per_s']:.0f} tok/s")
        parts.append(f"{timings.get('time/step_s', 0.0):.1f} s")
        if state := judge({**metrics, **timings}):
            parts.append(state.verdict.value)
        parts += [f"{report.name} {verdict_text(report)}" for report in self._reports]
        parts.append(f"ETA {self._pace.eta()}")
        sys.stdout.write("  ".join(parts) + "\n")
        sys.stdout.flush()

    def evaluated(self, step: int, figures: Mapping[str, float]) -> None:
        if "eval/reward_mean" in figures:
            late = f"{figures['eval/lag_steps']:.0f} steps later, after {figures['eval/latency_s']:.1f} s"
            self.say(f"eval of step {step}  {figures['eval/reward_mean']:.3f}  ({late})")

    def say(self, message: str, *, alarm: bool = False) -> None:
        sys.stdout.write(f"ALARM {message}\n" if alarm else f"{message}\n")
        sys.stdout.flush()

    def start(self) -> None: ...
    def stop(self) -> None: ...


class LiveDisplay:
    """A panel that is redrawn in place; messages scroll above it."""

    def __init__(self, *, steps: int, groups: int, console: Console | None = None) -> None:
        self._console = console or Console()
        self._steps = steps
        self._groups = groups
        self._pace = Pace(steps)
        self._phase = "start"
        self._phase_since = time.monotonic()
        self._accepted = 0
        self._step = 0
        self._rewards: deque[float] = deque(maxlen=48)
        self._eval: tuple[int, float] | None = None
        self._tokens_per_s: float | None = None
        self._state: State | None = None
        self._outlook = Outlook()
        self._reports: Sequence[Report] = ()
        self._live = Live(get_renderable=self.render, console=self._console, refresh_per_second=4)

    def phase(self, name: str) -> None:
        self._phase, self._phase_since = name, time.monotonic()
        if name == "rollout":
            self._accepted = 0

    def groups_done(self, accepted: int) -> None:
        self._accepted = accepted

    def contracts(self, reports: Sequence[Report]) -> None:
        self._reports = reports

    def step(self, step: int, metrics: Mapping[str, float], timings: Mapping[str, float]) -> None:
        self._step = step
        self._pace.step(step, timings)
        if "rollout/reward_mean" in metrics:
            self._rewards.append(metrics["rollout/reward_mean"])
        if "eval/reward_mean" in metrics:
            self._eval = (step, metrics["eval/reward_mean"])
        self._tokens_per_s = timings.get("throughput/rollout_tokens_per_s", self._tokens_per_s)
        self._state = judge({**metrics, **timings})
        self._outlook.step(metrics, timings)

    def evaluated(self, step: int, figures: Mapping[str, float]) -> None:
        if "eval/reward_mean" in figures:
            self._eval = (step, figures["eval/reward_mean"])

    def say(self, message: str, *, alarm: bool = False) -> None:
        # soft_wrap keeps a printed path in one piece, so that terminals can make it clickable.
        text = Text(f"! {message}", style="bold yellow") if alarm else Text(message)
        self._console.print(text, soft_wrap=True)

    def start(self) -> None:
        self._live.start()

    def stop(self) -> None:
        self._live.stop()

    def render(self) -> RenderableType:
        """The panel as it stands."""
        doing = f"{self._phase.replace('_', ' ')} {time.monotonic() - self._phase_since:.0f} s"
        if self._phase == "rollout":
            doing += f", {self._accepted} of {self._groups} groups"
        head = Table.grid(padding=(0, 2), expand=True)
        head.add_column(no_wrap=True)
        head.add_column(ratio=1)
        head.add_column(no_wrap=True, justify="right")
        bar = ProgressBar(total=max(self._steps, 1), completed=self._step)
        head.add_row(f"[bold]step {self._step}[/]/{self._steps}", bar, f"ETA {self._pace.eta()}")

        facts = Table.grid(padding=(0, 2))
        facts.add_column(style="dim", no_wrap=True)
        facts.add_column()
        if self._rewards:
            facts.add_row("reward", f"[bold]{self._rewards[-1]:.3f}[/]  {sparkline(self._rewards)}")
        else:
            facts.add_row("reward", "[dim]after the first step[/]")
        if self._eval:
            facts.add_row("eval", f"{self._eval[1]:.3f} [dim]after step {self._eval[0]}[/]")
        if self._tokens_per_s is not None:
            facts.add_row("tokens/s", f"{self._tokens_per_s:,.0f} [dim]in rollout[/]")
        if self._state is not None:
            facts.add_row(self._state.verdict.value, escape(self._state.sentence))
        if (ahead := self._outlook.forecast()) is not None:
            facts.add_row("forecast", escape(str(ahead)))
        facts.add_row("now", escape(doing))

        checks = Table.grid(padding=(0, 2))
        found = {report.name: report for report in self._reports}
        for name in CONTRACTS:
            report = found.get(name)
            symbol, style = STYLES[report.status] if report else ("·", "dim")
            numbers = escape(verdict_text(report)) if report else "[dim]not checked yet[/]"
            checks.add_row(f"[{style}]{symbol} {name}[/]", f"[{style}]{numbers}[/]")
        return Panel(Group(head, Text(), facts, Text(), checks), border_style="dim", padding=(0, 1))


class Pace:
    """How long the rest will take, from the mean of the last steps: early steps warm caches up, lengths drift."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._step = 0
        self._seconds: deque[float] = deque(maxlen=8)

    def step(self, step: int, timings: Mapping[str, float]) -> None:
        self._step = step
        if step > 0 and "time/step_s" in timings:
            self._seconds.append(timings["time/step_s"])

    def eta(self) -> str:
        if not self._seconds:
            return "–"
        return clock((self._steps - self._step) * sum(self._seconds) / len(self._seconds))


def clock(seconds: float) -> str:
    """``7:42`` or ``1:07:42``."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def sparkline(values: Sequence[float] | deque[float]) -> str:
    """One block a value, scaled to their range; NaN is a blank."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    low, high = min(finite), max(finite)
    span = (high - low) or 1.0
    return "".join(
        BLOCKS[min(len(BLOCKS) - 1, int((value - low) / span * len(BLOCKS)))] if math.isfinite(value) else " "
        for value in values
    )


def verdict_text(report: Report) -> str:
    """The contract's verdict in one short line, with the number that tells most."""
    if report.status is Verdict.NOT_APPLICABLE:
        return "n/a (dense model)" if report.name == "routes" else "n/a"
    if report.status is Verdict.UNAVAILABLE:
        return figures_text(report.name, report.metrics) or "not measured"
    if report.status is Verdict.BROKEN and report.offenders:
        return f"BROKEN {report.offenders[0]}"
    return figures_text(report.name, report.metrics) or str(report.status)


def _logprobs_text(numbers: Mapping[str, float]) -> str:
    """Age moves log-probs too, so fresh tokens are told apart where there are others."""
    mean, fraction = numbers["abs_diff_mean"], numbers.get("fresh_fraction", 1.0)
    fresh = numbers.get("abs_diff_mean_fresh")
    if fraction < 1 and fresh is not None:
        return f"mean |d| {fresh:.2g} on the {fraction:.0%} fresh tokens, {mean:.2g} on all; the rest is also age"
    if fraction < 1:
        return f"mean |d| {mean:.2g} nats; no fresh tokens, so age and numerics are not told apart"
    if (largest := numbers["abs_diff_max"]) == 0:
        return "identical, token by token"
    return f"mean |d| {mean:.2g}, max {largest:.2g} nats (broken above a mean of {MAX_MEAN_ABS_DIFF:g})"


_TELLING = {
    "tokens": "checked_trajectories",
    "routes": "coverage",
    "logprobs": "abs_diff_mean",
    "versions": "s_old_max",
}
"""The figure without which a contract was not measured."""


def figures_text(contract: str, metrics: Mapping[str, float]) -> str | None:
    """The number that tells most of a contract, from a step's metrics; None where it was not measured."""
    prefix = f"contract/{contract}/"
    numbers = {name.removeprefix(prefix): value for name, value in metrics.items() if name.startswith(prefix)}
    if _TELLING.get(contract) not in numbers:
        return None
    match contract:
        case "tokens":
            return f"{numbers['checked_trajectories']:.0f} rows, {numbers['trained_tokens']:.0f} trained tokens"
        case "routes":
            covered = f"{numbers['coverage']:.0%} covered"
            different = numbers.get("different_fraction")
            return covered if different is None else f"{covered}, {different:.2%} sent to other experts"
        case "logprobs":
            return _logprobs_text(numbers)
        case "versions":
            age = f"oldest {numbers['s_old_max']:.0f}, mean {numbers['token_staleness']:.2g} versions behind"
            return age if numbers.get("proven", 1.0) else f"{age}; not proven: {NOT_PROVEN}"
        case _:
            return None
