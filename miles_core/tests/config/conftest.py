"""A registry of core's own capabilities and stand-ins for the rest, and a model folder without weights."""

from __future__ import annotations

import importlib.metadata
import json
import struct
from pathlib import Path
from typing import Any

import pytest

from miles_core.capability import Capability, State, conflicts
from miles_core.registry import Entry, Registry, discover

STAND_INS: dict[str, list[Capability]] = {
    "backend": [
        Capability(
            name="fsdp",
            summary="",
            load="x:X",
            provides=frozenset({"multi-rank", "reference-model", "replays-routes", "true-on-policy"}),
        ),
        Capability(name="plain", summary="", load="x:X"),
    ],
    "engine": [
        Capability(
            name="local",
            summary="",
            load="x:X",
            provides=frozenset({"verifies-weights", "records-routes", "true-on-policy"}),
        ),
        Capability(
            name="steady",
            summary="",
            load="x:X",
            provides=frozenset({"verifies-weights", "pauses-in-place", "true-on-policy", "version-spans"}),
        ),
        Capability(name="mute", summary="", load="x:X"),
    ],
    "transport": [
        Capability(name="inprocess", summary="", load="x:X", provides=frozenset({"same-process"})),
        Capability(
            name="ring",
            summary="",
            load="x:X",
            options="miles_core.options:ClipOrPopOptions",
            provides=frozenset({"cross-host"}),
            rules=(
                conflicts(
                    "placement.mode=colocated",
                    id="ring-separate",
                    because="a ring needs engines in processes of their own",
                    instead="transport: inprocess, or placement.mode: separate",
                ),
            ),
        ),
    ],
    "executor": [Capability(name="spread", summary="", load="x:X", provides=frozenset({"places-processes"}))],
    "tracker": [Capability(name="log", summary="", load="x:X")],
    "environment": [Capability(name="gym", summary="", load="x:X", provides=frozenset({"provides-prompts"}))],
}


@pytest.fixture(scope="session")
def registry() -> Registry:
    own = [e for e in importlib.metadata.entry_points(group="miles.plugins") if e.value == "miles_core.builtin"]
    found = discover(entry_points=own)
    more = [
        Entry(kind=kind, capability=each, distribution="miles-stand-in", version="0.1.0", plugin="stand-in")
        for kind, capabilities in STAND_INS.items()
        for each in capabilities
    ]
    missing = Entry(
        kind="engine",
        capability=Capability(name="sglang", summary="", load="x:X"),
        distribution="miles-sglang",
        version="0.1.0",
        plugin="sglang",
        state=State.UNAVAILABLE,
        reason="needs sglang>=0.5.5, which is not installed",
        do="pip install 'miles-sglang[engine]'",
    )
    return Registry(plugins=found.plugins, capabilities=(*found.capabilities, *more, missing))


def write_model(folder: Path, *, context_length: int = 1024, experts: int | None = None, **changes: Any) -> Path:
    """A Hugging Face folder as far as validation looks: config, weights' header, tokenizer, chat template."""
    folder.mkdir(parents=True)
    config = {
        "architectures": ["TinyForCausalLM"],
        "hidden_size": 8,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "num_hidden_layers": 3,
        "vocab_size": 10,
        "max_position_embeddings": context_length,
    }
    if experts is not None:
        config["num_experts"] = experts
    (folder / "config.json").write_text(json.dumps(config | changes))
    header = json.dumps(
        {
            "embed": {"dtype": "BF16", "shape": [10, 8], "data_offsets": [0, 160]},
            "scale": {"dtype": "F32", "shape": [], "data_offsets": [160, 164]},
            "__metadata__": {"format": "pt"},
        }
    ).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(164))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


def write_registered_model(folder: Path, dtype: str = "F32", **changes: Any) -> Path:
    """A folder of the shape of profile `qwen3-tiny`, with all tensors in one dtype."""
    write_model(folder)
    config = {
        "model_type": "qwen3",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": 1024,
    }
    (folder / "config.json").write_text(json.dumps(config | changes))
    size = {"F32": 4, "BF16": 2, "F16": 2}[dtype]
    header = json.dumps({"embed": {"dtype": dtype, "shape": [8], "data_offsets": [0, 8 * size]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(8 * size))
    return folder


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with `model`, `moe`, `exact`, `long`, `train.jsonl`, `heldout.jsonl` and `score.py` in it."""
    write_model(tmp_path / "model")
    write_model(tmp_path / "moe", experts=4)
    write_registered_model(tmp_path / "exact")
    longrope = {"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}
    write_model(tmp_path / "long", rope_scaling=longrope, original_max_position_embeddings=512)
    (tmp_path / "train.jsonl").write_text('{"prompt": "1 + 1"}\n')
    (tmp_path / "heldout.jsonl").write_text('{"prompt": "1 + 2"}\n')
    (tmp_path / "score.py").write_text("def score(scored):\n    return 1.0\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path
