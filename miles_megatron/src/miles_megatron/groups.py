"""Megatron's process groups, of which a process has one set: who made them, for which layout, and until when.

Megatron keeps them in module globals. Backends of one layout may share them; another layout has to wait until the last
user of the old one is closed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from miles_core.errors import ConfigError, RunError


@dataclass(frozen=True, slots=True)
class Layout:
    """How the trainer's ranks are arranged; the sizes multiply as Megatron lays them out."""

    world: int
    tensor: int = 1
    pipeline: int = 1
    virtual: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1

    @property
    def data(self) -> int:
        """Data-parallel replicas of attention and dense layers."""
        return self.world // (self.tensor * self.pipeline * self.context)

    def problem(self) -> tuple[str, str, str] | None:
        """What does not divide: expected, found, where; or None."""
        dense = self.tensor * self.pipeline * self.context
        if self.world % dense:
            return (
                "tensor_parallel x pipeline_parallel x context_parallel to divide the number of trainer ranks",
                f"{self.tensor} x {self.pipeline} x {self.context} = {dense} for {self.world} ranks",
                "backend.tensor_parallel",
            )
        experts = self.expert * self.expert_tensor * self.pipeline
        if self.world % experts:
            return (
                "expert_parallel x expert_tensor_parallel x pipeline_parallel to divide the number of trainer ranks",
                f"{self.expert} x {self.expert_tensor} x {self.pipeline} = {experts} for {self.world} ranks",
                "backend.expert_parallel",
            )
        return None


_users: list[Layout] = []
_made_default_group = False


def acquire(layout: Layout, device: torch.device) -> None:
    """Initialise Megatron's groups, or join the ones of an equal layout. A collective.

    Raises:
        ConfigError: the ranks cannot be arranged so, or several ranks have no torch.distributed.
        RunError: a backend of another layout lives in this process.
    """
    global _made_default_group
    problem = layout.problem()
    if problem is not None:
        raise ConfigError(
            "the trainer's ranks cannot be arranged so",
            expected=problem[0],
            found=problem[1],
            where=problem[2],
            do="change the sizes, or placement.trainer_ranks",
        )
    if _users and _users[0] != layout:
        raise RunError(
            "one process has one Megatron layout",
            expected=str(_users[0]),
            found=str(layout),
            where="miles_megatron.groups",
            do="close the other backend first",
        )
    if not dist.is_initialized():
        if layout.world > 1:
            raise ConfigError(
                "several ranks need torch.distributed",
                expected=f"a process group of {layout.world} ranks",
                found="none",
                where="placement.trainer_ranks",
                do="use an executor that initialises one",
            )
        _alone(device)
        _made_default_group = True
    _users.append(layout)
    if len(_users) > 1:
        return
    try:
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tensor,
            pipeline_model_parallel_size=layout.pipeline,
            virtual_pipeline_model_parallel_size=layout.virtual if layout.virtual > 1 else None,
            context_parallel_size=layout.context,
            expert_model_parallel_size=layout.expert,
            expert_tensor_parallel_size=layout.expert_tensor,
            create_gloo_process_groups=False,
        )
    except BaseException:
        release(layout)
        raise


def _alone(device: torch.device) -> None:
    """A process group of this process only, since Megatron asks for one also where there is nothing to share."""
    # Not told its device: NCCL would then make communicators for all of Megatron's groups at once, seconds of work.
    collectives = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(collectives, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]


def release(layout: Layout) -> None:
    """Forget one user; the last one takes the groups down."""
    global _made_default_group
    _users.remove(layout)
    if not _users:
        _take_down()
        if _made_default_group:
            dist.destroy_process_group()
            _made_default_group = False


def _take_down() -> None:
    """Megatron only forgets its groups; torch would keep each of them, with its threads and sockets, until the end."""
    groups = [group for group in parallel_state._global_process_group_list or () if group is not None]
    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        for group in groups:
            dist.destroy_process_group(group)
