"""Await what an actor does, and turn Ray's errors back into ours."""

from __future__ import annotations

from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from miles_core.errors import MilesError


async def fetch(
    ref: Any, *, who: str, died: type[MilesError], doing: str, failed: type[MilesError] | None = None
) -> Any:
    """Await an actor call.

    Args:
        who: The actor, as it is called in messages: ``trainer rank 1``.
        died: What to raise when its process is gone.
        failed: What to raise when the call itself failed with an error that is not ours; None is `died`.
        doing: What it was asked to do.

    Raises:
        MilesError: the one the actor raised, itself, with the remote traceback as a note; or `died`.
    """
    try:
        return await ref
    except RayTaskError as error:
        cause = error.cause
        if isinstance(cause, MilesError):
            cause.add_note(str(error))
            raise cause from None
        raise (failed or died)(
            f"{doing} failed: {type(cause).__name__}: {cause}", found=_last_line(error), where=who
        ) from error
    except RayError as error:  # the actor's process, its node, or the object that it answered with is gone
        raise died(
            f"{who} died while it was to {doing}",
            found=_last_line(error),
            where=who,
            do=f"look at its log in {log_directory()}; a process that the system killed ran out of memory",
        ) from error


def log_directory() -> str:
    """Where Ray keeps the workers' output on this host."""
    node = ray._private.worker._global_node
    return "Ray's session directory" if node is None else str(node.get_logs_dir_path())


def _last_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
