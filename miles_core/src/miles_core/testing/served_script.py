"""Engine `scripted` of `miles serve`: every session's turns are sampled from a list of texts, in order.

    "Let me look.\\n<tool_call>\\n{\\"name\\": \\"ls\\", \\"arguments\\": {}}\\n</tool_call>"
    "There are two files."

One JSON string per line. So an agent program goes through a conversation that is known beforehand, token by token.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from miles_core.errors import DataError, EngineError
from miles_core.kinds.engine import GenerateRequest
from miles_core.kinds.tito_family import TitoFamily
from miles_core.testing.scripted import ScriptedEngine
from miles_core.types import Message


def read_script(path: Path) -> list[str]:
    """The texts of a script file.

    Raises:
        DataError: a line is no JSON string, or there is none.
    """
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            text = json.loads(line)
        except ValueError as error:
            raise DataError("a line of the script is not JSON", found=str(error), where=f"{path}:{number}") from error
        if not isinstance(text, str):
            raise DataError("a line of the script is no text", found=type(text).__name__, where=f"{path}:{number}")
        found.append(text)
    if not found:
        raise DataError("the script is empty", expected="one JSON string per line", where=str(path))
    return found


def scripted_engine(family: TitoFamily, texts: list[str], *, context_length: int | None = None) -> ScriptedEngine:
    """An engine whose answer to a session's request number k is text number k, closed by the family's stop token."""
    row = family.render([Message(role="user", content="u"), Message(role="assistant", content="a"), _USER])
    stop = next((index for index in sorted(family.stop_token_ids) if index in row), min(family.stop_token_ids))
    replies = [(*family.tokenizer.encode(text), stop) for text in texts]
    asked: Counter[str] = Counter()

    def answer(request: GenerateRequest) -> tuple[int, ...] | Exception:
        number = asked[request.session_id]
        asked[request.session_id] += 1
        if number >= len(replies):
            return EngineError(f"the script has {len(replies)} answers, and session {request.session_id} asks for more")
        return replies[number]

    return ScriptedEngine(answer, context_length=context_length)


_USER = Message(role="user", content="u")
