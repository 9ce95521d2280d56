"""Reports the first failure of each kind at once, and ends a run in which every attempt times out.

Otherwise a reward or an environment that always hangs would cost a time-out for every attempt of a whole step before
the user hears of it.
"""

from __future__ import annotations

from collections.abc import Callable

from miles_core.errors import RunError
from miles_core.types import Boundary, Trajectory

FEWEST = 4
"""Attempts that must have timed out before the run is given up, however small its waves are."""


class FirstFailures:
    """Observes every attempt of a run.

    Args:
        say: Called with the message of the first failure at each boundary.
        wave: How many attempts run at once when the run begins.
    """

    def __init__(self, say: Callable[[str], None], *, wave: int) -> None:
        self._say = say
        self._enough = max(wave, FEWEST)
        self._seen: set[Boundary] = set()
        self._timed_out = 0
        self._hopeless = True

    def observe(self, attempt: Trajectory) -> None:
        """Take note of how an attempt ended.

        Raises:
            RunError: every attempt so far timed out, and there were as many as a whole first wave.
        """
        failure = attempt.failure
        if failure is None or not failure.timed_out:
            self._hopeless = False
        if failure is None:
            return
        message = failure.message.splitlines()[0]
        if failure.boundary not in self._seen:
            self._seen.add(failure.boundary)
            self._say(f"first failure at the {failure.boundary} (prompt {attempt.prompt_id!r}): {message}")
        self._timed_out += failure.timed_out
        if self._hopeless and self._timed_out >= self._enough:
            raise RunError(
                f"each of the first {self._timed_out} attempts timed out",
                expected="at least one that ends in time",
                found=message,
                where=f"the {failure.boundary}",
                do="fix what hangs, or raise rollout.trajectory_timeout_s or rollout.reward_timeout_s",
            )
