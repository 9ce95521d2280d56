"""Sessions as JSON: the turns for people and agent programs, the trajectories for trainers."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from miles_core.session.assembly import AnySession
from miles_core.session.linear import Turn
from miles_core.session.serving.store import Entry
from miles_core.session.tree import Node, TreeSession
from miles_core.types import Message, Trajectory


def record(entry: Entry) -> dict[str, Any]:
    """What a GET of a session returns. It has no token ids, since agents read it too."""
    session = entry.session
    return {
        "session_id": entry.key,
        "created": entry.created,
        "history": "branching" if isinstance(session, TreeSession) else "linear",
        "in_flight": session.in_flight,
        "sampling": {
            "temperature": session.params.temperature,
            "top_p": session.params.top_p,
            "top_k": session.params.top_k,
            "min_p": session.params.min_p,
            "max_tokens": session.params.max_tokens,
        },
        "overridden": dict(entry.overridden),
        "records": _turns(session),
        "leaves": [node.number for node in session.leaves] if isinstance(session, TreeSession) else None,
        "bytes": session.size_bytes,
    }


def _turns(session: AnySession) -> list[dict[str, Any]]:
    found = []
    turns: Sequence[Turn | Node] = session.turns
    for number, turn in enumerate(turns):
        parent = turn.parent if isinstance(turn, Node) else number - 1
        messages = session.messages_to(number)
        before = len(session.messages_to(parent)) if parent >= 0 else 0
        found.append(
            {
                "turn": number,
                "parent": parent if parent >= 0 else None,
                "messages": [wire_message(message) for message in messages[before:]],
                "prompt_tokens": turn.row_end - turn.sampled,
                "kept_tokens": turn.attached,
                "sampled_tokens": turn.sampled,
                "finish_reason": turn.finish_reason.value,
                "temperature": turn.temperature,
            }
        )
    return found


def wire_message(message: Message) -> dict[str, Any]:
    """A message in the OpenAI shape."""
    found: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning:
        found["reasoning_content"] = message.reasoning
    if message.tool_calls:
        found["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    for name in ("tool_call_id", "name"):
        if (value := getattr(message, name)) is not None:
            found[name] = value
    return found


def sample(trajectory: Trajectory) -> dict[str, Any]:
    """A trajectory for a trainer elsewhere. Arrays are base64 of little-endian bytes, with dtype and shape."""
    failure = trajectory.failure
    return {
        "prompt_id": trajectory.prompt_id,
        "session_id": trajectory.session_id,
        "status": trajectory.status.value,
        "failure": None if failure is None else {"boundary": failure.boundary.value, "message": failure.message},
        "reward": trajectory.reward,
        "temperature": trajectory.temperature,
        "token_ids": packed(trajectory.token_ids.astype("<i4")),
        "sampled": packed(trajectory.sampled.astype("u1")),
        "loss_mask": packed(trajectory.loss_mask.astype("u1")),
        "logprobs": packed(trajectory.logprobs.astype("<f4")),
        "spans": [[span.start, span.end, span.weight_version] for span in trajectory.spans],
        "routes": None if trajectory.routes is None else packed(trajectory.routes),
        "messages": [wire_message(message) for message in trajectory.messages],
        "metadata": dict(trajectory.metadata),
    }


def packed(values: npt.NDArray[Any]) -> dict[str, Any]:
    data = np.ascontiguousarray(values)
    little = data.astype(data.dtype.newbyteorder("<"))
    return {
        "dtype": little.dtype.str,
        "shape": list(little.shape),
        "data": base64.b64encode(little.tobytes()).decode(),
    }


def unpacked(raw: Mapping[str, Any]) -> npt.NDArray[Any]:
    """The array that `packed` wrote."""
    return np.frombuffer(base64.b64decode(raw["data"]), dtype=raw["dtype"]).reshape(raw["shape"])
