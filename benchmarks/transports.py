"""Transports against what their wires and memories can do at all, as ratios measured in one run.

    python benchmarks/transports.py [broadcast cuda-ipc delta] [--mib 512] [--bucket-mib 128] [--repeats 5]

broadcast   a publish against one collective after the other over the same bytes in the same group; goal 85%
cuda-ipc    a publish (a copy into shared memory, a copy out of it) against two plain copies of the same bytes there;
            goal 70%
delta       comparing and compressing, and applying, against the slower of a memory copy of the model and zstd level 1
            of what the encoding compresses, with as many threads; goal 60%. Each is the third version, which finds the
            memory of the ones before

Both sides of a ratio are measured in turn, so that a busy machine burdens both alike; the median of these pairs counts.
Digests are the trainer's and the engine's own cost and not in these figures. With two GPUs broadcast goes through NCCL.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import multiprocessing
import os
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import zstandard
from safetensors.torch import save_file

from miles_core.types import NamedTensor, WeightBucket
from miles_core.weights.digests import digest_tensor
from miles_transports.broadcast import BroadcastReceiver, BroadcastSender, choose_wire
from miles_transports.cuda_ipc import CudaIpcReceiver, CudaIpcSender
from miles_transports.delta.checkout import Checkout
from miles_transports.delta.codec import Encoding
from miles_transports.delta.publication import Publication
from miles_transports.delta.source import DeltaSource
from miles_transports.delta.store import FolderStore
from miles_transports.group import BroadcastGroup
from miles_transports.meeting import Address, Meeting

MIB = 2**20
GOALS = {"broadcast": 0.85, "cuda-ipc": 0.70, "encode": 0.60, "apply": 0.60}


def buckets(arguments: argparse.Namespace, version: int, device: torch.device) -> list[WeightBucket]:
    """Sixteen bfloat16 tensors in each."""
    count = arguments.mib // arguments.bucket_mib
    size = arguments.bucket_mib * MIB // 16 // 2
    made = []
    for index in range(count):
        tensors = tuple(
            NamedTensor(name=f"layers.{index}.{i}", tensor=torch.full((size,), i, dtype=torch.bfloat16, device=device))
            for i in range(16)
        )
        made.append(WeightBucket(version=version, index=index, last=index == count - 1, tensors=tensors))
    return made


def target(link: Connection, kind: str, address: Address, gpu: int, bucket_bytes: int, count: int) -> None:
    """The engine's process."""
    if torch.cuda.is_available():
        torch.cuda.set_device(gpu)
    receiver: Any = BroadcastReceiver(address, 0) if kind == "broadcast" else CudaIpcReceiver(address, 0)
    link.send("joined")
    block: torch.Tensor | None = None
    while (order := link.recv()) is not None:
        if order == "raw":
            group = receiver._party.group(receiver._party.meeting.attempt())
            if block is None:  # made once, as a publish does: touching new pages would be most of a collective
                block = torch.ones(bucket_bytes, dtype=torch.uint8, device=group.device)
            for _ in range(count):
                group.broadcast(block, lambda: None)
        else:
            for bucket in receiver.receive(order):
                last = bucket
            link.send("done")
            link.send([digest_tensor(named.tensor) for named in last.tensors])
            continue
        link.send("done")
    receiver.close()


def timed(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began


def between_processes(kind: str, arguments: argparse.Namespace) -> tuple[list[float], list[float], str]:
    """Seconds of the raw way and of a publish, in turn; and what carried them."""
    gpus = torch.cuda.device_count()
    device = torch.device("cuda", 0) if gpus else torch.device("cpu")
    meeting, address = Meeting.host("127.0.0.1", 120.0, 1)
    meeting.tell("generation", 0)
    meeting.tell("attempt", 0)
    here, there = multiprocessing.Pipe()
    count, bucket_bytes = arguments.mib // arguments.bucket_mib, arguments.bucket_mib * MIB
    gpu = 1 if kind == "broadcast" and gpus > 1 else 0
    process = multiprocessing.get_context("spawn").Process(
        target=target, args=(there, kind, address, gpu, bucket_bytes, count)
    )
    process.start()
    sender: Any = BroadcastSender(address) if kind == "broadcast" else CudaIpcSender(address, 0, 1)
    here.recv()
    carrier = device.type
    if kind == "broadcast":
        carrier = choose_wire("auto", {name: meeting.told(f"device/{name}") for name in ("trainer", "engine 0")})  # type: ignore[misc]
        meeting.tell("wire", carrier)
    else:
        meeting.tell("served_by", [0])
    raw, ours = [], []
    for repeat in range(arguments.repeats + 1):
        made = buckets(arguments, repeat, device)
        if kind == "broadcast":
            here.send("raw")
            group = sender._party.group(repeat)
            block = torch.ones(bucket_bytes, dtype=torch.uint8, device=group.device)  # touched before the clock runs
            raw.append(timed(functools.partial(collectives, group, block, count)))
            here.recv()
        else:
            source, to = (torch.ones(bucket_bytes, dtype=torch.uint8, device=device) for _ in range(2))
            raw.append(timed(functools.partial(copies, source, to, 2 * count)))
        meeting.tell("attempt", repeat + 1)
        here.send(repeat)

        def publish(made: list[WeightBucket] = made, repeat: int = repeat) -> None:
            for bucket in made:
                sender.send(bucket)
            if kind == "cuda-ipc":
                sender.finish(repeat)
            here.recv()

        ours.append(timed(publish))
        if here.recv() != [digest_tensor(named.tensor) for named in made[-1].tensors]:
            raise SystemExit(f"{kind}: other bytes arrived than were sent")
    here.send(None)
    process.join(60)
    sender.close()
    return raw[1:], ours[1:], str(carrier)  # the first of each connects


def collectives(group: BroadcastGroup, block: torch.Tensor, count: int) -> None:
    for _ in range(count):
        group.broadcast(block, lambda: None)


def copies(source: torch.Tensor, to: torch.Tensor, count: int) -> None:
    for _ in range(count):
        to.copy_(source)


def pooled(work: Callable[[Any], Any], items: Sequence[Any]) -> float:
    """Seconds of `work` on all items with as many threads as there are cores."""
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        return timed(lambda: [None for _ in pool.map(work, items)] and None)


def delta(arguments: argparse.Namespace, encoding: Encoding, work: Path) -> dict[str, tuple[float, float]]:
    """Seconds of the yardstick and of ours, to encode and to apply."""
    random = np.random.default_rng(0)
    size = 8 * MIB
    names = [f"layers.{index}.weight" for index in range(arguments.mib * MIB // size)]
    bits = {name: random.integers(0, 2**16, size // 2, dtype=np.uint16).view(np.int16) for name in names}
    old = {name: torch.from_numpy(each) for name, each in bits.items()}
    base = work / "base"
    base.mkdir()
    save_file(old, base / "model.safetensors")
    new = {name: tensor.clone() for name, tensor in old.items()}
    for tensor in new.values():
        tensor[torch.randperm(tensor.numel())[: tensor.numel() // 100]] += 1  # one per cent of the elements
    copy = pooled(lambda each: each.copy(), [tensor.numpy() for tensor in new.values()])
    compressed = [what_is_compressed(bits[name], new[name].numpy(), encoding) for name in names]
    squeeze = pooled(lambda each: zstandard.ZstdCompressor(level=1).compress(each), compressed)
    packed = [zstandard.ZstdCompressor(level=1).compress(each) for each in compressed]
    unpack = pooled(lambda each: zstandard.ZstdDecompressor().decompress(each), packed)
    del compressed, packed
    store = FolderStore(work / "published")
    source = DeltaSource(base, store, "run", rank=0, world_size=1, encoding=encoding, kind="xxh3-128", visible_s=60)
    publication = Publication(
        store, "run", names=names, encoding=encoding, kind="xxh3-128", snapshot_every=0, keep=2, visible_s=60
    )
    checkout = Checkout(base, work / "local", store, "run", timeout_s=60)
    for version, state in enumerate((new, old, new)):
        source.begin(version, publication.begin(version)[0])
        tensors = tuple(NamedTensor(name=name, tensor=tensor) for name, tensor in state.items())
        bucket = WeightBucket(version=version, index=0, last=True, tensors=tensors)
        encoded = timed(lambda bucket=bucket: source.add(bucket) or (source.finish(full=False) and None))  # type: ignore[misc]
        key = publication.seal(version, names)
        applied = timed(lambda key=key: checkout.materialise(key) and None)  # type: ignore[misc]
    source.close()
    return {"encode": (max(copy, squeeze), encoded), "apply": (max(copy, unpack), applied)}


def what_is_compressed(old: npt.NDArray[np.int16], new: npt.NDArray[np.int16], encoding: Encoding) -> bytes:
    if encoding == "xor":
        return (old ^ new).tobytes()
    positions = np.flatnonzero(old != new).astype("<u4")
    return positions.tobytes() + new[positions].tobytes()


def report(name: str, raw: list[float], ours: list[float], mib: int, carrier: str) -> None:
    base, found = statistics.median(raw), statistics.median(ours)
    ratio = statistics.median(ratios := [one / other for one, other in zip(raw, ours, strict=True)])
    verdict = "ok" if ratio >= GOALS[name] else "below the goal"
    print(
        f"{name:13} {carrier:9}  yardstick {mib / 1024 / base:7.2f} GiB/s  ours {mib / 1024 / found:7.2f} GiB/s  "
        f"ratio {ratio:6.1%} ({min(ratios):.0%} to {max(ratios):.0%})  goal {GOALS[name]:.0%}  {verdict}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", default=["broadcast", "cuda-ipc", "delta"])
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--bucket-mib", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    print(f"torch {torch.__version__}, {platform.machine()}, {os.cpu_count()} cores, {gpu}, {arguments.mib} MiB")
    for kind in ("broadcast", "cuda-ipc"):
        if kind in arguments.what:
            raw, ours, carrier = between_processes(kind, arguments)
            report(kind, raw, ours, arguments.mib, carrier)
    if "delta" in arguments.what:
        found: dict[tuple[str, Encoding], list[tuple[float, float]]] = {}
        encodings: tuple[Encoding, ...] = ("xor", "overwrite")
        for _, encoding in itertools.product(range(arguments.repeats), encodings):
            memory = Path("/dev/shm")  # a disk's speed is not the question
            roomy = shutil.disk_usage(memory).free > 5 * arguments.mib * MIB
            work = Path(tempfile.mkdtemp(dir=memory if roomy else None))
            for name, pair in delta(arguments, encoding, work).items():
                found.setdefault((name, encoding), []).append(pair)
            shutil.rmtree(work)
        for (name, encoding), pairs in found.items():
            report(name, [base for base, _ in pairs], [ours for _, ours in pairs], arguments.mib, encoding)


if __name__ == "__main__":
    main()
