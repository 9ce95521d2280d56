"""Megatron's optimizer under Miles' settings: our schedule, our decision whether a step happens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor
from torch.nn import Parameter

from miles_core.kinds.backend import OptimizerSettings
from miles_core.trainer.schedule import learning_rate

STATE = ("master", "exp_avg", "exp_avg_sq")
"""What is kept of each parameter, float32: its master weight and AdamW's moments."""


class Optimizer:
    """AdamW over float32 masters; dense and expert parameters are two chained optimizers of Megatron."""

    def __init__(
        self, models: Sequence[Any], settings: OptimizerSettings, *, dtype: torch.dtype, distributed: bool
    ) -> None:
        self._settings = settings
        self.updates = 0
        """Optimizer steps applied; skipped ones do not count."""
        config = OptimizerConfig(
            optimizer="adam",
            lr=settings.lr,
            min_lr=0.0,
            weight_decay=settings.weight_decay,
            adam_beta1=settings.betas[0],
            adam_beta2=settings.betas[1],
            adam_eps=settings.eps,
            clip_grad=0.0,
            bf16=dtype == torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=distributed,
        )
        self.megatron = get_megatron_optimizer(config, list(models), use_gloo_process_groups=False)
        self.parts = [part for part in self.megatron.chained_optimizers if part.optimizer is not None]
        self._make_state()

    def _make_state(self) -> None:
        """Moments exist from the start: memory is known before the first step, and a checkpoint can fill them."""
        for part in self.parts:
            for group in part.optimizer.param_groups:
                for parameter in group["params"]:
                    part.optimizer.state[parameter] = {
                        "step": torch.zeros((), dtype=torch.float32),
                        "exp_avg": torch.zeros_like(parameter.detach()),
                        "exp_avg_sq": torch.zeros_like(parameter.detach()),
                    }

    @property
    def next_lr(self) -> float:
        return learning_rate(self._settings, self.updates)

    def gradient_norm(self) -> float:
        """L2 norm of the whole gradient over all ranks; hands the gradients to the masters. A collective."""
        self.megatron.prepare_grads()
        return float(self.megatron.get_grad_norm())

    def step(self, norm: float) -> None:
        """Clip by `norm`, apply, and copy the masters to the parameters."""
        limit = self._settings.clip_grad_norm
        for part in self.parts:
            for group in part.optimizer.param_groups:
                group["lr"] = self.next_lr
                group["weight_decay"] = self._settings.weight_decay * group["wd_mult"]
            parameters = part.get_parameters()
            if limit is not None and parameters:
                clip_grad_by_total_norm_fp32(parameters, max_norm=limit, total_norm=norm)
        self.megatron.step_with_ready_grads()
        self.updates += 1

    def zero_grad(self) -> None:
        self.megatron.zero_grad()

    # --- state by parameter -------------------------------------------------------------------------------------------

    def state_of(self, parameter: Parameter) -> dict[str, Tensor]:
        """`STATE` of one parameter of this rank, in its shape; live tensors where they are whole.

        A collective of the data-parallel group when the optimizer is distributed.
        """
        part = self._part(parameter)
        if not isinstance(part, DistributedOptimizer):
            master = getattr(parameter, "main_param", parameter)
            moments = part.optimizer.state[master]
            return {"master": master.detach(), **{kind: moments[kind] for kind in STATE[1:]}}
        gathered = {}
        shard = self._shard(part, parameter)
        for kind in STATE:
            whole = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
            if shard is not None:
                start, end, tensors = shard
                whole[start:end] = tensors[kind].detach().reshape(-1)
            dist.all_reduce(whole, group=part.data_parallel_group)  # each element is owned by one rank
            gathered[kind] = whole.view(parameter.shape)
        return gathered

    def set_state(self, parameter: Parameter, kind: str, value: Tensor) -> None:
        """Overwrite one of `STATE`; a master is copied to the parameter, too."""
        part = self._part(parameter)
        with torch.no_grad():
            if kind == "master":
                parameter.copy_(value)
            if not isinstance(part, DistributedOptimizer):
                master = getattr(parameter, "main_param", parameter)
                (master if kind == "master" else part.optimizer.state[master][kind]).copy_(value)
                return
            shard = self._shard(part, parameter)
            if shard is not None:
                start, end, tensors = shard
                tensors[kind].copy_(value.reshape(-1)[start:end].view(tensors[kind].shape))

    def _part(self, parameter: Parameter) -> Any:
        """The optimizer of experts, or that of all else."""
        return self.megatron.chained_optimizers[0 if getattr(parameter, "allreduce", True) else 1]

    def _shard(self, part: Any, parameter: Parameter) -> tuple[int, int, dict[str, Tensor]] | None:
        """Range of the flattened parameter that this rank's optimizer owns, with its state; None for none of it."""
        if parameter not in part.model_param_gbuf_map:
            return None
        owned = part._get_model_param_range_map(parameter)["param"]
        group, place = part.model_param_group_index_map[parameter]
        master = part.optimizer.param_groups[group]["params"][place]
        return owned.start, owned.end, {"master": master, **part.optimizer.state[master]}

    def restore(self, updates: int) -> None:
        """Continue after `updates` steps, masters and moments having been filled in place."""
        self.updates = updates
        for part in self.parts:
            for state in part.optimizer.state.values():
                state["step"].fill_(float(updates))

    def tensors(self) -> list[Tensor]:
        """Masters and moments, for offloading."""
        found: list[Tensor] = []
        for part in self.parts:
            for group in part.optimizer.param_groups:
                for parameter in group["params"]:
                    found += [parameter, *part.optimizer.state[parameter].values()]
        return found
