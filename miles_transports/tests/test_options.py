"""Values of options that can never work are refused before anything starts."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from miles_transports.options import DiskDeltaOptions, P2pOptions


@pytest.mark.parametrize("wrong", [{"publish_dir": ""}, {"local_dir": ""}, {"local_dir": "s3://bucket/path"}])
def test_folders_of_disk_delta_are_named_and_the_local_one_is_no_url(wrong: dict[str, str]) -> None:
    right = {"publish_dir": "s3://bucket/path", "local_dir": "/nvme/weights"}
    DiskDeltaOptions.model_validate(right)
    with pytest.raises(ValidationError, match=next(iter(wrong))):
        DiskDeltaOptions.model_validate(right | wrong)


def test_several_ranks_need_a_layout_that_divides() -> None:
    assert P2pOptions(engine_ranks=2, layout="fused").engine_ranks == 2
    with pytest.raises(ValidationError, match="layout: fused"):
        P2pOptions(engine_ranks=2)


def test_a_device_that_no_protocol_would_read_is_refused() -> None:
    assert P2pOptions(protocol="rdma", device="mlx5_0").device == "mlx5_0"
    with pytest.raises(ValidationError, match="rdma"):
        P2pOptions(device="mlx5_0")
