"""The plan's arithmetic, by hand on a model folder of known size."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from miles_core.capability import Capability
from miles_core.config.model_folder import read_model_folder
from miles_core.config.resolve import Resolved, ResolvedRun
from miles_core.config.spec import RunSpec
from miles_core.driver.first_look import require_device
from miles_core.errors import ConfigError
from miles_core.machine import Host, _device_memory, _memory, count_devices
from miles_core.numerics.profiles import RULES
from miles_core.plan import Plan, derive_run_dir, make_plan, render, show_bytes
from miles_core.testing.tiny import make_tiny_model
from miles_fsdp.options import FsdpOptions
from miles_megatron.options import MegatronOptions

SMALL = Host(cpus=2, memory_bytes=2**30)
GPUS = Host(cpus=8, memory_bytes=2**36, devices=2, device_bytes=2**36)
PARAMETERS = 1000


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """1000 bfloat16 parameters in two files; 3 layers of 1 KV head of 4."""
    config = {
        "hidden_size": 8,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "num_hidden_layers": 3,
        "max_position_embeddings": 600,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    weight_map = {}
    for name, shape in (("a", [20, 40]), ("b", [200])):
        header = json.dumps({name: {"dtype": "BF16", "shape": shape, "data_offsets": [0, 0]}}).encode()
        (tmp_path / f"{name}.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
        weight_map[name] = f"{name}.safetensors"
    (tmp_path / "unused.safetensors").write_bytes(b"not in the index")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return tmp_path


FSDP = Resolved(
    kind="backend",
    capability=Capability(name="fsdp", summary="", load="some.module:Some", memory="miles_fsdp.memory:plan"),
    distribution="miles-fsdp",
    version="1.0",
    options=FsdpOptions(),
)
MEGATRON = replace(
    FSDP,
    capability=Capability(name="megatron", summary="", load="some.module:Some", memory="miles_megatron.memory:plan"),
    options=MegatronOptions(),
)


def run(
    model: Path, *, tags: frozenset[str] = frozenset(), backend: Resolved | None = None, **sections: Any
) -> ResolvedRun:
    raw = {"name": "x", "model": str(model), "schedule": {"steps": 10}, **sections}
    executor = Resolved(
        kind="executor",
        capability=Capability(name="some", summary="", load="some.module:Some", provides=tags),
        distribution="miles-some",
        version="1.0",
        options=None,
    )
    one = {"executor": executor, **({"backend": backend} if backend else {})}
    return ResolvedRun(spec=RunSpec.model_validate(raw), one=one, many={})


def sizes(plan: Plan, role: str) -> dict[str, int]:
    return {item.what: item.num_bytes for item in plan.memory if item.role == role}


def test_amounts_follow_the_schedule(model: Path) -> None:
    made = make_plan(
        run(
            model,
            schedule={"steps": 10, "groups_per_step": 5, "group_size": 4, "minibatches": 2},
            rollout={"over_sample": 1.3, "sampling": {"max_tokens": 7}},
            eval={"every_steps": 4, "prompts": 6, "samples_per_prompt": 2, "sampling": {"temperature": 1.0}},
            checkpoint={"every_steps": 3},
        ),
        SMALL,
    ).amounts
    assert (made.steps, made.optimizer_steps) == (10, 20)
    assert (made.trajectories_per_step, made.trajectories) == (20, 200)
    assert made.groups_started == 7  # 6.5, rounded up
    assert made.sampled_tokens_per_step == 7 * 4 * 7
    assert (made.evaluations, made.trajectories_per_evaluation) == (4, 12)  # before the first, 4, 8, 10
    assert made.checkpoints == 4  # 3, 6, 9, 10


def test_an_asynchronous_plan_says_what_is_under_way_and_how_old_it_may_grow(model: Path) -> None:
    schedule = {"mode": "fully-async", "steps": 1, "groups_per_step": 3, "group_size": 3, "max_concurrent_samples": 18}
    said = render(make_plan(run(model, schedule=schedule), SMALL))
    assert re.search(r"trajectories in flight +18 +fully-async; trained any number of versions later", said)
    said = render(make_plan(run(model, schedule={**schedule, "max_weight_staleness": 2}), SMALL))
    assert "trained at most 2 versions later" in said
    assert "first wave" not in said


def test_without_evaluation_and_interim_checkpoints_there_is_one_save(model: Path) -> None:
    made = make_plan(run(model), SMALL).amounts
    assert (made.evaluations, made.trajectories_per_evaluation, made.checkpoints) == (0, 0, 1)


@pytest.mark.parametrize(("every_steps", "noted"), [(None, True), (5, False)])
def test_held_out_data_that_no_evaluation_reads_is_noted(model: Path, every_steps: int | None, noted: bool) -> None:
    data = {"train": "a.jsonl", "eval": "b.jsonl"}
    notes = make_plan(run(model, data=data, eval={"every_steps": every_steps}), SMALL).notes
    assert ("evaluation is off, so nothing reads data.eval" in notes) is noted


def test_trainer_memory_is_whole_where_the_backend_does_not_say(model: Path) -> None:
    three = make_plan(run(model, placement={"trainer_ranks": 3}, objective={"kl_coef": 0.1}), SMALL)
    assert list(sizes(three, "trainer").values()) == [4 * PARAMETERS, 4 * PARAMETERS, 8 * PARAMETERS, 2 * PARAMETERS]
    assert all("not divided" in what for what in sizes(three, "trainer"))
    # The folder's tensors tell no layers apart, so no backend can say.
    assert make_plan(run(model, backend=FSDP), SMALL).bytes_of("trainer") == 16 * PARAMETERS


def test_trainer_memory_is_divided_as_the_backend_divides_it(tmp_path: Path) -> None:
    """Four ranks of fsdp share everything; four full replicas of megatron share nothing until the optimizer is cut."""
    folder = make_tiny_model(tmp_path)
    parameters = read_model_folder(folder).parameters

    def moments(backend: Resolved, **options: Any) -> int:
        chosen = replace(backend, options=backend.options.model_copy(update=options))
        made = make_plan(run(folder, backend=chosen, placement={"trainer_ranks": 4}), SMALL)
        return sizes(made, "trainer")["optimizer state: moments"]

    assert moments(FSDP) == pytest.approx(8 * parameters / 4, rel=0.01)
    assert moments(FSDP, dp_replicate=4) == 8 * parameters
    assert moments(MEGATRON) == 8 * parameters
    assert moments(MEGATRON, distributed_optimizer=True) == pytest.approx(8 * parameters / 4, rel=0.01)


def test_engine_memory_counts_rows_at_once_over_the_engines(model: Path) -> None:
    spec = {"schedule": {"steps": 1, "groups_per_step": 3, "group_size": 3}, "placement": {"engines": 2}}
    made = sizes(make_plan(run(model, rollout={"sampling": {"max_tokens": 50}}, **spec), SMALL), "engine")
    # 9 rows over 2 engines; 512 + 50 tokens; 2 * 3 layers * 1 head * 4 * 2 bytes a token
    assert made["keys and values of 5 rows of 562 tokens"] == 5 * 562 * 48
    assert made["weights"] == 2 * PARAMETERS
    capped = {"rollout": {"max_concurrent": 4, "sampling": {"max_tokens": 200}}, **spec}
    assert "keys and values of 2 rows of 600 tokens" in sizes(make_plan(run(model, **capped), SMALL), "engine")


def test_places_share_or_split_devices(model: Path) -> None:
    own = frozenset({"places-processes"})
    split = {"placement": {"mode": "separate", "trainer_ranks": 2, "engines": 1}}
    made = make_plan(run(model, tags=own, **split), GPUS)
    assert [(p.role, p.index, p.device, p.process) for p in made.places] == [
        ("trainer", 0, "cuda:0", "its own"),
        ("trainer", 1, "cuda:1", "its own"),
        ("engine", 0, "cuda:2", "its own"),
    ]
    assert "needs 3 CUDA devices; this machine has 2" in made.notes
    shared = make_plan(run(model, tags=own, placement={"trainer_ranks": 2, "engines": 2}), GPUS)
    assert [p.device for p in shared.places] == ["cuda:0", "cuda:1", "cuda:0", "cuda:1"]
    assert re.search(r"trainers 0 to 1 +cuda:0 to cuda:1 +process: its own\n  engine 0 +cuda:2 +process", render(made))
    fleet = {"placement": {"engines": 31}, "eval": {"every_steps": 1, "on": "dedicated", "engines": 32}}
    said = render(make_plan(run(model, **fleet), SMALL))
    assert re.search(r"engines 0 to 30 +cpu .*\n  eval engines 31 to 62 +cpu +process: driver\n\n", said)
    assert {p.device for p in make_plan(run(model), SMALL).places} == {"cpu"}
    assert {p.device for p in make_plan(run(model, placement={"device": "cpu"}), GPUS).places} == {"cpu"}


def test_the_plan_says_whether_the_estimate_fits(model: Path) -> None:
    need = 16 * PARAMETERS + sum(sizes(make_plan(run(model), SMALL), "engine").values())
    for memory, verdict in ((need, "fits"), (need - 1, "DOES NOT FIT")):
        said = render(make_plan(run(model), replace(SMALL, memory_bytes=memory)))
        assert f"{show_bytes(need)} of this machine's main memory, {show_bytes(memory)}: {verdict}\n" in said + "\n"
    one = {"placement": {"device": "cuda"}}
    said = render(make_plan(run(model, **one), replace(GPUS, device_bytes=2**30)))
    assert f"{show_bytes(need)} of the memory of a device, 1.0 GiB: fits" in said
    assert "which nobody told" in render(make_plan(run(model, **one), replace(GPUS, device_bytes=None)))


def test_no_more_prompts_are_evaluated_than_there_are(model: Path) -> None:
    wanted = run(model, eval={"every_steps": 5, "prompts": 64, "samples_per_prompt": 2})
    counts = {
        rows: make_plan(wanted, SMALL, held_out=rows).amounts.trajectories_per_evaluation for rows in (6, 99, None)
    }
    assert counts == {6: 12, 99: 128, None: 128}


def test_a_run_on_cuda_is_refused_where_there_is_none(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    here, cuda = Host(cpus=1), {"placement": {"device": "cuda"}}
    with pytest.raises(ConfigError, match="CUDA is not available"):
        require_device(make_plan(run(model, **cuda), here))
    require_device(make_plan(run(model, **cuda), GPUS))
    require_device(make_plan(run(model), here))
    require_device(make_plan(run(model, tags=frozenset({"places-processes"}), **cuda), here))
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)  # a device without a device file
    require_device(make_plan(run(model, **cuda), here))


def test_the_plan_lists_what_is_loaded_and_is_json(model: Path) -> None:
    made = make_plan(run(model), SMALL)
    text = render(made)
    assert "executor  some  miles-some 1.0  some.module:Some" in text
    assert "trainer 0  cpu  process: driver" in text
    assert json.loads(json.dumps(made.as_json()))["amounts"]["trajectories"] == 640
    assert max(len(line) for line in text.splitlines()) < 120 + len(str(model))


def test_the_kernel_contract_is_printed_when_both_sides_compute_by_one(model: Path) -> None:
    assert make_plan(run(model), SMALL).kernels == ()
    plan = make_plan(run(model, precision={"true_on_policy": True}), SMALL)
    printed = render(plan)
    assert "kernel contract" in printed
    for what, how in RULES:
        assert what in printed
        assert how in printed


def test_the_same_run_gives_the_same_plan(model: Path) -> None:
    assert make_plan(run(model), SMALL) == make_plan(run(model), SMALL)


def test_the_run_directory_is_named_after_the_run(model: Path) -> None:
    assert derive_run_dir(run(model, tracking={"dir": "out"}).spec) == Path("out/x")


def test_devices_are_counted_without_torch(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidia10", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert count_devices(tmp_path, {}) == 3
    assert count_devices(tmp_path, {"CUDA_VISIBLE_DEVICES": "0,1"}) == 2
    assert count_devices(tmp_path, {"CUDA_VISIBLE_DEVICES": ""}) == 0


def test_this_machine_is_described() -> None:
    here = Host.here()
    assert here.cpus >= 1
    assert here.memory_bytes is None or here.memory_bytes > 2**26


def test_the_memory_of_a_container_and_of_the_smallest_device_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = tmp_path / "memory.max"
    whole = _memory(limit)
    limit.write_text("max\n")
    assert _memory(limit) == whole
    limit.write_text("1048576\n")
    assert _memory(limit) == 2**20
    program = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    for said, found in (("81559\\n40960", 40960 * 2**20), ("[N/A]", None), ("", None)):
        program.write_text(f"#!/bin/sh\nprintf '{said}'\n")
        program.chmod(0o755)
        assert _device_memory() == found


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (2**30, "1.0 GiB"), (300 * 2**20, "300 MiB")]
)
def test_bytes_read_well(count: int, text: str) -> None:
    assert show_bytes(count) == text
