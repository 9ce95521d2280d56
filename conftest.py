"""Import the packages whose folders carry the same name before pytest derives module names from those folders.

In importlib mode pytest would otherwise register the folder `miles_core/` as the package `miles_core`.
"""

import sys
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

import miles_core  # noqa: F401
import miles_fsdp  # noqa: F401
import miles_megatron  # noqa: F401
import miles_transports  # noqa: F401

# Neither the clock nor luck decides: the examples are the same each time, and a slow machine may take its time.
settings.register_profile("miles", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("miles")


@pytest.fixture(autouse=True)
def torch_draws_the_same_numbers_whatever_ran_before() -> None:
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(0)


@pytest.fixture(scope="module", autouse=True)
def no_process_group_is_left_behind() -> Iterator[None]:
    """torch's default group is one of the process: one that a test leaves would serve whatever test comes next."""
    yield
    distributed = sys.modules.get("torch.distributed")
    assert distributed is None or not distributed.is_initialized(), "a test left torch's default process group behind"
