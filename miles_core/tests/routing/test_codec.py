"""Routes on the wire and in pieces."""

from __future__ import annotations

import base64

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_core.errors import ContractError, EngineError
from miles_core.routing import codec
from miles_core.types import UNRECORDED

FULL = np.arange(28, dtype=np.int32).reshape(7, 2, 2)  # 8 tokens, 2 layers, 2 experts


@st.composite
def routes(draw: st.DrawFn) -> np.ndarray:
    shape = draw(st.tuples(st.integers(1, 9), st.integers(1, 4), st.integers(1, 4)))
    seed = draw(st.integers(0, 2**32 - 1))
    return np.random.default_rng(seed).integers(UNRECORDED, 128, shape).astype(np.int16)


@given(routes(), st.sampled_from(["int16", "int32"]), st.booleans())
def test_the_wire_gives_back_what_it_took(made: np.ndarray, dtype: codec.WireDtype, raw: bool) -> None:
    payload = codec.to_bytes(made, dtype) if raw else codec.to_base64(made, dtype)
    back = codec.decode(payload, rows=made.shape[0], layers=made.shape[1], dtype=dtype)
    assert back.dtype == dtype
    np.testing.assert_array_equal(back, made)


def test_base64_is_little_endian_int32_in_c_order() -> None:
    payload = codec.to_base64(np.array([[[1, 258]], [[-1, 3]]], dtype=np.int16))
    assert base64.b64decode(payload) == bytes([1, 0, 0, 0, 2, 1, 0, 0, 255, 255, 255, 255, 3, 0, 0, 0])


def test_dense_layers_on_the_wire_are_left_out() -> None:
    back = codec.decode(codec.to_base64(FULL), rows=7, layers=2, keep_layers=[1])
    np.testing.assert_array_equal(back, FULL[:, 1:])


def test_no_rows_are_an_empty_array() -> None:
    assert codec.decode("", rows=0, layers=2, top_k=2).shape == (0, 2, 2)


@pytest.mark.parametrize(("rows", "layers", "top_k"), [(6, 2, 2), (7, 3, None), (8, 2, None), (7, 2, 3)])
def test_a_payload_of_another_size_is_refused(rows: int, layers: int, top_k: int | None) -> None:
    with pytest.raises(EngineError, match="another size"):
        codec.decode(codec.to_bytes(FULL), rows=rows, layers=layers, top_k=top_k)


@pytest.mark.parametrize("payload", ["%%%", "AAA", ""])
def test_text_that_is_no_payload_is_refused(payload: str) -> None:
    with pytest.raises(EngineError, match=r"base64|another size"):
        codec.decode(payload, rows=1, layers=1)


def test_sizes_are_those_of_the_formula() -> None:
    tokens, layers, top_k = 32 * 1024, 60, 8
    assert codec.num_bytes(tokens, layers, top_k) / 2**20 == pytest.approx(60, abs=0.01)
    assert codec.num_bytes(tokens, layers, top_k, codec.dtype_for(256).itemsize) / 2**20 == pytest.approx(30, abs=0.01)
    assert codec.num_bytes(8, 2, 2) == len(codec.to_bytes(FULL))


def test_int16_holds_experts_below_32768() -> None:
    assert codec.dtype_for(32767) == np.int16
    assert codec.dtype_for(32768) == np.int32
    with pytest.raises(ContractError, match="fit"):
        codec.to_bytes(np.array([[[32768]]], dtype=np.int32), "int16")


# --- turns ------------------------------------------------------------------------------------------------------------


def test_rows_recorded_first_stay_when_a_later_turn_recomputed_them() -> None:
    later = FULL + 100
    joined = codec.extend(FULL[:4], 4, later)
    np.testing.assert_array_equal(joined, np.concatenate([FULL[:4], later[4:]]))


def test_rows_whose_token_changed_are_taken_from_the_later_turn() -> None:
    later = FULL + 100
    np.testing.assert_array_equal(codec.extend(FULL[:5], 3, later), np.concatenate([FULL[:3], later[3:]]))


def test_an_aborted_turn_leaves_its_rows_unrecorded_until_somebody_records_them() -> None:
    known = codec.extend(FULL[:4], 4, None)
    assert known is not None
    padded = codec.pad(known, 6)
    assert codec.recorded_rows(padded).tolist() == [True] * 4 + [False] * 2
    np.testing.assert_array_equal(codec.extend(padded, 6, FULL), FULL)


def test_routes_may_not_change_their_shape_between_turns() -> None:
    with pytest.raises(EngineError, match="shape"):
        codec.extend(FULL[:4], 4, FULL[:, :1])
