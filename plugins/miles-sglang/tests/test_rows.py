"""Rows, their events and the body of a request; no server."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from miles_core.errors import EngineError
from miles_core.kinds.engine import GenerateRequest
from miles_core.testing.tiny import make_tiny_model
from miles_core.types import FinishReason, SamplingParams
from miles_sglang.checkpoint import Checkpoint, read_checkpoint
from miles_sglang.claim import Claim
from miles_sglang.client import Client
from miles_sglang.requests import rank_of, seed_of
from miles_sglang.rows import Row, cut_at_stop, finish_of, parse, payload, routes_of, stretches


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = make_tiny_model(tmp_path_factory.mktemp("moe") / "model", architecture="qwen3-moe", layers=3)
    return read_checkpoint(folder, "checkpoint")


def row(*prompt: int, **params: Any) -> Row:
    request = GenerateRequest(
        request_id="r", session_id="s", token_ids=prompt or (1, 2, 3), params=SamplingParams(**params), routes=True
    )
    return Row(request, seed=5, limit=10, rank=None)


def nobody() -> Client:
    raise AssertionError("nothing is asked")


def event(ids: list[int], *logprobs: float, **meta: Any) -> dict[str, Any]:
    entries = [[value, token, None] for value, token in zip(logprobs or [-1.0] * len(ids), ids, strict=True)]
    return {"output_ids": ids, "meta_info": {"finish_reason": None, "output_token_logprobs": entries, **meta}}


def test_what_is_left_of_a_row_is_asked_for_with_every_parameter(moe: Checkpoint) -> None:
    taken = row(1, 2, temperature=0.5, top_k=0, stop_token_ids=(9,))
    taken.ids = [7, 8]
    body = payload(taken, checkpoint=moe, epoch=4, stream_interval=2)
    assert body["input_ids"] == [1, 2, 7, 8]
    sampling = body["sampling_params"]
    assert sampling["max_new_tokens"] == 8
    assert sampling["top_k"] == -1
    assert sampling["sampling_seed"] == 5
    assert body["extra_key"] == "4"
    assert body["return_routed_experts"]
    assert moe.stops == {2}
    assert sampling["ignore_eos"], "the checkpoint's end token must not end a row that does not name it"
    own = payload(row(1, stop_token_ids=(2, 9)), checkpoint=moe, epoch=0, stream_interval=1)
    assert not own["sampling_params"]["ignore_eos"]


def test_an_event_whose_log_probs_belong_to_other_tokens_is_refused() -> None:
    broken = event([4, 5])
    broken["output_ids"] = [4]
    with pytest.raises(EngineError, match="not those of its tokens"):
        parse(broken, "here")
    with pytest.raises(EngineError, match="not finite"):
        parse(event([4], float("nan")), "here")
    absent: Any = None  # how the server's JSON tells it
    with pytest.raises(EngineError, match="not finite"):
        parse(event([4], absent), "here")
    for strange in ({"text": "x"}, {"meta_info": {"output_token_logprobs": [[]]}}, {"meta_info": []}):
        with pytest.raises(EngineError, match="not the form"):
            parse(strange, "here")
    assert parse(event([4], 1e-9), "here").logprobs == [0.0]


def test_tokens_after_a_stop_token_are_dropped() -> None:
    piece = parse(event([4, 9, 5, 9]), "here")
    assert cut_at_stop(piece, (9,))
    assert piece.ids == [4, 9]
    assert len(piece.logprobs) == 2
    assert not cut_at_stop(parse(event([4]), "here"), (9,))


def test_spans_tell_which_version_made_the_last_tokens() -> None:
    claim = Claim("miles/host/1/2/ab", "here", nobody)

    def number(name: object) -> int:
        return claim.read(name, newest=5)

    spans = [{"version": claim.name(3), "start": 0, "end": 4}, {"version": claim.name(5), "start": 4, "end": 9}]
    meta = {"weight_versions": spans}
    assert list(stretches(meta, 2, 7, 3, number, "here")) == [(2, 3), (5, 5)]
    assert list(stretches(meta, 0, 3, 3, number, "here")) == [(3, 3)], "tokens beyond a stop are in the spans"
    assert list(stretches({}, 2, 7, 8, number, "here")) == [(7, 8)]
    assert list(stretches(meta, 0, 12, 3, number, "here", cut_off=True)) == [(4, 3), (5, 5)], (
        "what no span covers is dropped"
    )
    with pytest.raises(EngineError, match="do not cover"):
        list(stretches(meta, 0, 12, 3, number, "here"))
    with pytest.raises(EngineError, match="did not publish"):
        list(
            stretches({"weight_versions": [{"version": claim.name(6), "start": 0, "end": 1}]}, 0, 1, 0, number, "here")
        )
    with pytest.raises(EngineError, match="spans are none"):
        list(stretches({"weight_versions": [{"version": "3"}]}, 0, 1, 0, number, "here"))


def test_versions_of_others_are_told_from_ones_own() -> None:
    own, other = Claim("miles/host/1/2/ab", "here", nobody), Claim("miles/host/1/2/cd", "here", nobody)
    assert own.read(own.name(3), newest=3) == 3
    assert own.read("-1", newest=3) == -1
    for foreign in (own.name(4), other.name(3), "3", "41", "default", None):
        with pytest.raises(EngineError, match="did not publish"):
            own.read(foreign, newest=3)


@pytest.mark.parametrize(
    ("finish", "reason"),
    [
        ({"type": "length", "length": 3}, FinishReason.LENGTH),
        ({"type": "stop", "matched": 2}, FinishReason.STOP),
        ({"type": "abort", "message": "Aborted", "status_code": None}, FinishReason.ABORT),
        ({"type": "abort", "message": "too long", "status_code": 400}, None),
        ({"type": "stop", "matched": "NaN happened"}, None),
    ],
)
def test_finish_reasons(finish: dict[str, Any], reason: FinishReason | None) -> None:
    piece = parse(event([4], finish_reason=finish), "here")
    if reason is None:
        with pytest.raises(EngineError, match="ended a request with an error"):
            finish_of(piece, "here")
    else:
        assert finish_of(piece, "here") is reason


def test_routes_of_a_later_attempt_do_not_replace_recorded_ones(moe: Checkpoint) -> None:
    taken = row(1, 2, 3)
    taken.ids = [4]
    first = np.arange(3 * 3 * 2, dtype=np.int32).reshape(3, 3, 2) % 4

    def reply(array: np.ndarray[Any, Any], sampled: int) -> dict[str, Any]:
        encoded = base64.b64encode(array.tobytes()).decode()
        return {"routed_experts": encoded, "prompt_tokens": 3, "completion_tokens": sampled}

    taken.routes = routes_of(taken, reply(first, 1), moe, "here")
    taken.ids = [4, 5]
    second = np.full((5, 3, 2), 3, dtype=np.int32)  # one token more than is kept
    found = routes_of(taken, reply(second, 3), moe, "here")
    assert found is not None
    assert found.shape == (4, 3, 2)
    np.testing.assert_array_equal(found[:3], first)
    np.testing.assert_array_equal(found[3], second[3])
    whole = reply(second, 3)
    for wrong in (
        reply(second[:, :2], 3),
        {**reply(second[:2], 0), "prompt_tokens": 3},
        {**whole, "routed_experts": second.tolist()},
        {**whole, "prompt_tokens": None},
        {"routed_experts": whole["routed_experts"]},
    ):
        with pytest.raises(EngineError, match="routes"):
            routes_of(taken, wrong, moe, "here")


def test_seeds_and_ranks_are_functions_of_what_names_them() -> None:
    asked = row(seed=11).request
    assert seed_of(asked, 1, 0, 0) == seed_of(asked, 2, 3, 9)
    free = row().request
    assert len({seed_of(free, 1, index, arrival) for index in range(3) for arrival in range(3)}) == 9
    assert 0 <= seed_of(free, 1, 0, 0) < 2**63
    assert rank_of("session", 1) is None
    assert {rank_of(f"session {n}", 4) for n in range(64)} == {0, 1, 2, 3}
    assert rank_of("one", 4) == rank_of("one", 4)


def test_a_folder_tells_forms_in_the_served_precision(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model", dtype="bfloat16")
    assert {str(form.dtype) for form in read_checkpoint(folder, "checkpoint").forms.values()} == {"torch.bfloat16"}
    assert {str(form.dtype) for form in read_checkpoint(folder, "float32").forms.values()} == {"torch.float32"}
    assert read_checkpoint(folder, "checkpoint").moe_layers is None
