"""Backend: one rank of the trainer. Its methods are ordinary blocking calls."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from miles_core.types import Float32, RouteMode, TrainBatch, WeightBucket


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSettings:
    """AdamW and its learning-rate schedule. Every backend must honour every field."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    schedule: Literal["constant", "linear", "cosine"]
    warmup_steps: int
    min_lr_ratio: float
    """Final learning rate as a fraction of `lr`."""
    total_steps: int
    """Optimizer steps of the whole run, at which the schedule ends."""
    clip_grad_norm: float | None
    """Largest L2 norm of the whole gradient, over all ranks and shards; None does not clip."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSettings:
    """What each rank computes on a micro-batch."""

    load: str
    """The picked loss: ``module:function`` or ``/absolute/file.py:function``, as `registry.load_target` takes it."""
    options: Mapping[str, Any] = field(default_factory=dict)
    entropy_coef: float = 0.0
    """The loss of a token is lowered by this times the entropy of the policy there."""
    kl_coef: float = 0.0
    """The loss of a token is raised by this times the KL to the reference policy; 0 without KL, and with KL in the
    reward."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    on_nonfinite: Literal["skip", "stop"] = "stop"
    """What all ranks do when the loss or the gradient of any rank is NaN or infinite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendContext:
    """What the executor tells a rank at creation. With `world_size` > 1, torch.distributed is already initialised."""

    model_path: str
    device: str
    rank: int
    world_size: int
    seed: int
    optimizer: OptimizerSettings
    loss: LossSettings
    reference: bool
    """Keep a frozen copy of the initial policy and answer ``log_probs(..., model="reference")``."""
    routes: RouteMode = "off"
    """What forward passes of the policy do with `TrainBatch.routes`: ignore them, count where the trainer's routers
    would choose other experts, or also use the recorded ones (tag `replays-routes`). The model has MoE layers unless
    this is `off`."""
    true_on_policy: bool = False
    """Compute exactly the log-probs that the engine sampled with, bit for bit (tag `true-on-policy`)."""
    architecture: str | None = None
    """``module:attribute`` of the `kinds.architecture.Architecture` that a plugin has for this checkpoint, or None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteCounts:
    """How recorded routes compare with the trainer's, in one scoring pass over all ranks.

    Counted are (position, MoE layer) pairs; the last position of a sequence is left out. Experts are compared as sets,
    whatever their order.
    """

    recorded: int
    """Pairs with a record."""
    unrecorded: int
    """Pairs without a record, for which the trainer chose."""
    own_differs: int
    """Recorded pairs for which the trainer's router, in this very pass, would have chosen other experts."""
    used_differs: int
    """Recorded pairs for which the trainer used other experts than recorded; 0 under replay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """Figures of one optimizer step over all ranks; the same on every rank."""

    values: Mapping[str, float]
    """``loss``, ``grad_norm``, ``lr``, ``entropy``, with a KL ``kl``, and each metric of the loss by its name."""
    skipped: str | None = None
    """Why the step was not taken (a loss or gradient that is not finite), or None."""


class Backend(Protocol):
    """Created in every rank as ``Backend(options, context)``. Each method is called on all ranks with equal arguments.

    Each rank gets the whole batch of an update and takes its own share of it. How the batch is split over ranks and
    micro-batches is the backend's business: the gradient must always be that of
    ``sum(token_weights * per_token_loss)`` over the whole batch.

    Checkpoints are converted in one process, whatever layout the run has. If some options need several ranks, their
    class therefore has a method ``on_one_rank()`` that returns the options of the same model on one rank.
    """

    def log_probs(self, batch: TrainBatch, *, model: Literal["policy", "reference"] = "policy") -> Float32:
        """f32[N] log-prob of every trained token given the tokens before it, at the temperature it was sampled with.

        Without gradient or dropout. 0.0 where `loss_mask` is False, and at the first token of each sequence. Only rank
        0 has to return the values; other ranks may return anything of shape [N].
        """
        ...

    def route_counts(self) -> RouteCounts | None:
        """The counts of the latest ``log_probs(batch, model="policy")``; None before the first, and with routes off
        (tag `replays-routes`)."""
        ...

    def train_step(self, batch: TrainBatch) -> StepMetrics:
        """Take one optimizer step. The loss of a token is
        ``correction_weights * policy loss - entropy_coef * entropy + kl_coef * KL``."""
        ...

    def export(self, version: int) -> Iterator[WeightBucket]:
        """The current weights, bucket by bucket, under Hugging Face names and in the dtype that engines serve.

        All ranks call it together, and every rank yields every bucket.
        """
        ...

    def save(self, directory: Path) -> None:
        """Write parameters, optimizer and schedule, so that after `load` training goes on bit for bit. Another number
        of ranks must be able to read them."""
        ...

    def load(self, directory: Path) -> None: ...

    def save_hf(self, directory: Path) -> None:
        """Write a Hugging Face folder (safetensors, config, tokenizer)."""
        ...

    def offload(self) -> None:
        """Move everything out of accelerator memory, until `onload`. Does nothing on a CPU."""
        ...

    def onload(self) -> None: ...

    def close(self) -> None: ...
