"""Transport `cuda-ipc`; here its blocks are main memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from miles_core.errors import TransportError
from miles_core.kinds.transport import Transport
from miles_core.testing.recording import RecordingOptions
from miles_core.testing.transport import TransportConformance
from miles_transports.cuda_ipc import CudaIpcTransport, assign
from miles_transports.options import CudaIpcOptions
from miles_transports.shared_block import PREFIX, SHARED_MEMORY, SharedBlock, open_block

CPU = torch.device("cpu")


def blocks() -> set[Path]:
    return set(SHARED_MEMORY.glob("miles-*"))


class TestCudaIpc(TransportConformance):
    def make(self) -> Transport:
        return CudaIpcTransport(CudaIpcOptions(timeout_s=20))


async def test_two_blocks_serve_every_bucket_and_nothing_is_left_behind() -> None:
    before, kit = blocks(), TestCudaIpc()
    async with kit.connected(options=RecordingOptions(tensors_per_bucket=1)) as connected:
        for version in range(3):
            staged = await kit.publish(connected, version)
            assert staged.sent.figures["wire_bytes"] >= 2 * staged.sent.num_bytes
        assert len(blocks() - before) <= 2
    assert blocks() == before


OTHER_PROCESS = """
import sys, torch
from miles_transports.shared_block import open_block
block = open_block(sys.argv[1], torch.device("cpu"))
print(block[:4].tolist())
block[0] = 9
"""


def test_another_process_sees_the_memory_itself() -> None:
    block = SharedBlock(16, CPU)
    block.bytes[:4] = torch.tensor([1, 2, 3, 4], dtype=torch.uint8)
    command = [sys.executable, "-c", OTHER_PROCESS, block.handle]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[1, 2, 3, 4]"
    assert int(block.bytes[0]) == 9
    block.close()
    with pytest.raises(TransportError, match="cannot be mapped"):
        open_block(block.handle, CPU)


def test_each_engine_is_served_by_a_rank_on_its_device_in_turn() -> None:
    assert assign(["h gpu0", "h gpu1"], ["h gpu1", "h gpu0"]) == [1, 0]
    assert assign(["h cpu"] * 2, ["h cpu"] * 3) == [0, 1, 0]
    with pytest.raises(TransportError, match="engine 1 shares its device with no trainer rank"):
        assign(["h gpu0"], ["h gpu0", "h gpu1"])


def test_a_block_that_shared_memory_cannot_hold_is_refused_before_anybody_writes_to_it() -> None:
    room, before = os.statvfs(SHARED_MEMORY), blocks()
    with pytest.raises(TransportError, match="shared memory is too small") as raised:
        SharedBlock(2 * room.f_blocks * room.f_frsize, CPU)
    assert "--shm-size" in str(raised.value)
    assert blocks() == before


def test_what_a_killed_process_left_is_removed_and_what_a_live_one_holds_is_not() -> None:
    left = SHARED_MEMORY / f"{PREFIX}test-{os.getpid()}"
    left.touch()  # no process has it locked
    mine = SharedBlock(16, CPU)
    assert left.is_file(), "it may be as young as one that is not locked yet"
    assert mine._path is not None
    for path in (left, mine._path):
        os.utime(path, (0, 0))
    SharedBlock(16, CPU).close()
    assert not left.exists()
    assert mine._path.is_file()
    mine.close()
    mine.close()
