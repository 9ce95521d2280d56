"""Which fields a request may have, and which values of fields that cannot be served are harmless.

A field that would change what is sampled, or what the prompt says, is never ignored. It is refused by name, unless its
value asks for nothing. Token ids and offsets into them belong to the server alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from miles_core.session.serving.problems import Refused

OWNED = frozenset(
    {
        "input_ids",
        "token_ids",
        "prompt_token_ids",
        "output_ids",
        "completion_token_ids",
        "input_embeds",
        "prompt_ids",
        "tokens",
        "routed_experts",
        "routed_experts_start_len",
        "logprob_start_len",
        "token_ids_logprob",
        "prompt_logprobs",
        "echo",
        "return_token_ids",
        "return_tokens_as_token_ids",
        "return_hidden_states",
    }
)
"""Token ids, offsets into them, and switches of their capture."""

Harmless = Callable[[Any], bool]


def absent(value: Any) -> bool:
    return value is None


def empty(value: Any) -> bool:
    return value is None or value in ({}, [], "")


def only(*values: Any) -> Harmless:
    """The value is harmless if it is one of `values` (of the same type), or null."""
    return lambda value: value is None or any(type(value) is type(each) and value == each for each in values)


def number(value: float) -> Harmless:
    """The value is harmless if it is this number, or null."""
    return lambda found: found is None or (not isinstance(found, bool) and found == value)


def anything(value: Any) -> bool:
    return True


class Fields(BaseModel):
    """The fields of a request that are understood. All others must be harmless."""

    model_config = ConfigDict(extra="allow", strict=True, use_attribute_docstrings=True)


def check_extra(extra: Mapping[str, Any], known: Mapping[str, Harmless], why: Mapping[str, str]) -> None:
    """Refuse the first field that cannot be ignored.

    Args:
        known: For each field, a function that says whether a value asks for nothing.
        why: For each field, why any other value is refused.

    Raises:
        Refused: 400 naming the field.
    """
    for name, value in extra.items():
        if name in OWNED:
            raise Refused(400, "token ids belong to the server, and so does their capture; send messages", param=name)
        harmless = known.get(name)
        if harmless is None:
            if value is None:
                continue
            raise Refused(400, "unknown field; it might change what is sampled, so it is not ignored", param=name)
        if not harmless(value):
            reason = why.get(name, "not supported with a value that changes what is sampled")
            raise Refused(400, f"{reason} (found {value!r:.80})", param=name)


Model = TypeVar("Model", bound=BaseModel)


def validated(model: type[Model], raw: Any) -> Model:
    """Validate `raw` as a `model`.

    Raises:
        Refused: 400 naming the first field that does not fit.
    """
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        raise misfit(error) from error


def misfit(error: ValidationError, at: str = "") -> Refused:
    """The refusal of a value that does not fit its schema; `at` is the path of the value."""
    first = error.errors(include_url=False, include_context=False)[0]
    path = ".".join([part for part in (at, *map(str, first["loc"])) if part])
    return Refused(400, str(first["msg"]), param=path or None)
