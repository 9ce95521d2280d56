"""The model of a weight update against the published sweep, and against itself on held-out rows."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from miles_core.planning import sync
from miles_core.planning.sync import PUBLISHED, Links, Published, Topology


def factor(predicted: float, measured: float) -> float:
    return max(predicted / measured, measured / predicted)


def worst(rows: tuple[Published, ...], links: Links) -> float:
    return max(
        max(
            factor(sync.broadcast(row.topology, links).pause_s, row.broadcast_s),
            factor(sync.p2p(row.topology, links).pause_s, row.p2p_s),
        )
        for row in rows
    )


@pytest.mark.parametrize("row", PUBLISHED, ids=lambda row: row.model)
def test_each_published_window_is_predicted_within_a_factor_of_one_and_a_half(row: Published) -> None:
    assert worst((row,), Links()) < 1.5


@pytest.mark.parametrize("row", PUBLISHED, ids=lambda row: row.model)
def test_each_published_pair_is_ranked_rightly(row: Published) -> None:
    faster = next(each.transport for each in sync.estimates(row.topology) if each.transport in ("broadcast", "p2p"))
    assert faster == ("broadcast" if row.broadcast_s < row.p2p_s else "p2p")


@pytest.mark.parametrize("held_out", PUBLISHED, ids=lambda row: row.model)
def test_constants_fitted_without_a_row_still_predict_it_within_a_factor_of_two(held_out: Published) -> None:
    # Three constants and fourteen figures: were the model a disguised table, it would fail on what it never saw.
    rest = tuple(row for row in PUBLISHED if row is not held_out)
    grid = (
        replace(Links(), broadcast_efficiency=efficiency / 100, gather=float(gather), host_staging=float(staging))
        for efficiency in range(50, 100, 5)
        for gather in range(60, 240, 30)
        for staging in range(12, 30, 2)
    )
    fitted = min(grid, key=lambda links: worst(rest, links))
    assert worst((held_out,), fitted) < 2.0


def test_shared_devices_leave_only_cuda_ipc_and_shared_storage_only_disk_delta() -> None:
    base = Topology(model_bytes=60e9)
    assert [e.transport for e in sync.estimates(replace(base, fabric="shared-device"))] == ["cuda-ipc"]
    assert [e.transport for e in sync.estimates(replace(base, fabric="storage"))] == ["disk-delta"]
    assert "only one" in sync.recommend(sync.estimates(replace(base, fabric="storage")))


@pytest.mark.parametrize(
    ("transport", "change", "links", "word"),
    [
        (sync.broadcast, {}, Links(), "network card"),
        (sync.broadcast, {}, Links(nic=5000.0), "gathering"),
        (sync.p2p, {}, Links(), "main memory"),
        (sync.p2p, {"engines": 640}, Links(), "a copy for each engine"),
        (sync.p2p, {"post_load_s": 100.0}, Links(), "engine's own work"),
        (sync.cuda_ipc, {}, Links(), "no network"),
        (sync.cuda_ipc, {}, Links(device_copy=1.0), "inside the devices"),
        (sync.disk_delta, {}, Links(), "diffing"),
        (sync.disk_delta, {"density": 1.0}, Links(storage=0.1), "shared storage"),
        (sync.disk_delta, {}, Links(reload=1.0), "local disks"),
    ],
)
def test_the_reason_is_the_longest_part(
    transport: Callable[[Topology, Links], sync.Estimate], change: dict[str, Any], links: Links, word: str
) -> None:
    assert word in transport(Topology(model_bytes=100e9, **change), links).because


def test_more_replicas_cost_p2p_bytes_on_the_wire_and_broadcast_none() -> None:
    one, four = Topology(model_bytes=1e12), Topology(model_bytes=1e12, engines=4)
    assert sync.p2p(four, Links()).wire_bytes == 4 * sync.p2p(one, Links()).wire_bytes
    assert sync.p2p(four, Links()).pause_s > sync.p2p(one, Links()).pause_s
    assert math.isclose(sync.broadcast(four, Links()).pause_s, sync.broadcast(one, Links()).pause_s)
