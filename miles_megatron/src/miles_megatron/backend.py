"""One trainer rank on Megatron Core: scores tokens, takes optimizer steps, exports and saves weights.

Every rank gets the whole update's batch. Ranks that share a model replica work on the same micro-batches; replicas take
different ones. Weights of tokens come with the batch and Megatron is told to add gradients, never to average them, so
the gradient is that of the sum over all tokens, whatever the layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

import miles_megatron.start  # noqa: F401
from miles_core.batching import plan_micro_batches
from miles_core.errors import ContractError, DataError, RunError
from miles_core.kinds.backend import BackendContext, RouteCounts, StepMetrics
from miles_core.kinds.loss import Loss
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
from miles_core.trainer.packing import scored_positions
from miles_core.types import UNRECORDED, Float32, RouteMode, TrainBatch, WeightBucket
from miles_megatron.options import MegatronOptions
from miles_megatron.packed import pack, row_length
from miles_megatron.passes import Item, run
from miles_megatron.replica import Replica, Setup
from miles_megatron.start import at_work
from miles_megatron.tables import ModelShape

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class MegatronBackend:
    """See `miles_core.kinds.backend.Backend`."""

    def __init__(self, options: MegatronOptions, context: BackendContext) -> None:
        """Arrange the ranks, build this rank's pieces of the model and load them; a collective.

        Raises:
            ConfigError: the model folder is unusable, its architecture has no table, or the ranks or the model cannot
                be cut as the options say.
        """
        self._options, self._context = options, context
        self._device = torch.device(context.device)
        self._loss: Loss = load_target(context.loss.load)
        with at_work(self._device):
            self._setup = Setup(options, context)
            try:
                self._policy = self._setup.policy()
                self._reference = self._setup.reference() if context.reference else None
            except BaseException:
                self._setup.release()
                raise
        self._mode: RouteMode = context.routes
        self._counts: RouteCounts | None = None
        self._closed = False

    # --- scoring ------------------------------------------------------------------------------------------------------

    def log_probs(self, batch: TrainBatch, *, model: Literal["policy", "reference"] = "policy") -> Float32:
        """See `Backend.log_probs`. Complete on every rank, whichever stage has the logits.

        Raises:
            DataError: a sequence is longer than the model's limit.
            RunError: there is no reference model, or the state is offloaded.
        """
        self._check(batch)
        replica: Replica = self._policy
        if model == "reference":
            if self._reference is None:
                raise RunError(
                    "this backend keeps no reference model",
                    expected="BackendContext.reference to be true",
                    found="false",
                    do="set objective.kl_coef, which makes the run keep one",
                )
            replica = self._reference
        counting = replica is self._policy and self._mode != "off"
        self._counts = None if replica is self._policy else self._counts
        result = torch.zeros(batch.num_tokens, dtype=torch.float32, device=self._device)
        offsets = batch.offsets
        parts = self._plan(batch)
        places = iter(parts)
        speaks = self._setup.speaks

        def keep(part: TrainBatch, logprobs: Tensor, entropy: Tensor) -> Tensor:
            sequences = next(places)
            if speaks and sequences:
                tokens = np.concatenate([np.arange(offsets[s], offsets[s + 1]) for s in sequences])
                at = torch.from_numpy(tokens[scored_positions(part)]).to(self._device)
                result[at] = logprobs.detach().float()
            return logprobs.sum()

        with at_work(self._device), torch.no_grad():
            length = self._common_length(batch, parts)
            routes = self._mode if counting else "off"
            items = self._items(batch, parts, length, entropy_grad=False, routes=routes, counts=counting)
            run(replica.chunks, items, keep, backward=False, length=length)
            if counting:
                self._counts = self._count(batch)
            if self._context.world_size > 1:
                dist.all_reduce(result)  # each token was scored by one rank that speaks, the others hold 0
        return np.asarray(result.cpu().numpy(), dtype=np.float32)

    def route_counts(self) -> RouteCounts | None:
        """See `Backend.route_counts`."""
        return self._counts

    def _count(self, batch: TrainBatch) -> RouteCounts:
        """What the routers of all ranks counted in the pass that just ended. A collective."""
        replays = self._policy.replays()
        differs = torch.stack([count for replay in replays for count in replay.take()] or [torch.zeros(())])
        total = differs.sum().to(self._device, torch.int64)
        if not self._setup.share.sees_own_tokens:
            total.zero_()  # another rank counts the same tokens
        if self._context.world_size > 1:
            dist.all_reduce(total)
        assert batch.routes is not None
        recorded = int((batch.routes[..., 0] >= 0).sum())
        pairs = (batch.num_tokens - int((batch.lengths > 0).sum())) * batch.routes.shape[1]
        own = int(total)
        used = 0 if self._mode == "replay" else own
        return RouteCounts(recorded=recorded, unrecorded=pairs - recorded, own_differs=own, used_differs=used)

    def _common_length(self, batch: TrainBatch, parts: Sequence[Sequence[int]]) -> int | None:
        """Megatron's interleaved schedule mixes up the shapes of rows that differ, so there all are padded alike."""
        if self._setup.layout.virtual == 1:
            return None
        return row_length(max(int(batch.lengths[part].sum()) for part in parts), self._setup.share)

    def _items(
        self,
        batch: TrainBatch,
        parts: Sequence[Sequence[int]],
        length: int | None,
        *,
        entropy_grad: bool,
        routes: RouteMode,
        counts: bool,
    ) -> list[Callable[[], Item]]:
        def make(sequences: Sequence[int]) -> Item:
            part = batch.select(sequences)
            packed = pack(part, self._setup.share, self._device, length=length, routed=routes != "off")
            packed.entropy_grad, packed.counts, packed.replays = entropy_grad, counts, routes == "replay"
            return part, packed

        return [partial(make, sequences) for sequences in parts]

    def _plan(self, batch: TrainBatch) -> list[list[int]]:
        """Sequences of each micro-batch of this replica; as many on every replica as the pipeline's schedule needs."""
        layout = self._setup.layout
        budget = self._options.micro_batch_tokens * layout.context
        parts = plan_micro_batches(batch.lengths, layout.data, budget)[self._setup.data_rank]
        multiple = layout.pipeline if layout.virtual > 1 else 1
        return parts + [[] for _ in range(-len(parts) % multiple)]

    # --- training -----------------------------------------------------------------------------------------------------

    def train_step(self, batch: TrainBatch) -> StepMetrics:
        """See `Backend.train_step`. A skipped step reports the finite ones of its figures.

        Raises:
            ContractError: the batch lacks what the loss needs.
            DataError: a sequence is longer than the model's limit.
            RunError: loss or gradient is not finite and the run says stop; or the state is offloaded.
        """
        self._check(batch)
        check_trainable(batch, needs_reference=self._context.loss.kl_coef != 0.0)
        settings, sums = self._context.loss, Sums()
        optimizer = self._policy.optimizer

        def evaluate(part: TrainBatch, logprobs: Tensor, entropy: Tensor) -> Tensor:
            return micro_batch_loss(part, logprobs, entropy, self._loss, settings, sums)

        with at_work(self._device):
            self._policy.zero_grad()
            parts = self._plan(batch)
            length = self._common_length(batch, parts)
            entropy_grad = settings.entropy_coef != 0.0
            items = self._items(batch, parts, length, entropy_grad=entropy_grad, routes=self._mode, counts=False)
            run(self._policy.chunks, items, evaluate, backward=True, length=length)
            norm = optimizer.gradient_norm()
            report = self._gather(sums, norm)
            values = report.metrics(batch.num_loss_tokens) | {"grad_norm": norm, "lr": optimizer.next_lr}
            if report.nonfinite:
                self._policy.zero_grad()
                return refuse_update(report, values, self._context.loss, updates=self._policy.optimizer.updates)
            optimizer.step(norm)
            self._policy.zero_grad()
        return StepMetrics(values=values)

    def _gather(self, sums: Sums, norm: float) -> RankReport:
        """What the ranks that speak for their tokens found, in rank order: equal on all ranks, so they decide alike."""
        speaks = self._setup.speaks
        found = [] if sums.finite else ["the loss"]
        if not np.isfinite(norm):
            found += [f"the gradient of {name}" for name in self._policy.nonfinite()] or ["the gradient norm"]
        where = tuple(f"rank {self._context.rank}: {what}" for what in found)
        mine = RankReport(sums=sums.totals() if speaks else {}, nonfinite=where)
        return agreed(mine, self._context.world_size)

    # --- weights and checkpoints --------------------------------------------------------------------------------------

    def export(self, version: int) -> Iterator[WeightBucket]:
        """See `Backend.export`; every rank yields complete buckets of copies.

        Weights are those the trainer computes with: in bfloat16 the rounded masters.
        """
        self._check_here()
        dtype = self._export_dtype()
        bucket_bytes = self._options.bucket_mib * 2**20
        yield from self._policy.weights.buckets(version=version, bucket_bytes=bucket_bytes, dtype=dtype)

    def _export_dtype(self) -> torch.dtype | None:
        named = self._options.export_dtype
        return None if named == "checkpoint" else _DTYPES[named]

    def save(self, directory: Path) -> None:
        """See `Backend.save`. Raises CheckpointError when it cannot be written."""
        self._check_here()
        with at_work(self._device):
            self._policy.save(directory)

    def load(self, directory: Path) -> None:
        """Continue from `directory`, also one that another layout wrote.

        Raises:
            CheckpointError: absent, half written, damaged, or of another model.
        """
        self._check_here()
        with at_work(self._device):
            self._policy.load(directory)

    def save_hf(self, directory: Path) -> None:
        """See `Backend.save_hf`."""
        write_folder(
            self.export(0),
            self._policy.weights.described(self._export_dtype()),
            directory,
            model_path=self._context.model_path,
            writes=self._context.rank == 0,
        )
        if self._context.world_size > 1:
            checkpoint.meet()

    # --- life ---------------------------------------------------------------------------------------------------------

    def offload(self) -> None:
        """Free accelerator memory: parameters, gradients' buffers, masters and moments go to pinned host memory."""
        if self._device.type == "cuda":
            self._setup.offload([r for r in (self._policy, self._reference) if r is not None])

    def onload(self) -> None:
        if self._device.type == "cuda":
            self._setup.onload()

    def close(self) -> None:
        """Drop the model and Megatron's groups; safe to call twice."""
        if self._closed:
            return
        self._closed = True
        self._policy.let_go()
        del self._policy, self._reference
        self._setup.release()

    # --- checks -------------------------------------------------------------------------------------------------------

    def _check_here(self) -> None:
        if self._closed or self._setup.away:
            raise RunError(
                "the trainer's state is not here",
                expected="an onload before the next call",
                found="a closed backend" if self._closed else "an offloaded one",
                where=f"rank {self._context.rank}",
                do="report the driver",
            )

    def _check(self, batch: TrainBatch) -> None:
        self._check_here()
        longest = int(batch.lengths.max(initial=0))
        if self._mode != "off":
            _check_routes(batch, self._setup.shape)
        limit = self._setup.shape.max_positions
        if longest > limit:
            raise DataError(
                "a sequence is longer than the model's limit",
                expected=f"at most {limit} tokens",
                found=f"{longest} tokens",
                where=f"sequence {int(np.argmax(batch.lengths))} of the batch",
                do="lower model.context_length or rollout.sampling.max_tokens",
            )


def _check_routes(batch: TrainBatch, shape: ModelShape) -> None:
    layers, chosen, experts = len(shape.sparse_layers), shape.experts_per_token, shape.experts
    routes = batch.routes
    found = None
    if routes is None:
        found = "none"
    elif routes.shape[1:] != (layers, chosen):
        found = f"{routes.shape[1]} layers, {routes.shape[2]} experts a token"
    elif routes.size and not (int(routes.min()) >= UNRECORDED and int(routes.max()) < experts):
        found = f"experts {int(routes.min())} to {int(routes.max())}"
    if found is not None:
        raise ContractError(
            "the batch's routes are not of this model",
            expected=f"routes of {layers} layers, {chosen} experts a token, numbered below {experts}",
            found=found,
            where="TrainBatch.routes",
            do="let engine and trainer load the same checkpoint",
        )
