"""Environment and reward `reasoning-gym`."""

from __future__ import annotations

from collections.abc import Iterable

from miles_core.plugin import Capability, Rule, hookimpl

MILES_API = 1


@hookimpl
def miles_environments() -> Iterable[Capability]:
    return [
        Capability(
            name="reasoning-gym",
            summary="generated reasoning tasks with verifiers; brings train and held-out prompts",
            load="miles_env_reasoning_gym.environment:ReasoningGymEnvironment",
            options="miles_env_reasoning_gym.options:EnvironmentOptions",
            provides=frozenset({"provides-prompts", "needs-rewards"}),
        )
    ]


@hookimpl
def miles_rewards() -> Iterable[Capability]:
    return [
        Capability(
            name="reasoning-gym",
            summary="the task's own verifier, partial credit included",
            load="miles_env_reasoning_gym.reward:reasoning_gym_reward",
            options="miles_env_reasoning_gym.options:RewardOptions",
            rules=(
                Rule(
                    id="reasoning-gym-verifier",
                    needs=("environment.use=reasoning-gym",),
                    because="the verifier reads the entry that the environment of the same name generated",
                    instead="set environment: {use: reasoning-gym, task: ...}, or pick another reward",
                ),
            ),
        )
    ]
