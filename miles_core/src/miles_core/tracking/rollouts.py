"""rollouts/step_000012.parquet: one row per trajectory, written for people and tools that look back.

Token columns are lists of the trajectory's length. `logprobs` is null where a token was not sampled, `old_logprobs`
where it was not trained. Failed trajectories are there too, with what failed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from miles_core.errors import DataError
from miles_core.tracking.run_dir import write_error
from miles_core.types import Bool, Float32, Group, Int32, Int64, TrainBatch, Trajectory

SCHEMA = pa.schema(
    [
        ("step", pa.int64()),
        ("group", pa.int64()),
        ("sample", pa.int64()),
        ("prompt_id", pa.string()),
        ("session_id", pa.string()),
        ("status", pa.string()),
        ("failure", pa.string()),
        ("reward", pa.float64()),
        ("temperature", pa.float64()),
        ("text", pa.string()),
        ("messages", pa.string()),
        ("metadata", pa.string()),
        ("token_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.bool_())),
        ("logprobs", pa.list_(pa.float32())),
        ("old_logprobs", pa.list_(pa.float32())),
        ("versions", pa.list_(pa.int64())),
    ]
)
_NAME = re.compile(r"^step_(\d{6,})\.parquet$")


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRow:
    """One trajectory as it was written. T tokens."""

    step: int
    group: int
    sample: int
    """Place within the file; what ``miles inspect --sample`` takes."""
    prompt_id: str
    session_id: str
    status: str
    failure: str | None
    """``boundary: message``, or None."""
    reward: float | None
    temperature: float
    text: str
    """What the assistant said, all turns joined."""
    messages: tuple[Mapping[str, Any], ...]
    metadata: Mapping[str, Any]
    token_ids: Int32
    loss_mask: Bool
    logprobs: Float32
    """[T], NaN where not sampled"""
    old_logprobs: Float32
    """[T] trainer's, NaN where not trained or not known"""
    versions: Int64
    """[T], -1 where not sampled"""

    @property
    def log_ratio(self) -> Float32:
        """[T] trainer minus rollout log-prob; NaN where either is unknown."""
        return self.old_logprobs - self.logprobs


def write(folder: Path, step: int, groups: Sequence[Group], batch: TrainBatch) -> Path:
    """Write the step's trajectories with the trainer's log-probs beside the engine's.

    Raises:
        RunError: the file could not be written; no half file is left.
    """
    table = _table(step, list(_with_old(groups, batch)))
    target = folder / f"step_{step:06d}.parquet"
    partial = target.with_name(target.name + ".partial")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        pq.write_table(table, partial, compression="zstd")
        partial.rename(target)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise write_error(target, error) from error
    return target


def steps(folder: Path) -> list[int]:
    """Steps whose rollouts are in `folder`, ascending."""
    names = folder.iterdir() if folder.is_dir() else ()
    return sorted(int(match[1]) for path in names if (match := _NAME.match(path.name)))


def read(folder: Path, step: int) -> list[RolloutRow]:
    """The trajectories of one step.

    Raises:
        DataError: there is no file of that step, and which there are; or it is cut off, or of another schema.
    """
    file = folder / f"step_{step:06d}.parquet"
    if not file.exists():
        there = steps(folder)
        raise DataError(
            f"no rollouts of step {step}",
            expected=f"one of the steps {_ranges(there)}" if there else "a run that wrote rollouts",
            where=str(folder),
            do="choose another step; tracking.rollouts_every_steps says which are written",
        )
    try:
        table = pq.read_table(file)
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(file, str(error).splitlines()[0]) from error
    if missing := [name for name in SCHEMA.names if name not in table.column_names]:
        raise _unreadable(file, f"no column {', '.join(missing)}")
    return [_from_row(row) for row in table.to_pylist()]


def _unreadable(file: Path, found: str) -> DataError:
    return DataError(
        "the rollouts of a step cannot be read",
        expected="a whole parquet file with the columns of this version",
        found=found,
        where=str(file),
        do="restore the file, or move it away: the other steps do not need it",
    )


def _with_old(groups: Sequence[Group], batch: TrainBatch) -> list[tuple[int, Trajectory, Float32 | None]]:
    """Each trajectory with its group's number and, where it is in the batch, its part of the old log-probs."""
    offsets = batch.offsets
    found: list[tuple[int, Trajectory, Float32 | None]] = []
    place = 0
    for number, group in enumerate(groups):
        trained = {id(trajectory) for trajectory in group.trainable}
        rows = [(attempt, row) for attempt in group.trajectories for row in attempt.rows]
        for attempt, row in rows:
            old = None
            if id(attempt) in trained:
                if batch.old_logprobs is not None:
                    old = batch.old_logprobs[offsets[place] : offsets[place + 1]]
                place += 1
            found.append((number, row if row.reward == attempt.reward else row.with_reward(attempt.reward), old))
    return found


def _table(step: int, found: Sequence[tuple[int, Trajectory, Float32 | None]]) -> pa.Table:
    """All rows at once. Token columns come from whole arrays: token by token, a large step took half a minute."""
    rows = [trajectory for _, trajectory, _ in found]
    old = [np.full(row.length, np.nan, dtype=np.float32) if known is None else known for _, row, known in found]
    plain = [_row(step, group, sample, row) for sample, (group, row, _) in enumerate(found)]
    columns: dict[str, Any] = {name: [row[name] for row in plain] for name in (plain[0] if plain else ())}
    offsets = np.cumsum([0, *(row.length for row in rows)])

    def tokens(name: str, arrays: Sequence[Any], known: Sequence[Bool] | None = None) -> pa.Array:
        kind = SCHEMA.field(name).type
        nulls = None if known is None else ~np.concatenate(known)
        values = pa.array(np.concatenate(arrays), type=kind.value_type, mask=nulls)
        return pa.ListArray.from_arrays(pa.array(offsets, type=pa.int32()), values, type=kind)

    if rows:
        columns |= {
            "token_ids": tokens("token_ids", [row.token_ids for row in rows]),
            "loss_mask": tokens("loss_mask", [row.loss_mask for row in rows]),
            "logprobs": tokens("logprobs", [row.logprobs for row in rows], [np.isfinite(row.logprobs) for row in rows]),
            "old_logprobs": tokens(
                "old_logprobs", old, [row.loss_mask & np.isfinite(known) for row, known in zip(rows, old, strict=True)]
            ),
            "versions": tokens("versions", [_versions(row) for row in rows]),
        }
    return pa.Table.from_pydict({name: columns.get(name, []) for name in SCHEMA.names}, schema=SCHEMA)


def _versions(trajectory: Trajectory) -> Int64:
    """[T], -1 where not sampled"""
    versions = np.full(trajectory.length, -1, dtype=np.int64)
    for span in trajectory.spans:
        versions[span.start : span.end] = span.weight_version
    return versions


def _row(step: int, group: int, sample: int, trajectory: Trajectory) -> dict[str, Any]:
    """The columns that hold one value each."""
    failure = trajectory.failure
    said = [message.content for message in trajectory.messages if message.role == "assistant"]
    return {
        "step": step,
        "group": group,
        "sample": sample,
        "prompt_id": trajectory.prompt_id,
        "session_id": trajectory.session_id,
        "status": trajectory.status.value,
        "failure": None if failure is None else f"{failure.boundary}: {failure.message}",
        "reward": trajectory.reward,
        "temperature": trajectory.temperature,
        "text": "\n\n".join(said),
        "messages": json.dumps([asdict(message) for message in trajectory.messages], ensure_ascii=False),
        "metadata": json.dumps(dict(trajectory.metadata), ensure_ascii=False, default=repr),
    }


def _from_row(row: Mapping[str, Any]) -> RolloutRow:
    def floats(name: str) -> Float32:
        return np.array([np.nan if value is None else value for value in row[name]], dtype=np.float32)

    return RolloutRow(
        **{name: row[name] for name in ("step", "group", "sample", "prompt_id", "session_id", "status", "failure")},
        reward=row["reward"],
        temperature=row["temperature"],
        text=row["text"],
        messages=tuple(json.loads(row["messages"])),
        metadata=json.loads(row["metadata"]),
        token_ids=np.array(row["token_ids"], dtype=np.int32),
        loss_mask=np.array(row["loss_mask"], dtype=np.bool_),
        logprobs=floats("logprobs"),
        old_logprobs=floats("old_logprobs"),
        versions=np.array(row["versions"], dtype=np.int64),
    )


def _ranges(numbers: Sequence[int]) -> str:
    """``1-4, 6`` of ``[1, 2, 3, 4, 6]``."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1][1:] = [number]
        else:
            parts.append([number])
    return ", ".join("-".join(map(str, part)) for part in parts)
