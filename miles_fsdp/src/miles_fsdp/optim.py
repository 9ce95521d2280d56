"""AdamW over the master weights, its learning-rate schedule, and the global gradient norm."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from miles_core.kinds.backend import OptimizerSettings
from miles_core.trainer.schedule import decays, learning_rate

MOMENTS = ("exp_avg", "exp_avg_sq")
"""AdamW's state per parameter, beside the step counter that all parameters share."""


class Optimizer:
    """AdamW with its state made at once, so that memory is known before the first step and a checkpoint can fill it."""

    def __init__(self, masters: Mapping[str, Tensor], settings: OptimizerSettings) -> None:
        self._masters = masters
        self._settings = settings
        self.updates = 0
        """Optimizer steps applied; skipped ones do not count."""
        groups = [
            {"params": [p for n, p in masters.items() if decays(n, p)], "weight_decay": settings.weight_decay},
            {"params": [p for n, p in masters.items() if not decays(n, p)], "weight_decay": 0.0},
        ]
        self._adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=settings.lr,
            betas=settings.betas,
            eps=settings.eps,
            fused=True,
        )
        for parameter in masters.values():
            state = self._adamw.state[parameter]
            state["step"] = torch.zeros((), dtype=torch.float32, device=_local(parameter).device)
            for moment in MOMENTS:
                state[moment] = torch.zeros_like(parameter, requires_grad=False)

    @property
    def next_lr(self) -> float:
        return learning_rate(self._settings, self.updates)

    def step(self) -> None:
        """Apply the gradients in the masters' `.grad`."""
        for group in self._adamw.param_groups:
            group["lr"] = self.next_lr
        self._adamw.step()
        self.updates += 1

    def moments(self) -> dict[str, Tensor]:
        """``name.exp_avg`` and ``name.exp_avg_sq`` of every master; the live tensors."""
        return {f"{n}.{m}": self._adamw.state[p][m] for n, p in self._masters.items() for m in MOMENTS}

    def restore(self, updates: int) -> None:
        """Continue after `updates` steps, the moments having been filled in place."""
        self.updates = updates
        for parameter in self._masters.values():
            self._adamw.state[parameter]["step"].fill_(float(updates))

    def tensors(self) -> list[Tensor]:
        """All tensors of the state, for offloading."""
        return [t for p in self._masters.values() for t in self._adamw.state[p].values()]


def grad_norm(masters: Mapping[str, Tensor]) -> Tensor:
    """L2 norm of the whole gradient, over all shards: a scalar, equal on every rank. A collective when sharded."""
    grads = [p.grad for p in masters.values() if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(grads)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def clip(masters: Mapping[str, Tensor], norm: Tensor, limit: float) -> None:
    """Scale the gradient so that its norm is at most `limit`."""
    with_grad = [p for p in masters.values() if p.grad is not None]
    torch.nn.utils.clip_grads_with_norm_(with_grad, limit, norm)


def nonfinite(masters: Mapping[str, Tensor], limit: int = 3) -> list[str]:
    """Names of masters whose gradient holds a NaN or infinity in this rank's shard, `limit` at most."""
    names: list[str] = []
    for name, parameter in masters.items():
        if parameter.grad is not None and not bool(torch.isfinite(_local(parameter.grad)).all()):
            names.append(name)
            if len(names) == limit:
                break
    return names


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
