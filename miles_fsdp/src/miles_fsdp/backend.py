"""One trainer rank: scores tokens, takes optimizer steps, exports and saves weights.

Every rank gets the whole update's batch, takes its own micro-batches of it, and weights each token as the batch says.
FSDP averages gradients over ranks, so the loss is multiplied by the world size: the gradient is that of the sum over
all tokens, whatever the split.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from miles_core.batching import plan_micro_batches
from miles_core.errors import ConfigError, DataError, RunError
from miles_core.kinds.backend import BackendContext, RouteCounts, StepMetrics
from miles_core.kinds.loss import Loss
from miles_core.numerics import ops
from miles_core.registry import load_target
from miles_core.trainer import checkpoint
from miles_core.trainer.folder import write_folder
from miles_core.trainer.objective import (
    RankReport,
    Sums,
    agreed,
    check_trainable,
    micro_batch_loss,
    refuse_update,
)
from miles_core.trainer.offload import Offloader
from miles_core.trainer.packing import scored_positions
from miles_core.types import Float32, TrainBatch, WeightBucket
from miles_fsdp import optim, true_on_policy
from miles_fsdp.export import Exporter
from miles_fsdp.logprobs import log_sum_exp
from miles_fsdp.mesh import PlainWeights, ShardedWeights, Weights, build_mesh, shard_size
from miles_fsdp.model import LoadedModel, PackedScorer, checkpoint_dtype, checkpoint_layers, load_model
from miles_fsdp.options import FsdpOptions
from miles_fsdp.packing import pack
from miles_fsdp.probe import check_packing
from miles_fsdp.routes import PolicyRoutes

_DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class FsdpBackend:
    """See `miles_core.kinds.backend.Backend`."""

    def __init__(self, options: FsdpOptions, context: BackendContext) -> None:
        """Load, check and shard the model; a collective when `context.world_size` > 1.

        Raises:
            ConfigError: the model folder is unusable, or the ranks cannot be arranged as the options say.
        """
        shard_size(context.world_size, options.dp_replicate)
        if context.world_size > 1 and not dist.is_initialized():
            raise ConfigError(
                "several ranks need torch.distributed",
                expected=f"a process group of {context.world_size} ranks",
                found="none",
                do="use an executor that initialises one",
            )
        self._options = options
        self._context = context
        self._device = torch.device(context.device)
        named = options.param_dtype
        self._param_dtype = checkpoint_dtype(context.model_path) if named == "checkpoint" else _DTYPES[named]
        self._master_dtype = torch.float64 if self._param_dtype == torch.float64 else torch.float32
        self._mesh: Any = None
        if context.world_size > 1:
            self._mesh = build_mesh(self._device.type, context.world_size, options.dp_replicate)

        loaded = load_model(context.model_path, options.attn_implementation, self._param_dtype)
        export_dtype = None if options.export_dtype == "checkpoint" else _DTYPES[options.export_dtype]
        self._exporter = Exporter(loaded.module, export_dtype)
        self._max_positions = loaded.max_positions
        self._policy = loaded.module
        self._routes = PolicyRoutes(loaded.module, context.routes, self._device)
        self._weights = self._place(loaded, train=True)
        self._optimizer = optim.Optimizer(self._weights.masters, context.optimizer)
        self._buffers = dict(self._policy.named_buffers())
        if options.micro_batch_tokens > 1:
            vocab_size = self._policy.config.get_text_config().vocab_size
            check_packing(self._policy, vocab_size, self._device, self._param_dtype)
        self._reference: Any = None
        if context.reference:
            reference = load_model(context.model_path, options.attn_implementation, self._param_dtype)
            self._place(reference, train=False)
            self._reference = reference.module
        self._loss: Loss = load_target(context.loss.load)
        self._offloader = Offloader()

    def _place(self, loaded: LoadedModel, *, train: bool) -> Weights:
        """Cast, move and shard a loaded model, and make its forward a `PackedScorer`."""
        exact = self._context.true_on_policy
        if exact:
            true_on_policy.apply(loaded, self._device, self._param_dtype)
        normalise = ops.logsumexp if exact else log_sum_exp
        loaded.module.forward = PackedScorer(loaded.module, self._options.logprob_chunk_tokens, normalise)
        if self._options.gradient_checkpointing and train:
            checkpoint_layers(loaded.layers)
        if self._mesh is None:
            return PlainWeights(
                loaded.module,
                device=self._device,
                master_dtype=self._master_dtype,
                param_dtype=self._param_dtype,
                train=train,
            )
        wide = self._param_dtype == torch.float64
        return ShardedWeights(
            loaded.module,
            loaded.layers,
            mesh=self._mesh,
            device=self._device,
            master_dtype=self._master_dtype,
            param_dtype=self._param_dtype,
            reduce_dtype=torch.float64 if wide else _DTYPES[self._options.reduce_dtype],
            train=train,
        )

    # --- scoring ------------------------------------------------------------------------------------------------------

    def log_probs(self, batch: TrainBatch, *, model: Literal["policy", "reference"] = "policy") -> Float32:
        """See `Backend.log_probs`. Complete on every rank.

        Raises:
            DataError: a sequence is longer than the model's limit.
            RunError: there is no reference model, or the state is offloaded.
        """
        self._check(batch)
        module = self._policy
        if model == "reference":
            if self._reference is None:
                raise RunError(
                    "this backend keeps no reference model",
                    expected="BackendContext.reference to be true",
                    found="false",
                    do="set objective.kl_coef, which makes the run keep one",
                )
            module = self._reference
        scores_policy = module is self._policy
        result = torch.zeros(batch.num_tokens, dtype=torch.float32, device=self._device)
        offsets = batch.offsets
        counting = self._routes.counting(batch, sharded=self._mesh is not None) if scores_policy else nullcontext()
        with torch.no_grad(), counting:
            for sequences in self._plan(batch):
                part = batch.select(sequences)
                if scores_policy:
                    self._routes.load(part)
                logprobs, _ = module(pack(part, self._device))
                places = [np.arange(offsets[s], offsets[s + 1]) for s in sequences]
                at = np.concatenate(places)[scored_positions(part)] if places else np.zeros(0, np.int64)
                result[torch.from_numpy(at).to(self._device)] = logprobs.float()
        if self._mesh is not None:
            dist.all_reduce(result)  # each token was scored by one rank, the others hold 0
        return np.asarray(result.cpu().numpy(), dtype=np.float32)

    def route_counts(self) -> RouteCounts | None:
        """See `Backend.route_counts`."""
        return self._routes.counts

    # --- training -----------------------------------------------------------------------------------------------------

    def train_step(self, batch: TrainBatch) -> StepMetrics:
        """See `Backend.train_step`.

        A skipped step reports the finite ones of its figures.

        Raises:
            ContractError: the batch lacks what the loss needs.
            DataError: a sequence is longer than the model's limit.
            RunError: loss or gradient is not finite and the run says stop; or the state is offloaded.
        """
        self._check(batch)
        check_trainable(batch, needs_reference=self._context.loss.kl_coef != 0.0)
        self._weights.zero_grad()
        sums = Sums()
        entropy_grad = self._context.loss.entropy_coef != 0.0
        for sequences in self._plan(batch):
            part = batch.select(sequences)
            self._routes.load(part)
            logprobs, entropy = self._policy(pack(part, self._device), entropy_grad=entropy_grad)
            loss = micro_batch_loss(part, logprobs, entropy, self._loss, self._context.loss, sums)
            (loss * self._context.world_size).backward()  # type: ignore[no-untyped-call]
        norm = optim.grad_norm(self._weights.masters)
        report = self._gather(sums, norm)
        lr = self._optimizer.next_lr
        values = report.metrics(batch.num_loss_tokens) | {"grad_norm": float(norm), "lr": lr}
        if report.nonfinite:
            self._weights.zero_grad()
            return refuse_update(report, values, self._context.loss, updates=self._optimizer.updates)
        if self._context.optimizer.clip_grad_norm is not None:
            optim.clip(self._weights.masters, norm, self._context.optimizer.clip_grad_norm)
        self._optimizer.step()
        self._weights.refresh()
        self._weights.zero_grad()
        return StepMetrics(values=values)

    def _gather(self, sums: Sums, norm: Tensor) -> RankReport:
        """Every rank's sums and findings, combined in rank order: equal on all ranks, so they all decide alike."""
        found = []
        if not sums.finite:
            found.append("the loss")
        if not bool(torch.isfinite(norm)):
            found += [f"the gradient of {name}" for name in optim.nonfinite(self._weights.masters)]
            found = found or ["the gradient norm"]
        mine = RankReport(sums=sums.totals(), nonfinite=tuple(f"rank {self._context.rank}: {what}" for what in found))
        return agreed(mine, self._context.world_size)

    # --- weights and checkpoints --------------------------------------------------------------------------------------

    def export(self, version: int) -> Iterator[WeightBucket]:
        """See `Backend.export`; every rank yields complete buckets of copies."""
        self._check_here()
        live = {**self._buffers, **self._weights.masters}
        yield from self._exporter.buckets(live, version=version, bucket_bytes=self._options.bucket_mib * 2**20)

    def save(self, directory: Path) -> None:
        """See `Backend.save`. Raises CheckpointError when it cannot be written."""
        self._check_here()
        checkpoint.save(directory, self._state(), updates=self._optimizer.updates)

    def load(self, directory: Path) -> None:
        """Continue from `directory`, also one that another number of ranks wrote.

        Raises:
            CheckpointError: absent, half written, damaged, or of another model.
        """
        self._check_here()
        self._optimizer.restore(checkpoint.load(directory, self._state()))
        self._weights.refresh()

    def _state(self) -> dict[str, Tensor]:
        masters = {f"{name}.master": master.detach() for name, master in self._weights.masters.items()}
        return masters | self._optimizer.moments()

    def save_hf(self, directory: Path) -> None:
        """See `Backend.save_hf`."""
        write_folder(
            self.export(0),
            self._exporter.described(),
            directory,
            model_path=self._context.model_path,
            writes=self._context.rank == 0,
        )
        if self._mesh is not None:
            checkpoint.meet()

    # --- life ---------------------------------------------------------------------------------------------------------

    def offload(self) -> None:
        """Free accelerator memory: masters, compute weights, reference and optimizer state go to pinned host memory."""
        if self._device.type != "cuda" or self._offloader.away:
            return
        self._weights.zero_grad()
        self._weights.refresh()  # nothing gathered may stay behind
        modules = [self._policy] + ([self._reference] if self._reference is not None else [])
        tensors = [t for m in modules for t in (*m.parameters(), *m.buffers())]
        self._offloader.offload([*tensors, *self._weights.masters.values(), *self._optimizer.tensors()])

    def onload(self) -> None:
        self._offloader.onload()

    def close(self) -> None:
        """Drop the model; the process group belongs to the executor."""
        self._weights.zero_grad()
        del self._policy, self._reference, self._weights, self._optimizer, self._buffers

    # --- checks -------------------------------------------------------------------------------------------------------

    def _plan(self, batch: TrainBatch) -> list[list[int]]:
        plan = plan_micro_batches(batch.lengths, self._context.world_size, self._options.micro_batch_tokens)
        return plan[self._context.rank]

    def _check_here(self) -> None:
        if self._offloader.away:
            raise RunError(
                "the trainer's state is offloaded",
                expected="onload() before any work",
                found="offload() was the last call",
                do="report the driver",
            )

    def _check(self, batch: TrainBatch) -> None:
        self._check_here()
        longest = int(batch.lengths.max()) if batch.num_sequences else 0
        if self._max_positions is not None and longest > self._max_positions:
            raise DataError(
                "a sequence is longer than the model's limit",
                expected=f"at most {self._max_positions} tokens",
                found=f"{longest} tokens",
                where=f"sequence {int(np.argmax(batch.lengths))} of the batch",
                do="lower model.context_length or rollout.sampling.max_tokens",
            )
