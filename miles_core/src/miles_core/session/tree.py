"""A branching session: a tree of turns that only grows, for agents that start sub-agents or rewrite their history.

A request continues the deepest turn whose whole conversation is the beginning of the history that is sent; its own turn
becomes a child of that one. If there is no such turn, the history is rendered and starts a new root. Since nothing is
changed or deleted, no history is refused, and turns may be sampled at the same time. A turn that was cut off cannot be
continued. Each node holds only its own tokens, so what branches share is stored once.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

from miles_core.errors import BranchNeeded
from miles_core.kinds.environment import Completion
from miles_core.routing.codec import Routes
from miles_core.session.base import Listener, Prepared, Session, SessionSetup, fixed_tools, same_tools
from miles_core.session.generation import Output
from miles_core.session.matching import match_prefix
from miles_core.session.refusals import StaleTurn, TooManyTurns, TurnCut
from miles_core.session.row import TokenIds, TokenRow
from miles_core.session.seam import join
from miles_core.types import FinishReason, Message, SamplingParams, Tool

MAX_NODES = 1024
"""The largest number of turns in a session, so that an agent in an endless loop does not use up all memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One committed turn."""

    number: int
    """Nodes are numbered in the order in which they were committed."""
    parent: int
    """-1 for a root."""
    messages: tuple[Message, ...]
    """What the turn added: the agent's new messages and the answer."""
    accepted: list[Message]
    """See `match_prefix`."""
    tools: tuple[Tool, ...]
    attached: int
    """How many tokens of the parent's row the prompt begins with."""
    row: TokenRow
    """The tokens after those."""
    sampled: int
    """How many of them were sampled; they are the last ones."""
    finish_reason: FinishReason
    temperature: float
    generation: int
    """Number under which it was sampled; no other turn of the session has it."""
    routes: Routes | None
    """Routes of the whole prompt and output, as the engine returned them."""
    children: list[int] = field(default_factory=list)

    @property
    def row_end(self) -> int:
        """Length of the whole row, from the root to the end of this turn."""
        return self.attached + len(self.row)


@dataclass(slots=True)
class _Path:
    """The path from a root to the node that was committed last, with its messages and tokens in one piece. An agent
    that simply goes on is matched against this, at a cost that does not grow with the number of turns."""

    nodes: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    """How many messages the conversation has at the end of each node."""
    messages: list[Message] = field(default_factory=list)
    accepted: list[Message] = field(default_factory=list)
    row: array[int] = field(default_factory=lambda: array("i"))
    sides: list[tuple[int, int]] = field(default_factory=list)
    """Every node that branches off the path, other roots included, and the number of messages before it."""

    def extend(self, node: Node) -> None:
        self.nodes.append(node.number)
        self.messages += node.messages
        self.accepted += node.messages
        self.ends.append(len(self.messages))
        del self.row[node.attached :]
        self.row += node.row.slice(0, len(node.row))


class TreeSession(Session):
    """See `base.Session`."""

    def __init__(self, session_id: str, setup: SessionSetup) -> None:
        super().__init__(session_id, setup)
        self.nodes: list[Node] = []
        self._roots: list[int] = []
        self._active = _Path()
        self._flying: set[int] = set()
        """Generations that are being sampled."""

    # --- views --------------------------------------------------------------------------------------------------------

    @property
    def turns(self) -> Sequence[Node]:
        return self.nodes

    @property
    def leaves(self) -> list[Node]:
        """Nodes without children, in order of commits."""
        return [node for node in self.nodes if not node.children]

    def path(self, number: int) -> list[Node]:
        """All nodes from the root to node `number`."""
        found: list[Node] = []
        while number >= 0:
            found.append(self.nodes[number])
            number = found[-1].parent
        return found[::-1]

    def sampled_of(self, number: int) -> tuple[array[int], array[float]]:
        """Ids and log-probs of the tokens that were sampled in node `number`."""
        node = self.nodes[number]
        end = len(node.row)
        return node.row.slice(end - node.sampled, end), node.row.logprobs(end - node.sampled, end)

    def messages_to(self, number: int) -> tuple[Message, ...]:
        return tuple(message for node in self.path(number) for message in node.messages)

    # --- the turn -----------------------------------------------------------------------------------------------------

    def prepare(
        self, messages: Sequence[Message], tools: Sequence[Tool] = (), *, params: SamplingParams | None = None
    ) -> Prepared:
        self._check_open(messages)
        if len(self.nodes) + self.in_flight >= MAX_NODES:
            raise TooManyTurns(
                "the session is full",
                expected=f"at most {MAX_NODES} turns",
                where=self._where,
                do="end the episode, or open a new session",
            )
        fixed = fixed_tools(tools)
        base, depth = self.attach(messages)
        if base >= 0 and not same_tools(fixed, self.nodes[base].tools):
            base, depth = -1, 0  # other tools are other tokens at the head of the row
        prompt, shared = array("i"), 0
        if base >= 0:
            try:
                prompt, shared = self._extended(base, messages, depth, fixed)
            except BranchNeeded:
                base, depth = -1, 0
        if base < 0:
            prompt = array("i", self._family.render(messages, fixed))
        self._check_fits(prompt, len(self.nodes))
        return Prepared(
            base=base,
            messages=tuple(messages[depth:]),
            tools=fixed,
            prompt_ids=TokenIds(prompt),
            shared=shared,
            generation=self._ordinal(base),
            params=self.params if params is None else params,
        )

    def attach(self, messages: Sequence[Message]) -> tuple[int, int]:
        """The node that a history continues, and the number of messages up to it; (-1, 0) if it continues none."""
        active = self._active
        matched = match_prefix(active.messages, messages, self._matcher, accepted=active.accepted)
        whole = bisect_right(active.ends, matched)
        best, covered = (active.nodes[whole - 1], active.ends[whole - 1]) if whole else (-1, 0)
        # A stack, not recursion: a history of a thousand turns is a path of a thousand nodes.
        todo = [(number, start) for number, start in active.sides if start <= matched]
        while todo:
            number, start = todo.pop()
            node = self.nodes[number]
            size = len(node.messages)
            part = messages[start : start + size]
            if len(part) < size or match_prefix(node.messages, part, self._matcher, accepted=node.accepted) < size:
                continue
            if (start + size, number) > (covered, best):
                best, covered = number, start + size
            todo += [(child, start + size) for child in node.children]
        return best, covered

    async def run(self, prepared: Prepared, listener: Listener | None = None) -> Completion:
        self._flying.add(prepared.generation)
        try:
            return await super().run(prepared, listener)
        finally:
            self._flying.discard(prepared.generation)

    def row_to(self, number: int) -> array[int]:
        """Ids of the whole row, from the root to the end of node `number`."""
        if number == self._active.nodes[-1]:
            return self._active.row[:]
        row = array("i")
        for node in self.path(number):
            del row[node.attached :]
            row += node.row.slice(0, len(node.row))
        return row

    # --- private ------------------------------------------------------------------------------------------------------

    def _check_current(self, prepared: Prepared) -> None:
        if self._closed:
            raise StaleTurn(
                "the session was closed while its turn was generated; the turn is dropped", where=self._where
            )

    def _apply(self, prepared: Prepared, output: Output, message: Message) -> int:
        row = TokenRow()
        row.append_given(prepared.prompt_ids[prepared.shared :])
        row.append_output(output)
        messages = (*prepared.messages, message)
        node = Node(
            number=len(self.nodes),
            parent=prepared.base,
            messages=messages,
            accepted=list(messages),
            tools=prepared.tools,
            attached=prepared.shared,
            row=row,
            sampled=len(output.ids),
            finish_reason=output.finish_reason or FinishReason.ABORT,
            temperature=prepared.params.temperature,
            generation=prepared.generation,
            routes=output.routes,
        )
        (self._roots if node.parent < 0 else self.nodes[node.parent].children).append(node.number)
        self.nodes.append(node)
        if node.parent == (self._active.nodes[-1] if self._active.nodes else -1):
            self._active.extend(node)
        else:
            self._active = self._path_to(node)
        return node.number

    def _path_to(self, last: Node) -> _Path:
        found, siblings = _Path(), self._roots
        for node in self.path(last.number):
            found.sides += [(number, len(found.messages)) for number in siblings if number != node.number]
            found.extend(node)
            siblings = node.children
        return found

    def _extended(
        self, base: int, messages: Sequence[Message], depth: int, tools: tuple[Tool, ...]
    ) -> tuple[array[int], int]:
        """The prompt after node `base`, and how many of its tokens are the node's row."""
        node = self.nodes[base]
        if node.finish_reason is not FinishReason.STOP:
            raise TurnCut(
                f"the turn to extend was cut off (finish reason {node.finish_reason.value})",
                expected="a turn that ended by itself",
                found=f"{node.sampled} sampled tokens without a stop token",
                where=f"{self._where}, turn {base}",
                do="branch before that turn, end there, or raise sampling.max_tokens",
            )
        prompt = self.row_to(base)
        suffix = self._family.append(messages[:depth], messages[depth:], tools)
        shared, fresh = join(self._family, prompt, suffix, where=f"{self._where}, after turn {base}")
        del prompt[shared:]
        prompt.extend(fresh)
        return prompt, shared

    def _ordinal(self, base: int) -> int:
        """The number of a new generation after `base`. It decides the seed: a turn is repeated exactly if the engine
        failed, and its siblings, also those being sampled, must have other numbers."""
        siblings = self._roots if base < 0 else self.nodes[base].children
        taken = self._flying | self.reserved | {self.nodes[number].generation for number in siblings}
        return next(number for number in count((base + 1) * MAX_NODES) if number not in taken)

    def _call_id_taken(self, prepared: Prepared, call_id: str) -> bool:
        before = (message for node in self.path(prepared.base) for message in node.messages)
        return any(
            call.id == call_id for messages in (before, prepared.messages) for m in messages for call in m.tool_calls
        )


def leaf_spans(path: Sequence[Node]) -> Iterator[tuple[int, int, int]]:
    """(node, start, end) of the sampled tokens of every turn, as positions in the row of the path's last node.

    A stop token that the next turn's opener replaced is left out.
    """
    for node, after in zip(path, (*path[1:], None), strict=True):
        end = node.row_end if after is None else min(node.row_end, after.attached)
        yield node.number, node.row_end - node.sampled, end
