"""In which order prompts are drawn: shuffled anew each epoch by (seed, epoch), resumable to the exact next prompt.

The order of an epoch is a pure function of (seed, epoch, number of prompts), so that the whole state is two integers.
Only guarantees of the standard library are used (`random.Random(str).random()` is stable across Python versions,
`shuffle` is not).
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from miles_core.errors import CheckpointError, DataError
from miles_core.types import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """One prompt as drawn; (epoch, prompt.id) occurs once in a run."""

    prompt: Prompt
    epoch: int
    number: int
    """How many prompts were drawn before this one in the whole run."""


class PromptStream:
    """Endless draws from a fixed set of prompts.

    Example:
        stream = PromptStream(prompts, seed=7)
        draws = stream.take(8)
        saved = stream.state()          # JSON-compatible
        stream.restore(saved)           # the next `take` continues there
    """

    def __init__(self, prompts: Sequence[Prompt], *, seed: int) -> None:
        if not len(prompts):
            raise DataError("no prompts to draw from", expected="at least one prompt", found="an empty dataset")
        self._prompts = prompts
        self._seed = seed
        self._digest = _digest(prompts)
        self._drawn = 0
        self._order_epoch = -1
        self._order: list[int] = []
        self._by_id: dict[str, Prompt] | None = None

    def __len__(self) -> int:
        return len(self._prompts)

    @property
    def drawn(self) -> int:
        """Prompts handed out so far."""
        return self._drawn

    @property
    def epoch(self) -> int:
        """Epoch of the next draw, from 0."""
        return self._drawn // len(self._prompts)

    def take(self, count: int) -> list[Draw]:
        """Draw the next `count` prompts, going on into as many epochs as that needs."""
        draws = [self.draw(number) for number in range(self._drawn, self._drawn + count)]
        self._drawn += count
        return draws

    def prompt(self, prompt_id: str) -> Prompt:
        """The prompt of that id.

        Raises:
            KeyError: there is none.
        """
        if self._by_id is None:
            self._by_id = {prompt.id: prompt for prompt in self._prompts}
        return self._by_id[prompt_id]

    def draw(self, number: int) -> Draw:
        """The draw of that number, past or future; does not advance the stream."""
        epoch, position = divmod(number, len(self._prompts))
        return Draw(prompt=self._prompts[self._epoch_order(epoch)[position]], epoch=epoch, number=number)

    def state(self) -> dict[str, Any]:
        """Where the stream stands, JSON-compatible; `digest` and `size` say of which data."""
        return {"drawn": self._drawn, "seed": self._seed, "size": len(self._prompts), "digest": self._digest}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue at a saved state.

        Raises:
            CheckpointError: it was saved over other prompts or with another seed, so its position means nothing here.
        """
        own = self.state()
        for name in ("seed", "size", "digest"):
            if state.get(name) != own[name]:
                raise CheckpointError(
                    "the saved data position belongs to other data",
                    expected=f"{name} {own[name]!r}",
                    found=f"{name} {state.get(name)!r}",
                    where="state of the prompt stream",
                    do="resume with the dataset and seed of the saved run, or start a new run",
                )
        drawn = state.get("drawn")
        if not isinstance(drawn, int) or drawn < 0:
            raise CheckpointError("the saved data position is unusable", expected="a count", found=repr(drawn))
        self._drawn = drawn

    def _epoch_order(self, epoch: int) -> list[int]:
        if epoch != self._order_epoch:
            source = random.Random(f"miles prompts {self._seed} {epoch}")
            keys = [source.random() for _ in range(len(self._prompts))]
            self._order = sorted(range(len(keys)), key=keys.__getitem__)
            self._order_epoch = epoch
        return self._order


def _digest(prompts: Sequence[Prompt]) -> str:
    """Fingerprint of the ids in order: equal exactly when a position means the same prompt."""
    digest = hashlib.blake2b(digest_size=16)
    for prompt in prompts:
        encoded = prompt.id.encode()
        digest.update(len(encoded).to_bytes(8, "big") + encoded)
    return digest.hexdigest()
