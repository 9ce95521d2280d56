"""Transport `cuda-ipc`; here its blocks are main memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest
import torch

from miles_core.errors import EngineError, TransportError
from miles_core.kinds.transport import Transport
from miles_core.testing.recording import RecordingOptions
from miles_core.testing.transport import TransportConformance
from miles_transports.cuda_ipc import CudaIpcTransport, assign
from miles_transports.options import CudaIpcOptions
from miles_transports.shared_block import PREFIX, SHARED_MEMORY, SharedBlock, open_block

CPU = torch.device("cpu")


def blocks() -> set[Path]:
    """Names of blocks of this process."""
    return set(SHARED_MEMORY.glob(f"{PREFIX}{os.getpid()}-*"))


class TestCudaIpc(TransportConformance):
    def make(self) -> Transport:
        return CudaIpcTransport(CudaIpcOptions(timeout_s=120))


async def test_blocks_lose_their_names_once_mapped_so_that_a_kill_leaves_nothing_behind() -> None:
    kit = TestCudaIpc()
    async with kit.connected(options=RecordingOptions(tensors_per_bucket=1)) as connected:
        for version in range(3):
            staged = await kit.publish(connected, version)
            assert staged.sent.figures["wire_bytes"] >= 2 * staged.sent.num_bytes
            assert not blocks()


async def test_an_engine_that_missed_the_first_publish_maps_the_blocks_in_the_next() -> None:
    kit = TestCudaIpc()
    async with kit.connected() as connected:

        async def absent(version: int) -> NoReturn:
            raise EngineError("not now")

        late = connected.engines[1]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(late, "receive", absent)
            await kit.refused(connected, 0)
        staged = await kit.publish(connected, 1)
        assert [each.digests for each in staged.received] == [staged.sent.digests] * 2
    assert not blocks()


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
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    assert done.stdout.strip() == "[1, 2, 3, 4]"
    assert int(block.bytes[0]) == 9
    block.close()
    with pytest.raises(TransportError, match="cannot be mapped"):
        open_block(block.handle, CPU)


KILLED = """
import os, signal, torch
from miles_transports.shared_block import SharedBlock
print(SharedBlock(16, torch.device("cpu")).handle, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_block_of_a_process_that_was_killed_is_removed_and_one_in_use_is_not() -> None:
    mine = SharedBlock(16, CPU)
    done = subprocess.run([sys.executable, "-c", KILLED], capture_output=True, text=True, timeout=240, check=False)
    orphan = Path(json.loads(done.stdout)[-1])
    assert orphan.is_file()
    another = SharedBlock(16, CPU)
    assert not orphan.exists()
    assert len(blocks()) == 2
    mine.close()
    another.close()
    assert not blocks()


def test_each_engine_is_served_by_a_rank_on_its_device_in_turn() -> None:
    assert assign(["h gpu0", "h gpu1"], ["h gpu1", "h gpu0"]) == [1, 0]
    assert assign(["h cpu"] * 2, ["h cpu"] * 3) == [0, 1, 0]
    with pytest.raises(TransportError, match="engine 1 shares its device with no trainer rank"):
        assign(["h gpu0"], ["h gpu0", "h gpu1"])


def test_a_block_that_shared_memory_cannot_hold_is_refused_before_anybody_writes_to_it() -> None:
    room = os.statvfs(SHARED_MEMORY)
    with pytest.raises(TransportError, match="shared memory is too small") as raised:
        SharedBlock(2 * room.f_blocks * room.f_frsize, CPU)
    assert "--shm-size" in str(raised.value)
    assert not blocks()
