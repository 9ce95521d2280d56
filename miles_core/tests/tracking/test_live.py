"""What people see while a run goes: the panel's content, and one line a step without a terminal."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from miles_core.contracts.report import Report, Verdict
from miles_core.tracking import live

REPORTS = (
    Report(
        name="tokens",
        status=Verdict.OK,
        metrics={"contract/tokens/checked_trajectories": 64, "contract/tokens/trained_tokens": 2600},
    ),
    Report(name="routes", status=Verdict.NOT_APPLICABLE),
    Report(
        name="logprobs",
        status=Verdict.OK,
        metrics={"contract/logprobs/abs_diff_mean": 0.0025, "contract/logprobs/abs_diff_max": 0.1},
    ),
    Report(name="versions", status=Verdict.BROKEN, offenders=("prompt 'p': 3 versions old, 0 allowed",)),
)
TIMINGS = {"time/step_s": 10.0, "throughput/rollout_tokens_per_s": 512.4}


def panel(display: live.LiveDisplay) -> str:
    console = Console(file=io.StringIO(), width=100, force_terminal=False)
    console.print(display.render())
    output = console.file
    assert isinstance(output, io.StringIO)
    return output.getvalue()


def test_the_panel_shows_step_reward_speed_contracts_phase_and_time_left() -> None:
    display = live.LiveDisplay(steps=60, groups=8)
    display.contracts(REPORTS)
    display.step(0, {"eval/reward_mean": 0.25}, {"time/step_s": 99.0})
    display.step(1, {"rollout/reward_mean": 0.5}, TIMINGS)
    display.step(2, {"rollout/reward_mean": 0.75}, TIMINGS)
    display.phase("rollout")
    display.groups_done(3)
    shown = panel(display)
    for text in ("step 2/60", "0.750", "▁█", "0.250 after step 0", "512", "rollout 0 s, 3 of 8 groups", "ETA 9:40"):
        assert text in shown, text
    for text in ("✓ tokens", "64 rows, 2600 trained tokens", "· routes", "n/a", "mean |d| 0.0025, max 0.1 nats"):
        assert text in shown, text
    assert "✗ versions" in shown
    assert "3 versions old" in shown


def test_the_panel_stands_before_anything_was_measured() -> None:
    shown = panel(live.LiveDisplay(steps=60, groups=8))
    assert "step 0/60" in shown
    assert shown.count("not checked yet") == 4


def test_text_from_outside_is_not_read_as_markup() -> None:
    display = live.LiveDisplay(steps=1, groups=1)
    display.contracts([Report(name="versions", status=Verdict.BROKEN, offenders=("prompt '[/red]'",))])
    assert "[/red]" in panel(display)


def test_a_new_phase_of_rollout_counts_its_groups_anew() -> None:
    display = live.LiveDisplay(steps=2, groups=8)
    display.phase("rollout")
    display.groups_done(8)
    display.phase("train")
    display.phase("rollout")
    assert "0 of 8 groups" in panel(display)


def test_messages_scroll_above_the_live_panel() -> None:
    output = io.StringIO()
    display = live.LiveDisplay(steps=1, groups=1, console=Console(file=output, width=60, force_terminal=True))
    display.start()
    display.say("report: /runs/a/long/path/that/must/stay/in/one/piece/however/wide/the/terminal/report.html")
    display.say("all rewards are equal", alarm=True)
    display.stop()
    assert "/however/wide/the/terminal/report.html" in output.getvalue()
    assert "! all rewards are equal" in output.getvalue()


def test_without_a_terminal_a_step_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    display = live.make_display(steps=60, groups=8, plain=False)
    assert isinstance(display, live.PlainDisplay)
    display.start()
    display.contracts(REPORTS)
    display.step(1, {"rollout/reward_mean": 0.5, "eval/reward_mean": 0.25}, TIMINGS)
    display.say("look at this", alarm=True)
    display.stop()
    line, alarm = capsys.readouterr().out.splitlines()
    assert line.startswith("step 1/60  reward 0.500  eval 0.250  512 tok/s  10.0 s  tokens 64 rows")
    assert line.endswith("ETA 9:50")
    assert alarm == "ALARM look at this"


def test_the_time_left_follows_the_last_steps_only() -> None:
    pace = live.Pace(steps=100)
    assert pace.eta() == "–"
    for step in range(1, 41):
        pace.step(step, {"time/step_s": 100.0 if step <= 20 else 2.0})
    assert pace.eta() == "2:00"


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00"), (59.6, "1:00"), (462, "7:42"), (4062, "1:07:42"), (-3, "0:00")]
)
def test_seconds_read_as_a_clock(seconds: float, text: str) -> None:
    assert live.clock(seconds) == text


def test_sparklines_span_the_blocks_and_skip_nan() -> None:
    assert live.sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert live.sparkline([1.0, float("nan"), 1.0]) == "▁ ▁"
    assert live.sparkline([]) == ""
