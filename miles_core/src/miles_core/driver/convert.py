"""From a run's checkpoint to a Hugging Face folder, through the backend that wrote it, on one rank."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from miles_core.config.load import load as load_run_file
from miles_core.config.resolve import resolve
from miles_core.driver import checkpoint
from miles_core.driver.settings import choose_device, trainer_spec
from miles_core.errors import CheckpointError
from miles_core.kinds.backend import BackendContext
from miles_core.registry import discover, load_target


def convert(run_dir: Path, output: Path, *, step: int | None = None) -> int:
    """Write the folder and return the step it holds.

    Raises:
        CheckpointError: there is no such complete checkpoint, or `output` exists already.
        ConfigError: the run-file does not resolve with what is installed now.
    """
    if output.exists():
        raise CheckpointError("the output exists already", where=str(output), do="name a folder that does not")
    found = _find(run_dir, step)
    source = load_run_file(run_dir / "run.yaml")
    spec = trainer_spec(resolve(source, discover(source.disabled_plugins())), choose_device("cpu"))
    context = BackendContext(
        model_path=spec.model_path,
        device="cpu",
        rank=0,
        world_size=1,
        seed=spec.seed,
        optimizer=spec.optimizer,
        loss=replace(spec.loss, kl_coef=0.0),
        reference=False,
    )
    backend = load_target(spec.load)(spec.options, context)
    try:
        backend.load(found.backend_dir)
        backend.save_hf(output)
    finally:
        backend.close()
    return found.step


def _find(run_dir: Path, step: int | None) -> checkpoint.Checkpoint:
    if step is not None:
        return checkpoint.load(run_dir / "checkpoints" / f"step_{step:06d}")
    found, passed_over = checkpoint.newest(run_dir / "checkpoints")
    if found is None:
        raise CheckpointError(
            "there is no complete checkpoint",
            found="; ".join(passed_over) or "none",
            where=str(run_dir / "checkpoints"),
            do="give the directory of a run that saved one, such as runs/quickstart",
        )
    return found
