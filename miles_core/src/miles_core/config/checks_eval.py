"""What must hold between keys of the core for evaluation, during training or beside it."""

from __future__ import annotations

from miles_core.config.checks import Check, Setup
from miles_core.config.checks_model import context_of
from miles_core.errors import PluginError
from miles_core.user_function import function_target


def _eval_without_data(s: Setup) -> str | None:
    absent = s.spec.data is None or s.spec.data.eval is None
    wanted = s.spec.eval.every_steps is not None
    if wanted and absent and not s.provides("environment", "provides-prompts"):
        return "evaluation needs held-out prompts: `data.eval` is absent and the environment brings none"
    return None


def _greedy_eval(s: Setup) -> str | None:
    if s.spec.eval.sampling.temperature == 0 and s.spec.eval.samples_per_prompt > 1:
        return "evaluation at temperature 0 would sample one and the same answer several times"
    return None


def _eval_room(s: Setup) -> str | None:
    context, longest = context_of(s), s.spec.eval.sampling.max_tokens
    if s.spec.eval.every_steps is not None and context is not None and longest >= context:
        return f"{longest} sampled tokens leave no room for a prompt in a context of {context}"
    return None


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
        function_target("evaluation", s.spec.eval.function)
    except PluginError as error:
        return f"{error.message}: {error.found}" if error.found else error.message
    return None


EVAL_CHECKS: tuple[Check, ...] = (
    Check(
        id="MIL101",
        about="Evaluation needs held-out prompts.",
        path="eval.every_steps",
        find=_eval_without_data,
        do="set data.eval, or eval.every_steps: null",
        reads=("data", "eval.every_steps"),
        kinds=("environment",),
    ),
    Check(
        id="MIL203",
        about="Greedy evaluation samples each prompt once.",
        path="eval.samples_per_prompt",
        find=_greedy_eval,
        do="set eval.samples_per_prompt: 1, or eval.sampling.temperature above 0",
        reads=("eval.sampling.temperature",),
    ),
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
    Check(
        id="MIL602",
        about="The same for evaluation.",
        path="eval.sampling.max_tokens",
        find=_eval_room,
        do="lower it, or raise model.context_length",
        reads=("model", "eval.every_steps"),
    ),
)
