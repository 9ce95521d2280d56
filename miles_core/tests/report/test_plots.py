"""Charts: ticks, thinning, and what is drawn where."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_core.report import plots
from miles_core.report.plots import Series, line_chart, stacked_bars

number = st.floats(-1e9, 1e9, allow_nan=False).filter(lambda x: x == 0 or abs(x) > 1e-9)


@given(number, number)
def test_ticks_are_few_round_and_enclose_the_data(a: float, b: float) -> None:
    low, high = min(a, b), max(a, b)
    found = plots.ticks(low, high)
    reach = max(abs(low), abs(high), 1e-9) * 1e-6
    assert found[0] <= low + reach
    assert found[-1] >= high - reach
    assert 2 <= len(found) <= 8
    assert list(found) == sorted(set(found))


def test_ticks_of_constants() -> None:
    assert plots.ticks(0, 0) == (0, 0.5, 1)
    found = plots.ticks(5, 5)
    assert found[0] < 5 < found[-1]


@pytest.mark.parametrize(
    ("value", "text"), [(0.25, "0.25"), (0, "0"), (12000, "12k"), (1.5e6, "1.5M"), (2e-6, "2e-6"), (-0.5, "-0.5")]
)
def test_tick_labels_are_short(value: float, text: str) -> None:
    assert plots.label(value) == text


def test_a_line_runs_from_the_first_to_the_last_point() -> None:
    svg = line_chart("Loss", [Series(label="loss", points=[(0, 0.0), (10, 1.0)])])
    path = re.search(r'<path class="c0" d="M([\d.]+) ([\d.]+)L([\d.]+) ([\d.]+)"', svg)
    assert path
    x0, y0, x1, y1 = map(float, path.groups())
    assert (x0, x1) == (plots.LEFT, plots.WIDTH - plots.RIGHT)
    assert (y0, y1) == (plots.HEIGHT - plots.BOTTOM, plots.TOP)
    assert "<title>step 10\nloss 1</title>" in svg


def test_nothing_recorded_draws_nothing() -> None:
    assert line_chart("Loss", [Series(label="loss", points=[])]) == ""
    assert stacked_bars("Time", "s", []) == ""


def test_a_single_step_is_a_dot() -> None:
    assert '<circle class="c0"' in line_chart("Loss", [Series(label="loss", points=[(1, 2.0)])])


def test_long_runs_are_averaged_into_buckets() -> None:
    points = [(float(step), float(step % 2)) for step in range(10_000)]
    svg = line_chart("Loss", [Series(label="loss", points=points)])
    assert svg.count("L") < 400
    assert len(svg) < 120_000


def test_error_bars_stay_inside_the_chart() -> None:
    svg = line_chart("R", [Series(label="held out", points=[(0, 0.0), (1, 1.0)], dots=True, errors=[0.5, 0.5])])
    ys = [float(y) for y in re.findall(r'<line class="c0"[^>]* y[12]="(-?[\d.]+)"', svg)]
    assert ys
    assert all(plots.TOP <= y <= plots.HEIGHT - plots.BOTTOM for y in ys)


def test_stacked_parts_add_up_to_the_bar() -> None:
    svg = stacked_bars("Time", "s", [Series(label="a", points=[(1, 2.0)]), Series(label="b", points=[(1, 6.0)])])
    a, b = (float(h) for h in re.findall(r'<rect class="f[01]"[^>]*height="([\d.]+)"', svg))
    assert b == pytest.approx(3 * a, abs=0.3)
    assert "step 1: 8 s" in svg


def test_labels_from_outside_are_escaped() -> None:
    svg = line_chart('"><script>', [Series(label="<b>", points=[(0, 1.0)])])
    assert "<script>" not in svg
    assert "<b>" not in svg
