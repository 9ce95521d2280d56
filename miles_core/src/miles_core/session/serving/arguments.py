"""Tool-call arguments in protocols that carry objects instead of text.

The arguments of a call are the text that the model sampled. Some protocols show the agent an object, and get the object
back. `exact` finds the text that it was made from. Only an object that the agent changed is spelled again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from miles_core.types import ToolCall

RAW = "_raw"
"""Holds the text of arguments that are no JSON object."""


def as_object(text: str) -> dict[str, Any]:
    """The object that `text` spells. Text that spells no object is kept under the key `RAW`."""
    if not text.strip():
        return {}
    try:
        found = json.loads(text, parse_constant=_refuse, parse_float=_finite)
        # Half a surrogate pair is JSON, but no text that an answer could carry.
        json.dumps(found, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return {RAW: text}
    return found if isinstance(found, dict) else {RAW: text}


def exact(call_id: str, value: Mapping[str, Any], calls: Mapping[str, Sequence[ToolCall]]) -> str:
    """The text of a replayed call's arguments.

    Args:
        calls: The calls the session's model made, by id.
    """
    spelled = json.dumps(value, ensure_ascii=False)
    for call in calls.get(call_id, ()):
        # Compared as text, since Python finds True equal to 1.
        if json.dumps(as_object(call.arguments), ensure_ascii=False) == spelled:
            return call.arguments
    return spelled


def _finite(number: str) -> float:
    found = float(number)
    if not math.isfinite(found):
        raise ValueError(f"{number} is beyond any float")
    return found


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
