"""Finds out from a checkpoint's chat template what a token family must say: wraps, ends, seams, thoughts, calls.

Made-up conversations with words that nothing else contains are rendered, and the text around the words is read off.
Where a template cannot be read that way, or rewrites what it must not, that is an `Underivable` with both texts.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from miles_core.errors import DataError
from miles_core.tito.family import Wrap
from miles_core.tito.formats import CallFormat, FunctionTags, JsonBlocks
from miles_core.tito.parser import Thoughts
from miles_core.tito.probes import ADD, ADD_CALL
from miles_core.tokenizer import ChatTokenizer
from miles_core.types import Message, Tool

SYSTEM = Message(role="system", content="systemword")
ONE, TWO = Message(role="user", content="userone"), Message(role="user", content="usertwo")
SAID = Message(role="assistant", content="answerword")
_THINKING = Message(role="assistant", content="answerword", reasoning="thoughtword")
CALLING = Message(role="assistant", tool_calls=(ADD_CALL,))
RESULTS = (
    Message(role="tool", content="resultone", tool_call_id=ADD_CALL.id, name="add"),
    Message(role="tool", content="resulttwo", tool_call_id=ADD_CALL.id, name="add"),
)
FORMATS: tuple[tuple[str, CallFormat], ...] = (
    ("JsonBlocks()", JsonBlocks()),
    ("FunctionTags()", FunctionTags()),
    ('FunctionTags(before="\\n", after="\\n")', FunctionTags(before="\n", after="\n")),
)


class Underivable(DataError):
    """A property that the template does not have, with the two texts that show it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Derived:
    """What a family's class variables are."""

    end: str
    seam: str
    stops: tuple[str, ...]
    replaced_stops: tuple[str, ...]
    control_tokens: tuple[str, ...]
    header: str
    opened: str
    unthought: str
    user: Wrap
    system: Wrap | None
    tool: Wrap
    tool_group: Wrap
    thoughts: Thoughts | None
    calls: tuple[str, CallFormat] | None
    forgets: bool
    """The template drops reasoning once a user speaks again; the family keeps it."""


def derive(tokenizer: ChatTokenizer) -> Derived:
    """Read a template.

    Raises:
        Underivable: it cannot be read, or is not append-only where it must be.
    """
    whole = _text(tokenizer, [SYSTEM, ONE, SAID, TWO])
    before, after = _around(whole, ONE.content)
    tail, closing = _around(after, TWO.content)
    lead, tail = _around(tail, SAID.content)
    _same(
        "the first user's turn, when a conversation goes on",
        _text(tokenizer, [SYSTEM, ONE]),
        before + ONE.content + closing,
    )
    opener = _text(tokenizer, [SYSTEM, ONE, SAID, TWO], opener=True)
    _begins("the opener only adds", opener, whole)
    opener = opener[len(whole) :]
    if not lead.startswith(closing):
        raise Underivable("a user's turn ends in two ways", expected=repr(closing), found=repr(lead))
    spoken = lead[len(closing) :]
    header, opened, unthought = _header(spoken, opener)
    opening = _opening(before, tail, tokenizer)
    ending = tail[: len(tail) - len(opening)]
    end = next((token for token in _specials(tokenizer) if ending.startswith(token)), "")
    if ending and not end:
        raise Underivable("an answer ends with no special token", expected="a special token", found=repr(ending))
    calls, tool, group = _tools(tokenizer, header, unthought, ending)
    # An opener that holds a whole thought leaves none to the reply.
    thoughts = None if "</" in opened else _thoughts(tokenizer, unthought)
    named = tuple(dict.fromkeys(token for token in _specials(tokenizer) if token in whole + opener))
    openers = tuple(
        t for t in named if not end and (opening.startswith(t) or (group.before + tool.before).startswith(t))
    )
    eos = tokenizer.special_tokens.get("eos_token")
    return Derived(
        end=end,
        seam=ending[len(end) :],
        stops=tuple(dict.fromkeys([*([end] if end else openers), *([eos] if eos else [])])),
        replaced_stops=openers,
        control_tokens=named,
        header=header,
        opened=opened,
        unthought=thoughts.write("") if thoughts is not None and opened else unthought,
        user=Wrap(opening, closing),
        system=_system(tokenizer, whole, ending),
        tool=tool,
        tool_group=group,
        thoughts=thoughts,
        calls=calls,
        forgets=_forgets(tokenizer),
    )


# --- private ----------------------------------------------------------------------------------------------------------


def _text(
    tokenizer: ChatTokenizer, messages: Sequence[Message], tools: Sequence[Tool] = (), *, opener: bool = False
) -> str:
    return tokenizer.render(messages, tools, add_generation_prompt=opener)


def _around(text: str, word: str) -> tuple[str, str]:
    head, found, rest = text.partition(word)
    if not found or word in rest:
        raise Underivable("a message is not shown exactly once", expected=word, found=repr(text[-300:]))
    return head, rest


def _same(what: str, one: str, other: str) -> None:
    if one != other:
        raise Underivable(f"{what}, changes", expected=repr(one[-200:]), found=repr(other[-200:]))


def _begins(what: str, longer: str, shorter: str) -> None:
    if not longer.startswith(shorter):
        at = next((i for i, (a, b) in enumerate(zip(longer, shorter, strict=False)) if a != b), len(longer))
        near = slice(max(0, at - 60), at + 60)
        raise Underivable(f"{what}: it does not", expected=repr(shorter[near]), found=repr(longer[near]))


def _header(spoken: str, opener: str) -> tuple[str, str, str]:
    """(header, what the opener adds to it, what stands for no thought)."""
    thought = re.search(r"<(\w+)>(\s*)(</\1>\s*)?$|</\w+>\s*$", opener)
    header, opened = (opener[: thought.start()], thought[0]) if thought else (opener, "")
    if not spoken.startswith(header):
        raise Underivable("the opener is not how an assistant's turn begins", expected=repr(spoken), found=repr(opener))
    if thought is None:
        return header, "", spoken[len(header) :]
    if thought[1] is None or thought[3] is not None:
        return header, opened, opened
    return header, opened, f"{opened}{thought[2]}</{thought[1]}>" + thought[2] * 2


def _opening(before: str, tail: str, tokenizer: ChatTokenizer) -> str:
    """What opens a user's turn, given what stands before the first one and between an answer and the next.

    Where both end alike, a turn's closing token may be part of it: then the opening begins with the second special
    token. A single one is the opening itself, which ends the answer too.
    """
    size = next((n for n in range(min(len(before), len(tail)), 0, -1) if before.endswith(tail[-n:])), 0)
    common = tail[len(tail) - size :]
    starts = sorted({at for token in _specials(tokenizer) if (at := common.find(token)) >= 0})
    if not starts:
        raise Underivable("no special token opens a user's turn", expected="one", found=repr(tail))
    return common[starts[1] if size == len(tail) and len(starts) > 1 else starts[0] :]


def _specials(tokenizer: ChatTokenizer) -> list[str]:
    found = (tokenizer.token(index) for index in sorted(tokenizer.special_ids))
    return sorted((token for token in found if token), key=len, reverse=True)


def _system(tokenizer: ChatTokenizer, whole: str, ending: str) -> Wrap | None:
    middle = Message(role="system", content="middleword")
    try:
        text = _text(tokenizer, [SYSTEM, ONE, SAID, middle, TWO])
        head, rest = _around(text, middle.content)
        start = whole.index(SAID.content) + len(SAID.content + ending)
        _begins("a system message in the middle only adds", text, whole[:start])
    except (Underivable, DataError):
        return None
    after = rest[: len(rest) - len(whole[start:])]
    return Wrap(head[start:], after) if rest.endswith(whole[start:]) else None


def _tools(
    tokenizer: ChatTokenizer, header: str, unthought: str, ending: str
) -> tuple[tuple[str, CallFormat] | None, Wrap, Wrap]:
    nothing = (None, Wrap("", ""), Wrap("", ""))
    try:
        text = _text(tokenizer, [SYSTEM, ONE, CALLING, *RESULTS], [ADD])
        head, rest = _around(text, RESULTS[0].content)
        middle, last = _around(rest, RESULTS[1].content)
    except DataError:
        return nothing
    for source, spelling in FORMATS:
        called = spelling.write(CALLING.tool_calls, content=False)
        if called + ending in head:
            first = head[head.rindex(called + ending) + len(called + ending) :]
            size = next((n for n in range(min(len(first), len(middle)), 0, -1) if first.endswith(middle[-n:])), 0)
            shared = middle[len(middle) - size :]
            result = Wrap(shared, middle[: len(middle) - size])
            if last.startswith(result.after):
                return (source, spelling), result, Wrap(first[: len(first) - size], last[len(result.after) :])
    return nothing


def _thoughts(tokenizer: ChatTokenizer, unthought: str) -> Thoughts | None:
    """How reasoning is written; where the template hides it, as the empty thought it writes instead."""
    empty = re.fullmatch(r"(?P<open><\w+>)(?P<pad>\s*)(?P<close></\w+>)(?P<after>\s*)", unthought)
    fallback = Thoughts(opening=empty["open"], closing=empty["close"], pad="", after=empty["after"]) if empty else None
    try:
        text = _text(tokenizer, [SYSTEM, ONE, _THINKING])
        head, rest = _around(text, "thoughtword")
        between, _ = _around(rest, "answerword")
    except DataError:
        return fallback
    shape = re.fullmatch(r"(\s*)(</\w+>)(\s*)", between)
    opening = re.search(r"(<\w+>)(\s*)$", head)
    if shape is None or opening is None or opening[2] != shape[1]:
        return fallback
    return Thoughts(opening=opening[1], closing=shape[2], pad=shape[1], after=shape[3])


def _forgets(tokenizer: ChatTokenizer) -> bool:
    shown = "thoughtword" in _text(tokenizer, [SYSTEM, ONE, _THINKING])
    return shown and "thoughtword" not in _text(tokenizer, [SYSTEM, ONE, _THINKING, TWO])
