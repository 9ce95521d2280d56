"""A checkpoint's chat template: messages to text, exactly as Hugging Face's ``apply_chat_template`` renders it.

Templates are untrusted code, so they run in Jinja's immutable sandbox, see plain JSON values only, and are stopped
after `LIMIT_S` of this thread's processor time: every turn of a loop and every call of a macro looks. One deliberate
difference: nothing hidden enters the text. ``strftime_now`` exists only when the caller fixes the date, because a row
that changes at midnight is neither reproducible nor the row its neighbour was compared with. Templates that ask
whether it is defined fall back to their own constant; those that do not are refused with a reason.
"""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedEnvironment

from miles_core.errors import DataError
from miles_core.types import Message, Tool

LIMIT_S = 10.0
"""Longest conversations render in a fraction of a second; a waiting machine does not count."""
_DEADLINE = "__deadline"


class ChatTemplate:
    """A compiled template with the checkpoint's special tokens as variables.

    Args:
        source: Jinja text.
        variables: Named special tokens (``bos_token``, ...) the template may write.
        where: File the text came from, for errors.
        today: The date ``strftime_now`` tells; None leaves the function undefined.
        sandbox: What the template may do. Some published ones change lists, which the default refuses.

    Raises:
        DataError: the text is not a Jinja template.
    """

    def __init__(
        self,
        source: str,
        *,
        variables: Mapping[str, str] | None = None,
        where: str = "chat template",
        today: datetime.date | None = None,
        sandbox: type[SandboxedEnvironment] = ImmutableSandboxedEnvironment,
    ) -> None:
        self.source = source
        self.where = where
        self._variables = dict(variables or {})
        try:
            environment = _environment(today, sandbox)
            self._template = environment.from_string(_watched(environment.parse(source)))
        except jinja2.TemplateSyntaxError as error:
            raise DataError(
                "the chat template is not valid Jinja",
                found=f"line {error.lineno}: {error.message}",
                where=where,
                do="replace it by the template published with the checkpoint",
            ) from error

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        *,
        add_generation_prompt: bool,
        **kwargs: Any,
    ) -> str:
        """The conversation as text.

        Args:
            add_generation_prompt: Also write the opener of the next assistant turn.
            kwargs: Further variables the template reads (``enable_thinking``); they win over special tokens.

        Raises:
            DataError: the template refuses the messages, or needs something that is not there.
        """
        variables: dict[str, Any] = {**self._variables, **kwargs}
        try:
            return self._template.render(
                messages=[template_message(message) for message in messages],
                tools=[plain(tool) for tool in tools] or None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **variables,
                **{_DEADLINE: time.thread_time() + LIMIT_S},
            )
        except Exception as error:
            # A template is foreign code: it adds strings and None, divides, recurses, ranges too far. All of it means
            # that it has no form for these messages.
            date = "strftime_now" in str(error)
            raise DataError(
                "the chat template refused the conversation",
                found=f"{type(error).__name__}: {error}",
                where=f"{self.where}, roles {[message.role for message in messages]}",
                do="load the tokenizer with a fixed `today`, since the template writes the date"
                if date
                else "send only roles and fields that the checkpoint's template knows",
            ) from error


def template_message(message: Message) -> dict[str, Any]:
    """The message under the names templates read; absent fields are absent, not None.

    Tool-call arguments become an object where their text is a JSON object, since templates apply ``tojson`` themselves.
    """
    found: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning is not None:
        found |= {"reasoning_content": message.reasoning, "thinking": message.reasoning}
    if message.tool_calls:
        found["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": _arguments(call.arguments)},
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        found["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        found["name"] = message.name
    return found


def plain(value: Any) -> Any:
    """`value` rebuilt from plain JSON types, so that a template can call no method of a caller's object.

    Raises:
        DataError: something in it has no JSON form.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [plain(item) for item in value]
    raise DataError(
        "a tool description holds a value without a JSON form",
        expected="strings, numbers, booleans, null, lists and mappings",
        found=type(value).__name__,
        do="pass tools in the OpenAI shape",
    )


def _arguments(text: str) -> Any:
    if not text:
        return {}
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return parsed if isinstance(parsed, dict) else text


def _environment(today: datetime.date | None, sandbox: type[SandboxedEnvironment]) -> SandboxedEnvironment:
    environment = sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.filters[_DEADLINE] = _look
    environment.globals["raise_exception"] = _raise_exception
    if today is not None:
        environment.globals["strftime_now"] = today.strftime
    return environment


def _watched(template: nodes.Template) -> nodes.Template:
    """The template with a look at the clock wherever it may go round."""
    look = nodes.Filter(nodes.Const(True), _DEADLINE, [], [], None, None)
    for loop in list(template.find_all(nodes.For)):
        loop.body.insert(0, nodes.ExprStmt(look))
        if loop.test is not None:
            loop.test = nodes.And(look, loop.test)
    called = [macro.body for macro in template.find_all(nodes.Macro)]
    called += [block.body for block in template.find_all(nodes.CallBlock)]
    for body in called:
        body.insert(0, nodes.ExprStmt(look))
    return template


@jinja2.pass_context
def _look(context: Context, value: bool) -> bool:
    deadline = context.get(_DEADLINE)
    if deadline is not None and time.thread_time() > deadline:
        raise jinja2.TemplateError(f"it was not done after {LIMIT_S:g} s")
    return value


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes <, > and & for HTML; checkpoints were trained on the unescaped text.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


class _GenerationBlock(Extension):
    """``{% generation %}`` marks what the model wrote; here it only passes its body through, in a scope of its own."""

    tags = {"generation"}  # noqa: RUF012 - the attribute is Jinja's

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()
