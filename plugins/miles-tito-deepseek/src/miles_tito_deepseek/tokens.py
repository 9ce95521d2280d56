"""Control tokens that all DeepSeek-V3 checkpoints share."""

from __future__ import annotations

from miles_core.errors import DataError
from miles_core.tito.probes import USER
from miles_core.tokenizer import ChatTokenizer

BEGIN, END = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
USER_TOKEN, ASSISTANT_TOKEN = "<｜User｜>", "<｜Assistant｜>"
CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_SEPARATOR, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
OUTPUT_BEGIN, OUTPUT_END = "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"


def empty_thought(tokenizer: ChatTokenizer) -> str:
    """What the checkpoint's template opens a reply with while thinking is off.

    Published templates disagree: ``</think>`` alone, or with the opening tag before it.
    """
    try:
        text = tokenizer.render([USER], add_generation_prompt=True, thinking=False)
    except DataError:
        return "</think>"
    return "<think></think>" if text.endswith("<think></think>") else "</think>"
