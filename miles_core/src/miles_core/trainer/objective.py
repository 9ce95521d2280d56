"""The loss of one micro-batch and the figures of a step. No denominators here: the batch's weights hold them all.

Letters: N packed tokens of the micro-batch, K of them trained.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from miles_core.algorithms import kl
from miles_core.errors import ContractError, PluginError, RunError
from miles_core.kinds.backend import LossSettings, StepMetrics
from miles_core.kinds.loss import Loss, LossInputs, LossOutput
from miles_core.trainer.packing import scored_positions
from miles_core.types import Float32, TrainBatch


class Sums:
    """Figures of this rank, summed over its micro-batches in float64; on the device until asked for."""

    def __init__(self) -> None:
        self._totals: dict[str, Tensor] = {}

    def add(self, name: str, value: Tensor) -> None:
        value = value.detach().double()
        self._totals[name] = self._totals[name] + value if name in self._totals else value

    def totals(self) -> dict[str, float]:
        return {name: float(value) for name, value in self._totals.items()}

    @property
    def finite(self) -> bool:
        return "loss" not in self._totals or math.isfinite(float(self._totals["loss"]))


@dataclass(frozen=True, slots=True)
class RankReport:
    """What one rank, or all of them together, found in a step."""

    sums: Mapping[str, float]
    nonfinite: tuple[str, ...] = ()
    """Where NaN or infinity was found."""

    def metrics(self, num_loss_tokens: int) -> dict[str, float]:
        """`loss` is the global sum; every other figure a mean over the trained tokens."""
        return {name: total if name == "loss" else total / num_loss_tokens for name, total in self.sums.items()}


def combine(reports: Sequence[RankReport]) -> RankReport:
    """Add the ranks' sums in rank order. A rank without work brings no names."""
    sums: dict[str, float] = {}
    for report in reports:
        for name, value in report.sums.items():
            sums[name] = sums.get(name, 0.0) + value
    return RankReport(sums=sums, nonfinite=tuple(where for report in reports for where in report.nonfinite))


def agreed(mine: RankReport, world_size: int) -> RankReport:
    """Every rank's report combined, equal on all ranks, so that they all decide alike. Collective."""
    if world_size == 1:
        return mine
    reports: list[Any] = [None] * world_size
    dist.all_gather_object(reports, mine)
    return combine(reports)


def refuse_update(
    report: RankReport, values: Mapping[str, float], settings: LossSettings, *, updates: int
) -> StepMetrics:
    """A step whose loss or gradient is not finite changes no weights: it is skipped, or ends the run.

    Args:
        report: With the places where NaN or infinity was found.
        values: `loss` and `grad_norm` among them.
        settings: Their `on_nonfinite` decides.
        updates: Optimizer steps so far, for the message.

    Raises:
        RunError: The run is to stop.
    """
    reason = "; ".join(report.nonfinite)
    if settings.on_nonfinite == "stop":
        raise RunError(
            "loss or gradient is not finite; the weights were not changed",
            expected="finite numbers",
            found=f"loss {values.get('loss')}, gradient norm {values['grad_norm']}",
            where=f"optimizer step {updates}; {reason}",
            do="lower optimizer.lr, look at the batch in rollouts/, or set objective.on_nonfinite: skip",
        )
    finite = {name: value for name, value in values.items() if math.isfinite(value)}
    return StepMetrics(values=finite, skipped=f"not finite: {reason}")


def micro_batch_loss(
    batch: TrainBatch, logprobs_K: Tensor, entropy_K: Tensor, loss: Loss, settings: LossSettings, sums: Sums
) -> Tensor:
    """``sum(token_weights * (correction_weights * policy loss - entropy_coef * H + kl_coef * KL))`` of a micro-batch.

    Args:
        batch: The micro-batch; may be empty or without trained tokens.
        logprobs_K, entropy_K: f[K] of the trained tokens; the log-probs carry a gradient.
        sums: Receives loss, entropy, kl and the loss's own metrics.

    Returns:
        A scalar that depends on `logprobs_K` even where it is 0, so that backward runs on every rank.

    Raises:
        PluginError: the loss breaks its protocol.
    """
    if logprobs_K.shape[0] == 0:
        return logprobs_K.sum() + entropy_K.sum()
    if batch.old_logprobs is None:
        raise ContractError("the batch has no `old_logprobs`", do="report the driver")
    device, dtype = logprobs_K.device, logprobs_K.dtype
    scored = torch.from_numpy(scored_positions(batch)).to(device)

    def full(values_K: Tensor) -> Tensor:
        return torch.zeros(batch.num_tokens, dtype=dtype, device=device).index_put((scored,), values_K)

    def per_token(values: Float32) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(device=device, dtype=dtype)

    mask = torch.from_numpy(batch.loss_mask).to(device)
    logprobs = full(logprobs_K)
    inputs = LossInputs(
        logprobs=logprobs,
        old_logprobs=per_token(batch.old_logprobs),
        advantages=per_token(batch.advantages),
        mask=mask,
        sequence_ids=torch.from_numpy(batch.sequence_ids).to(device),
    )
    output = _checked(loss(inputs, **settings.options), batch.num_tokens, settings)
    total = per_token(batch.correction_weights) * output.per_token
    entropy = full(entropy_K)
    if settings.entropy_coef:
        total = total - settings.entropy_coef * entropy
    if settings.kl_coef and batch.ref_logprobs is not None:
        divergence = kl.estimate(settings.kl_estimator, logprobs, per_token(batch.ref_logprobs))
        divergence = torch.where(mask, divergence, 0.0)
        total = total + settings.kl_coef * divergence
        sums.add("kl", divergence.sum())
    # where() before the product: a weight of 0 does not silence a NaN outside the mask.
    result = torch.where(mask, per_token(batch.token_weights) * total, 0.0).sum()
    sums.add("loss", result)
    sums.add("entropy", entropy.sum())
    for name, values in output.metrics.items():
        sums.add(name, torch.where(mask, values, 0.0).sum())
    return result


def _checked(output: LossOutput, count: int, settings: LossSettings) -> LossOutput:
    if output.per_token.shape != (count,):
        raise PluginError(
            "the loss breaks its protocol",
            expected=f"per_token of shape ({count},)",
            found=f"{tuple(output.per_token.shape)}",
            where=settings.load,
            do="return one value per token; reduction is the backend's business",
        )
    return output


def check_trainable(batch: TrainBatch, *, needs_reference: bool) -> None:
    """
    Raises:
        ContractError: the batch lacks what the loss needs.
    """
    problem = None
    if batch.num_loss_tokens == 0:
        problem = ("at least one trained token", f"none among {batch.num_tokens}")
    elif batch.old_logprobs is None:
        problem = ("`old_logprobs`", "None")
    elif needs_reference and batch.ref_logprobs is None:
        problem = ("`ref_logprobs`, since the loss has a KL term", "None")
    elif scored_positions(batch).shape[0] != batch.num_loss_tokens:
        problem = ("trained tokens that have a prefix", "a sequence whose first token is trained")
    if problem is not None:
        raise ContractError(
            "the batch cannot be trained on", expected=problem[0], found=problem[1], do="report the driver"
        )
