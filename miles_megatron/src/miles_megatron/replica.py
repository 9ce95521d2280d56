"""What one rank holds: its place among the ranks, the policy with its optimizer, and a frozen reference."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from miles_core.errors import ConfigError
from miles_core.kinds.backend import BackendContext
from miles_core.trainer.offload import Offloader
from miles_megatron import checkpoint, groups
from miles_megatron.checkpoint_folder import Fields, open_folder
from miles_megatron.fits import check_fits
from miles_megatron.groups import Layout
from miles_megatron.known import table_for
from miles_megatron.layouts import Heads
from miles_megatron.model import Blueprint, ScoringModel, build
from miles_megatron.optim import Optimizer
from miles_megatron.options import MegatronOptions
from miles_megatron.packed import Share
from miles_megatron.replay import Replay, replay_of
from miles_megatron.weights import WeightMap, global_name

_TRAINABLE = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Setup:
    """The ranks' arrangement and the model's plan; builds replicas."""

    def __init__(self, options: MegatronOptions, context: BackendContext) -> None:
        """A collective. See `MegatronBackend.__init__` for what it raises."""
        self._options, self._context = options, context
        self._device = torch.device(context.device)
        self.layout = layout_of(options, context.world_size)
        self._folder = open_folder(context.model_path)
        self._table = table_for(self._folder, context.architecture)
        self.shape = self._table.architecture.describe(Fields(self._folder.config))
        check_fits(self.shape, options)
        self._check_routes()
        self._check_gloo()
        self._dtype = self._param_dtype()
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        groups.acquire(self.layout, self._device)
        on_cpu = self._device.type == "cpu"
        # Nothing random is left in the model; Megatron asks for a seed all the same.
        model_parallel_cuda_manual_seed(context.seed, inference_rng_tracker=on_cpu, force_reset_rng=True)
        self.data_rank = parallel_state.get_data_parallel_rank()
        self.share = Share(
            context_rank=parallel_state.get_context_parallel_rank(),
            context_size=self.layout.context,
            tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
            tensor_size=self.layout.tensor,
            sequence_parallel=options.sequence_parallel,
        )
        self._offloader = Offloader()

    def _check_gloo(self) -> None:
        """Shards of an expert gather tokens whose numbers differ once experts are spread, which gloo cannot."""
        if self._device.type == "cpu" and self.layout.expert > 1 and self.layout.expert_tensor > 1:
            raise ConfigError(
                "gloo cannot gather unequal parts",
                expected="expert_parallel or expert_tensor_parallel to be 1 on CPUs",
                found=f"{self.layout.expert} and {self.layout.expert_tensor}",
                where="backend.expert_tensor_parallel",
                do="take GPUs, or one of the two",
            )

    def _check_routes(self) -> None:
        if self._context.routes != "off" and not self.shape.experts:
            raise ConfigError(
                "a dense model has no routes",
                expected="layers with experts",
                found=self._folder.config.model_type,
                where="rollout.routes",
                do="set rollout.routes: off",
            )

    def _param_dtype(self) -> torch.dtype:
        named = self._options.param_dtype
        dtype = self._folder.dtype if named == "checkpoint" else _TRAINABLE[named]
        if dtype not in _TRAINABLE.values():
            raise ConfigError(
                "the checkpoint's dtype is not one to train in",
                expected="float32 or bfloat16",
                found=str(dtype).removeprefix("torch."),
                where=self._context.model_path,
                do="name one: backend: {use: megatron, param_dtype: bfloat16}",
            )
        return dtype

    @property
    def speaks(self) -> bool:
        """Whether this rank answers for the tokens of its replica: one rank of the last stage does."""
        last = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
        return bool(last) and self.share.tensor_rank == 0 and self.share.context_rank == 0

    def policy(self) -> Policy:
        models, weights = self._load(routed=self._context.routes != "off")
        return Policy(models, weights, self._context, self._options, self._dtype)

    def reference(self) -> Replica:
        models, weights = self._load(routed=False)
        for model in models:
            model.requires_grad_(False)
        return Replica(models, weights)

    def _load(self, *, routed: bool) -> tuple[list[ScoringModel], WeightMap]:
        plan = Blueprint(
            shape=self.shape,
            checkpoint_config=self._folder.config,
            layout=self.layout,
            options=self._options,
            dtype=self._dtype,
            device=self._device,
        )
        models = build(plan, routed=routed)
        heads = Heads(self.shape.heads, self.shape.key_value_heads, self.shape.vocab)
        weights = WeightMap(self._folder, self._table, models, heads, tied=self.shape.tied)
        weights.load()
        return models, weights

    @property
    def away(self) -> bool:
        return self._offloader.away

    def offload(self, replicas: Sequence[Replica]) -> None:
        self._offloader.offload([tensor for replica in replicas for tensor in replica.tensors()])

    def onload(self) -> None:
        self._offloader.onload()

    def release(self) -> None:
        groups.release(self.layout)


class Replica:
    """A model that only scores."""

    def __init__(self, models: Sequence[ScoringModel], weights: WeightMap) -> None:
        self.models = list(models)
        self.chunks: list[Any] = self.models
        """What the schedules run."""
        self.weights = weights

    def tensors(self) -> list[torch.Tensor]:
        return [t for model in self.models for t in (*model.parameters(), *model.buffers())]


class Policy(Replica):
    """The model that is trained; its routers may replay routes."""

    def __init__(
        self,
        models: Sequence[ScoringModel],
        weights: WeightMap,
        context: BackendContext,
        options: MegatronOptions,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(models, weights)
        ddp = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=False,
            use_distributed_optimizer=options.distributed_optimizer,
        )
        self.chunks = [
            DistributedDataParallel(config=model.config, ddp_config=ddp, module=model, disable_bucketing=index > 0)
            for index, model in enumerate(models)
        ]
        for model in models:
            model.config.finalize_model_grads_func = _finalize
        self.optimizer = Optimizer(
            self.chunks, context.optimizer, dtype=dtype, distributed=options.distributed_optimizer
        )

    def zero_grad(self) -> None:
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    def let_go(self) -> None:
        """Cut the ring that would keep the model, its buffers and its process groups for ever.

        A dispatcher keeps the last router's probabilities. Their graph ends at the hooks that DistributedDataParallel
        put on the parameters, these lead to the model, and the garbage collector does not look into graphs.
        """
        for model in self.models:
            for module in model.modules():
                dispatcher = getattr(module, "token_dispatcher", None)
                if dispatcher is not None:
                    dispatcher.probs = None

    def replays(self) -> list[Replay]:
        """Of every layer with experts on this rank, when the run has routes."""
        found = (replay_of(layer) for model in self.models for layer in model.decoder.layers)
        return [replay for replay in found if replay is not None]

    def nonfinite(self, limit: int = 3) -> list[str]:
        """Names of parameters whose gradient holds a NaN or infinity on this rank, `limit` at most."""
        names = []
        for model in self.models:
            for name, parameter in model.named_parameters():
                gradient = getattr(parameter, "main_grad", None)
                if gradient is not None and not bool(torch.isfinite(gradient).all()):
                    names.append(global_name(model, name))
        return names[:limit]

    def save(self, directory: Path) -> None:
        checkpoint.save(directory, self.weights, self.optimizer)

    def load(self, directory: Path) -> None:
        checkpoint.load(directory, self.weights, self.optimizer)

    def tensors(self) -> list[torch.Tensor]:
        buffers = [
            tensor
            for chunk in self.chunks
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)
            for tensor in (buffer.param_data, buffer.grad_data)
            if tensor is not None
        ]
        return [*super().tensors(), *buffers, *self.optimizer.tensors()]


def _finalize(models: list[Any], num_tokens: Any = None, **kwargs: Any) -> None:
    """Megatron's, without its division by the number of tokens: weights of tokens hold every denominator."""
    finalize_model_grads(models, None, **kwargs)


def layout_of(options: MegatronOptions, world_size: int) -> Layout:
    return Layout(
        world=world_size,
        tensor=options.tensor_parallel,
        pipeline=options.pipeline_parallel,
        virtual=options.virtual_pipeline,
        context=options.context_parallel,
        expert=options.expert_parallel,
        expert_tensor=options.expert_tensor_parallel,
    )
