"""What a word of other frameworks is called here, so that a suggestion follows its meaning and not only its letters."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

MEANT: dict[str, tuple[str, ...]] = {
    # schedule.mode, schedule.on_weight_update, placement, eval.on
    "async": ("fully-async",),
    "asynchronous": ("fully-async",),
    "overlap": ("one-step-off",),
    "pipelined": ("one-step-off",),
    "on-policy": ("sync",),
    "partial": ("in-place",),
    "keep": ("in-place",),
    "recompute": ("retract",),
    "cancel": ("abort",),
    "disaggregated": ("separate", "dedicated"),
    "decoupled": ("separate",),
    "split": ("separate",),
    "hybrid": ("colocated",),
    "gpu": ("cuda",),
    # objective, optimizer
    "bnpo": ("token-mean",),
    "seq-mean-token-sum": ("sequence-mean-token-sum",),
    "seq-mean-token-mean": ("sequence-mean-token-mean",),
    "seq-mean-token-sum-norm": ("fixed-length",),
    "kl": ("k1",),
    "mse": ("k2",),
    "low-var-kl": ("k3",),
    "constant-with-warmup": ("constant",),
    # precision, switches, paths
    "bf16": ("bfloat16",),
    "fp16": ("float16",),
    "half": ("float16",),
    "fp32": ("float32",),
    "float": ("float32",),
    "fp64": ("float64",),
    "r3": ("replay",),
    "none": ("off", "constant"),
    "never": ("off",),
    "disabled": ("off",),
    "all": ("always",),
    "tree": ("branching",),
    # capabilities
    "ppo": ("ppo-clip", "gae"),
    "grpo": ("ppo-clip", "sequence-mean-token-mean"),
    "dapo": ("ppo-clip", "grpo", "nonzero-std", "token-mean"),
    "vanilla": ("ppo-clip",),
    "gspo": ("grpo",),
    "reinforce++": ("reinforce-pp",),
    "reinforce-plus-plus": ("reinforce-pp",),
    "reinforce++-baseline": ("reinforce-pp-baseline",),
    "reinforce-plus-plus-baseline": ("reinforce-pp-baseline",),
    "icepop": ("clip-or-pop",),
    "truncated": ("tis",),
    "is": ("importance",),
    "dynamic-sampling": ("nonzero-std",),
    "vllm": ("sglang",),
    "hf": ("local",),
    "huggingface": ("local",),
    "transformers": ("local", "fsdp"),
    "deepspeed": ("fsdp",),
    "ddp": ("fsdp",),
    "accelerate": ("fsdp",),
    "mcore": ("megatron",),
    "nccl": ("broadcast",),
    "gloo": ("broadcast",),
    "distributed": ("broadcast",),
    "disk": ("disk-delta",),
    "ipc": ("cuda-ipc",),
    "rdma": ("p2p",),
    "mooncake": ("p2p",),
    "process": ("inprocess",),
    "tb": ("tensorboard",),
}
"""A value, to what it means wherever one of these is possible."""

KEYS: dict[str, str] = {
    "learning-rate": "optimizer.lr",
    "lr-scheduler-type": "optimizer.schedule",
    "max-grad-norm": "optimizer.clip_grad_norm",
    "grad-clip": "optimizer.clip_grad_norm",
    "adam-beta1": "optimizer.betas",
    "adam-beta2": "optimizer.betas",
    "batch-size": "schedule.groups_per_step",
    "train-batch-size": "schedule.groups_per_step",
    "rollout-batch-size": "schedule.groups_per_step",
    "n": "schedule.group_size",
    "num-generations": "schedule.group_size",
    "n-samples-per-prompt": "schedule.group_size",
    "rollout-n": "schedule.group_size",
    "max-steps": "schedule.steps",
    "num-steps": "schedule.steps",
    "total-training-steps": "schedule.steps",
    "num-rollout": "schedule.steps",
    "staleness": "schedule.max_weight_staleness",
    "max-new-tokens": "rollout.sampling.max_tokens",
    "max-response-length": "rollout.sampling.max_tokens",
    "max-completion-length": "rollout.sampling.max_tokens",
    "max-model-len": "model.context_length",
    "model-name-or-path": "model.path",
    "beta": "objective.kl_coef",
    "kl-loss-coef": "objective.kl_coef",
    "loss-agg-mode": "objective.reduction",
    "loss-type": "objective.reduction",
    "entropy-coeff": "objective.entropy_coef",
    "adv-estimator": "advantage",
    "reward": "rewards",
    "reward-funcs": "rewards",
    "dataset": "data",
    "train-files": "data.train",
    "val-files": "data.eval",
    "output-dir": "tracking.dir",
    "report-to": "tracking.trackers",
    "logger": "tracking.trackers",
    "save-steps": "checkpoint.every_steps",
    "save-freq": "checkpoint.every_steps",
    "save-interval": "checkpoint.every_steps",
    "eval-steps": "eval.every_steps",
    "test-freq": "eval.every_steps",
    "eval-interval": "eval.every_steps",
}
"""A key, to the key of a run-file that means it."""


def plain(word: str) -> str:
    """A word as the tables above spell it."""
    return word.strip().lower().replace("_", "-").replace(" ", "-")


def closest(word: str, known: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """The one of `known` that a word means, or else is spelt like; None when there is no telling."""
    names = list(known)
    for meant in (plain(word), *MEANT.get(plain(word), ())):
        if meant in names:
            return meant
    close = difflib.get_close_matches(word, names, n=1, cutoff=cutoff)
    return close[0] if close else None
