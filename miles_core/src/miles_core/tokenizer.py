"""A checkpoint's tokenizer and chat template, read from its folder with the `tokenizers` library alone.

It never adds a token by itself: no BOS, no EOS, no padding, no truncation. Whatever a row holds was written by a chat
template, by a token family, or sampled.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from miles_core.chat_template import ChatTemplate
from miles_core.errors import DataError
from miles_core.types import Message, Tool

NAMED_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""The names under which a tokenizer_config.json lists special tokens and templates read them."""


class ChatTokenizer:
    """Text and messages to ids and back, for one checkpoint. Immutable.

    Example:
        tokenizer = ChatTokenizer.from_dir("models/smollm2-135m")
        ids = tokenizer.encode(tokenizer.render(messages, add_generation_prompt=True))
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        templates: Mapping[str, ChatTemplate],
        special_tokens: Mapping[str, str],
        *,
        where: str,
    ) -> None:
        # A tokenizer.json remembers the settings of whoever saved it; both would silently change rows.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._templates = dict(templates)
        self.special_tokens: Mapping[str, str] = dict(special_tokens)
        """Named special tokens, for instance ``{"eos_token": "<|im_end|>"}``."""
        self.where = where
        """Folder it came from, for errors."""

    @classmethod
    def from_dir(
        cls, path: str | Path, *, today: datetime.date | None = None, template: Path | None = None
    ) -> ChatTokenizer:
        """Read ``tokenizer.json``, ``tokenizer_config.json`` and the chat template of a Hugging Face folder.

        Args:
            today: Date a template may write; None gives it none (see `chat_template`).
            template: A chat template file, instead of the folder's.

        Raises:
            DataError: a file is missing or unreadable; says which and what to do.
        """
        folder = Path(path)
        tokenizer = _read_tokenizer(folder)
        config = _read_json(folder / "tokenizer_config.json")
        named = {**_read_json(folder / "special_tokens_map.json"), **config}
        special = {name: _token_text(named[name]) for name in NAMED_SPECIAL_TOKENS if named.get(name)}
        templates = {
            name: ChatTemplate(source, variables=special, where=where, today=today)
            for name, (source, where) in (
                _template_sources(folder, config)
                if template is None
                else {"default": (_read_template(template), str(template))}
            ).items()
        }
        if not templates:
            raise DataError(
                "the checkpoint has no chat template, so messages have no token form",
                expected="chat_template.jinja, or `chat_template` in tokenizer_config.json",
                found=f"neither in {folder}",
                where=str(folder),
                do="use an instruction-tuned checkpoint, or put its chat_template.jinja into the folder",
            )
        return cls(tokenizer, templates, special, where=str(folder))

    # --- text ---------------------------------------------------------------------------------------------------------

    def encode(self, text: str, *, allow_special: bool = True) -> list[int]:
        """Ids of `text`; never more than the text spells.

        Args:
            allow_special: Whether text that spells a special token becomes that token, or ordinary text.
        """
        tokenizer = self._tokenizer if allow_special else self._plain_tokenizer
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int], *, skip_special: bool = False) -> str:
        """Text of `ids`. Bytes that are not UTF-8 become U+FFFD, so the text is a view: ids are the truth."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=skip_special))

    def text_stream(self) -> TextStream:
        """A decoder that can be fed token by token."""
        return TextStream(self)

    # --- vocabulary ---------------------------------------------------------------------------------------------------

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of the tokens marked special: control tokens, not text."""
        added = self._tokenizer.get_added_tokens_decoder()
        return frozenset(index for index, token in added.items() if token.special)

    @cached_property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included; a checkpoint's embedding may have more rows."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    def token_id(self, token: str) -> int | None:
        """Id of exactly this token, or None when the vocabulary has none."""
        found: int | None = self._tokenizer.token_to_id(token)
        return found

    def token(self, index: int) -> str | None:
        """The token as the vocabulary spells it (byte-level form), or None for an id without one."""
        found: str | None = self._tokenizer.id_to_token(index)
        return found

    @property
    def eos_id(self) -> int | None:
        return self._named_id("eos_token")

    @property
    def bos_id(self) -> int | None:
        return self._named_id("bos_token")

    # --- messages -----------------------------------------------------------------------------------------------------

    def template(self, tools: Sequence[Tool] = ()) -> ChatTemplate:
        """The template for a conversation: a checkpoint may bring one of its own for tool use."""
        if tools and "tool_use" in self._templates:
            return self._templates["tool_use"]
        return self._templates["default"]

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        *,
        add_generation_prompt: bool,
        **kwargs: Any,
    ) -> str:
        """Text of a conversation through the checkpoint's template; see `ChatTemplate.render`."""
        return self.template(tools).render(messages, tools, add_generation_prompt=add_generation_prompt, **kwargs)

    # --- private ------------------------------------------------------------------------------------------------------

    def _named_id(self, name: str) -> int | None:
        text = self.special_tokens.get(name)
        return None if text is None else self.token_id(text)

    @cached_property
    def _plain_tokenizer(self) -> Tokenizer:
        # The switch is a property of the whole tokenizer, so a second one keeps `encode` free of shared state.
        other = Tokenizer.from_str(self._tokenizer.to_str())
        other.encode_special_tokens = True
        return other


_LONG_WINDOW = 32
"""Tokens without a complete text after which a stream looks for a place to cut."""


class TextStream:
    """Decodes a growing row piece by piece; the pieces joined are ``decode`` of the whole row.

    A character whose bytes are spread over tokens is held back until it is complete.
    """

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        # Tokens since the last place where the text was complete, plus those before it that decoding needs as context:
        # SentencePiece drops the space of a row's first token.
        self._window: list[int] = []
        self._context = 0
        self._emitted = 0  # characters of the window's text already returned

    def push(self, ids: Sequence[int]) -> str:
        """Text that became certain with `ids`."""
        if not ids:
            return ""
        self._window.extend(ids)
        text = self._tokenizer.decode(self._window)
        complete = not text.endswith("�")
        certain = text if complete else text[:-1]
        piece = certain[self._emitted :]
        self._emitted = max(self._emitted, len(certain))
        if complete:
            self._window = self._window[self._context :]
            self._context = len(self._window)
            self._emitted = len(self._tokenizer.decode(self._window))
        elif len(self._window) > _LONG_WINDOW:
            self._shorten(text)
        return piece

    def _shorten(self, text: str) -> None:
        """Let go of tokens that no later byte can change, so that a model stuck on bytes that are no character costs
        linear time: a character has four bytes at most, so one of the last boundaries lies between characters."""
        size = len(self._window)
        for end in range(size - 4, size):
            alone = self._tokenizer.decode(self._window[end:])
            kept = self._window[end - 4 :]
            head, whole = self._tokenizer.decode(kept[:4]), self._tokenizer.decode(kept)
            rest = whole[len(head) :]
            # Bytes that belong together would be one sign together and two apart.
            if whole.startswith(head) and rest.count("�") == alone.count("�") and text.endswith(rest):
                self._window, self._context = kept, 4
                self._emitted += len(whole) - len(text)
                return

    def flush(self) -> str:
        """The rest: bytes that never became a character."""
        piece = self._tokenizer.decode(self._window)[self._emitted :] if self._window else ""
        self._window, self._context, self._emitted = [], 0, 0
        return piece


# --- reading a folder -------------------------------------------------------------------------------------------------


def _read_tokenizer(folder: Path) -> Tokenizer:
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise DataError(
            "the checkpoint has no fast tokenizer",
            expected="tokenizer.json",
            found="a missing folder" if not folder.is_dir() else f"{sorted(p.name for p in folder.iterdir())[:12]}",
            where=str(folder),
            do="check `model.path`, or save the tokenizer with transformers' `save_pretrained`",
        )
    try:
        return Tokenizer.from_str(file.read_text(encoding="utf-8"))
    except Exception as error:
        # `tokenizers` raises bare Exception for every malformed file.
        raise DataError(
            "tokenizer.json is unreadable", found=str(error), where=str(file), do="download the checkpoint again"
        ) from error


def _read_json(file: Path) -> dict[str, Any]:
    """The object in `file`; empty when there is no such file, since both config files are optional."""
    if not file.is_file():
        return {}
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(
            f"{file.name} is not JSON", found=str(error), where=str(file), do="download the checkpoint again"
        ) from error
    if not isinstance(found, dict):
        raise DataError(f"{file.name} is not a JSON object", found=type(found).__name__, where=str(file))
    return found


def _token_text(value: Any) -> str:
    if isinstance(value, dict) and "content" not in value:
        raise DataError("a special token has no content", expected='{"content": ...}', found=f"{value!r:.80}")
    return str(value["content"]) if isinstance(value, dict) else str(value)


def _read_template(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            "the chat template is not UTF-8", found=str(error), where=str(file), do="download the checkpoint again"
        ) from error


def _template_sources(folder: Path, config: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Template name -> (text, where). Files win over tokenizer_config.json, as in Hugging Face's loader."""
    found: dict[str, tuple[str, str]] = {}
    entry = config.get("chat_template")
    where = str(folder / "tokenizer_config.json")
    if isinstance(entry, str):
        found["default"] = (entry, where)
    elif isinstance(entry, list):
        try:
            found |= {str(item["name"]): (str(item["template"]), where) for item in entry}
        except (KeyError, TypeError) as error:
            raise DataError(
                "a chat template of tokenizer_config.json is not one",
                expected='{"name": ..., "template": ...}',
                found=f"{entry!r:.80}",
                where=where,
            ) from error
    single = folder / "chat_template.jinja"
    named = sorted((folder / "additional_chat_templates").glob("*.jinja"))
    if single.is_file() or named:
        found = {file.stem: (_read_template(file), str(file)) for file in named}
        if single.is_file():
            found["default"] = (_read_template(single), str(single))
    if found and "default" not in found:
        raise DataError(
            "the checkpoint has several chat templates and none is the default",
            found=f"{sorted(found)}",
            where=where,
            do="name one of them `default`",
        )
    return found
