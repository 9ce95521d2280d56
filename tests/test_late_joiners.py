"""An engine dies in the middle of a run and another takes its place: by every transport between processes."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

import pytest

from .test_chaos import CHAOS, Fire, check_nothing_lost, check_versions, ctrl_c, ended, newcomers, started

if TYPE_CHECKING:
    from .conftest import Workspace

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("transport", ["cuda-ipc", "p2p", "disk-delta"])
def test_who_takes_its_place_serves_from_the_published_version_on(workspace: Workspace, transport: str) -> None:
    if transport == "p2p":
        pytest.importorskip("mooncake.engine", reason="mooncake-transfer-engine-non-cuda is absent")
    pick: dict[str, Any] = {"use": transport}
    if transport == "disk-delta":
        published, local = workspace.folder / "published", workspace.folder / "local"
        pick.update(publish_dir=str(published), local_dir=str(local), snapshot_every=3)
    overrides = {**CHAOS, "transport": pick, "schedule.steps": 100_000, "weights.timeout_s": 60}
    if transport == "cuda-ipc":
        overrides["placement.mode"] = "colocated"
        overrides["schedule.mode"] = "sync"
        for key in ("schedule.max_concurrent_samples", "schedule.unused_groups", "corrections"):
            del overrides[key]
    with started(workspace, overrides) as run:
        fire = Fire(workspace, run, seed=0)
        fire.a_step()
        fire.a_step()
        assert fire.strike("engine", signal.SIGKILL)
        fire.wait_for(lambda: bool(newcomers(workspace)))
        fire.a_step()
        fire.a_step()
        ctrl_c(run)
        ended(workspace, run, 130)
    assert newcomers(workspace)
    check_versions(workspace)
    if transport != "cuda-ipc":
        check_nothing_lost(workspace, workspace.lines()[-1]["step"], 2, 3)
    if transport == "disk-delta":
        assert len(list(published.iterdir())) == 1, "the chain goes on when an engine joins"
        assert len(list(local.glob("*/v*"))) <= 2
