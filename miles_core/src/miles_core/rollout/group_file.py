"""Saves finished groups in a checkpoint, so that a resumed run trains what was waiting. Exact, and without pickles.

groups.json     everything except arrays, in order
groups.npz      the arrays of trajectory i under ``i/<field>``
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from miles_core.errors import damaged_checkpoint
from miles_core.kinds.data_buffer import FinishedGroup
from miles_core.types import Boundary, Failure, Group, Message, Prompt, Status, TokenSpan, ToolCall, Trajectory

ARRAYS = ("token_ids", "sampled", "loss_mask", "logprobs")
PLAIN = ("prompt_id", "session_id", "temperature", "reward")
SPECIAL = frozenset({"spans", "status", "failure", "routes", "messages", "metadata", "branches"})


def write(folder: Path, groups: Sequence[FinishedGroup]) -> None:
    """Write `groups` in order."""
    folder.mkdir(parents=True, exist_ok=True)
    arrays: dict[str, Any] = {}
    records = []
    for finished in groups:
        rows = [_put(row, arrays) for row in finished.group.trajectories]
        records.append({"number": finished.number, "prompt": finished.group.prompt.id, "trajectories": rows})
    (folder / "groups.json").write_text(json.dumps(records))
    np.savez(folder / "groups.npz", **arrays)


def read(folder: Path, prompt_of: Callable[[str], Prompt]) -> list[FinishedGroup]:
    """The groups that `write` wrote.

    Args:
        prompt_of: Returns the prompt with an id. Prompts are not written, since the data has them.

    Raises:
        CheckpointError: the files cannot be read.
    """
    try:
        records = json.loads((folder / "groups.json").read_text())
        groups = []
        with np.load(folder / "groups.npz", allow_pickle=False) as arrays:
            for record in records:
                prompt = prompt_of(record["prompt"])
                rows = tuple(_trajectory(row, arrays) for row in record["trajectories"])
                groups.append(FinishedGroup(number=record["number"], group=Group(prompt=prompt, trajectories=rows)))
    except (OSError, ValueError, KeyError, TypeError) as error:
        found = f"{type(error).__name__}: {error}"
        raise damaged_checkpoint(folder, expected="groups that can be read", found=found) from error
    return groups


def _put(row: Trajectory, arrays: dict[str, Any]) -> dict[str, Any]:
    """Add the arrays of a row and of its branches to `arrays`. Returns a record of the rest."""
    index = len(arrays)
    arrays |= {f"{index}/{name}": getattr(row, name) for name in ARRAYS}
    if row.routes is not None:
        arrays[f"{index}/routes"] = row.routes
    return {"index": index, **_plain(row), "branches": [_put(branch, arrays) for branch in row.branches]}


def _plain(row: Trajectory) -> dict[str, Any]:
    return {
        **{name: getattr(row, name) for name in PLAIN},
        "spans": [[span.start, span.end, span.weight_version] for span in row.spans],
        "status": row.status.value,
        "failure": None if row.failure is None else asdict(row.failure),
        "messages": [asdict(message) for message in row.messages],
        "metadata": dict(row.metadata),
    }


def _trajectory(record: Mapping[str, Any], arrays: Mapping[str, Any]) -> Trajectory:
    index, failure = record["index"], record["failure"]
    return Trajectory(
        **{name: record[name] for name in PLAIN},
        **{name: arrays[f"{index}/{name}"] for name in ARRAYS},
        spans=tuple(TokenSpan(start=start, end=end, weight_version=version) for start, end, version in record["spans"]),
        status=Status(record["status"]),
        failure=None if failure is None else Failure(**{**failure, "boundary": Boundary(failure["boundary"])}),
        routes=arrays.get(f"{index}/routes"),
        messages=tuple(_message(message) for message in record["messages"]),
        metadata=record["metadata"],
        branches=tuple(_trajectory(branch, arrays) for branch in record["branches"]),
    )


def _message(record: Mapping[str, Any]) -> Message:
    return Message(**{**record, "tool_calls": tuple(ToolCall(**call) for call in record["tool_calls"])})
