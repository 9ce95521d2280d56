"""What surrounds a server: its command line, its settings, its versions, its staged weights, its processes."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from aiohttp import web
from pydantic import ValidationError
from safetensors.torch import load_file

from miles_core.errors import EngineError
from miles_core.kinds.engine import EngineContext
from miles_core.testing.engine_oracle import SPOILT, buckets_of, spoil, weights_of
from miles_core.testing.tiny import make_tiny_model
from miles_core.types import NamedTensor
from miles_core.weights.digests import digest_tensor
from miles_sglang.checkpoint import Checkpoint, read_checkpoint
from miles_sglang.dialect import TESTED, Dialect
from miles_sglang.engine import SglangEngine
from miles_sglang.launch import SERVERSIDE, command, environment
from miles_sglang.options import ServerOptions, SglangOptions
from miles_sglang.process import LEFT_BEHIND, SHARED_MEMORY, ServerProcess
from miles_sglang.settings import check_settings, fit_problems, sampling_problems
from miles_sglang.staging import SAFETENSORS_DTYPES, WeightStore, write_file

GOOD = {
    "version": "0.5.21", "incremental_streaming_output": True, "enable_return_routed_experts": True, "tp_size": 1,
    "dp_size": 1, "context_length": 104, "max_total_num_tokens": 8192, "dtype": "float32",
    "enable_deterministic_inference": False, "disaggregation_mode": "null",
}  # fmt: skip


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "model", context=96)


@pytest.fixture
def checkpoint(model: Path) -> Checkpoint:
    return read_checkpoint(model, "checkpoint")


def context(model: Path, **changes: Any) -> EngineContext:
    return replace(EngineContext(model_path=str(model), context_length=None, device="cuda:2", seed=1), **changes)


class TestCommand:
    def test_flags_follow_from_options_and_context(self, model: Path) -> None:
        options = ServerOptions(python="/env/python", tensor_parallel=4, server_args={"attention-backend": "fa3"})
        argv = command(options, context(model), context_length=96, port=9, name="one", version=-1, stream_interval=3)
        assert argv[:3] == ["/env/python", "-m", "sglang.launch_server"]
        for flag in (
            "--tp-size=4",
            "--weight-version=-1",
            "--base-gpu-id=2",
            "--device=cuda",
            "--attention-backend=fa3",
        ):
            assert flag in argv
        assert "--incremental-streaming-output" in argv
        assert "--context-length=104" in argv
        assert not [flag for flag in argv if "deterministic" in flag or "routed" in flag]
        assert "--enable-return-routed-experts" in command(
            options, context(model, routes=True), context_length=96, port=9, name="one", version=-1, stream_interval=3
        )

    def test_arguments_that_miles_sets_are_refused(self) -> None:
        with pytest.raises(ValidationError, match="Miles sets tp-size itself"):
            SglangOptions(server_args={"tp-size": 2})

    def test_keys_do_not_go_where_anybody_reads_them(self) -> None:
        with pytest.raises(ValidationError, match="Miles sets api-key itself"):
            SglangOptions(server_args={"api-key": "secret"})

    def test_the_server_sees_its_own_packages_only(self) -> None:
        env = environment(ServerOptions(env={"A": "1"}, python_path=("/x",)), {"PYTHONPATH": "/miles", "PATH": "/bin"})
        assert env["PYTHONPATH"] == f"{SERVERSIDE}{os.pathsep}/x"
        assert env["PATH"] == "/bin"
        assert env["A"] == "1"


class TestSettings:
    def test_a_server_started_for_the_run_has_no_problem(self, model: Path) -> None:
        check_settings(GOOD, SglangOptions(dtype="float32"), context(model, routes=True), 96, "engine 0")

    @pytest.mark.parametrize(
        ("wrong", "flag"),
        [
            ({"incremental_streaming_output": False}, "--incremental-streaming-output"),
            ({"enable_return_routed_experts": False}, "--enable-return-routed-experts"),
            ({"enable_deterministic_inference": True}, "--enable-deterministic-inference"),
            ({"tp_size": 2}, "--tp-size=1"),
            ({"dp_size": 2}, "--dp-size=1"),
            ({"context_length": 96}, "--context-length=104"),
            ({"max_total_num_tokens": 64}, "--mem-fraction-static"),
            ({"dtype": "bfloat16"}, "--dtype=float32"),
            ({"skip_tokenizer_init": True}, "--skip-tokenizer-init"),
            ({"speculative_algorithm": "EAGLE"}, "--speculative-algorithm"),
            ({"preferred_sampling_params": "{}"}, "--preferred-sampling-params"),
            ({"disaggregation_mode": "prefill"}, "--disaggregation-mode"),
        ],
    )
    def test_each_wrong_setting_is_named_with_its_flag(self, model: Path, wrong: dict[str, Any], flag: str) -> None:
        options = SglangOptions(dtype="float32")
        info = {**GOOD, **wrong}
        found = [*fit_problems(info, options, 96), *sampling_problems(info, options, context(model, routes=True))]
        assert len(found) == 1
        assert flag in found[0]

    def test_all_are_reported_at_once(self, model: Path) -> None:
        wrong = {**GOOD, "tp_size": 2, "context_length": 1}
        with pytest.raises(EngineError, match="2 settings of the server"):
            check_settings(wrong, SglangOptions(dtype="float32"), context(model), 96, "engine 0")


class TestDialect:
    def test_a_release_says_what_it_lacks(self) -> None:
        assert Dialect.of("0.5.21", "here").remarks() == []
        old = Dialect.of("0.5.17", "here")
        assert not old.has("safe-retract")
        assert any("in-place pauses are refused" in line for line in old.remarks())
        for other in ("0.5.19", "0.6.0"):
            assert "not one of the releases that were tested" in Dialect.of(other, "here").remarks()[0]

    def test_the_readme_names_the_tested_releases(self) -> None:
        readme = (Path(__file__).parents[1] / "README.md").read_text()
        rows = re.findall(r"^\| (\d+\.\d+\.\d+) \|", readme, re.MULTILINE)
        assert rows == [str(version) for version in TESTED]

    @pytest.mark.parametrize("text", ["0.5.9", "None", ""])
    def test_a_release_that_cannot_be_served_is_refused(self, text: str) -> None:
        with pytest.raises(EngineError):
            Dialect.of(text, "here")


class TestStaging:
    def test_a_staged_version_is_a_folder_that_loads(self, model: Path, checkpoint: Checkpoint, tmp_path: Path) -> None:
        store = WeightStore(checkpoint, str(tmp_path), "engine 0")
        store.open()
        tensors = [NamedTensor(name=name, tensor=t + 1) for name, t in weights_of(model).items()]
        received = store.stage(4, buckets_of(4, tensors))
        assert store.staged is not None
        version, folder = store.staged
        loaded = {name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}
        assert version == 4
        assert loaded.keys() == received.digests.keys() == checkpoint.forms.keys()
        assert all(loaded[named.name].equal(named.tensor) for named in tensors)
        assert (folder / "config.json").read_text() == (model / "config.json").read_text()
        store.commit()
        store.stage(5, buckets_of(5, tensors))
        store.commit()
        assert not folder.exists(), "the version before the served one is kept"
        assert store.served is not None
        store.close()
        assert not store.root.exists()

    @pytest.mark.parametrize("dtype", SAFETENSORS_DTYPES, ids=str)
    def test_files_hold_what_the_library_would_write(self, dtype: torch.dtype, tmp_path: Path) -> None:
        values = torch.arange(24).reshape(2, 3, 4).to(torch.float32).to(dtype)
        tensors = {"scalar": values[0, 0, 1], "transposed": values.transpose(0, 2), "view": values[1:], "ü": values[:0]}
        digests = write_file(tmp_path / "ours", [NamedTensor(name=name, tensor=t) for name, t in tensors.items()])
        loaded = load_file(tmp_path / "ours")
        assert loaded.keys() == tensors.keys() == digests.keys()
        for name, tensor in tensors.items():
            assert (loaded[name].dtype, loaded[name].shape) == (dtype, tensor.shape)
            assert loaded[name].reshape(-1).view(torch.uint8).equal(tensor.reshape(-1).view(torch.uint8))
            assert digests[name] == digest_tensor(tensor)

    @pytest.mark.parametrize("fault", SPOILT)
    def test_a_spoilt_version_is_not_staged(
        self, model: Path, checkpoint: Checkpoint, tmp_path: Path, fault: str
    ) -> None:
        store = WeightStore(checkpoint, str(tmp_path), "engine 0")
        store.open()
        buckets, named = spoil([NamedTensor(name=name, tensor=t) for name, t in weights_of(model).items()], fault)
        with pytest.raises(EngineError, match=named):
            store.stage(0, buckets)
        assert store.staged is None

    def test_a_full_folder_is_told_with_sizes_and_gives_its_room_back(
        self, model: Path, checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(file: Any, data: memoryview) -> None:
            file.write(data[: len(data) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr("miles_sglang.staging._write_all", full)
        store = WeightStore(checkpoint, str(tmp_path), "engine 0")
        store.open()
        tensors = [NamedTensor(name=name, tensor=t) for name, t in weights_of(model).items()]
        with pytest.raises(EngineError, match=r"(?s)No space left.*MiB are free.*engine\.staging_dir"):
            store.stage(0, buckets_of(0, tensors))
        assert list(store.root.iterdir()) == []


CHILDREN = (
    "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(300)'])\n"
    "time.sleep(300)"
)
LITTERING = (
    "import mmap, multiprocessing, os, subprocess, sys, tempfile\n"
    "semaphore = multiprocessing.get_context('spawn').Semaphore()\n"
    "kept = tempfile.NamedTemporaryFile(delete=False)\n"
    "file = open(sys.argv[1], 'wb+'); file.truncate(9)\n"
    "mapped = mmap.mmap(file.fileno(), 9)\n" + CHILDREN
)
"""A group that leaves a file in the temporary folder and one in shared memory, as SGLang does."""


def _group(leader: int) -> list[int]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):  # some other process has just ended
            if process.status() != psutil.STATUS_ZOMBIE and os.getpgid(process.pid) == leader:
                found.append(process.pid)
    return found


def _eventually(condition: Any) -> bool:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return False


class TestProcess:
    async def test_a_group_may_be_ended_twice(self, tmp_path: Path) -> None:
        process = ServerProcess([sys.executable, "-c", CHILDREN], dict(os.environ), tmp_path / "log", [])
        process.kill()
        await process.stop()
        assert process.exit_code == -signal.SIGKILL

    def test_killing_takes_grandchildren_along(self, tmp_path: Path) -> None:
        process = ServerProcess([sys.executable, "-c", CHILDREN], dict(os.environ), tmp_path / "log", [])
        assert _eventually(lambda: len(_group(process.pid)) == 2)
        process.kill()
        assert _eventually(lambda: _group(process.pid) == [])

    def test_a_killed_group_leaves_no_file(self, tmp_path: Path) -> None:
        shared = SHARED_MEMORY / f"{LEFT_BEHIND[0]}{tmp_path.name}-{os.getpid()}.shm"
        argv = [sys.executable, "-c", LITTERING, str(shared)]
        env = environment(ServerOptions(), {**os.environ, "TMPDIR": "/nonexistent"})
        process = ServerProcess(argv, env, tmp_path / "log", [])
        temporary = process._temporary
        assert _eventually(lambda: len(_group(process.pid)) == 3), "the server, its child, a tracker of resources"
        assert shared.exists()
        assert len(list(temporary.iterdir())) == 1
        process.note_files()
        assert len(process._files) == 2, "the ledger and the semaphore"
        os.killpg(process.pid, signal.SIGKILL)  # not by us: nothing can be asked any more
        process.kill()
        assert [path for path in process._files if path.exists()] == []
        assert not temporary.exists()

    @pytest.mark.parametrize("attached", [False, True])
    def test_a_vanished_owner_leaves_no_process_no_staged_weights_and_no_file(
        self, tmp_path: Path, attached: bool
    ) -> None:
        scratch, shared = tmp_path / "scratch", SHARED_MEMORY / f"{LEFT_BEHIND[0]}{tmp_path.name}-{os.getpid()}.shm"
        scratch.mkdir()
        argv = f"[sys.executable, '-c', {LITTERING!r}, {str(shared)!r}]"
        start = (
            f"kept = ServerProcess({argv}, {{'TMPDIR': folders[0]}}, None, folders)\n"
            "while not (maps := Path(f'/proc/{kept.pid}/maps').read_text()).count('sglang_loads'): time.sleep(0.05)\n"
            "kept.note_files(); print(kept.pid, flush=True)\n"
        )
        owner = subprocess.Popen(
            [
                sys.executable,
                "-c",
                "import os, sys, time; from pathlib import Path\n"
                "from miles_sglang.process import Guard, ServerProcess\n"
                f"folders = [Path({str(scratch)!r})]\n"
                f"{'kept = Guard(None, folders); print(0, flush=True)' if attached else start}\n"
                "time.sleep(300)",
            ],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert owner.stdout is not None
        leader = int(owner.stdout.readline())
        assert attached or _eventually(lambda: len(_group(leader)) == 3)
        assert scratch.exists()
        assert attached or shared.exists()
        owner.send_signal(signal.SIGKILL)
        owner.wait()
        owner.stdout.close()
        assert attached or _eventually(lambda: _group(leader) == [])
        assert _eventually(lambda: not scratch.exists() and not shared.exists())


class TestStart:
    def options(self, tmp_path: Path, module: str, **more: Any) -> SglangOptions:
        folders: dict[str, Any] = {"staging_dir": str(tmp_path), "log_dir": str(tmp_path / "logs")}
        return SglangOptions(python=sys.executable, module=module, python_path=(str(tmp_path),), **folders, **more)

    async def test_a_server_that_cannot_start_is_told_with_its_last_words(self, model: Path, tmp_path: Path) -> None:
        options = self.options(tmp_path, "json.tool", server_args={"no_such_argument": 3})
        with pytest.raises(EngineError, match=r"(?s)ended while it started.*exit code 2.*no-such-argument"):
            await SglangEngine(options, context(model, device="cpu")).start()
        assert list(tmp_path.glob("miles-sglang-*")) == [], "staged weights are left behind"

    @pytest.mark.parametrize(
        ("wrong", "named"),
        [
            ({"python": "/nonexistent/python"}, "engine.python"),
            ({"python": "/tmp"}, "engine.python"),
            ({"log_dir": "/proc/nothing"}, "engine.log_dir"),
            ({"staging_dir": "/nonexistent"}, "engine.staging_dir"),
            ({"urls": ("http://a:1",)}, "placement.engines"),
            ({"adapter": "/nonexistent"}, "adapter"),
        ],
    )
    async def test_what_cannot_be_is_told_with_its_key_and_leaves_nothing(
        self, model: Path, tmp_path: Path, wrong: dict[str, Any], named: str
    ) -> None:
        options = self.options(tmp_path, "json.tool").model_copy(update=wrong)
        with pytest.raises(EngineError, match=named):
            await SglangEngine(options, context(model, device="cpu", index=1)).start()
        assert list(tmp_path.glob("miles-sglang-*")) == [], "staged weights are left behind"

    async def test_another_server_at_its_port_is_not_taken_for_it(
        self, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def answer(_: web.Request) -> web.Response:
            return web.json_response({"served_model_name": "somebody's", **GOOD})

        app = web.Application()
        app.add_routes([web.get("/{path:.*}", answer)])
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        monkeypatch.setattr("miles_sglang.server.reserved_port", lambda: contextlib.nullcontext(runner.addresses[0][1]))
        (tmp_path / "loading.py").write_text("import time; time.sleep(600)")
        options = self.options(tmp_path, "loading", start_timeout_s=1.0)
        with pytest.raises(EngineError, match="did not become ready"):
            await SglangEngine(options, context(model, device="cpu")).start()
        await runner.cleanup()
