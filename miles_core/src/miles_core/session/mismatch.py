"""Compares a session's row with the conversation as the checkpoint's template renders it; never changes any ids.

Differences in what the assistant wrote are expected: the model sampled other tokens than the template would have
written. Any other kind means that the family does not write what the checkpoint's template writes.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from miles_core.errors import MilesError
from miles_core.kinds.tito_family import TitoFamily
from miles_core.session.seam import join
from miles_core.tokenizer import ChatTokenizer
from miles_core.types import Bool, FinishReason, Message, Tool

Kind = Literal["special_token_count", "special_token_type", "non_assistant_text", "assistant_text"]
SHOWN, EXCERPT = 5, 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    kind: Kind
    segment: int
    """Number of the stretch between special tokens; -1 where their numbers differ."""
    expected: str
    """Of the canonical rendering."""
    found: str
    """Of the session's row."""


def compare(
    tokenizer: ChatTokenizer, row: Sequence[int], sampled: Sequence[bool] | Bool, canonical: Sequence[int]
) -> list[Mismatch]:
    """Compare two rows stretch by stretch, where stretches end at special tokens.

    Args:
        sampled: For each token of `row`; a stretch with a sampled token is the assistant's.
    """
    ours, theirs = _stretches(tokenizer, row), _stretches(tokenizer, canonical)
    if len(ours) != len(theirs):
        return [
            Mismatch(
                kind="special_token_count",
                segment=-1,
                expected=f"{len(theirs) - 1} special tokens",
                found=f"{len(ours) - 1}",
            )
        ]
    found = []
    for number, ((start, end), (first, last)) in enumerate(zip(ours, theirs, strict=True)):
        opener, expected_opener = row[start - 1 : start], canonical[first - 1 : first]
        if number and list(opener) != list(expected_opener):
            spelled = (tokenizer.decode(expected_opener), tokenizer.decode(opener))
            found.append(_mismatch("special_token_type", number, *spelled))
        text, expected = tokenizer.decode(row[start:end]), tokenizer.decode(canonical[first:last])
        if text != expected:
            kind: Kind = "assistant_text" if any(sampled[start:end]) else "non_assistant_text"
            found.append(_mismatch(kind, number, expected, text))
    return found


def diagnose(
    family: TitoFamily,
    row: array[int],
    sampled: Bool,
    messages: Sequence[Message],
    tools: Sequence[Tool],
    *,
    finish_reason: FinishReason,
    last_sampled: int,
) -> dict[str, Any]:
    """The diagnosis of a trajectory as metadata: counts by kind, and the first few differences.

    Args:
        finish_reason: Of the last turn. One that was cut off has no canonical form, so its prompt is compared.
        last_sampled: Tokens the last turn sampled.
    """
    try:
        if finish_reason is FinishReason.STOP:
            seam = join(family, row, family.append(messages, (), tools), where="canonical rendering")
            ours = row[: seam.kept] + array("i", seam.fresh)
            canonical = family.render(messages, tools)
        else:
            ours = row[: len(row) - last_sampled]
            canonical = family.render(messages[:-1], tools)
        mask = [*sampled[: len(ours)].tolist(), *[False] * (len(ours) - len(sampled))]
        found = compare(family.tokenizer, ours, mask, canonical)
    except Exception as error:  # noqa: BLE001 - a family is foreign code, and a diagnosis must not cost the trajectory
        return {"error": error.message if isinstance(error, MilesError) else f"{type(error).__name__}: {error}"}
    return {
        "kinds": dict(Counter(each.kind for each in found)),
        "first": [
            {"kind": each.kind, "segment": each.segment, "expected": each.expected, "found": each.found}
            for each in found[:SHOWN]
        ],
    }


def _stretches(tokenizer: ChatTokenizer, row: Sequence[int]) -> list[tuple[int, int]]:
    """[start, end) of the tokens before, between and after special tokens."""
    special = tokenizer.special_ids
    at = [index for index, token in enumerate(row) if token in special]
    return list(zip([0, *(index + 1 for index in at)], [*at, len(row)], strict=True))


def _mismatch(kind: Kind, segment: int, expected: str, found: str) -> Mismatch:
    same = next((i for i, (a, b) in enumerate(zip(expected, found, strict=False)) if a != b), 0)
    near = slice(max(0, same - 20), same + EXCERPT)
    return Mismatch(kind=kind, segment=segment, expected=expected[near], found=found[near])
