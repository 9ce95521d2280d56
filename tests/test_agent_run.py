"""A run whose trajectories come from an agent program that only knows a base URL."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from .conftest import Workspace

AGENT = """
import json, os, sys, urllib.error, urllib.request

def ask(messages):
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"model": "policy", "messages": messages}).encode(),
        {"content-type": "application/json"},
    )
    return json.load(urllib.request.urlopen(request))["choices"][0]

messages = json.load(sys.stdin)["messages"]
answers = 0
for fork in range(int(sys.argv[1])):
    history = [*messages, {"role": "user", "content": f"part {fork}"}]
    for _ in range(2):
        choice = ask(history)
        answers += 1
        if choice["finish_reason"] != "stop":
            break
        history += [choice["message"], {"role": "user", "content": "and then?"}]
with open(os.environ["MILES_RESULT"], "w") as file:
    json.dump({"reward": len(choice["message"]["content"]) / 10, "metadata": {"answers": answers}}, file)
"""

RUN_FILE = """
name: tiny
seed: 7
model: {folder}/model
data: {folder}/train.jsonl
environment: {{use: agent, command: {command}}}
session: {{history: {history}, matcher: role-content-only}}
rollout: {{sampling: {{max_tokens: 6}}}}
schedule: {{steps: 2, groups_per_step: 2, group_size: 3}}
checkpoint: {{export_hf: false}}
placement: {{device: cpu}}
tracking: {{dir: {folder}/runs, trackers: []}}
"""


@pytest.mark.parametrize(("history", "forks"), [("branching", 2), pytest.param("linear", 1, marks=pytest.mark.slow)])
def test_a_black_box_agent_is_trained(history: str, forks: int, workspace: Workspace) -> None:
    agent = workspace.folder / "agent.py"
    agent.write_text(AGENT)
    command = f"{sys.executable} {agent} {forks}"
    workspace.run_file.write_text(RUN_FILE.format(folder=workspace.folder, command=command, history=history))
    done = workspace.train("--fresh")
    assert "role-content-only takes turns" in done.stdout + done.stderr
    lines = workspace.lines()
    assert [line["step"] for line in lines] == [1, 2], done.stdout
    for line in lines:
        assert line["contract/tokens/broken_trajectories"] == 0
        assert line["contract/logprobs/abs_diff_max"] < 1e-3
        assert line["contract/tokens/checked_trajectories"] == 6 * forks
