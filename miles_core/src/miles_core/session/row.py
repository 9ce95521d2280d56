"""The token row of one session: ids, log-probs and version spans in compact arrays, changed at the tail only."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from miles_core.types import Bool, Float32, Int32, TokenSpan


@dataclass(frozen=True, slots=True)
class Tail:
    """Tokens cut from the end of a row, so that a rollback can put them back."""

    ids: array[int]
    logprobs: array[float]
    spans: tuple[TokenSpan, ...]


class TokenRow:
    """Eight bytes a token: int32 ids and float32 log-probs (NaN where not sampled), and a span per turn and version."""

    __slots__ = ("_ids", "_logprobs", "_spans")

    def __init__(self) -> None:
        self._ids = array("i")
        self._logprobs = array("f")
        self._spans: list[TokenSpan] = []

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def spans(self) -> tuple[TokenSpan, ...]:
        """Sampled stretches in order; neighbours of one version are one span."""
        return tuple(self._spans)

    def ids(self, end: int | None = None) -> list[int]:
        """Ids of positions below `end`."""
        return self._ids[:end].tolist()

    def append_given(self, ids: Sequence[int]) -> None:
        """Append tokens nobody sampled: prompt, tool results, openers, separators."""
        self._ids.extend(ids)
        self._logprobs.extend([float("nan")] * len(ids))

    def append_sampled(self, ids: Sequence[int], logprobs: Sequence[float], version: int) -> None:
        """Append tokens that weight version `version` sampled, with their log-probs."""
        if not ids:
            return
        start = len(self._ids)
        self._ids.extend(ids)
        self._logprobs.extend(logprobs)
        last = self._spans[-1] if self._spans else None
        if last is not None and last.end == start and last.weight_version == version:
            start = self._spans.pop().start
        self._spans.append(TokenSpan(start=start, end=len(self._ids), weight_version=version))

    def cut(self, length: int) -> Tail:
        """Shorten the row to `length` tokens and return what was cut."""
        if length >= len(self._ids):
            return Tail(array("i"), array("f"), ())
        tail = Tail(
            self._ids[length:],
            self._logprobs[length:],
            tuple(_clip(span, low=length) for span in self._spans if span.end > length),
        )
        del self._ids[length:]
        del self._logprobs[length:]
        self._spans = [_clip(span, high=length) for span in self._spans if span.start < length]
        return tail

    def paste(self, tail: Tail) -> None:
        """Undo the `cut` that returned `tail`; the row must have the length it had then."""
        self._ids.extend(tail.ids)
        self._logprobs.extend(tail.logprobs)
        for span in tail.spans:
            last = self._spans[-1] if self._spans else None
            if last is not None and last.end == span.start and last.weight_version == span.weight_version:
                self._spans.pop()
                span = TokenSpan(start=last.start, end=span.end, weight_version=span.weight_version)
            self._spans.append(span)

    def arrays(self) -> tuple[Int32, Bool, Float32]:
        """Copies: ids int32 [T], sampled bool [T], log-probs float32 [T] (NaN where not sampled)."""
        ids = np.array(self._ids, dtype=np.int32)
        sampled = np.zeros(len(ids), dtype=np.bool_)
        for span in self._spans:
            sampled[span.start : span.end] = True
        return ids, sampled, np.array(self._logprobs, dtype=np.float32)


def _clip(span: TokenSpan, *, low: int = 0, high: int | None = None) -> TokenSpan:
    end = span.end if high is None else min(span.end, high)
    return TokenSpan(start=max(span.start, low), end=end, weight_version=span.weight_version)
