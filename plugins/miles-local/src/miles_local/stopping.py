"""Stop strings: found in decoded text, so that a string spelled by several tokens, or by half a token, stops as
well."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from miles_core.errors import EngineError


def load_tokenizer(model_path: Path) -> Tokenizer:
    """The checkpoint's own tokenizer; needed only by requests with stop strings.

    Raises:
        EngineError: the folder has no ``tokenizer.json``.
    """
    file = model_path / "tokenizer.json"
    if not file.is_file():
        raise EngineError(
            "stop strings need the checkpoint's tokenizer",
            expected="tokenizer.json in the model folder",
            found="no such file",
            where=str(model_path),
            do="stop by `stop_token_ids`, or add the file",
        )
    return Tokenizer.from_file(str(file))


def ends_with_stop(tokenizer: Tokenizer, output_ids: Sequence[int], stop: Sequence[str]) -> bool:
    """Whether the text of the sampled tokens holds one of the strings, given that it did not before the last token.

    Only a tail is decoded: enough tokens for the longest string and one token more, whatever their lengths. A tail
    may begin within a character; that spoils its first character only.
    """
    longest = max(map(len, stop))
    count = longest + 4
    while True:
        text = tokenizer.decode(list(output_ids[-count:]), skip_special_tokens=False)
        if count >= len(output_ids) or len(text) > 2 * longest + 4:
            return any(string in text for string in stop)
        count *= 2
