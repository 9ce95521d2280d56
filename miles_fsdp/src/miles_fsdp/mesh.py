"""How ranks share one model: the device mesh, and FSDP2 applied from outside.

With several ranks each decoder layer and the root are `fully_shard`-ed: parameters are float32 DTensors, gathered in
the compute dtype. With one rank there is nothing to shard, and FSDP2 would copy every weight twice per micro-batch; a
plain module with a float32 master beside it computes the same numbers, so `PlainWeights` does that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from miles_core.errors import ConfigError


class Weights(Protocol):
    """The trained parameters of one model on one rank."""

    masters: Mapping[str, Tensor]
    """What the optimizer steps: plain tensors or DTensors by module name, each tied one once; gradients in `.grad`."""

    def zero_grad(self) -> None: ...

    def refresh(self) -> None:
        """Make the module compute with the masters' current values."""
        ...


def shard_size(world_size: int, dp_replicate: int) -> int:
    """Ranks over which one replica is sharded.

    Raises:
        ConfigError: `dp_replicate` does not divide `world_size`.
    """
    if world_size % dp_replicate:
        raise ConfigError(
            "the trainer's ranks cannot be arranged as replicas",
            expected=f"backend.dp_replicate to divide placement.trainer_ranks ({world_size})",
            found=f"backend.dp_replicate = {dp_replicate}",
            where="backend.dp_replicate",
            do="take a divisor of the number of trainer ranks",
        )
    return world_size // dp_replicate


def build_mesh(device_type: str, world_size: int, dp_replicate: int) -> DeviceMesh:
    """1-D mesh ``(shard,)``, or 2-D ``(replicate, shard)`` for hybrid sharding."""
    sharded = shard_size(world_size, dp_replicate)
    if dp_replicate == 1:
        return init_device_mesh(device_type, (sharded,), mesh_dim_names=("dp_shard",))
    return init_device_mesh(device_type, (dp_replicate, sharded), mesh_dim_names=("dp_replicate", "dp_shard"))


class ShardedWeights:
    """FSDP2: masters are the module's own parameters, sharded."""

    def __init__(
        self,
        model: nn.Module,
        layers: list[nn.Module],
        *,
        mesh: DeviceMesh,
        device: torch.device,
        master_dtype: torch.dtype,
        param_dtype: torch.dtype,
        reduce_dtype: torch.dtype,
        train: bool,
    ) -> None:
        # Casting inputs would round what is exact in the plain module (rotary tables, temperatures).
        policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False)
        # Layer by layer, so that at most one layer is whole in the master dtype.
        for layer in layers:
            _move(layer, device, master_dtype if train else param_dtype)
            fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
        _move(model, device, master_dtype if train else param_dtype)
        # A frozen model has no backward that would free the root's full parameters.
        self._root = fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=not train)
        model.requires_grad_(train)
        self._model = model
        self.masters: Mapping[str, Tensor] = dict(model.named_parameters())

    def zero_grad(self) -> None:
        self._model.zero_grad(set_to_none=True)

    def refresh(self) -> None:
        # A forward without backward leaves the root gathered, and the next one would compute with that copy.
        self._root.reshard()


class PlainWeights:
    """One rank: the module computes in `param_dtype`; a master in `master_dtype` stands beside it where they differ.

    Gradients of micro-batches are summed in the master's dtype: adding many small ones in bfloat16 would lose them.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        device: torch.device,
        master_dtype: torch.dtype,
        param_dtype: torch.dtype,
        train: bool,
    ) -> None:
        self._computes: dict[str, nn.Parameter] = {}
        if not train or param_dtype == master_dtype:
            _move(model, device, param_dtype)
            self.masters: Mapping[str, Tensor] = dict(model.named_parameters())
        else:
            masters = {}
            for name, parameter in model.named_parameters():
                masters[name] = parameter.detach().to(device=device, dtype=master_dtype, copy=True)
            _move(model, device, param_dtype)
            self.masters = masters
            self._computes = dict(model.named_parameters())
            for name, parameter in self._computes.items():
                parameter.register_post_accumulate_grad_hook(_adder(masters[name]))  # type: ignore[no-untyped-call]
        model.requires_grad_(train)

    def zero_grad(self) -> None:
        for master in self.masters.values():
            master.grad = None

    def refresh(self) -> None:
        if self._computes:
            with torch.no_grad():
                torch._foreach_copy_(list(self._computes.values()), [self.masters[name] for name in self._computes])


class _adder:
    """Hook that moves a finished gradient of the compute parameter into its master's."""

    def __init__(self, master: Tensor) -> None:
        self._master = master

    def __call__(self, parameter: Tensor) -> None:
        grad, parameter.grad = parameter.grad, None
        if grad is None:
            return
        if self._master.grad is None:
            self._master.grad = grad.to(self._master.dtype)
        else:
            self._master.grad.add_(grad)


def _move(module: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Move parameters to device and dtype, buffers to the device only: `Module.to` would round rotary tables."""
    for parameter in module.parameters():
        if not isinstance(parameter, DTensor):  # layers that are already sharded stay as they are
            parameter.data = parameter.data.to(device=device, dtype=dtype)
    for buffer in module.buffers():
        buffer.data = buffer.data.to(device=device)
