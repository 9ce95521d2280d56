"""Converts between a run's checkpoint and a Hugging Face folder, with the run's own backend on one rank.

to_folder   checkpoints/step_000012 of a run -> a Hugging Face folder
to_run      a Hugging Face folder            -> checkpoints/step_000000 of a new run, which `--resume` continues
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from safetensors import SafetensorError, safe_open

from miles_core.config.files import check_model
from miles_core.config.load import Source
from miles_core.config.load import load as load_run_file
from miles_core.config.model_folder import ModelFolderError, tensor_shapes
from miles_core.config.resolve import ResolvedRun, resolve
from miles_core.config.spec import dump
from miles_core.driver import checkpoint
from miles_core.driver.settings import choose_device, trainer_spec
from miles_core.errors import CheckpointError, ConfigError
from miles_core.kinds.backend import Backend, BackendContext
from miles_core.registry import discover, load_target
from miles_core.tracking.run_dir import RunDir
from miles_core.weights.digests import digest_tensor


def to_folder(run_dir: Path, output: Path, *, step: int | None = None) -> int:
    """Write the folder and return the step it holds.

    Raises:
        CheckpointError: there is no such complete checkpoint, or `output` exists already.
        ConfigError: the run-file does not resolve with what is installed now.
    """
    _check_absent(output)
    found = _find(run_dir, step)
    source = load_run_file(run_dir / "run.yaml")
    resolved = resolve(source, discover(source.disabled_plugins()), files=False)  # what only training needs may be gone
    for wrong in check_model("model.path", resolved.spec.model.path):
        raise ConfigError(wrong.message, where="model.path", do=wrong.do)
    with _backend(resolved, resolved.spec.model.path) as backend:
        backend.load(found.backend_dir)
        _write_whole(output, backend.save_hf)
    return found.step


def _write_whole(output: Path, write: Callable[[Path], None]) -> None:
    """Write a folder completely or not at all: what a full disk leaves would look like one."""
    partial = output.with_name(output.name + ".partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        write(partial)
        partial.rename(output)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            "the folder cannot be written",
            expected="room for the weights and the right to write them",
            found=str(error),
            where=str(output),
            do="name a folder on a disk with room; nothing is left behind",
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def to_run(folder: Path, run_dir: Path, source: Source) -> None:
    """Write a run directory whose checkpoint of step 0 holds the folder's weights, and prove that they come back.

    `model.path` stays what the run-file says: config, tokenizer and reference policy come from there. The weights that
    are trained come from `folder`.

    Raises:
        CheckpointError: `run_dir` exists already, or a tensor of the folder would not come back bit for bit, such as
            one that is not trained and differs from that of `model.path`. Nothing is left behind.
        ConfigError: the run-file does not resolve, or is of another name or another model.
    """
    _check_absent(run_dir)
    resolved = resolve(source, discover(source.disabled_plugins()))
    spec = resolved.spec
    if run_dir.name != spec.name:
        raise ConfigError(
            "the directory is not that of this run",
            expected=f"a directory called {spec.name}, as the run-file's `name`",
            found=run_dir.name,
            where=str(run_dir),
            do=f"name {run_dir.with_name(spec.name)}, or correct `name`",
        )
    _check_same_model(folder, Path(spec.model.path))
    directory = RunDir(run_dir)
    directory.open()
    try:
        with _backend(resolved, str(folder)) as backend:
            wanted = _digests(backend)
            _check_not_rounded(folder, wanted)

            async def write(target: Path) -> None:
                backend.save(target)

            asyncio.run(checkpoint.save(directory.checkpoints, 0, {}, write, keep=None))
        with _backend(resolved, spec.model.path) as backend:
            backend.load(checkpoint.load(directory.checkpoints / "step_000000").backend_dir)
            found = _digests(backend)
        lost = sorted(name for name, digest in wanted.items() if found.get(name) != digest)
        if lost:
            raise CheckpointError(
                "tensors of the folder are not in the checkpoint",
                expected="trained tensors, or equal ones in both folders",
                found=f"{len(lost)} that differ, such as {', '.join(lost[:3])}",
                where=str(folder),
                do="use the folder itself as model.path",
            )
        directory.write_text("run.source.yaml", source.as_given())
        directory.write_text("run.yaml", dump(spec))  # last: with it, the directory is a run
    except BaseException:
        shutil.rmtree(run_dir, ignore_errors=True)
        raise
    finally:
        directory.close()


@contextlib.contextmanager
def _backend(resolved: ResolvedRun, model_path: str) -> Iterator[Backend]:
    """Open the run's backend on one rank on the CPU, without the parts that only training needs."""
    spec = trainer_spec(resolved, choose_device("cpu"))
    context = BackendContext(
        model_path=model_path,
        device="cpu",
        rank=0,
        world_size=1,
        seed=spec.seed,
        optimizer=spec.optimizer,
        loss=replace(spec.loss, kl_coef=0.0),
        reference=False,
        architecture=spec.architecture,
    )
    alone = getattr(spec.options, "on_one_rank", None)  # see `kinds.backend.Backend`
    backend: Backend = load_target(spec.load)(spec.options if alone is None else alone(), context)
    try:
        yield backend
    finally:
        backend.close()


def _digests(backend: Backend) -> dict[str, str]:
    return {each.name: digest_tensor(each.tensor) for bucket in backend.export(0) for each in bucket.tensors}


def _check_not_rounded(folder: Path, held: Mapping[str, str]) -> None:
    """Compare the tensors that the backend holds with those of the folder, bit for bit."""
    rounded = []
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            names = [name for name in tensors.keys() if name in held]  # noqa: SIM118 - it is no mapping
            rounded += [name for name in names if digest_tensor(tensors.get_tensor(name)) != held[name]]
    if rounded:
        raise CheckpointError(
            "tensors of the folder would not be held bit for bit",
            expected="trained weights in the folder's own precision",
            found=f"{len(rounded)} others, such as {', '.join(rounded[:3])}",
            where=str(folder),
            do="let the backend hold the folder's dtype (backend.param_dtype), or store the folder in the backend's",
        )


def _check_absent(output: Path) -> None:
    if output.exists():
        raise CheckpointError("the output exists already", where=str(output), do="name a folder that does not")


def _check_same_model(folder: Path, of_run: Path) -> None:
    try:
        found, expected = tensor_shapes(folder), tensor_shapes(of_run)
    except ModelFolderError as error:
        raise ConfigError("the model folder is unusable", found=str(error), where=str(folder)) from error
    differing = sorted(
        name for name in found.keys() | expected.keys() if found.get(name, None) != expected.get(name, None)
    )
    if differing:
        name = differing[0]
        raise ConfigError(
            "the folder holds another model than the run's",
            expected=f"{name}: {expected.get(name, 'absent')}",
            found=f"{name}: {found.get(name, 'absent')}; {len(differing)} tensors differ",
            where=str(folder),
            do="name that folder in model.path",
        )


def _find(run_dir: Path, step: int | None) -> checkpoint.Checkpoint:
    if step is not None:
        wanted = run_dir / "checkpoints" / f"step_{step:06d}"
        if not wanted.is_dir():
            there = sorted(path.name for path in wanted.parent.glob("step_*") if not path.name.endswith(".partial"))
            raise CheckpointError(
                "there is no checkpoint of this step",
                expected=wanted.name,
                found=", ".join(there) or "none",
                where=str(wanted.parent),
                do="give --step one of those, or leave it out for the newest",
            )
        return checkpoint.load(wanted)
    found, passed_over = checkpoint.newest(run_dir / "checkpoints")
    if found is None:
        raise CheckpointError(
            "there is no complete checkpoint",
            found="; ".join(passed_over) or "none",
            where=str(run_dir / "checkpoints"),
            do="give the directory of a run that saved one, such as runs/quickstart",
        )
    return found
