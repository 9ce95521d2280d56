"""A Hugging Face folder becomes a checkpoint that a run goes on from, and comes back bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file

from miles_core.cli import main
from miles_core.testing.tiny import make_tiny_model

from .conftest import Workspace, make_workspace

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
CUT = {
    "use": "megatron",
    "tensor_parallel": 2,
    "sequence_parallel": True,
    "pipeline_parallel": 2,
    "virtual_pipeline": 2,
    "expert_parallel": 2,
    "distributed_optimizer": True,
}


def set_keys(workspace: Workspace, **values: Any) -> None:
    """Append to the run-file, whose keys are one a line."""
    lines = [line for line in workspace.run_file.read_text().splitlines() if line.partition(":")[0] not in values]
    lines += [f"{key}: {json.dumps(value)}" for key, value in values.items()]
    workspace.run_file.write_text("\n".join(lines) + "\n")


def miles(*arguments: Any) -> Result:
    return CliRunner().invoke(main, [str(each) for each in arguments])


def to_run(workspace: Workspace, folder: Path) -> Result:
    return miles("convert", folder, workspace.directory(), "--run", workspace.run_file)


def test_a_run_goes_on_from_a_converted_folder_as_it_starts_from_the_folder(workspace: Workspace) -> None:
    other = make_tiny_model(workspace.folder / "other", seed=1)
    converted = to_run(workspace, other)
    assert converted.exit_code == 0, converted.output
    assert f"miles train {workspace.run_file} --resume" in converted.output
    workspace.train("--resume", overrides={"schedule.steps": 2})
    direct = {"name": "direct", "schedule.steps": 2, "model.path": str(other)}
    workspace.train(overrides=direct)
    assert workspace.lines() == workspace.lines(name="direct")
    own = {"name": "own", "schedule.steps": 2}
    workspace.train(overrides=own)
    assert workspace.lines() != workspace.lines(name="own")


def test_a_folder_that_the_backend_would_round_is_refused(workspace: Workspace) -> None:
    other = make_tiny_model(workspace.folder / "other", seed=1, dtype="float32")
    set_keys(workspace, backend={"use": "megatron", "param_dtype": "bfloat16"})
    refused = to_run(workspace, other)
    assert refused.exit_code == 1
    assert "would not be held bit for bit" in refused.output
    assert not workspace.directory().exists()


def test_a_folder_that_cannot_be_written_leaves_nothing(workspace: Workspace) -> None:
    workspace.train(overrides={"schedule.steps": 1})
    (workspace.folder / "file").write_text("")
    output = workspace.folder / "file" / "out"
    refused = miles("convert", workspace.directory(), output)
    assert refused.exit_code == 1
    assert "the folder cannot be written" in refused.output
    absent = miles("convert", workspace.directory(), workspace.folder / "out", "--step", "7")
    assert "found:    step_000001" in absent.output
    assert not (workspace.folder / "out.partial").exists()


@pytest.mark.parametrize("architecture", ["qwen3-moe", "llama"])
def test_a_folder_comes_back_from_a_megatron_run_bit_for_bit(tmp_path: Path, architecture: Any) -> None:
    """In one process, although the run is cut over ranks; llama's embeddings are tied."""
    pytest.importorskip("megatron.core", reason="backend megatron needs megatron-core")
    models = []
    for seed in (0, 1):
        settings: dict[str, Any] = {"architecture": architecture, "layers": 4, "dtype": "bfloat16", "overrides": HEADS}
        models.append(make_tiny_model(tmp_path / f"model-{seed}", seed=seed, tie=architecture == "llama", **settings))
    (tmp_path / "run").mkdir()
    workspace = make_workspace(tmp_path / "run", models[0])
    backend = CUT if architecture == "qwen3-moe" else {**CUT, "expert_parallel": 1}
    placement = {"device": "cpu", "mode": "separate", "trainer_ranks": 4}
    set_keys(workspace, backend=backend, executor="ray", transport="broadcast", placement=placement)
    converted = to_run(workspace, models[1])
    assert converted.exit_code == 0, converted.output
    back = miles("convert", workspace.directory(), tmp_path / "back")
    assert back.exit_code == 0, back.output
    expected, found = (load_file(folder / "model.safetensors") for folder in (models[1], tmp_path / "back"))
    assert expected.keys() == found.keys()
    assert all(found[name].dtype == tensor.dtype for name, tensor in expected.items())
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


class TestRefusals:
    def refused(self, workspace: Workspace, folder: Path, words: str) -> None:
        result = to_run(workspace, folder)
        assert result.exit_code in (1, 2), result.output
        assert words in result.output
        assert not workspace.directory().exists()

    def test_another_model(self, workspace: Workspace) -> None:
        wide = make_tiny_model(workspace.folder / "wide", hidden=64)
        self.refused(workspace, wide, "another model")

    def test_a_buffer_that_no_checkpoint_holds(self, tmp_path: Path) -> None:
        """The bias of a router is not trained, so a run would take that of its own folder."""
        pytest.importorskip("megatron.core", reason="backend megatron needs megatron-core")
        from miles_core.testing.tiny_moe import save_model

        model = make_tiny_model(tmp_path / "weights")  # for its tokenizer
        save_model("glm4-moe", model)
        workspace = make_workspace(tmp_path, model)
        set_keys(workspace, backend={"use": "megatron"})
        other = save_model("glm4-moe", tmp_path / "other")
        tensors = load_file(other / "model.safetensors")
        name = next(name for name in tensors if name.endswith("e_score_correction_bias"))
        tensors[name] = tensors[name] + 1
        save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
        self.refused(workspace, other, name)

    def test_a_directory_of_another_name_or_one_that_exists(self, workspace: Workspace) -> None:
        model = workspace.folder / "model"
        result = miles("convert", model, workspace.folder / "elsewhere", "--run", workspace.run_file)
        assert "not that of this run" in result.output
        workspace.directory().mkdir(parents=True)
        assert "exists already" in to_run(workspace, model).output

    def test_a_step_of_a_folder(self, workspace: Workspace) -> None:
        result = miles("convert", workspace.folder / "model", "x", "--run", workspace.run_file, "--step", "1")
        assert result.exit_code == 2
        assert "--step" in result.output
