"""A wait ends when its condition holds, and otherwise says what was awaited."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from itertools import count

import pytest

from miles_core.testing.virtual_time import in_virtual_time
from miles_core.testing.waiting import until, wait_until


@in_virtual_time
async def test_until_returns_once_it_holds_and_names_what_never_came() -> None:
    looks = count()
    await until(lambda: next(looks) == 1000)
    with pytest.raises(AssertionError, match="waited 5 s in vain for the moon"):
        await until(lambda: False, "the moon", deadline_s=5)
    assert asyncio.get_running_loop().time() == pytest.approx(6, abs=0.1)


def test_wait_until_ends_with_the_process_or_the_deadline() -> None:
    with subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE) as process:
        looks = count()
        wait_until(lambda: next(looks) == 2, process, lambda: "")
        with pytest.raises(AssertionError, match="its output"):
            wait_until(lambda: False, process, lambda: "its output", deadline_s=0)
        process.communicate(b"\n")
        with pytest.raises(AssertionError, match="its output"):
            wait_until(lambda: False, process, lambda: "its output")
