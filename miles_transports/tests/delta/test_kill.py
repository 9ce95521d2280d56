"""Processes killed with SIGKILL at random moments: nobody gets a partial version, and whoever comes next goes on.

A victim tells after each system call of the protocol; the blow falls after a random one, while it works on. So a slow
machine changes what is hit, and never whether anything is.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from miles_transports.delta.checkout import published
from miles_transports.delta.index import BASE, Key
from miles_transports.delta.store import FolderStore

from .conftest import LINEAGE, World, holds, large

SEEDS = [*range(3), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 20))]
KILLED = -signal.SIGKILL


@dataclass(eq=False)
class Victim:
    nursery: Nursery
    pid: int
    pipe: int

    def works(self, calls: int) -> bool:
        """Wait until it has made so many system calls; whether it made them before its end."""
        while calls and (told := os.read(self.pipe, calls)):
            calls -= len(told)
        return calls == 0

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)  # the nursery keeps the PID until it is asked to bury it

    def ended(self) -> int:
        """Its exit code, when it has one."""
        while os.read(self.pipe, 4096):
            pass
        os.close(self.pipe)
        return self.nursery.ask({"wait": self.pid})


class Nursery:
    """See `victim.py`."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._count = folder, 0
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("victim.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, order: dict[str, Any]) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(order), file=self._process.stdin, flush=True)
        return int(self._process.stdout.readline())

    def start(self, world: World, job: str, local: Path | None = None, **arguments: Any) -> Victim:
        assert isinstance(world.store, FolderStore)
        self._count += 1
        pipe = self._folder / f"pipe-{self._count}"
        os.mkfifo(pipe)
        folders = [str(world.base), str(local or world.local), str(world.store.root)]
        pid = self.ask({"job": job, "pipe": str(pipe), "folders": folders, **arguments})
        return Victim(self, pid, os.open(pipe, os.O_RDONLY))

    def calls(self, world: World, job: str, **arguments: Any) -> int:
        """How many system calls a job makes that nobody disturbs."""
        victim, count = self.start(world, job, **arguments), 0
        while told := os.read(victim.pipe, 4096):
            count += len(told)
        assert victim.ended() == 0
        return count

    def close(self) -> None:
        self._process.communicate()


@pytest.fixture(scope="module")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    opened = Nursery(tmp_path_factory.mktemp("pipes"))
    yield opened
    opened.close()


@pytest.fixture
def world(make: Callable[..., World]) -> World:
    return make(weights=large, snapshot_every=2, keep=9)


def whole(world: World, local: Path) -> list[int]:
    """The versions that a host sees, each built by one that has nothing yet."""
    seen = published(world.store, LINEAGE)
    for each in seen:
        if not each.full:
            assert holds(world.checkout(local=local / str(each.version)).materialise(each.key), each.version, large)
    return [each.version for each in seen if not each.full]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_trainer_killed_while_it_publishes_shows_whole_versions_or_none(
    make: Callable[..., World], nursery: Nursery, tmp_path: Path, seed: int
) -> None:
    rng = random.Random(seed)
    calls = nursery.calls(make(weights=large), "publish", versions=[0, 1, 2])
    world = make(weights=large, snapshot_every=2, keep=9)
    host = nursery.start(world, "follow", last=3)
    trainer = nursery.start(world, "publish", versions=[0, 1, 2])
    assert trainer.works(rng.randrange(calls))
    trainer.kill()
    assert trainer.ended() in (KILLED, 0)
    assert whole(world, tmp_path / "fresh") in ([], [0], [0, 1], [0, 1, 2])
    world.publish(3)  # by a trainer that knows nothing of the first
    assert host.ended() == 0, "a host that followed met a partial version"


@pytest.mark.parametrize("seed", SEEDS)
def test_ranks_killed_while_they_export_cost_an_attempt(world: World, nursery: Nursery, seed: int) -> None:
    rng, publication, outcomes = random.Random(seed), world.publication, Counter[int]()
    assert publication is not None
    calls = {False: 8, True: 16}
    for version in range(3):
        for attempt in range(3):
            base, full = publication.begin(version)
            job = {"version": version, "base_version": base, "full": full}
            ranks = [nursery.start(world, "export", rank=rank, **job) for rank in (0, 1)]
            if attempt < 2:
                unlucky = rng.choice(ranks)
                unlucky.works(rng.randrange(calls[full]))
                unlucky.kill()
            codes = [each.ended() for each in ranks]
            outcomes.update(codes)
            if codes == [0, 0]:
                break
            assert version not in whole(world, world.local / f"fresh-{version}-{attempt}")
        key = publication.seal(version, large(version))
        assert holds(world.checkout().materialise(key), version, large)
    assert set(outcomes) <= {KILLED, 0}
    assert outcomes[KILLED] > 0


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("shared", [True, False])
def test_hosts_killed_while_they_build_leave_whole_copies(
    world: World, nursery: Nursery, tmp_path: Path, seed: int, shared: bool
) -> None:
    """Two processes, of one host, or of two with a folder each; one dies, the other goes on, and the next comes."""
    rng = random.Random(seed)
    keys = [world.publish(version) for version in range(3)]
    calls = nursery.calls(world, "build", local=tmp_path / "undisturbed", key=keys[0])
    locals_ = [world.local, world.local if shared else tmp_path / "other"]
    for key in keys:
        victims = [nursery.start(world, "build", local=local, key=key) for local in locals_]
        unlucky = rng.choice(victims)
        unlucky.works(rng.randrange(calls))
        unlucky.kill()
        codes = {each: each.ended() for each in victims}
        assert codes.pop(unlucky) in (KILLED, 0)
        assert list(codes.values()) == [0]
        for local in locals_:
            check_copies(world, local, keys)
        assert holds(world.checkout(local=rng.choice(locals_)).materialise(key), key[0], large)


def check_copies(world: World, local: Path, keys: list[Key]) -> None:
    checkout = world.checkout(local=local)
    by_name = {checkout.folder(key).name: key for key in keys if key[0] > BASE}
    for name in checkout.complete():
        assert holds(local / LINEAGE / name, by_name[name][0], large), f"{name} looks complete and is not"
