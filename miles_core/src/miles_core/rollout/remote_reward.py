"""Reward `http`: asks a server of yours for a score, with one POST for each episode.

It runs in a reward worker, so it may block: whatever the server does, the worker's deadline ends it.
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from miles_core.errors import RewardError
from miles_core.kinds.reward import Scored

BACKOFF_S = 0.25
"""Pause before the first retry; doubles with each."""
MAX_REPLY_BYTES = 1 << 20
"""A score is small; more is a server that answers something else."""
SHOWN_CHARS = 200


class _Transient(Exception):
    """Worth another try: the server is absent, busy or broken at the moment."""


def http_reward(scored: Scored, /, *, url: str, timeout_s: float = 20.0, retries: int = 2) -> float | dict[str, float]:
    """POST ``{prompt, messages, response, label, truncated, metadata}`` as JSON, and read a number, or an object with
    `reward`.

    Args:
        url: ``http://`` or ``https://`` address.
        timeout_s: Deadline of one request, connection included.
        retries: How often to try again after a refused connection, a time-out, 429 or a 5xx answer.

    Raises:
        RewardError: there is no usable score after all tries, or the answer is one that another try would not change.
    """
    if not url.startswith(("http://", "https://")):
        raise RewardError("reward url is not HTTP", expected="http:// or https://", found=url, where="rewards[].url")
    body = json.dumps(_request(scored), ensure_ascii=False, allow_nan=False).encode()
    for attempt in range(retries + 1):
        try:
            return _score(_post(url, body, timeout_s), url)
        except _Transient as error:
            if attempt == retries:
                raise RewardError(
                    f"reward server gave no score in {retries + 1} tries",
                    found=str(error),
                    where=url,
                    do="check the server, or raise timeout_s and rollout.reward_timeout_s",
                ) from None
            time.sleep(BACKOFF_S * 2**attempt)
    raise AssertionError("unreachable: the last try returns or raises")


def _request(scored: Scored) -> dict[str, Any]:
    return {
        "prompt": {"id": scored.prompt.id, "messages": [asdict(message) for message in scored.prompt.messages]},
        "messages": [asdict(message) for message in scored.messages],
        "response": scored.response,
        "label": scored.prompt.label,
        "truncated": scored.truncated,
        "metadata": {**scored.prompt.metadata, **scored.metadata},
    }


def _post(url: str, body: bytes, timeout_s: float) -> bytes:
    request = urllib.request.Request(url, data=body, headers={"content-type": "application/json"}, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            reply: bytes = answer.read(MAX_REPLY_BYTES + 1)
    except urllib.error.HTTPError as error:
        with error:
            text = error.read(4 * SHOWN_CHARS).decode("utf-8", "replace")[:SHOWN_CHARS]
        if error.code == 429 or error.code >= 500:
            raise _Transient(f"HTTP {error.code}: {text}") from None
        raise RewardError(f"reward server refused the request with HTTP {error.code}", found=text, where=url) from None
    except TimeoutError:
        raise _Transient(f"no answer within {timeout_s:g} s") from None
    except (urllib.error.URLError, OSError) as error:
        raise _Transient(str(error)) from None
    if len(reply) > MAX_REPLY_BYTES:
        raise RewardError("reward server's answer is too long", expected=f"at most {MAX_REPLY_BYTES} bytes", where=url)
    return reply


def _score(reply: bytes, url: str) -> float | dict[str, float]:
    try:
        parsed = json.loads(reply)
    except ValueError:
        parsed = None
    values = parsed if isinstance(parsed, Mapping) else {"reward": parsed}
    numbers = {name: float(value) for name, value in values.items() if _is_number(value)}
    if len(numbers) != len(values) or "reward" not in numbers:
        raise RewardError(
            "reward server's answer is no score",
            expected='a JSON number, or an object of numbers with the key "reward"',
            found=reply[:SHOWN_CHARS].decode("utf-8", "replace"),
            where=url,
        )
    return numbers if isinstance(parsed, Mapping) else numbers["reward"]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
