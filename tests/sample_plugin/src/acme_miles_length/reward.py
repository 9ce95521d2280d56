"""The reward itself; imported only where it is computed."""

from miles_core.kinds.reward import Scored


def near_length(scored: Scored, *, target_chars: int) -> float:
    """1.0 at the target length, less with every character away from it."""
    return 1.0 / (1.0 + abs(len(scored.response) - target_chars))
