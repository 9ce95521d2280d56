"""First-party capabilities by name, so that an uninstalled one is met with where it is instead of "unknown"."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Home:
    """Where a capability lives."""

    distribution: str
    folder: str
    """In the Miles repository. Until the distributions are published, a bare name must never be given to pip."""
    extra: str = ""
    """What the capability cannot do without, in the distribution's optional dependencies."""

    @property
    def target(self) -> str:
        """For `pip install`."""
        return f"'./{self.folder}[{self.extra}]'" if self.extra else f"./{self.folder}"


_FSDP = Home("miles-fsdp", "miles_fsdp")
_MEGATRON = Home("miles-megatron", "miles_megatron")
_LOCAL = Home("miles-local", "plugins/miles-local")
_SGLANG = Home("miles-sglang", "plugins/miles-sglang")
_TRANSPORTS = Home("miles-transports", "miles_transports")
_RAY = Home("miles-ray", "plugins/miles-ray", "ray")
_CHATML = Home("miles-tito-chatml", "plugins/miles-tito-chatml")
_QWEN = Home("miles-tito-qwen", "plugins/miles-tito-qwen")
_GLM = Home("miles-tito-glm", "plugins/miles-tito-glm")
_DEEPSEEK = Home("miles-tito-deepseek", "plugins/miles-tito-deepseek")
_KIMI = Home("miles-tito-kimi", "plugins/miles-tito-kimi")
_MINIMAX = Home("miles-tito-minimax", "plugins/miles-tito-minimax")
_NEMOTRON = Home("miles-tito-nemotron", "plugins/miles-tito-nemotron")
_GPT_OSS = Home("miles-tito-gpt-oss", "plugins/miles-tito-gpt-oss")
_LLAMA = Home("miles-tito-llama", "plugins/miles-tito-llama")
_REASONING_GYM = Home("miles-env-reasoning-gym", "plugins/miles-env-reasoning-gym")
_WANDB = Home("miles-wandb", "plugins/miles-wandb", "wandb")

KNOWN: dict[tuple[str, str], Home] = {
    ("backend", "fsdp"): _FSDP,
    ("backend", "megatron"): _MEGATRON,
    ("engine", "local"): _LOCAL,
    ("engine", "sglang"): _SGLANG,
    ("teacher", "sglang"): _SGLANG,
    ("transport", "inprocess"): _TRANSPORTS,
    ("transport", "broadcast"): _TRANSPORTS,
    ("transport", "p2p"): _TRANSPORTS,
    ("transport", "disk-delta"): _TRANSPORTS,
    ("transport", "cuda-ipc"): _TRANSPORTS,
    ("architecture", "deepseek-v3-for-causal-lm"): _MEGATRON,
    ("architecture", "glm4-moe-for-causal-lm"): _MEGATRON,
    ("architecture", "llama-for-causal-lm"): _MEGATRON,
    ("architecture", "qwen2-for-causal-lm"): _MEGATRON,
    ("architecture", "qwen3-for-causal-lm"): _MEGATRON,
    ("architecture", "qwen3-moe-for-causal-lm"): _MEGATRON,
    ("executor", "ray"): _RAY,
    ("tito_family", "chatml"): _CHATML,
    ("tito_family", "qwen3"): _QWEN,
    ("tito_family", "qwen3-thinking"): _QWEN,
    ("tito_family", "qwen35"): _QWEN,
    ("tito_family", "qwen3-coder"): _QWEN,
    ("tito_family", "glm46"): _GLM,
    ("tito_family", "glm47"): _GLM,
    ("tito_family", "deepseek-v31"): _DEEPSEEK,
    ("tito_family", "deepseek-v32"): _DEEPSEEK,
    ("tito_family", "deepseek-v4"): _DEEPSEEK,
    ("tito_family", "kimi-k2"): _KIMI,
    ("tito_family", "kimi-k2-thinking"): _KIMI,
    ("tito_family", "kimi-k25"): _KIMI,
    ("tito_family", "minimax-m2"): _MINIMAX,
    ("tito_family", "nemotron3"): _NEMOTRON,
    ("tito_family", "gpt-oss"): _GPT_OSS,
    ("tito_family", "llama31"): _LLAMA,
    ("environment", "reasoning-gym"): _REASONING_GYM,
    ("reward", "reasoning-gym"): _REASONING_GYM,
    ("tracker", "wandb"): _WANDB,
}

FIRST_PARTY = frozenset({"miles-core", *(place.distribution for place in KNOWN.values())})
"""Distributions of the Miles repository."""


def home(kind: str, name: str) -> Home | None:
    """Where a first-party capability outside core lives, or None when no such one is known."""
    return KNOWN.get((kind, name))
