"""A token family that a run-file names for a checkpoint of another kind."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .conftest import Workspace


def test_a_named_family_that_does_not_claim_the_checkpoint_is_an_alarm(workspace: Workspace) -> None:
    workspace.train(overrides={"schedule.steps": 1, "session.family": "qwen35"})
    alarms = [event["message"] for event in workspace.lines("events.jsonl") if event["event"] == "alarm"]
    assert any("qwen35, which does not claim" in message and "miles tito check" in message for message in alarms)
    assert "contract/tokens/mismatch_unknown" in workspace.lines()[-1]
