"""The errors people can catch, and the four parts each message has.

    MilesError
    ├── ConfigError        the run-file does not describe a run (collected; exit code 2)
    ├── PluginError        a capability is missing, broken or breaks its protocol
    ├── DataError          a dataset, prompt or row is unusable
    ├── SessionError       a request does not extend the history the session owns
    │   └── BranchNeeded   … and the family could only go on in a branch of its own
    ├── EngineError        generation or a weight load failed
    │   └── EngineLost     … because the engine is gone; another may go on
    ├── TransportError     a weight version could not be moved completely
    ├── CheckpointError    a checkpoint is absent, half-written or of another run
    ├── ContractError      one of the four contracts is broken
    ├── RewardError        a reward could not be computed
    └── RunError           the run cannot go on (no work, non-finite loss, stall)
        └── TrainerLost    … because a trainer rank is gone; it can go back to its last checkpoint

Every message says what was expected, what was found, where, and what to do.
"""

from __future__ import annotations

from typing import Any


class MilesError(Exception):
    """Base of all errors Miles raises on purpose.

    Args:
        message: One sentence, lower case, no full stop needed.
        expected, found, where, do: The four parts; omitted ones are not printed.
    """

    exit_code = 1

    def __init__(
        self,
        message: str,
        *,
        expected: str | None = None,
        found: str | None = None,
        where: str | None = None,
        do: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.expected = expected
        self.found = found
        self.where = where
        self.do = do

    def __str__(self) -> str:
        parts = (("expected", self.expected), ("found", self.found), ("where", self.where), ("do", self.do))
        return "\n".join([self.message, *(f"  {name + ':':<10}{text}" for name, text in parts if text)])

    def __reduce__(self) -> tuple[Any, ...]:
        # Ray and multiprocessing pickle exceptions by calling cls(*args); keyword-only parts need their own path.
        return _rebuild, (type(self), self.message, self.expected, self.found, self.where, self.do)


def _rebuild(cls: type[MilesError], message: str, *parts: str | None) -> MilesError:
    expected, found, where, do = parts
    return cls(message, expected=expected, found=found, where=where, do=do)


class ConfigError(MilesError):
    """The run-file does not describe a run."""

    exit_code = 2


class PluginError(MilesError):
    """A capability is missing, unusable, or breaks its protocol."""

    exit_code = 2


class DataError(MilesError):
    """A dataset, prompt or row is unusable."""


class SessionError(MilesError):
    """A request does not extend the history that the session owns."""


class BranchNeeded(SessionError):
    """The token family cannot extend the row: the template rewrites earlier turns here. A branching history starts a
    branch, rendered anew; a linear one has to refuse."""


class EngineError(MilesError):
    """Generation or a weight load failed."""


class EngineLost(EngineError):
    """An engine is gone: its process ended, it was closed, or it no longer answers. Another one may go on."""


class TransportError(MilesError):
    """A weight version could not be moved completely."""


class CheckpointError(MilesError):
    """A checkpoint is absent, half-written, or belongs to another run."""


class ContractError(MilesError):
    """One of the four contracts is broken."""


class RewardError(MilesError):
    """A reward could not be computed."""


class RunError(MilesError):
    """The run cannot go on."""


class TrainerLost(RunError):
    """A trainer rank is gone; the run can go back to its last checkpoint."""


def damaged_checkpoint(folder: object, *, expected: str, found: str) -> CheckpointError:
    """The error for a checkpoint, or a part of one in `folder`, that is not what was saved."""
    return CheckpointError(
        "the checkpoint is damaged or half-written",
        expected=expected,
        found=found,
        where=str(folder),
        do="restore what is missing or changed, or resume from an older checkpoint",
    )


def trainer_lost(error: BaseException | None) -> TrainerLost | None:
    """The loss of a trainer rank among an error and its causes, or None."""
    while error is not None and not isinstance(error, TrainerLost):
        error = error.__cause__
    return error
