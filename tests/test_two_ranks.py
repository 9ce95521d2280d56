"""The same run-file with `executor: ray`: two gloo ranks, an engine of its own, weights broadcast between processes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from miles_core.testing.executor import engine_spec, trainer_spec
from miles_core.testing.recording import example_weights, write_example_checkpoint
from miles_core.weights.digests import digest_tensor
from miles_core.weights.lifecycle import publish

if TYPE_CHECKING:
    from .conftest import Workspace


@pytest.mark.parametrize(
    "transport",
    [
        "broadcast",
        pytest.param("p2p", marks=pytest.mark.slow),
        pytest.param("disk-delta", marks=pytest.mark.slow),
    ],
)
def test_two_ranks_under_ray_train_like_one_rank_in_process(workspace: Workspace, transport: str) -> None:
    pytest.importorskip("ray", reason="executor ray needs ray")
    pick: dict[str, str] = {"use": transport}
    if transport == "p2p":
        pytest.importorskip("mooncake.engine", reason="mooncake-transfer-engine-non-cuda is absent")
    if transport == "disk-delta":
        pick.update(publish_dir=str(workspace.folder / "published"), local_dir=str(workspace.folder / "local"))
    short = {"schedule.steps": 2, "name": "one"}
    workspace.train(overrides=short)
    two = {
        **short,
        "name": "two",
        "executor": "ray",
        "transport": pick,
        "placement.mode": "separate",
        "placement.trainer_ranks": 2,
        "check_weight_update_equal": True,
    }
    workspace.train(overrides=two)
    one_rank, two_ranks = workspace.lines(name="one"), workspace.lines(name="two")
    assert [line["step"] for line in one_rank] == [line["step"] for line in two_ranks]
    for key in ("rollout/reward_mean", "train/loss", "train/grad_norm", "contract/tokens/trained_tokens"):
        # Step 1 samples from equal weights with equal seeds: the same tokens, hence the same figures.
        assert two_ranks[1][key] == pytest.approx(one_rank[1][key], rel=1e-3, abs=1e-5), key
    assert all(line["contract/logprobs/abs_diff_max"] < 1e-3 for line in two_ranks[1:])


@pytest.mark.slow
async def test_two_ranks_publish_their_shares_of_a_difference_and_two_engines_load_it(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="executor ray needs ray")
    from miles_ray.executor import RayExecutor
    from miles_ray.options import RayOptions
    from miles_transports.delta.transport import DiskDeltaTransport
    from miles_transports.options import DiskDeltaOptions

    base = str(write_example_checkpoint(tmp_path / "base"))
    executor = RayExecutor(RayOptions())
    try:
        trainer = await executor.start_trainer(trainer_spec(world_size=2, model_path=base))
        engines = await executor.start_engines(engine_spec(count=2))
        published, local = str(tmp_path / "published"), str(tmp_path / "local")
        transport = DiskDeltaTransport(DiskDeltaOptions(publish_dir=published, local_dir=local))
        await transport.open(trainer, engines)
        for version in range(2):
            report = await publish(transport, engines, version)
            assert [await engine.version() for engine in engines] == [version] * 2
            assert 0 < report.figures["sync/density"] <= 1
            expected = {name: digest_tensor(tensor) for name, tensor in example_weights(version).items()}
            assert [await engine.digests() for engine in engines] == [expected] * 2
            assert report.num_bytes == sum(tensor.nbytes for tensor in example_weights(version).values())
        await transport.close()
    finally:
        await executor.close()
    shards = sorted(path.name for path in (tmp_path / "published").glob("*/weight_v000001/*.safetensors"))
    assert shards == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
