"""The code inside the server finds every Hugging Face tensor in stacked layouts, and digests as the trainer does."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

from miles_core.types import NamedTensor
from miles_core.weights.digests import manifest
from miles_sglang.launch import SERVERSIDE

H, I, V = 8, 12, 10  # noqa: E741


@pytest.fixture(scope="module")
def worker() -> ModuleType:
    spec = importlib.util.spec_from_file_location("miles_sglang_worker", SERVERSIDE / "miles_sglang_worker.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def checkpoint() -> dict[str, torch.Tensor]:
    """A dense layer and a layer of two experts, as a checkpoint stores them."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).bfloat16()

    a, b = "model.layers.0.", "model.layers.1."
    tensors = {"model.embed_tokens.weight": draw(V, H), "model.norm.weight": draw(H)}
    tensors |= {f"{a}self_attn.q_proj.weight": draw(8, H), f"{a}self_attn.k_proj.weight": draw(4, H)}
    tensors |= {f"{a}self_attn.v_proj.weight": draw(4, H), f"{a}self_attn.q_proj.bias": draw(8)}
    tensors |= {f"{a}self_attn.k_proj.bias": draw(4), f"{a}self_attn.v_proj.bias": draw(4)}
    tensors |= {f"{a}mlp.gate_proj.weight": draw(I, H), f"{a}mlp.up_proj.weight": draw(I, H)}
    for expert in range(2):
        for part, shape in (("gate", (I, H)), ("up", (I, H)), ("down", (H, I))):
            tensors[f"{b}mlp.experts.{expert}.{part}_proj.weight"] = draw(*shape)
    return tensors


def served(tensors: dict[str, torch.Tensor]) -> nn.Module:
    """The same in a server's layout: stacked, and the vocabulary padded."""
    a, b = "model.layers.0.", "model.layers.1."

    def rows(*names: str) -> torch.Tensor:
        return torch.cat([tensors[name] for name in names])

    layout = {
        "model.embed_tokens.weight": torch.cat([tensors["model.embed_tokens.weight"], torch.zeros(6, H)]).bfloat16()
    }
    layout["model.norm.weight"] = tensors["model.norm.weight"]
    for kind in ("weight", "bias"):
        layout[f"{a}self_attn.qkv_proj.{kind}"] = rows(*(f"{a}self_attn.{x}_proj.{kind}" for x in "qkv"))
    layout[f"{a}mlp.gate_up_proj.weight"] = rows(f"{a}mlp.gate_proj.weight", f"{a}mlp.up_proj.weight")
    experts = [f"{b}mlp.experts.{e}" for e in range(2)]
    layout[f"{b}mlp.experts.w13_weight"] = torch.stack(
        [rows(f"{e}.gate_proj.weight", f"{e}.up_proj.weight") for e in experts]
    )
    layout[f"{b}mlp.experts.w2_weight"] = torch.stack([tensors[f"{e}.down_proj.weight"] for e in experts])
    model = nn.Module()
    for name, tensor in layout.items():
        owner = model
        *path, leaf = name.split(".")
        for part in path:
            if not hasattr(owner, part):
                owner.add_module(part, nn.Module())
            owner = getattr(owner, part)
        owner.register_parameter(leaf, nn.Parameter(tensor, requires_grad=False))
    return model


def ask(worker: ModuleType, model: nn.Module, folder: Path, **request: object) -> dict[str, dict[str, str]]:
    answer = folder / "answer.json"
    worker.handle(model, [(json.dumps({**request, "answer": str(answer)}), torch.zeros(1))])
    found: dict[str, dict[str, str]] = json.loads(answer.read_text())
    return found


def test_digests_of_stacked_tensors_are_the_trainers(worker: ModuleType, tmp_path: Path) -> None:
    tensors = checkpoint()
    shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
    names = sorted(tensors)[::2]
    found = ask(worker, served(tensors), tmp_path, op="digests", shapes=shapes, names=names)
    expected = manifest(0, [NamedTensor(name=name, tensor=tensor) for name, tensor in tensors.items()]).digests
    assert found["digests"] == {name: expected[name] for name in names}


def test_gate_and_up_are_not_taken_for_each_other(worker: ModuleType) -> None:
    tensors = checkpoint()
    shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
    for name, view in worker.views(served(tensors), shapes).items():
        assert torch.equal(view, tensors[name]), name


def test_noise_reaches_every_tensor(worker: ModuleType, tmp_path: Path) -> None:
    tensors = checkpoint()
    shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
    model = served({name: tensor.clone() for name, tensor in tensors.items()})
    ask(worker, model, tmp_path, op="scramble", seed=3, shapes=shapes)
    assert not [name for name, view in worker.views(model, shapes).items() if torch.equal(view, tensors[name])]


def test_a_name_without_a_tensor_is_an_answer_and_not_a_crash(worker: ModuleType, tmp_path: Path) -> None:
    shapes = {"model.layers.9.mlp.experts.0.gate_proj.weight": [I, H]}
    found = ask(worker, served(checkpoint()), tmp_path, op="digests", shapes=shapes, names=list(shapes))
    assert "no served tensor for 1 names, such as model.layers.9" in str(found["error"])


def test_an_answer_that_cannot_be_written_does_not_end_the_server(
    worker: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    request = {"op": "digests", "shapes": {}, "names": [], "answer": str(tmp_path / "other host" / "answer.json")}
    worker.handle(served(checkpoint()), [(json.dumps(request), torch.zeros(1))])
    assert "the answer cannot be written" in capsys.readouterr().err


def test_a_parameter_that_the_checkpoint_does_not_fill_is_told(worker: ModuleType, tmp_path: Path) -> None:
    tensors = checkpoint()
    model = served(tensors)
    model.add_module("lm_head", nn.Linear(H, V, bias=False, dtype=torch.bfloat16))
    request = {"op": "digests", "answer": str(tmp_path / "answer.json"), "names": ["model.norm.weight"]}
    request["shapes"] = {name: list(tensor.shape) for name, tensor in tensors.items()}
    worker.handle(model, [(json.dumps(request), torch.zeros(1))])
    assert "no tensor for lm_head.weight" in json.loads((tmp_path / "answer.json").read_text())["error"]
    model.lm_head.weight = model.model.embed_tokens.weight  # tied, as dense models are served
    worker.handle(model, [(json.dumps(request), torch.zeros(1))])
    assert "digests" in json.loads((tmp_path / "answer.json").read_text())
