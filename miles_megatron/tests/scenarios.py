"""What ranks do in tests: each scenario is a function of its place that returns what it found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from miles_core.kinds.backend import BackendContext
from miles_core.testing import backend_oracle
from miles_core.testing.backend import weights
from miles_core.testing.backend_oracle import LOSS, TRAINING, example_batch
from miles_core.testing.live_bytes import CHUNK, TOKENS, peak_of_a_step
from miles_core.types import UNRECORDED, TrainBatch
from miles_megatron.backend import MegatronBackend
from miles_megatron.options import MegatronOptions

LENGTHS = (7, 2, 19, 12, 5, 3)
PROBE = replace(backend_oracle.PROBE, eps=100.0)


@dataclass(frozen=True)
class Place:
    rank: int
    world: int
    folder: Path
    device: str

    def context(self, model: str, **changes: Any) -> BackendContext:
        context = BackendContext(
            model_path=str(self.folder / model),
            device=self.device if self.device == "cpu" else f"{self.device}:{self.rank}",
            rank=self.rank,
            world_size=self.world,
            seed=0,
            optimizer=PROBE,
            loss=LOSS,
            reference=False,
        )
        return replace(context, **changes)

    def make(self, model: str, *, changes: dict[str, Any] | None = None, **options: Any) -> MegatronBackend:
        settings: dict[str, Any] = {"micro_batch_tokens": 20, "logprob_chunk_tokens": 5, "bucket_mib": 1, **options}
        return MegatronBackend(MegatronOptions(**settings), self.context(model, **(changes or {})))


def batches(count: int) -> list[TrainBatch]:
    """Random tokens, padding tokens of the models among them: the row of such a token is never trained."""
    rng = np.random.default_rng(11)
    made = [example_batch(rng, LENGTHS) for _ in range(count)]
    for batch in made:
        batch.token_ids[4::7], batch.token_ids[6::11] = 2, 0
    return made


def one_update(place: Place, *, model: str, **options: Any) -> dict[str, Any]:
    """Score a batch and take one probing step."""
    (batch,) = batches(1)
    made = place.make(model, **options)
    logprobs = made.log_probs(batch)
    before = weights(made)
    metrics = dict(made.train_step(batch).values)
    result = {"logprobs": logprobs, "before": before, "metrics": metrics, "after": weights(made)}
    made.close()
    return result


def routed(batch: TrainBatch, layers: int, experts: int, chosen: int) -> TrainBatch:
    """Routes that no router would choose; some positions have no record, nor has a sequence's last."""
    rng = np.random.default_rng(5)
    order = np.argsort(rng.random((batch.num_tokens, layers, experts)), axis=-1)
    routes = order[..., :chosen].astype(np.int16)
    routes[batch.offsets[1:] - 1] = UNRECORDED
    routes[[3, 11, 30]] = UNRECORDED
    return replace(batch, routes=routes)


def replayed_update(place: Place, *, model: str, layers: int, experts: int, **options: Any) -> dict[str, Any]:
    """Like `one_update`, with routes replayed in scoring and training."""
    batch = routed(batches(1)[0], layers, experts, 2)
    made = place.make(model, changes={"routes": "replay"}, **options)
    logprobs, counts = made.log_probs(batch), made.route_counts()
    before = weights(made)
    metrics = dict(made.train_step(batch).values)
    result = {"logprobs": logprobs, "before": before, "metrics": metrics, "after": weights(made), "counts": counts}
    made.close()
    return result


def trained(place: Place, *, model: str, **options: Any) -> dict[str, Any]:
    """Two steps and a checkpoint, two more; then the checkpoint and the same two more in another backend."""
    some = batches(4)
    made = place.make(model, changes={"optimizer": TRAINING}, **options)
    for batch in some[:2]:
        made.train_step(batch)
    made.save(place.folder / "state")
    straight = [dict(made.train_step(batch).values) for batch in some[2:]]
    result = {"straight": straight, "after": weights(made)}
    made.close()
    made = place.make(model, changes={"optimizer": TRAINING}, **options)
    made.load(place.folder / "state")
    result["resumed"] = [dict(made.train_step(batch).values) for batch in some[2:]]
    result["resumed after"] = weights(made)
    made.close()
    return result


def continued(place: Place, *, model: str, **options: Any) -> dict[str, Any]:
    """Go on from the checkpoint that `trained` wrote under another layout."""
    made = place.make(model, changes={"optimizer": TRAINING}, **options)
    made.load(place.folder / "state")
    result = {"metrics": [dict(made.train_step(batch).values) for batch in batches(4)[2:]], "after": weights(made)}
    made.close()
    return result


def converted(place: Place, **options: Any) -> dict[str, Any]:
    """Go on from a folder of other weights that was made a checkpoint on one rank."""
    made = place.make("qwen3-moe", changes={"optimizer": TRAINING}, **options)
    made.load(place.folder / "converted" / "checkpoints" / "step_000000" / "backend")
    exported = weights(made)
    result = {"exported": exported, "metrics": [dict(made.train_step(batch).values) for batch in batches(2)]}
    made.close()
    return result


MEMORY_OF = {"qwen3": 128, "qwen3-moe": 64}
"""Hidden width of the models whose steps are measured, in folders ``memory-NAME``."""


def memory_options(*, recompute: bool, **options: Any) -> MegatronOptions:
    return MegatronOptions(
        recompute="full" if recompute else "none", micro_batch_tokens=TOKENS, logprob_chunk_tokens=CHUNK, **options
    )


def memory(place: Place, *, model: str, **options: Any) -> int:
    """Bytes at the peak of one step of four micro-batches."""
    return peak_of_a_step(
        lambda context: MegatronBackend(memory_options(**options), context),
        place.folder / f"memory-{model}",
        rank=place.rank,
        world=place.world,
        micro_batches=4,
    )


def refused(place: Place, *, model: str, **options: Any) -> list[str]:
    """A NaN on one rank's tokens: every rank refuses the step, weights stay, and the next one is taken."""
    (batch,) = batches(1)
    at = int(np.flatnonzero(batch.loss_mask)[-1])
    bad = replace(batch, advantages=np.where(np.arange(batch.num_tokens) == at, np.nan, batch.advantages))
    made = place.make(model, changes={"loss": replace(LOSS, on_nonfinite="skip")}, **options)
    before = weights(made)
    said = [made.train_step(bad).skipped or "taken"]
    said.append("unchanged" if all(np.array_equal(before[n], t) for n, t in weights(made).items()) else "changed")
    said.append(made.train_step(batch).skipped or "taken")
    made.close()
    return said


ALL: dict[str, Callable[[Place], Any]] = {}

for _model in ("qwen3", "llama", "qwen2", "qwen3-moe", "glm4-moe", "deepseek-v3"):
    _one = partial(partial, one_update, model=_model)
    ALL |= {
        f"{_model} dp2": _one(),
        f"{_model} dp2 distributed": _one(distributed_optimizer=True),
        f"{_model} tp2 sp": _one(tensor_parallel=2, sequence_parallel=True),
        f"{_model} tp2 sp distributed": _one(tensor_parallel=2, sequence_parallel=True, distributed_optimizer=True),
        f"{_model} pp2": _one(pipeline_parallel=2),
        f"{_model} vpp2": _one(pipeline_parallel=2, virtual_pipeline=2),
        f"{_model} cp2": _one(context_parallel=2),
        f"{_model} ep2": _one(expert_parallel=2),
        f"{_model} tp2": _one(tensor_parallel=2),
        f"{_model} tp2 sp ep2": _one(tensor_parallel=2, sequence_parallel=True, expert_parallel=2),
        f"{_model} tp2 sp etp2": _one(tensor_parallel=2, sequence_parallel=True, expert_tensor_parallel=2),
        f"{_model} recompute": _one(recompute="full"),
    }

for _model, _layers in (("qwen3-moe", 4), ("deepseek-v3", 3)):
    _one = partial(partial, replayed_update, model=_model, layers=_layers, experts=8)
    ALL |= {
        f"{_model} replay tp2 sp": _one(tensor_parallel=2, sequence_parallel=True, recompute="full"),
        f"{_model} replay ep2": _one(expert_parallel=2),
        f"{_model} replay pp2": _one(pipeline_parallel=2),
        f"{_model} replay vpp2": _one(pipeline_parallel=2, virtual_pipeline=2, recompute="full"),
        f"{_model} replay cp2": _one(context_parallel=2),
    }
ALL |= {
    "trained tp2": partial(
        trained, model="qwen3-moe", tensor_parallel=2, sequence_parallel=True, distributed_optimizer=True
    ),
    "continued ep2": partial(continued, model="qwen3-moe", expert_parallel=2, distributed_optimizer=True),
    "continued pp2": partial(continued, model="qwen3-moe", pipeline_parallel=2),
    "continued alone": partial(continued, model="qwen3-moe"),
    "converted tp2": partial(converted, tensor_parallel=2, sequence_parallel=True, distributed_optimizer=True),
    "converted vpp2": partial(converted, pipeline_parallel=2, virtual_pipeline=2),
    "converted ep2": partial(converted, expert_parallel=2),
    "refused pp2": partial(refused, model="qwen3", pipeline_parallel=2),
    "refused dp2": partial(refused, model="qwen3"),
}
MEMORY: dict[str, tuple[str, dict[str, Any]]] = {
    f"memory {how}{', recomputed' if recompute else ''}": (model, {**options, "recompute": recompute})
    for how, model, options in (
        ("tp2 sp", "qwen3", {"tensor_parallel": 2, "sequence_parallel": True}),
        ("vpp2", "qwen3", {"pipeline_parallel": 2, "virtual_pipeline": 2}),
        ("ep2", "qwen3-moe", {"expert_parallel": 2}),
        ("dp2 distributed", "qwen3", {"distributed_optimizer": True}),
    )
    for recompute in (False, True)
}
"""Model and options by scenario."""
ALL |= {name: partial(memory, model=model, **options) for name, (model, options) in MEMORY.items()}
REPLAYED = ("qwen3-moe replay tp2 sp", "qwen3-moe replay ep2", "deepseek-v3 replay vpp2", "qwen3-moe replay cp2")
CONVERTED = ("converted tp2", "converted vpp2", "converted ep2")
OTHERS = (*MEMORY, "trained tp2", "continued ep2", "continued pp2", *CONVERTED, "refused pp2", "refused dp2")
FAST = (
    "qwen3 dp2",
    "qwen3 tp2",
    "qwen3 tp2 sp",
    "qwen3 cp2",
    "llama pp2",
    "llama vpp2",
    "qwen2 dp2 distributed",
    "qwen3-moe ep2",
    "qwen3-moe tp2 sp",
    "qwen3-moe tp2 sp etp2",
    "qwen3-moe recompute",
    "glm4-moe tp2 sp ep2",
    "glm4-moe pp2",
    "deepseek-v3 ep2",
    "deepseek-v3 tp2 sp",
    "deepseek-v3 cp2",
)
"""Every layout of two ranks and every architecture, not every pair."""
FOUR = {
    "qwen3 tp2 pp2": partial(one_update, model="qwen3", tensor_parallel=2, sequence_parallel=True, pipeline_parallel=2),
    "qwen3 tp2 cp2": partial(one_update, model="qwen3", tensor_parallel=2, sequence_parallel=True, context_parallel=2),
    "llama vpp2 dp2": partial(
        one_update, model="llama", pipeline_parallel=2, virtual_pipeline=2, distributed_optimizer=True
    ),
    "qwen3-moe pp2 ep2": partial(one_update, model="qwen3-moe", pipeline_parallel=2, expert_parallel=2),
    "qwen3-moe tp2 ep4": partial(
        one_update, model="qwen3-moe", tensor_parallel=2, sequence_parallel=True, expert_parallel=4
    ),
    "deepseek-v3 tp2 ep2": partial(
        one_update,
        model="deepseek-v3",
        tensor_parallel=2,
        sequence_parallel=True,
        expert_parallel=2,
        distributed_optimizer=True,
    ),
    "glm4-moe cp2 ep4": partial(one_update, model="glm4-moe", context_parallel=2, expert_parallel=4, recompute="full"),
}
"""Layouts of four ranks."""
ALL |= FOUR
