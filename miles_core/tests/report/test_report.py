"""The page and the terminal views of runs: whole ones, killed ones, and ones whose model is gone."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from rich.console import Console

from miles_core import batching
from miles_core.cli import main
from miles_core.errors import DataError
from miles_core.report import inspect
from miles_core.report.html import render, write_report
from miles_core.report.load import load_run, quarters
from miles_core.testing.tiny import make_tiny_model
from miles_core.tracking import rollouts
from miles_core.tracking.run_dir import RunDir
from miles_core.types import Group, Message, Prompt, Status, TokenSpan, Trajectory

VOID = {"meta", "br"}


def trajectory(reward: float, text: str) -> Trajectory:
    sampled = np.arange(6) >= 2
    return Trajectory(
        prompt_id="p",
        session_id="s",
        token_ids=np.arange(100, 106, dtype=np.int32),
        sampled=sampled,
        loss_mask=sampled,
        logprobs=np.where(sampled, -1.0, np.nan).astype(np.float32),
        spans=(TokenSpan(start=2, end=4, weight_version=7), TokenSpan(start=4, end=6, weight_version=8)),
        temperature=1.0,
        status=Status.COMPLETED,
        reward=reward,
        messages=(Message(role="assistant", content=text),),
    )


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Twelve steps with everything the page shows; the model folder does not exist."""
    directory = RunDir(tmp_path / "quick")
    directory.open()
    directory.write_text(
        "run.yaml", "name: quick\nmodel: {path: /gone/tiny}\nloss: {use: ppo-clip}\nschedule: {steps: 12}\n"
    )
    directory.write_text("env.json", json.dumps({"python": "3.11", "packages": {"torch": "2.13"}}))
    directory.event("start", name="quick", resume=False)
    for step in range(13):
        metrics = {
            "rollout/reward_mean": step / 12,
            "train/entropy": None if step == 3 else 1.0,
            "contract/tokens/checked_trajectories": 8.0,
            "contract/tokens/trained_tokens": 40.0,
            "contract/logprobs/abs_diff_mean": 0.001,
            "contract/logprobs/abs_diff_max": 0.02,
            "contract/versions/s_old_max": 0.0,
            "contract/versions/token_staleness": 0.0,
        }
        if step % 6 == 0:
            metrics |= {"eval/reward_mean": step / 20, "eval/reward_stderr": 0.05}
        directory.append(directory.metrics, {"step": step, **(metrics if step else {"eval/reward_mean": 0.1})})
        directory.append(directory.timings, {"step": step, "time/rollout_s": 2.0, "time/train_s": 1.0})
        directory.event("publish", version=step)
    directory.event("alarm", step=4, message="<script>alert(1)</script>")
    rows = (trajectory(1.0, f"right {'word ' * 200}end"), trajectory(0.0, "<img src=x>"), trajectory(0.5, "half"))
    groups = [Group(prompt=Prompt(id="p", messages=()), trajectories=rows)]
    batch = batching.pack(groups)
    old = np.where(batch.loss_mask, -1.0, 0.0).astype(np.float32)
    old[[4, 5]] = [-0.7, -2.0]
    rollouts.write(directory.rollouts, 12, groups, batching.with_old_logprobs(batch, old))
    directory.event("stop", outcome="finished")
    directory.close()
    return directory.path


class Balance(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.problems: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.problems.append(tag)


def assert_sound(page: str) -> None:
    """Well-formed, and complete without a network."""
    parser = Balance()
    parser.feed(page)
    assert parser.problems == []
    assert parser.open == []
    assert not re.search(r"""(src|href)\s*=|url\(|@import|<script|<link|https?:""", page)


def test_the_page_is_whole_and_needs_nothing_from_elsewhere(run: Path) -> None:
    path = write_report(run)
    assert path == run / "report.html"
    page = path.read_text()
    assert_sound(page)
    for title in ("Reward", "Entropy", "Mismatch of trainer and rollout", "Staleness", "Seconds by phase"):
        assert f"<h3>{title}" in page, title
    assert page.count("<svg") == page.count("<figure>") >= 6
    assert 'class="badge good">finished' in page


def test_text_from_the_run_is_never_markup(run: Path) -> None:
    page = write_report(run).read_text()
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert(1)" in page
    assert "<img" not in page


def test_the_headline_compares_the_first_quarter_with_the_last(run: Path) -> None:
    page = render(load_run(run))
    assert "0.167 → 0.917" in page  # steps 1-3 and 10-12 of 12
    assert "Held-out reward, step 0 to 12: <b>0.100 → 0.600</b>" in page


def test_contracts_are_told_over_the_whole_run(run: Path) -> None:
    page = render(load_run(run))
    assert "Held for all 96 trajectories, 480 trained tokens." in page
    assert "worst token 0.02" in page
    assert "Not applicable" in page
    RunDir(run).event("contract_broken", step=9, contract="logprobs", offenders=["sequence 3: too far"])
    assert "Broken on 1 steps, last 9: sequence 3: too far" in render(load_run(run))


def test_tokens_are_coloured_by_their_mismatch_and_show_both_log_probs(run: Path) -> None:
    page = render(load_run(run))
    assert 'class="t0" title="rollout -1.0000, trainer -1.0000, version 7"' in page
    assert 'class="t2" title="rollout -1.0000, trainer -0.7000, version 8"' in page
    assert 'class="t3" title="rollout -1.0000, trainer -2.0000, version 8"' in page
    assert page.index("<h3>best") < page.index("<h3>middle") < page.index("<h3>worst")


def test_a_run_that_recorded_nothing_yet_has_a_page(tmp_path: Path) -> None:
    RunDir(tmp_path).write_text("run.yaml", "name: young\n")
    page = render(load_run(tmp_path))
    assert_sound(page)
    assert "No step was recorded" in page


@pytest.mark.parametrize("text", ["name: mine\nmodel: models/x\n", "[1]", "model: {", "name: x\nschedule: 4\n"])
def test_the_folder_of_a_run_file_is_no_run(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(DataError, match=r"no run directory|cannot be read"):
        load_run(tmp_path)


def test_a_killed_run_says_so(run: Path) -> None:
    events = (run / "events.jsonl").read_text().splitlines()
    (run / "events.jsonl").write_text("\n".join(events[:-1]) + '\n{"half')
    page = render(load_run(run))
    assert_sound(page)
    assert "running or killed" in page
    assert "all 12 steps are done, not what comes after. `--resume` finishes it." in page


@pytest.mark.parametrize(
    ("outcome", "said"),
    [
        (None, "was killed, unless it still runs: step 12 was never finished, 11 of 12 steps are done."),
        ("failed", "failed: step 12 was never finished, 11 of 12 steps are done."),
        ("interrupted", "was stopped: step 12 was never finished, 11 of 12 steps are done."),
        ("stopped", "was stopped: 11 of 12 steps are done."),
        ("finished", None),
    ],
)
def test_a_run_that_was_cut_short_says_where(run: Path, outcome: str | None, said: str | None) -> None:
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:-1]))
    RunDir(run).event("start", resume=True)
    if outcome is not None:
        RunDir(run).event("stop", outcome=outcome)
    sentence = said and f"The run {said} `--resume` goes on."
    assert load_run(run).cut_short == sentence
    told = CliRunner().invoke(main, ["doctor", str(run)]).output.splitlines()[0]
    assert told == (sentence or "Read 11 of 12 steps.")
    first, *rest = " ".join(shown(run, None).split()).split("`--resume` goes on. ")
    assert f"{first}`--resume` goes on." == sentence if rest else sentence is None
    assert "tokens not measured: the step was never finished" in [first, *rest][-1]


def test_a_folder_that_is_no_run_names_the_runs_beside_it(run: Path) -> None:
    with pytest.raises(DataError, match="quick"):
        load_run(run.parent / "quik")


def test_quarters_need_two_steps_each() -> None:
    assert quarters([1.0] * 7) is None
    found = quarters([0.0, 2.0, 5, 5, 5, 5, 7.0, 9.0])
    assert found == ((1.0, 1.0), (8.0, 1.0))


# --- terminal ---------------------------------------------------------------------------------------------------------


def shown(run: Path, sample: int | None, *, colour: bool = False) -> str:
    output = io.StringIO()
    console = Console(file=output, width=120, force_terminal=colour, color_system="standard" if colour else None)
    inspect.show(console, load_run(run), 12, sample, None)
    return output.getvalue()


@pytest.mark.parametrize(
    ("architecture", "words"), [("llama", "none: the model is dense"), ("qwen3-moe", "not measured")]
)
def test_routes_are_not_missed_where_there_are_none(run: Path, architecture: Any, words: str) -> None:
    model = make_tiny_model(run / "a-model", architecture=architecture)
    record = replace(load_run(run), config={"model": {"path": str(model)}})
    assert record.reading("routes", 0) == words
    assert record.reading("tokens", 0) == "not measured"


def test_versions_that_nothing_proved_are_said_to_be_so(run: Path) -> None:
    assert "not proven" not in load_run(run).reading("versions", 12)
    metrics = {"contract/versions/s_old_max": 0.0, "contract/versions/token_staleness": 0.0}
    directory = RunDir(run)
    directory.append(directory.metrics, {"step": 13, **metrics, "contract/versions/proven": 0.0})
    record = load_run(run)
    assert "not proven: with weights.verify off" in record.reading("versions", 13)
    assert "Not proven: no weights.verify" in render(record)


def test_a_step_is_a_table_of_its_trajectories(run: Path) -> None:
    contracts, lines = shown(run, None).splitlines()[:4], shown(run, None).splitlines()[5:]
    assert [line.split()[0] for line in contracts] == ["tokens", "routes", "logprobs", "versions"]
    assert "mean |d| 0.001, max 0.02" in contracts[2]
    assert "not measured" in contracts[1]
    assert len(lines) == 4
    assert "7-8" in lines[1]
    assert "right" in lines[1]
    assert "<img src=x>" in lines[2]


def test_a_trajectory_shows_given_and_sampled_tokens_and_where_versions_change(run: Path) -> None:
    text = shown(run, 0)
    assert "<100><101>⟦v7⟧<102><103>⟦v8⟧<104><105>" in text
    assert "mean 0.325, max 1 nats" in text
    worst = text[text.index("largest differences") :]
    assert worst.index("105") < worst.index("104")
    assert "0.3679" in worst  # e^-1


def test_the_colour_of_a_token_is_its_mismatch(run: Path) -> None:
    row = load_run(run).rollouts(12)[0]
    styles = [inspect.style(piece) for piece in inspect.pieces(row, None)]
    assert styles == ["dim", "dim", "green", "green", "dark_orange", "bold red"]
    unknown = replace(row, old_logprobs=np.full(6, np.nan, dtype=np.float32))
    assert inspect.style(inspect.pieces(unknown, None)[2]) == "cyan"
    assert "\x1b[" in shown(run, 0, colour=True)


def test_the_command_shows_the_last_step_by_default_and_refuses_what_is_not_there(run: Path) -> None:
    def miles(*arguments: str) -> tuple[int, str]:
        result = CliRunner().invoke(main, list(arguments))
        return result.exit_code, result.output

    code, output = miles("inspect", str(run), "--json")
    assert code == 0
    assert [item["reward"] for item in json.loads(output)] == [1.0, 0.0, 0.5]
    assert miles("inspect", str(run), "--step", "12", "--sample", "1")[0] == 0
    assert f"right {'word ' * 200}end\n" in miles("inspect", str(run))[1], "a pipe gets every answer in full"
    code, output = miles("inspect", str(run), "--sample", "3")
    assert code == 1
    assert "0 to 2" in output
    assert "one of the steps 12" in miles("inspect", str(run), "--step", "5")[1]
    code, output = miles("report", str(run))
    assert (code, output.strip()) == (0, str(run / "report.html"))
