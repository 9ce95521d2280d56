"""Does a token family hold on a checkpoint's tokenizer? The proof behind `miles tito check` and the conformance kit.

Every property is tried on made-up conversations whose replies are spelled by the family and tokenized as a model may
sample them. A scenario that the family refuses with a reason is `refused`, not a failure: refusing is honest. What a
row may not do is change, lose or double a token in silence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from miles_core.errors import BranchNeeded, MilesError, SessionError
from miles_core.kinds.tito_family import TitoFamily, joined
from miles_core.tito.arguments import shown_members
from miles_core.tito.family import DeclaredFamily
from miles_core.tito.scenarios import SCENARIOS, Scenario, given_and_sampled
from miles_core.types import Message

Verdict = Literal["ok", "refused", "FAILED"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What one property came to on one conversation."""

    property: str
    scenario: str
    verdict: Verdict
    detail: str = ""


class Broken(Exception):
    """A property does not hold; the text says what was expected and found."""


def check(family: TitoFamily, properties: Sequence[str] | None = None) -> Iterator[Finding]:
    """Every property, or those named, on every scenario, in order."""
    scenarios = {name: _sayable(family, scenario) for name, scenario in SCENARIOS.items()}
    for name in PROPERTIES if properties is None else properties:
        prove = PROPERTIES[name]
        for scenario_name, scenario in scenarios.items():
            yield try_one(family, name, prove, scenario_name, scenario)


def try_one(
    family: TitoFamily, name: str, prove: Callable[[TitoFamily, Scenario], None], at: str, scenario: Scenario
) -> Finding:
    try:
        prove(family, scenario)
    except Broken as error:
        return Finding(property=name, scenario=at, verdict="FAILED", detail=str(error))
    except MilesError as error:
        verdict: Verdict = "FAILED" if scenario.plain and not isinstance(error, BranchNeeded) else "refused"
        return Finding(property=name, scenario=at, verdict=verdict, detail=error.message)
    return Finding(property=name, scenario=at, verdict="ok")


# --- properties -------------------------------------------------------------------------------------------------------


def grows_by_appending(family: TitoFamily, scenario: Scenario) -> None:
    """Each turn's prompt begins with the row before it; only a stop token at its end may give way."""
    for before, after, _ in _rows(family, scenario):
        short = len(before) - 1
        kept = after[:short] == before[:short] and (
            after[short : short + 1] == before[short:] or _stops(family, before)
        )
        if not kept:
            raise Broken(_differ(family, before, after, "the row before", "the next prompt"))


def is_the_row_rendered_at_once(family: TitoFamily, scenario: Scenario) -> None:
    """A prompt built turn by turn spells what rendering the whole history spells, control token for control token."""
    for _, row, history in _rows(family, scenario):
        whole = family.render(history, scenario.tools)
        if view(family, row) != view(family, whole):
            raise Broken(_differ(family, whole, row, "rendered at once", "built turn by turn"))


def reads_what_it_writes(family: TitoFamily, scenario: Scenario) -> None:
    """`parse` returns the message that `spell` wrote: content, reasoning, calls with equal arguments."""
    for message, ids in _replies(family, scenario):
        found = family.parse(ids, scenario.tools)
        if _meaning(found) != _meaning(message):
            raise Broken(f"sampled {family.tokenizer.decode(ids)!r}: {_parted(message, found)}")


def streams_what_it_reads(family: TitoFamily, scenario: Scenario) -> None:
    """The deltas of a stream, joined, are what `parse` makes of the whole reply, however it is cut."""
    for _, ids in _replies(family, scenario):
        whole = family.parse(ids, scenario.tools)
        expected = replace(whole, reasoning=whole.reasoning or None)
        for size in (1, 3):
            parser = family.stream_parser(scenario.tools)
            deltas = [delta for at in range(0, len(ids), size) for delta in parser.feed(ids[at : at + size])]
            found = joined([*deltas, *parser.finish()])
            if found != expected:
                raise Broken(f"pieces of {size}: {_parted(expected, found)}")


def stops_once(family: TitoFamily, scenario: Scenario) -> None:
    """The stop token is none of the reply's text, and a turn that was cut off is not closed in silence."""
    for message, ids in _replies(family, scenario):
        early = [index for index in ids[:-1] if index in family.stop_token_ids]
        if early:
            raise Broken(f"a reply to say {message} holds the stop token {family.tokenizer.token(early[0])!r}")
    (given, reply), *_ = given_and_sampled(scenario.messages)
    row = [*family.render(given, scenario.tools), *family.tokenizer.encode(family.spell(reply, given[-1]))]
    if not row or row[-1] in family.stop_token_ids:
        return
    try:
        family.merge(row, [])
    except SessionError:
        return
    raise Broken(f"merge went on after a turn that was cut off: {family.tokenizer.decode(row[-6:])!r}")


def shows_what_is_said(family: TitoFamily, scenario: Scenario) -> None:
    """No tool, no message and no tool result vanishes from the row."""
    history = scenario.messages[:-1]
    text = family.tokenizer.decode(family.render(history, scenario.tools))
    wanted = [message.content.strip() for message in history if message.role != "assistant"]
    wanted += [tool["function"]["name"] for tool in scenario.tools]
    for part in wanted:
        spelled = (part, part.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n"))
        if not any(each in text for each in spelled):
            raise Broken(f"{part!r} is not in the row: {text[-400:]!r}")


PROPERTIES: dict[str, Callable[[TitoFamily, Scenario], None]] = {
    "append-only": grows_by_appending,
    "equals one rendering": is_the_row_rendered_at_once,
    "round trip": reads_what_it_writes,
    "streaming": streams_what_it_reads,
    "stop": stops_once,
    "nothing vanishes": shows_what_is_said,
}


# --- private ----------------------------------------------------------------------------------------------------------


def _rows(family: TitoFamily, scenario: Scenario) -> Iterator[tuple[list[int], list[int], tuple[Message, ...]]]:
    """(row with the sampled turn, next prompt, the prompt's history) for every turn that is followed by another."""
    (given, reply), *later = given_and_sampled(scenario.messages)
    row, history = family.render(given, scenario.tools), given
    for fresh, following in later:
        spelled = family.tokenizer.encode(family.spell(reply, history[-1]))
        stored = (*history, reply)
        suffix = family.append(stored, fresh, scenario.tools)
        history = (*stored, *fresh)
        whole = view(family, family.render(history, scenario.tools))
        # Which of its stop tokens a model samples may depend on what it said; any that leads to the whole row will do.
        closed = [[*row, *spelled, stop] for stop in sorted(family.stop_token_ids)]
        merged = [(before, after) for before in closed for after in _merged(family, before, suffix)]
        if not merged:
            family.merge(closed[0], suffix)
        before, row = next((pair for pair in merged if view(family, pair[1]) == whole), merged[0])
        yield before, row, history
        reply = following


def _merged(family: TitoFamily, row: Sequence[int], suffix: Sequence[int]) -> Iterator[list[int]]:
    try:
        yield family.merge(row, suffix)
    except SessionError:
        return


def _replies(family: TitoFamily, scenario: Scenario) -> Iterator[tuple[Message, list[int]]]:
    """Every reply with the ids that spell it; raises what rendering the conversation raises."""
    family.render(scenario.messages[:-1], scenario.tools)
    for given, reply in given_and_sampled(scenario.messages):
        ids = family.tokenizer.encode(family.spell(reply, given[-1]))
        yield reply, [*ids, min(family.stop_token_ids)]


def _sayable(family: TitoFamily, scenario: Scenario) -> Scenario:
    """The scenario without reasoning, for a family whose model writes none."""
    thought = Message(role="assistant", content="a", reasoning="r")
    if isinstance(family, DeclaredFamily):
        reasons = family.reasons
    else:
        reasons = family.parse(family.tokenizer.encode(family.spell(thought))).reasoning is not None
    if reasons:
        return scenario
    return replace(scenario, messages=tuple(replace(message, reasoning=None) for message in scenario.messages))


def _stops(family: TitoFamily, row: Sequence[int]) -> bool:
    return bool(row) and row[-1] in family.stop_token_ids


def view(family: TitoFamily, row: Sequence[int]) -> tuple[str, tuple[int, ...]]:
    """What a row spells and its control tokens: text may be cut into tokens in several ways, control tokens not."""
    special = family.tokenizer.special_ids
    return family.tokenizer.decode(row), tuple(index for index in row if index in special)


def _parted(expected: Message, found: Message) -> str:
    pairs = [(name, getattr(expected, name), getattr(found, name)) for name in ("content", "reasoning", "tool_calls")]
    return "; ".join(f"expected {name} {one!r}, found {other!r}" for name, one, other in pairs if one != other)


def _meaning(message: Message) -> tuple[object, ...]:
    calls = tuple((call.name, tuple(sorted(shown_members(call.arguments).items()))) for call in message.tool_calls)
    return message.content, message.reasoning or None, calls


def _differ(family: TitoFamily, expected: Sequence[int], found: Sequence[int], one: str, other: str) -> str:
    pairs = enumerate(zip(expected, found, strict=False))
    at = next((i for i, (a, b) in pairs if a != b), min(len(expected), len(found)))
    near = slice(max(0, at - 5), at + 6)
    rows = ((one, expected[near]), (other, found[near]))
    return f"from token {at} on\n" + "\n".join(
        f"  {name.ljust(19)} {list(row)} {family.tokenizer.decode(row)!r}" for name, row in rows
    )
