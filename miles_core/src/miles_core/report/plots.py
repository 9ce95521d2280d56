"""Line charts and stacked bars as inline SVG. Colours and fonts come from the page's style sheet, by class."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 400, 210
LEFT, RIGHT, TOP, BOTTOM = 48, 12, 10, 26
MAX_POINTS = 240
"""More steps than this are averaged into as many buckets: a phone has no more pixels."""

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One line, or the dots of figures that come now and then."""

    label: str
    points: Points
    dots: bool = False
    errors: Sequence[float] = ()
    """Half lengths of error bars, one a point; dots only."""
    smooth: bool = False
    """Draw the values faintly and their running mean over them."""


def line_chart(title: str, series: Sequence[Series]) -> str:
    """An SVG of all series over the step, or nothing when none has a point."""
    series = [one for one in series if one.points]
    if not series:
        return ""
    xs = [x for one in series for x, _ in one.points]
    ys = [y for one in series for _, y in _with_errors(one)]
    frame = _Frame.around(xs, ys)
    parts = [frame.grid()]
    for index, one in enumerate(series):
        points = _thinned(one.points)
        if one.dots:
            parts += _dots(frame, one, index)
        elif one.smooth and len(points) > 8:
            parts.append(f'<path class="c{index} faint" d="{frame.path(points)}"/>')
            parts.append(f'<path class="c{index}" d="{frame.path(_running_mean(points))}"/>')
        else:
            parts.append(f'<path class="c{index}" d="{frame.path(points)}"/>')
            if len(points) == 1:
                parts.append(frame.dot(points[0], f"c{index}"))
    parts += _tooltips(frame, series)
    return _svg(title, parts) + _legend([one.label for one in series])


def stacked_bars(title: str, unit: str, series: Sequence[Series]) -> str:
    """One bar a step, its parts stacked in the order given."""
    series = [one for one in series if one.points]
    if not series:
        return ""
    steps = sorted({x for one in series for x, _ in one.points})
    by_step = [dict(one.points) for one in series]
    totals = {step: sum(values.get(step, 0.0) for values in by_step) for step in steps}
    shown = _every_nth(steps)
    frame = _Frame.around([steps[0] - 0.5, steps[-1] + 0.5], [0.0, max(totals[step] for step in shown)])
    width = max(0.5, (frame.x(steps[0] + 1.0) - frame.x(steps[0])) * (steps[-1] - steps[0] + 1) / len(shown) * 0.8)
    parts = [frame.grid()]
    for step in shown:
        base = 0.0
        says = [f"step {step:g}: {totals[step]:.3g} {unit}"]
        bar = []
        for index, (one, values) in enumerate(zip(series, by_step, strict=True)):
            value = values.get(step, 0.0)
            low, high = frame.y(base), frame.y(base + value)
            left = frame.x(step) - width / 2
            bar.append(
                f'<rect class="f{index}" x="{left:.1f}" y="{high:.1f}" width="{width:.1f}" height="{low - high:.1f}"/>'
            )
            says.append(f"{one.label} {value:.3g}")
            base += value
        parts.append(f"<g><title>{escape(chr(10).join(says))}</title>{''.join(bar)}</g>")
    return _svg(title, parts) + _legend([one.label for one in series])


# --- scales -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Frame:
    """Data to pixels, and the ticks of both axes."""

    x_low: float
    x_high: float
    y_ticks: tuple[float, ...]

    @classmethod
    def around(cls, xs: Sequence[float], ys: Sequence[float]) -> _Frame:
        low, high = min(xs), max(xs)
        if low == high:
            low, high = low - 0.5, high + 0.5
        return cls(low, high, ticks(min(ys), max(ys)))

    def x(self, value: float) -> float:
        return LEFT + (value - self.x_low) / (self.x_high - self.x_low) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        low, high = self.y_ticks[0], self.y_ticks[-1]
        return HEIGHT - BOTTOM - (value - low) / (high - low) * (HEIGHT - TOP - BOTTOM)

    def path(self, points: Points) -> str:
        return "M" + "L".join(f"{self.x(x):.1f} {self.y(y):.1f}" for x, y in points)

    def dot(self, point: tuple[float, float], css: str) -> str:
        return f'<circle class="{css}" cx="{self.x(point[0]):.1f}" cy="{self.y(point[1]):.1f}" r="3"/>'

    def grid(self) -> str:
        parts = []
        for tick in self.y_ticks:
            y = self.y(tick)
            parts.append(f'<line class="grid" x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}"/>')
            parts.append(f'<text x="{LEFT - 6}" y="{y + 3.5:.1f}" text-anchor="end">{label(tick)}</text>')
        wanted = [tick for tick in ticks(self.x_low, self.x_high, count=5) if float(tick).is_integer()]
        for tick in wanted:
            if self.x_low <= tick <= self.x_high:
                x = self.x(tick)
                parts.append(f'<text x="{x:.1f}" y="{HEIGHT - 9}" text-anchor="middle">{tick:g}</text>')
        return "".join(parts)


def ticks(low: float, high: float, count: int = 4) -> tuple[float, ...]:
    """Round numbers from at or below `low` to at or above `high`, in about `count` steps of 1, 2 or 5 times 10^n."""
    if low == high == 0:
        high = 1.0  # a count or a distance that is always 0
    elif low == high:
        low, high = low - abs(low) * 0.1, high + abs(low) * 0.1
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return tuple(round(number * step, 12) for number in range(first, max(last, first + 1) + 1))


def label(value: float) -> str:
    """A tick in few characters: 0.25, 12, 3k, 1.5M, 2e-6."""
    size = abs(value)
    if size >= 1e6:
        return f"{value / 1e6:g}M"
    if size >= 1e4:
        return f"{value / 1e3:g}k"
    if 0 < size < 1e-3:
        return f"{value:.0e}".replace("e-0", "e-")
    return f"{value:g}"


# --- points -----------------------------------------------------------------------------------------------------------


def _thinned(points: Points) -> Points:
    """At most `MAX_POINTS`, each the mean of a bucket of neighbours."""
    if len(points) <= MAX_POINTS:
        return points
    size = math.ceil(len(points) / MAX_POINTS)
    buckets = [points[start : start + size] for start in range(0, len(points), size)]
    return [(sum(x for x, _ in b) / len(b), sum(y for _, y in b) / len(b)) for b in buckets]


def _every_nth(steps: Sequence[float]) -> Sequence[float]:
    return steps[:: math.ceil(len(steps) / MAX_POINTS)]


def _running_mean(points: Points) -> Points:
    """Centred mean over about a tenth of the run."""
    half = max(1, len(points) // 20)
    found = []
    for index, (x, _) in enumerate(points):
        window = points[max(0, index - half) : index + half + 1]
        found.append((x, sum(y for _, y in window) / len(window)))
    return found


def _with_errors(one: Series) -> Points:
    spread = [(x, y + sign * e) for (x, y), e in zip(one.points, one.errors, strict=False) for sign in (-1, 1)]
    return [*one.points, *spread]


def _dots(frame: _Frame, one: Series, index: int) -> list[str]:
    parts = [f'<path class="c{index} faint" d="{frame.path(one.points)}"/>']
    for (x, y), error in zip(one.points, one.errors, strict=False):
        low, high, at = frame.y(y - error), frame.y(y + error), frame.x(x)
        parts.append(f'<line class="c{index}" x1="{at:.1f}" y1="{low:.1f}" x2="{at:.1f}" y2="{high:.1f}"/>')
    return parts + [frame.dot(point, f"c{index}") for point in one.points]


def _tooltips(frame: _Frame, series: Sequence[Series]) -> list[str]:
    """An invisible band over each step with the values there; browsers show its title."""
    steps = _every_nth(sorted({x for one in series for x, _ in one.points}))
    by_step = [(one.label, dict(one.points)) for one in series]
    width = (WIDTH - LEFT - RIGHT) / max(len(steps), 1)
    bands = []
    for step in steps:
        values = [f"{name} {found[step]:.4g}" for name, found in by_step if step in found]
        says = escape("\n".join([f"step {step:g}", *values]))
        left = frame.x(step) - width / 2
        bands.append(
            f'<rect class="hit" x="{left:.1f}" y="{TOP}" width="{width:.1f}" height="{HEIGHT - TOP - BOTTOM}">'
            f"<title>{says}</title></rect>"
        )
    return bands


def _svg(title: str, parts: Sequence[str]) -> str:
    body = "".join(parts)
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title, quote=True)}">{body}</svg>'


def _legend(labels: Sequence[str]) -> str:
    keys = "".join(f'<span><i class="f{index}"></i>{escape(text)}</span>' for index, text in enumerate(labels))
    return f'<p class="legend">{keys}</p>'
