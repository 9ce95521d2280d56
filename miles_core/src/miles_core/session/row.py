"""The token row of one session: ids, log-probs and version spans in compact arrays, changed at the tail only."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np

from miles_core.session.generation import Output
from miles_core.types import Bool, Float32, Int32, TokenSpan


class TokenIds(Sequence[int]):
    """Token ids that nobody can change, in four bytes each; equal to any sequence of the same ids.

    Args:
        ids: The caller must not use it any more.
    """

    __slots__ = ("_ids",)

    def __init__(self, ids: array[int]) -> None:
        self._ids = ids

    def __len__(self) -> int:
        return len(self._ids)

    def __iter__(self) -> Iterator[int]:
        return iter(self._ids)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> TokenIds: ...
    def __getitem__(self, index: int | slice) -> int | TokenIds:
        return TokenIds(self._ids[index]) if isinstance(index, slice) else self._ids[index]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, TokenIds):
            return self._ids == other._ids
        return isinstance(other, Sequence) and len(self) == len(other) and self._ids.tolist() == list(other)

    def __hash__(self) -> int:
        return hash(self._ids.tobytes())

    def __repr__(self) -> str:
        return f"TokenIds({self._ids.tolist()})"

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        return np.array(self._ids, dtype=np.int32 if dtype is None else dtype)

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenIds, (self._ids,)


@dataclass(frozen=True, slots=True)
class Tail:
    """Tokens that were cut off the end of a row, with all that is needed to put them back."""

    ids: array[int]
    logprobs: array[float]
    spans: tuple[TokenSpan, ...]


class TokenRow:
    """The tokens of a session: int32 ids, float32 log-probs (NaN where not sampled), and the weight version of each
    stretch of sampled tokens. Eight bytes a token, and a span for each turn and version."""

    __slots__ = ("_ids", "_logprobs", "_spans")

    def __init__(self) -> None:
        self._ids = array("i")
        self._logprobs = array("f")
        self._spans: list[TokenSpan] = []

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def spans(self) -> tuple[TokenSpan, ...]:
        """The stretches of sampled tokens, in order. Neighbours of the same version are one span."""
        return tuple(self._spans)

    def ids(self, end: int | None = None) -> list[int]:
        """Ids of positions below `end`."""
        return self._ids[:end].tolist()

    def slice(self, start: int, end: int) -> array[int]:
        """A copy of the ids of positions [start, end)."""
        return self._ids[start:end]

    def logprobs(self, start: int, end: int) -> array[float]:
        """A copy of the log-probs of positions [start, end); NaN where not sampled."""
        return self._logprobs[start:end]

    def append_given(self, ids: Sequence[int]) -> None:
        """Append tokens that were not sampled: prompt, tool results, openers, separators."""
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

    def append_output(self, output: Output) -> None:
        """Append a generated turn."""
        at = 0
        for count, version in output.stretches:
            self.append_sampled(output.ids[at : at + count], output.logprobs[at : at + count], version)
            at += count

    def cut(self, length: int) -> Tail:
        """Shorten the row to `length` tokens and return what was cut."""
        if length >= len(self._ids):
            return Tail(array("i"), array("f"), ())
        tail = Tail(
            self._ids[length:],
            self._logprobs[length:],
            self._spans_from(length),
        )
        del self._ids[length:]
        del self._logprobs[length:]
        # From the end: a row of many turns has many spans, and with some families every turn cuts off one token.
        while self._spans and self._spans[-1].start >= length:
            self._spans.pop()
        if self._spans:
            self._spans[-1] = _clip(self._spans[-1], high=length)
        return tail

    def _spans_from(self, start: int) -> tuple[TokenSpan, ...]:
        found: list[TokenSpan] = []
        for span in reversed(self._spans):
            if span.end <= start:
                break
            found.append(_clip(span, low=start))
        return tuple(reversed(found))

    def tail(self, *, shift: int) -> Tail:
        """The whole row as something that can be pasted onto a row of `shift` tokens."""
        spans = tuple(
            TokenSpan(start=span.start + shift, end=span.end + shift, weight_version=span.weight_version)
            for span in self._spans
        )
        return Tail(self._ids, self._logprobs, spans)

    def paste(self, tail: Tail) -> None:
        """Put back what `cut` returned. The row must be as long as it was after that `cut`."""
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
