"""Routes as bytes: the compact dtype, the wire form, and how the pieces of one row are put together. Pure, numpy only.

Routes are an integer array ``[rows, L, K]``: row p holds, for each of L MoE layers in order of depth, the K experts
that the token at position p was sent to. A row of T tokens has T - 1 of them: the last token is never an input.
`UNRECORDED` fills a row nobody recorded; the trainer then takes its own choice there.

Sizes: ``(T - 1) * L * K * itemsize`` bytes. 32K tokens through 60 layers with K = 8 are 60 MiB in int32, the form
engines send, and 30 MiB in int16, the form that is kept. Base64 adds a third.

Wire form of SGLang's ``meta_info.routed_experts``: base64 of the raw little-endian int32 array in C order, with a row
for each decoder layer, MoE or not; K is what the byte count leaves.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from miles_core.errors import ContractError, EngineError
from miles_core.types import UNRECORDED

Routes = npt.NDArray[np.integer[Any]]

WireDtype = Literal["int16", "int32"]
_WIRE: dict[str, np.dtype[np.integer[Any]]] = {"int16": np.dtype("<i2"), "int32": np.dtype("<i4")}
INT16_EXPERTS = 2**15
"""Below this many experts every index, and `UNRECORDED`, fits int16."""


def dtype_for(num_experts: int) -> np.dtype[Any]:
    """int16 for fewer than 32768 experts, else int32."""
    return np.dtype(np.int16) if num_experts < INT16_EXPERTS else np.dtype(np.int32)


def num_bytes(tokens: int, layers: int, top_k: int, itemsize: int = 4) -> int:
    """Raw bytes of the routes of a row of `tokens` tokens; base64 makes 4 bytes of every 3."""
    return max(tokens - 1, 0) * layers * top_k * itemsize


# --- the wire ---------------------------------------------------------------------------------------------------------


def to_bytes(routes: Routes, dtype: WireDtype = "int32") -> bytes:
    """Raw little-endian bytes in C order.

    Raises:
        ContractError: an index does not fit `dtype`.
    """
    limits = np.iinfo(_WIRE[dtype])
    if routes.size and not (routes.min() >= limits.min and routes.max() <= limits.max):
        raise ContractError(
            "routes do not fit the wire's dtype", expected=f"at most {limits.max}", found=str(int(routes.max()))
        )
    return np.ascontiguousarray(routes, dtype=_WIRE[dtype]).tobytes()


def to_base64(routes: Routes, dtype: WireDtype = "int32") -> str:
    """`to_bytes` as ASCII base64: SGLang's ``routed_experts`` when `dtype` is int32."""
    return base64.b64encode(to_bytes(routes, dtype)).decode("ascii")


def decode(
    payload: str | bytes,
    *,
    rows: int,
    layers: int,
    top_k: int | None = None,
    dtype: WireDtype = "int32",
    keep_layers: Sequence[int] | None = None,
) -> Routes:
    """Routes ``[rows, L, K]`` of a payload in the host's byte order.

    Args:
        payload: Base64 text, or raw bytes.
        rows: Rows the sender must have sent; prompt + output - 1 for a whole answer.
        layers: Layers on the wire: all decoder layers for SGLang.
        top_k: Experts of a token; None takes what the byte count leaves.
        keep_layers: Wire layers that are MoE layers, in order; None keeps all. L is their number.

    Raises:
        EngineError: not base64, or a byte count that is not that of such an array.
    """
    raw = _raw(payload)
    itemsize = _WIRE[dtype].itemsize
    cells = rows * layers
    found_k = len(raw) // (cells * itemsize) if cells else (top_k or 0)
    wanted_k = found_k if top_k is None else top_k
    if len(raw) != cells * wanted_k * itemsize or (cells and wanted_k == 0):
        shape = f"{rows} rows x {layers} layers x {top_k or 'k'} experts of {itemsize} bytes"
        raise EngineError(
            "the engine's routes have another size than its tokens",
            expected=f"{shape} ({cells * wanted_k * itemsize} bytes)" if cells and wanted_k else shape,
            found=f"{len(raw)} bytes",
            do="compare the layers and experts of the served model with those of the run's checkpoint",
        )
    routes: Routes = np.frombuffer(raw, dtype=_WIRE[dtype]).reshape(rows, layers, wanted_k)
    if keep_layers is not None:
        routes = routes[:, list(keep_layers)]
    return routes.astype(np.dtype(dtype))  # a writable copy: the frame around the payload can go


def _raw(payload: str | bytes) -> bytes:
    if isinstance(payload, bytes):
        return payload
    try:
        return base64.b64decode(payload, validate=True)
    except (binascii.Error, ValueError) as error:
        raise EngineError("the engine's routes are not base64", found=str(error)) from error


# --- a row that grows, turn by turn -----------------------------------------------------------------------------------


def extend(recorded: Routes | None, kept: int, later: Routes | None) -> Routes | None:
    """Routes of a row that grew by a turn: what was recorded first stays.

    A token's log-prob was computed with the experts its prefix had when it was sampled. A later turn may have
    recomputed that prefix, after a preemption or under other weights, and its routes there belong to no log-prob.

    Args:
        recorded: Of the row before the turn, or None.
        kept: Leading rows of `recorded` whose token and position are unchanged.
        later: Of prompt and output of the turn, from position 0; None when the turn brought none, as an aborted one.

    Returns:
        The rows known of the longer row; it may be shorter than the row, `pad` fills it up.
    """
    if recorded is None:
        return later
    head = recorded[:kept]
    if later is None or later.shape[0] <= head.shape[0]:
        return head
    if later.shape[1:] != head.shape[1:]:
        raise EngineError(
            "the engine's routes changed their shape between two turns",
            expected=f"[rows, {head.shape[1]}, {head.shape[2]}]",
            found=str(list(later.shape)),
            do="report it to the engine's author",
        )
    known = np.concatenate([head, later[head.shape[0] :].astype(head.dtype, copy=False)])
    missing = (known[: head.shape[0]] == UNRECORDED).all(axis=(1, 2))
    known[: head.shape[0]][missing] = later[: head.shape[0]][missing]
    return known


def pad(routes: Routes, rows: int) -> Routes:
    """Exactly `rows` rows: cut, or filled up with `UNRECORDED`."""
    if routes.shape[0] >= rows:
        return routes[:rows]
    missing = np.full((rows - routes.shape[0], *routes.shape[1:]), UNRECORDED, dtype=routes.dtype)
    return np.concatenate([routes, missing])


def recorded_rows(routes: Routes) -> npt.NDArray[np.bool_]:
    """bool[rows], True where a row was recorded."""
    found: npt.NDArray[np.bool_] = (routes != UNRECORDED).any(axis=(1, 2))
    return found
