"""What a backend must compute, the slow way: float64, one sequence at a time, plain transformers and autograd.

Nothing here packs, chunks, shards or casts, so there is no split whose effect could hide.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from miles_core.kinds.backend import LossSettings, OptimizerSettings
from miles_core.kinds.loss import LossInputs, LossOutput
from miles_core.types import TrainBatch

if TYPE_CHECKING:
    from numpy.random import Generator


POISON = 100.0


def surrogate(inputs: LossInputs, /, *, power: float = 1.0) -> LossOutput:
    """``-A ratio^power`` at each token: a loss without clipping, smooth everywhere, so that gradients compare well.

    An advantage above `POISON` leaves the loss finite and makes its gradient NaN.
    """
    ratio = torch.where(inputs.mask, power * (inputs.logprobs - inputs.old_logprobs), 0.0).exp()
    per_token = torch.where(inputs.mask, -inputs.advantages * ratio, 0.0)
    if bool((inputs.advantages > POISON).any()):
        per_token = per_token + (inputs.logprobs * 0.0).sqrt()  # value 0, slope 0 * infinity
    return LossOutput(per_token=per_token, metrics={"ratio": ratio.detach() * inputs.mask})


SURROGATE = "miles_core.testing.backend_oracle:surrogate"
LOSS = LossSettings(load=SURROGATE, entropy_coef=0.05, kl_coef=0.3, options={"power": 0.5})
ADAMW = OptimizerSettings(
    lr=1e-3,
    betas=(0.9, 0.95),
    eps=1e-8,
    weight_decay=0.0,
    schedule="constant",
    warmup_steps=0,
    min_lr_ratio=0.0,
    total_steps=10,
    clip_grad_norm=None,
)
"""AdamW with everything else off; what tests train with are variations of it."""
TRAINING = replace(ADAMW, lr=0.05, schedule="cosine", warmup_steps=1, clip_grad_norm=0.1, weight_decay=0.1)
"""Everything on."""
PROBE = replace(ADAMW, lr=1.0, eps=1.0)
"""With a large epsilon, the change of the weights tells the gradient: g / (|g| + 1)."""


def example_batch(
    rng: Generator, lengths: Sequence[int], *, vocab: int = 270, temperatures: Sequence[float] | None = None
) -> TrainBatch:
    """A batch of random tokens, about half of them trained; every array differs from its neutral value."""
    sizes = np.array(lengths, dtype=np.int64)
    total = int(sizes.sum())
    mask = rng.random(total) < 0.5
    first = np.cumsum(sizes) - sizes
    mask[first] = False
    mask[first[sizes > 1] + 1] = True  # the token right after a boundary is where off-by-one shifts show

    def noise(low: float, high: float) -> Any:
        return np.where(mask, rng.uniform(low, high, total), 0.0).astype(np.float32)

    return TrainBatch(
        lengths=sizes,
        group_ids=np.arange(sizes.shape[0], dtype=np.int64) // 2,
        rewards=rng.random(sizes.shape).astype(np.float32),
        temperatures=np.asarray(
            temperatures if temperatures is not None else rng.choice([0.7, 1.0, 1.4], sizes.shape[0]), dtype=np.float32
        ),
        token_ids=rng.integers(3, vocab, total).astype(np.int32),
        loss_mask=mask,
        rollout_logprobs=noise(-6.0, -4.0),
        versions=np.where(mask, 0, -1).astype(np.int64),
        advantages=noise(-2.0, 2.0),
        token_weights=noise(0.5, 1.5) / np.float32(mask.sum()),
        correction_weights=np.where(mask, rng.uniform(0.5, 1.5, total), 1.0).astype(np.float32),
        old_logprobs=noise(-6.5, -5.0),
        ref_logprobs=noise(-6.5, -5.0),
    )


@dataclass(frozen=True)
class Expected:
    """The update's figures in float64."""

    logprobs: np.ndarray[Any, np.dtype[np.float64]]
    """f64[N], 0 outside the mask."""
    loss: float
    entropy: float
    """Mean over the trained tokens."""
    kl: float
    gradients: dict[str, Tensor]
    """By the module's own parameter names."""

    @property
    def grad_norm(self) -> float:
        return float(torch.stack([g.square().sum() for g in self.gradients.values()]).sum().sqrt())


def expected_update(
    model_path: Path, batch: TrainBatch, settings: LossSettings, *, given_experts: bool = False
) -> Expected:
    """Loss and gradient of `batch` under `surrogate` with the options in `settings`.

    Args:
        given_experts: Send the tokens to the experts in `batch.routes`; the model is a Qwen3-MoE then.
    """
    from transformers import AutoModelForCausalLM

    # "eager" attention takes its softmax in float32.
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float64, attn_implementation="sdpa")
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")
    model.eval()
    total = torch.zeros((), dtype=torch.float64)
    sums = {"entropy": 0.0, "kl": 0.0}
    logprobs = np.zeros(batch.num_tokens)
    for index in range(batch.num_sequences):
        span = slice(int(batch.offsets[index]), int(batch.offsets[index + 1]))
        row = batch.select([index])
        if given_experts:
            _give_experts(model, row)
        loss, lp, entropy, kl = _sequence(model, row, settings)
        total = total + loss
        logprobs[span] = np.where(batch.loss_mask[span], lp.numpy(), 0.0)
        sums["entropy"] += float(entropy)
        sums["kl"] += float(kl)
    if total.requires_grad:
        total.backward()  # type: ignore[no-untyped-call]
    count = max(1, batch.num_loss_tokens)
    return Expected(
        logprobs=logprobs,
        loss=float(total.detach()),
        entropy=sums["entropy"] / count,
        kl=sums["kl"] / count,
        gradients={name: p.grad for name, p in model.named_parameters() if p.grad is not None},
    )


def _give_experts(model: Any, row: TrainBatch) -> None:
    """Replace each MoE layer by its formula at given experts: every expert sees every token, its gate weighs it."""
    assert row.routes is not None
    for index, layer in enumerate(model.model.layers):
        block, given = layer.mlp, torch.from_numpy(row.routes[:, index].astype(np.int64))
        layer.mlp.forward = partial(_formula, block, given)


def _formula(block: Any, given: Tensor, hidden: Tensor) -> Tensor:
    router, experts, x = block.gate, block.experts, hidden[0]
    scores = torch.softmax(x @ router.weight.T, dim=-1, dtype=torch.float32)
    chosen = torch.where(given < 0, scores.detach().topk(router.top_k).indices, given)
    gates = torch.zeros_like(scores).scatter(1, chosen, 1.0) * scores
    if router.norm_topk_prob:
        gates = gates / gates.sum(-1, keepdim=True)
    result = torch.zeros_like(x)
    for expert in range(router.num_experts):
        gate, up = (x @ experts.gate_up_proj[expert].T).chunk(2, dim=-1)
        out = (torch.nn.functional.silu(gate) * up) @ experts.down_proj[expert].T
        result = result + gates[:, expert, None].to(x.dtype) * out
    return result[None]


def _sequence(model: Any, row: TrainBatch, settings: LossSettings) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Weighted loss, log-probs f64[T], and the sums of entropy and KL over the trained tokens of one sequence."""
    ids = torch.from_numpy(row.token_ids.astype(np.int64))
    logits = model(input_ids=ids[None], use_cache=False).logits[0] / float(row.temperatures[0])
    log_p = torch.log_softmax(logits, dim=-1)
    zero = torch.zeros(1, dtype=torch.float64)
    lp = torch.cat([zero, log_p[:-1].gather(-1, ids[1:, None])[:, 0]])
    entropy = torch.cat([zero, -(log_p.exp() * log_p).sum(-1)[:-1]])
    mask = torch.from_numpy(row.loss_mask)
    old, ref, advantages, corrections, weights = (
        torch.from_numpy(np.zeros(row.num_tokens, np.float32) if values is None else values).double()
        for values in (
            row.old_logprobs,
            row.ref_logprobs,
            row.advantages,
            row.correction_weights,
            row.token_weights,
        )
    )
    policy = -advantages * ((lp - old) * float(settings.options.get("power", 1.0))).exp()
    d = lp - ref
    kl = {"k1": d, "k2": d.square() / 2, "k3": (-d).exp() - 1 + d}[settings.kl_estimator]
    per_token = corrections * policy - settings.entropy_coef * entropy + settings.kl_coef * kl
    return (weights * per_token)[mask].sum(), lp.detach(), entropy[mask].sum().detach(), kl[mask].sum().detach()
