"""What no engine takes is refused by name, before anything the engine itself says."""

from __future__ import annotations

from typing import Any

import pytest

from miles_core.errors import EngineError
from miles_core.kinds.engine import GenerateRequest
from miles_core.requests import check_request
from miles_core.types import SamplingParams

OWN = ("not with this engine", "another one", "this one", None)


def check(*ids: int, own: Any = None, **params: Any) -> None:
    request = GenerateRequest(request_id="r", session_id="s", token_ids=ids, params=SamplingParams(**params))
    check_request(request, vocabulary=10, context=4, where="here", own=own)


@pytest.mark.parametrize(
    ("ids", "params", "named"),
    [
        ((), {}, "empty"),
        ((1, 2, 3, 4), {}, "does not fit"),
        ((1, 10), {}, "token 1 of the prompt"),
        ((-1, 2), {}, "token 0 of the prompt"),
        ((1,), {"temperature": float("inf")}, "`temperature`"),
        ((1,), {"top_p": 0.0}, "`top_p`"),
        ((1,), {"top_k": -1}, "`top_k`"),
        ((1,), {"min_p": 1.5}, "`min_p`"),
        ((1,), {"max_tokens": 0}, "`max_tokens`"),
        ((1,), {"stop": ("a", "")}, "`stop`"),
        ((1,), {"stop_token_ids": (10,)}, "`stop_token_ids`"),
    ],
)
def test_each_fault_is_named_before_the_engines_own(ids: tuple[int, ...], params: dict[str, Any], named: str) -> None:
    with pytest.raises(EngineError, match=named):
        check(*ids, own=OWN, **params)


def test_a_good_request_passes_unless_the_engine_refuses_it() -> None:
    check(0, 9, 3, temperature=0.0, stop_token_ids=(9,))
    with pytest.raises(EngineError, match="not with this engine"):
        check(0, 9, 3, own=OWN)
