"""A plugin's table reaches every rank through the driver, picked by the checkpoint and by nothing in the run-file."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import miles_megatron.start  # noqa: F401
from miles_core.capability import Capability, State, architecture_name
from miles_core.config.load import parse
from miles_core.config.problems import RunFileError
from miles_core.config.resolve import resolve
from miles_core.driver.settings import trainer_spec
from miles_core.errors import ConfigError
from miles_core.executors.rank import RankHost
from miles_core.registry import Entry, Registry, discover, load_target
from miles_core.testing.tiny import make_tiny_model
from miles_megatron.architectures.dense import LLAMA
from miles_megatron.known import BUILT_IN
from miles_megatron.plugin import miles_architectures

MISTRAL = replace(LLAMA, model_types=("mistral",))
OFFERED = Entry(
    kind="architecture",
    capability=Capability(name="mistral-for-causal-lm", summary="of a plugin", load=f"{__name__}:MISTRAL"),
    distribution="acme-miles",
    version="1",
    plugin="acme",
)


@pytest.mark.parametrize(
    ("model_class", "name"),
    [
        ("LlamaForCausalLM", "llama-for-causal-lm"),
        ("Qwen3MoeForCausalLM", "qwen3-moe-for-causal-lm"),
        ("SmolLM3ForCausalLM", "smol-lm3-for-causal-lm"),
        ("GPTNeoXForCausalLM", "gpt-neo-x-for-causal-lm"),
    ],
)
def test_names_are_the_model_classes_in_words(model_class: str, name: str) -> None:
    assert architecture_name(model_class) == name


@pytest.fixture
def run_file(tmp_path: Path) -> str:
    model = make_tiny_model(tmp_path / "model", architecture="llama", layers=4)
    config = json.loads((model / "config.json").read_text())
    config |= {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
    (model / "config.json").write_text(json.dumps(config))
    (tmp_path / "rows.jsonl").write_text('{"prompt": "one", "label": "1"}\n')
    (tmp_path / "reward.py").write_text("def score(scored):\n    return 0.0\n")
    return f"""
name: tiny
model: {{path: {model}}}
data: {{train: {tmp_path}/rows.jsonl}}
rewards: ['{tmp_path}/reward.py:score']
schedule: {{steps: 1, groups_per_step: 1, group_size: 2}}
backend: {{use: megatron}}
"""


def test_every_built_in_table_is_offered_under_the_name_of_its_model_class() -> None:
    offered = {each.name: load_target(each.load) for each in miles_architectures()}
    assert list(offered.values()) == list(BUILT_IN)
    for name, table in offered.items():
        for model_type in table.model_types:
            assert architecture_name(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]) == name


def spec_of(run_file: str, *entries: Entry) -> Any:
    installed = discover()
    registry = Registry(installed.plugins, (*installed.capabilities, *entries), installed.warnings)
    return trainer_spec(resolve(parse(run_file), registry), "cpu")


def test_the_backend_starts_with_the_table_that_the_checkpoint_picks(run_file: str) -> None:
    spec = spec_of(run_file, OFFERED)
    assert spec.architecture == f"{__name__}:MISTRAL"
    host = RankHost(spec, rank=0, device="cpu")
    host.run("close")


def test_without_a_table_the_backend_says_how_to_write_one(run_file: str) -> None:
    spec = spec_of(run_file)
    assert spec.architecture is None
    with pytest.raises(ConfigError, match="no table maps"):
        RankHost(spec, rank=0, device="cpu")


def test_a_table_that_cannot_be_used_is_no_reason_to_take_another(run_file: str) -> None:
    conflict = replace(OFFERED, state=State.CONFLICT, do="MILES_DISABLE_PLUGINS=zeta-miles keeps the one of acme-miles")
    ours = replace(OFFERED, distribution="miles-megatron", state=State.DISABLED, reason="that of acme goes before it")
    given = (replace(conflict, reason="also claimed by zeta-miles"), ours, replace(conflict, distribution="zeta-miles"))
    with pytest.raises(RunFileError) as caught:
        spec_of(run_file, *given)
    (problem,) = caught.value.problems
    assert problem.path == "model.path"
    assert "of acme-miles 1 and zeta-miles 1 cannot be used: also claimed by zeta-miles" in problem.message
    assert problem.do == "MILES_DISABLE_PLUGINS=zeta-miles keeps the one of acme-miles"
    assert spec_of(run_file.replace("megatron", "fsdp"), *given).architecture is None
