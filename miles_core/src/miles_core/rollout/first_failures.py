"""Reports the first failure of each kind at once, and ends a run in which nothing but failures comes.

Otherwise a reward or an environment that always raises or hangs would cost waves of generation, and a time-out for
every attempt, before the user hears of it.
"""

from __future__ import annotations

from collections.abc import Callable

from miles_core.errors import RunError
from miles_core.types import Boundary, Trajectory

FEWEST_TIMED_OUT = 4
"""Attempts that must have timed out before the run is given up, however small its waves are."""
FEWEST_FAILED = 32
"""The same for attempts that failed in any way. These cost less, and one that fails nine times of ten is let go on."""


class FirstFailures:
    """Observes every attempt of a run.

    Args:
        say: Called with the message of the first failure at each boundary.
        wave: How many attempts run at once when the run begins.
    """

    def __init__(self, say: Callable[[str], None], *, wave: int) -> None:
        self._say = say
        self._enough_timed_out = max(wave, FEWEST_TIMED_OUT)
        self._enough_failed = max(wave, FEWEST_FAILED)
        self._seen: set[Boundary] = set()
        self._attempts = 0
        self._all_timed_out = True
        self._all_failed = True

    def observe(self, attempt: Trajectory) -> None:
        """Take note of how an attempt ended.

        Raises:
            RunError: every attempt so far timed out, and there were as many as a whole first wave; or every one failed,
                none of them for the engine, which may come back.
        """
        failure = attempt.failure
        self._attempts += 1
        self._all_timed_out = self._all_timed_out and failure is not None and failure.timed_out
        self._all_failed = self._all_failed and failure is not None and failure.boundary is not Boundary.ENGINE
        if failure is None:
            return
        message = failure.message.splitlines()[0]
        if failure.boundary not in self._seen:
            self._seen.add(failure.boundary)
            self._say(f"first failure at the {failure.boundary} (prompt {attempt.prompt_id!r}): {message}")
        self._give_up(message, failure.boundary)

    def _give_up(self, message: str, boundary: Boundary) -> None:
        """Raises once: what is in flight fails as well, and would only repeat it."""
        if self._all_timed_out and self._attempts == self._enough_timed_out:
            raise RunError(
                f"each of the first {self._attempts} attempts timed out",
                expected="at least one that ends in time",
                found=message,
                where=f"the {boundary}",
                do="fix what hangs, or raise rollout.trajectory_timeout_s or rollout.reward_timeout_s",
            )
        if self._all_failed and self._attempts == self._enough_failed:
            raise RunError(
                f"each of the first {self._attempts} attempts failed",
                expected="at least one that can be trained",
                found=message,
                where=f"the {boundary}",
                do="fix what fails; where the model's answer is to blame, return a reward of 0 instead of raising",
            )
