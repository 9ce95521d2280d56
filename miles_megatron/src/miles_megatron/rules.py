"""What the numbers of a layout must satisfy, among themselves and of the model, checked before anything starts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from miles_core.config.files import absolute
from miles_core.config.model_folder import ModelFolderError, read_config
from miles_core.rules import Facts, Finding
from miles_megatron.fits import cuts_in, misfits, uncomputed
from miles_megatron.options import MegatronOptions


def layout_divides(facts: Facts) -> Iterable[Finding]:
    """Sizes multiply to a divisor of the trainer's ranks."""
    ranks = _number(facts, "placement.trainer_ranks")
    tensor, pipeline, context = (_number(facts, f"backend.{n}_parallel") for n in ("tensor", "pipeline", "context"))
    expert, expert_tensor = (_number(facts, f"backend.{n}_parallel") for n in ("expert", "expert_tensor"))
    dense = tensor * pipeline * context
    if ranks % dense:
        yield Finding(
            path="backend.tensor_parallel",
            found=f"tensor {tensor} x pipeline {pipeline} x context {context} = {dense} for {ranks} trainer ranks",
        )
    experts = expert * expert_tensor * pipeline
    if ranks % experts:
        yield Finding(
            path="backend.expert_parallel",
            found=f"expert {expert} x expert tensor {expert_tensor} x pipeline {pipeline} = {experts} for {ranks}",
        )


def virtual_needs_pipeline(facts: Facts) -> Iterable[Finding]:
    if _number(facts, "backend.virtual_pipeline") > 1 and _number(facts, "backend.pipeline_parallel") == 1:
        yield Finding(path="backend.virtual_pipeline", found="a virtual pipeline on one stage")


def sequence_needs_tensor(facts: Facts) -> Iterable[Finding]:
    if _number(facts, "backend.tensor_parallel") == 1:
        yield Finding(path="backend.sequence_parallel", found="sequence_parallel with tensor_parallel: 1")


def experts_need_sequence(facts: Facts) -> Iterable[Finding]:
    """Megatron refuses it while training: gradients of experts would miss tokens."""
    wide = _number(facts, "backend.tensor_parallel") > 1
    experts = _number(facts, "backend.expert_parallel") * _number(facts, "backend.expert_tensor_parallel") > 1
    if wide and experts:
        yield Finding(path="backend.sequence_parallel", found="experts over ranks and tensor_parallel without it")


def recompute_layers_are_read(facts: Facts) -> Iterable[Finding]:
    if _number(facts, "backend.recompute_layers") != 1:
        yield Finding(path="backend.recompute_layers", found="recompute_layers with recompute: none")


def divides_the_model(facts: Facts) -> Iterable[Finding]:
    """Heads, widths, layers and experts divide. Silent about a config.json that cannot be read: others report it."""
    values = {name: facts.values.get(f"backend.{name}") for name in MegatronOptions.model_fields}
    options = MegatronOptions.model_validate({name: value for name, value in values.items() if value is not None})
    config = _config(facts)
    if config is None:
        return
    reported = {each.path for rule in (virtual_needs_pipeline, experts_need_sequence) for each in rule(facts)}
    for path, found in misfits(cuts_in(config), options):
        if path not in reported:
            yield Finding(path=path, found=found)


def computes_the_model(facts: Facts) -> Iterable[Finding]:
    """Nothing that Megatron would compute otherwise than the checkpoint's own code, as far as config.json tells."""
    for found in uncomputed(_config(facts) or {}):
        yield Finding(path="model.path", found=found)


def _config(facts: Facts) -> Mapping[str, Any] | None:
    try:
        return read_config(absolute(str(facts.values.get("model.path"))))
    except (ModelFolderError, OSError):
        return None


def _number(facts: Facts, path: str) -> int:
    value = facts.values.get(path, 1)
    return value if isinstance(value, int) else 1
