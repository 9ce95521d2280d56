"""What must hold between core's keys when evaluation runs beside training."""

from __future__ import annotations

from pathlib import Path

from miles_core.config.checks import Check, Setup
from miles_core.errors import PluginError
from miles_core.registry import function_target


def _dedicated_colocated(s: Setup) -> str | None:
    if s.spec.eval.on == "dedicated" and s.spec.placement.mode == "colocated":
        return "a dedicated fleet evaluates while training goes on, so it cannot share the trainer's devices"
    return None


def _dedicated_engines(s: Setup) -> str | None:
    if s.spec.eval.on == "dedicated" and s.spec.eval.engines is None:
        return "nobody says how many engines the dedicated fleet has"
    return None


def _external_function(s: Setup) -> str | None:
    if s.spec.eval.on != "external":
        return None
    if s.spec.eval.function is None:
        return "an external evaluation needs a function that evaluates"
    try:
        place, _, attribute = function_target("evaluation", s.spec.eval.function).rpartition(":")
    except PluginError as error:
        return f"{error.message}: {error.found}" if error.found else error.message
    if place.endswith(".py") and attribute not in Path(place).read_text(encoding="utf-8", errors="replace"):
        return f"{place} does not say `{attribute}` anywhere"
    return None


EVAL_CHECKS: tuple[Check, ...] = (
    Check(
        id="MIL210",
        about="A dedicated fleet has devices of its own.",
        path="eval.on",
        find=_dedicated_colocated,
        do="set placement.mode: separate, or eval.on: shared",
        reads=("placement.mode",),
    ),
    Check(
        id="MIL211",
        about="A dedicated fleet has engines.",
        path="eval.engines",
        find=_dedicated_engines,
        do="set eval.engines",
        reads=("eval.on",),
    ),
    Check(
        id="MIL212",
        about="An external evaluation names a function that is there.",
        path="eval.function",
        find=_external_function,
        do="set eval.function: module:fn, or file.py:fn; relative paths start where you start miles",
        reads=("eval.on",),
    ),
)
