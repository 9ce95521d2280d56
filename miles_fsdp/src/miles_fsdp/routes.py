"""Recorded routes in this rank's forward passes: loaded for each micro-batch, compared, and counted over ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from miles_core.errors import ConfigError
from miles_core.kinds.backend import RouteCounts
from miles_core.routing.codec import recorded_rows
from miles_core.routing.hf import RouteReplay, find_routers
from miles_core.types import RouteMode, TrainBatch


class PolicyRoutes:
    """What the policy does with `TrainBatch.routes`; does nothing when the mode is off.

    Args:
        module: The loaded model, before it is sharded.
    """

    def __init__(self, module: Any, mode: RouteMode, device: torch.device) -> None:
        self._device = device
        self._control: RouteReplay | None = None
        self.counts: RouteCounts | None = None
        """Of the latest block of `counting`."""
        if mode == "off":
            return
        routers = find_routers(module)
        if not routers:
            raise ConfigError(
                "a dense model has no routes",
                expected="a model with MoE layers",
                found=type(module).__name__,
                where="rollout.routes",
                do="set rollout.routes: off",
            )
        self._control = RouteReplay(routers, replay=mode == "replay")

    def load(self, part: TrainBatch) -> None:
        """Set what the next forward pass, of `part`, and its recomputation in backward replay."""
        if self._control is None:
            return
        routes = part.routes if part.num_sequences else None
        self._control.load(None if routes is None else torch.from_numpy(routes).to(self._device))

    @contextmanager
    def counting(self, batch: TrainBatch, *, sharded: bool) -> Iterator[None]:
        """Count over the forward passes of the block, which score `batch` on all ranks together."""
        if self._control is None:
            yield
            return
        with self._control.counting(self._device) as differs:
            yield
        if sharded:
            dist.all_reduce(differs)
        own, used = differs.tolist()
        inputs = np.ones(batch.num_tokens, dtype=np.bool_)
        inputs[batch.offsets[1:][batch.lengths > 0] - 1] = False
        recorded = 0 if batch.routes is None else int((recorded_rows(batch.routes) & inputs).sum())
        layers = self._control.layers
        self.counts = RouteCounts(
            recorded=recorded * layers,
            unrecorded=(int(inputs.sum()) - recorded) * layers,
            own_differs=own,
            used_differs=used,
        )
