"""A fully asynchronous run, judged from what it left on disk: every number of every update, recomputed in float64.

Nothing of the framework's mathematics is used: a transformers model in float64 holds the weights of each checkpoint.
"""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from miles_core.tracking import rollouts
from miles_core.trainer import checkpoint

if TYPE_CHECKING:
    import torch

    from .conftest import Workspace

STEPS, LIMIT, HIGH = 8, 2, 1.05
LR, WARMUP, FLOOR = 1e-2, 3, 0.1
BETAS, EPS, CLIP = (0.9, 0.95), 1e-8, 1.0
OVERRIDES = {
    "placement.mode": "separate",
    "schedule": {"mode": "fully-async", "steps": STEPS, "groups_per_step": 2, "group_size": 4}
    | {"max_weight_staleness": LIMIT, "max_concurrent_samples": 16},
    "rollout.sampling.max_tokens": 24,
    "loss": {"use": "ppo-clip", "low": 0.2, "high": 0.28},
    "corrections": [{"use": "tis", "high": HIGH}],
    "optimizer": {"lr": LR, "warmup_steps": WARMUP, "schedule": "cosine", "min_lr_ratio": FLOOR},
    "checkpoint": {"every_steps": 1, "keep": None, "export_hf": False},
}


class Checkpoints:
    """What the trainer held after each step; float64."""

    def __init__(self, workspace: Workspace) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self.model: Any = AutoModelForCausalLM.from_pretrained(workspace.folder / "model", dtype=torch.float64)
        self._states = [self._initial(), *map(self._read, self._folders(workspace))]

    @staticmethod
    def _folders(workspace: Workspace) -> list[Path]:
        folders = sorted(path.parent for path in (workspace.directory() / "checkpoints").rglob(".metadata"))
        assert len(folders) == STEPS
        return folders

    def _initial(self) -> dict[str, torch.Tensor]:
        import torch

        state = {}
        for name, parameter in self.model.named_parameters():
            state[f"{name}.master"] = parameter.detach().clone()
            state[f"{name}.exp_avg"] = state[f"{name}.exp_avg_sq"] = torch.zeros_like(parameter)
        return state

    def _read(self, folder: Path) -> dict[str, torch.Tensor]:
        import torch

        state = {name: torch.empty_like(value, dtype=torch.float32) for name, value in self._initial().items()}
        checkpoint.load(folder, state)
        return {name: value.double() for name, value in state.items()}

    def get(self, step: int, name: str, part: str) -> torch.Tensor:
        return self._states[step][f"{name}.{part}"]

    def load(self, step: int) -> None:
        import torch

        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(self.get(step, name, "master"))

    def log_probs(self, ids: np.ndarray[Any, Any]) -> torch.Tensor:
        """f64[T] of each token; 0 for the first."""
        import torch

        tokens = torch.as_tensor(ids).long()
        logits = self.model(tokens[None]).logits[0, :-1]
        return torch.cat([logits.new_zeros(1), logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0]])


def advantages(rows: list[rollouts.RolloutRow]) -> list[float]:
    found: list[float] = []
    for _, group in itertools.groupby(rows, key=lambda row: row.group):
        rewards = np.array([row.reward for row in group], dtype=np.float64)
        deviation = rewards.std(ddof=1)
        found += list((rewards - rewards.mean()) / (deviation + 1e-6) if deviation else rewards * 0)
    return found


def rate(update: int) -> float:
    if update < WARMUP:
        return LR * (update + 1) / WARMUP
    return LR * (FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * (update - WARMUP) / (STEPS - WARMUP))))


def check_log_probs(held: Checkpoints, rows: list[rollouts.RolloutRow], step: int) -> list[int]:
    """Each sampled token against the weights of the version it names, each trained one against those before the update;
    the ages."""
    import torch

    ages = []
    for row in rows:
        for version in np.unique(row.versions[row.versions >= 0]):
            held.load(int(version))
            with torch.no_grad():
                truth = held.log_probs(row.token_ids).numpy()
            at = row.versions == version
            np.testing.assert_allclose(row.logprobs[at], truth[at], atol=1e-5)
            ages.append(step - 1 - int(version))
        held.load(step - 1)
        with torch.no_grad():
            truth = held.log_probs(row.token_ids).numpy()
        np.testing.assert_allclose(row.old_logprobs[row.loss_mask], truth[row.loss_mask], atol=1e-5)
    return ages


def check_gradient(held: Checkpoints, rows: list[rollouts.RolloutRow], step: int) -> None:
    """The loss of the documentation, differentiated by autograd in float64; the trainer's gradient is what its first
    moment gained."""
    import torch

    held.load(step - 1)
    held.model.zero_grad()
    total = sum(int(row.loss_mask.sum()) for row in rows)
    loss = torch.zeros((), dtype=torch.float64)
    for row, advantage in zip(rows, advantages(rows), strict=True):
        logprobs = held.log_probs(row.token_ids)
        old = logprobs.detach()
        weight = (old - torch.as_tensor(np.nan_to_num(row.logprobs)).double()).exp().clamp(max=HIGH)
        ratio = (logprobs - old).exp()
        per_token = torch.maximum(-ratio * advantage, -ratio.clamp(0.8, 1.28) * advantage)
        loss = loss + (weight * per_token)[torch.as_tensor(row.loss_mask)].sum() / total
    loss.backward()
    truth = {name: parameter.grad for name, parameter in held.model.named_parameters()}
    norm = math.sqrt(sum(float(grad.square().sum()) for grad in truth.values()))
    apart = 0.0
    for name, grad in truth.items():
        before, after = held.get(step - 1, name, "exp_avg"), held.get(step, name, "exp_avg")
        taken = (after - BETAS[0] * before) / (1 - BETAS[0])
        apart += float((taken - grad * min(1.0, CLIP / norm)).square().sum())
    assert math.sqrt(apart) < 1e-5 * min(norm, CLIP)


def check_update(held: Checkpoints, step: int) -> None:
    """AdamW as it is written, from the moments on disk."""
    for name, _ in held.model.named_parameters():
        first = held.get(step, name, "exp_avg") / (1 - BETAS[0] ** step)
        second = held.get(step, name, "exp_avg_sq") / (1 - BETAS[1] ** step)
        moved = held.get(step - 1, name, "master") - rate(step - 1) * first / (second.sqrt() + EPS)
        np.testing.assert_allclose(held.get(step, name, "master").numpy(), moved.numpy(), atol=1e-6)


@pytest.mark.slow
def test_every_update_on_old_data_is_what_the_documentation_says(workspace: Workspace) -> None:
    workspace.train(overrides=OVERRIDES)
    held = Checkpoints(workspace)
    sessions: list[str] = []
    ages: list[int] = []
    for step, line in zip(range(1, STEPS + 1), workspace.lines()[1:], strict=True):
        rows = rollouts.read(workspace.directory() / "rollouts", step)
        found = check_log_probs(held, rows, step)
        assert line["contract/versions/s_old_max"] == max(found) <= LIMIT
        check_gradient(held, rows, step)
        check_update(held, step)
        ages += found
        sessions += [row.session_id for row in rows]
    assert max(ages) > 0, "nothing was old: the run shows nothing"
    assert len(sessions) == len(set(sessions)) == STEPS * 8
