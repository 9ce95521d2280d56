"""Each check between core's keys finds its fault, and nothing else does."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from miles_core.config import yaml12
from miles_core.config.checks_async import uncorrected
from miles_core.config.files import FILE_CHECKS
from miles_core.config.load import parse
from miles_core.config.resolve import CORE_CHECKS, check_run
from miles_core.config.unused import UNUSED
from miles_core.registry import Registry

from .runs import BASE, only, problems

FULLY_ASYNC = ["schedule.mode=fully-async", "placement.mode=separate"]
SOUND_BUT_FOR = {
    "MIL101": ["eval.every_steps=1"],
    "MIL102": ["data=null"],
    "MIL103": ["rewards=[]"],
    "MIL104": ["tracking.trackers=[{use: log}, log]"],
    "MIL201": ["schedule.minibatches=9"],
    "MIL202": ["rollout.sampling.temperature=0"],
    "MIL203": ["data.eval=heldout.jsonl", "eval={every_steps: 1, samples_per_prompt: 2}"],
    "MIL204": ["schedule.mode=one-step-off"],
    "MIL205": [*FULLY_ASYNC, "schedule.on_weight_update=abort"],
    "MIL206": [*FULLY_ASYNC, "schedule.group_size=4", "schedule.max_concurrent_samples=3"],
    "MIL207": ["schedule.buffer={use: bounded, capacity_factor: 3}"],
    "MIL208": ["schedule.on_weight_update=in-place"],
    "MIL301": ["objective={kl_coef: 0.1, kl_estimator: k1}"],
    "MIL302": ["objective={kl_coef: 0.1, kl_in: reward}"],
    "MIL303": ["objective={kl_coef: 0.1}", "backend=plain"],
    "MIL401": ["optimizer.warmup_steps=4"],
    "MIL501": ["placement={trainer_ranks: 2, mode: separate}", "executor=spread", "transport=ring", "backend=plain"],
    "MIL502": ["check_weight_update_equal=true", "engine=mute", "weights.verify=off"],
    "MIL503": ["rollout.routes=replay"],
    "MIL504": ["model=moe", "rollout.routes=record", "engine=mute", "weights.verify=off"],
    "MIL505": ["model=moe", "rollout.routes=replay", "backend=plain"],
    "MIL506": ["engine=mute"],
    "MIL507": ["model.context_length=40", "rollout.sampling.max_tokens=8"],
    "MIL601": ["rollout.sampling.max_tokens=1024"],
    "MIL602": ["data.eval=heldout.jsonl", "eval={every_steps: 1, sampling: {max_tokens: 1024}}"],
    "MIL603": ["model.context_length=1025"],
    "MIL604": ["model=long"],
    "MIL701": ["model=model/config.json"],
    "MIL703": ["data.train=absent.jsonl"],
    "MIL704": ["data.eval=./train.jsonl", "eval.every_steps=1"],
    "MIL705": ["rewards=['nosuch_module:score']"],
    "MIL801": ["precision.true_on_policy=true"],
    "MIL802": ["precision.true_on_policy=true", "model=exact", "backend=plain"],
    "MIL803": ["precision.true_on_policy=true", "model=exact", "objective.old_logprobs=rollout"],
    "MIL804": [
        "precision.true_on_policy=true", "model=exact", "engine=steady", "schedule.on_weight_update=in-place",
    ],
    "MIL805": [
        *FULLY_ASYNC, "precision.true_on_policy=true", "model=exact", "schedule.update_weights_interval=2",
    ],
    "MIL210": ["data.eval=heldout.jsonl", "eval={every_steps: 1, on: dedicated, engines: 1}"],
    "MIL211": ["data.eval=heldout.jsonl", "placement.mode=separate", "eval={every_steps: 1, on: dedicated}"],
    "MIL212": ["data.eval=heldout.jsonl", "eval={every_steps: 1, on: external, function: 'no_such_file.py:score'}"],
    "MIL910": ["data.eval=heldout.jsonl", "eval={every_steps: 1, engines: 1}"],
    "MIL911": ["data.eval=heldout.jsonl", "eval={every_steps: 1, function: 'json:loads'}"],
    "MIL912": ["data.eval=heldout.jsonl", "eval={every_steps: 1, overflow: skip}"],
    "MIL901": ["environment=gym"],
    "MIL902": ["eval.prompts=3"],
    "MIL903": ["environment=gym", "data=null", "rewards=[]", "rollout.reward_workers=3"],
    "MIL904": ["objective.kl_in=reward"],
    "MIL905": ["objective.fixed_length_tokens=9"],
    "MIL906": ["optimizer.min_lr_ratio=0.1"],
    "MIL907": ["schedule.max_weight_staleness=1"],
    "MIL908": ["schedule.update_weights_interval=2"],
    "MIL909": [*FULLY_ASYNC, "rollout.max_concurrent=3"],
}  # fmt: skip


@pytest.mark.parametrize("id", SOUND_BUT_FOR)
def test_each_check_finds_its_fault_alone(workplace: Path, registry: Registry, id: str) -> None:
    problem = only(registry, *SOUND_BUT_FOR[id])
    assert problem.rule == id
    assert problem.message
    assert problem.do


def test_every_check_is_tried_above() -> None:
    tried = {*SOUND_BUT_FOR, "MIL702", "MIL706", "MIL707"}  # the last two in test_first_look
    assert {check.id for check in (*CORE_CHECKS, *UNUSED, *FILE_CHECKS)} == tried


FUNCTIONS = """
from json import loads as imported
if True:
    def guarded(job): ...
async def waits(job): ...
nosuch = 1 if False else 2  # commented: in a comment only
"""


@pytest.mark.parametrize(
    ("text", "name", "found"),
    [
        (FUNCTIONS, "imported", None),
        (FUNCTIONS, "guarded", None),
        (FUNCTIONS, "waits", None),
        (FUNCTIONS, "commented", "no `commented` in it; it defines guarded, waits"),
        (FUNCTIONS, "wait", "no `wait` in it"),
        ("def score(job)\n", "score", "SyntaxError: expected ':' (scores.py, line 1)"),
        ("x = a" + ".b" * 50_000, "score", "RecursionError: maximum recursion depth"),
    ],
)
def test_functions_of_the_run_file_are_bound_by_their_files(
    workplace: Path, registry: Registry, text: str, name: str, found: str | None
) -> None:
    (workplace / "scores.py").write_text(text)
    absent = ("data.eval=heldout.jsonl", "eval={every_steps: 1, on: external, function: 'nosuch_module:score'}")
    assert [(problem.rule, problem.path) for problem in problems(registry, *absent)] == [("MIL705", "eval.function")]
    external = ("data.eval=heldout.jsonl", f"eval={{every_steps: 1, on: external, function: 'scores.py:{name}'}}")
    for given in (external, (f"rewards=['scores.py:{name}']",)):
        messages = [problem.message.replace(f"{workplace}/", "") for problem in problems(registry, *given)]
        assert len(messages) == (found is not None)
        assert found is None or found in messages[0]


@pytest.mark.parametrize(
    ("settings", "warned"),
    [
        ([], False),
        (FULLY_ASYNC, True),
        (["schedule.mode=one-step-off", "placement.mode=separate"], True),
        ([*FULLY_ASYNC, "corrections=[tis]"], False),
        ([*FULLY_ASYNC, "objective.old_logprobs=rollout"], False),
    ],
)
def test_a_run_that_neither_corrects_nor_measures_is_told_what_to_watch(
    workplace: Path, registry: Registry, settings: list[str], warned: bool
) -> None:
    run, found = check_run(parse(BASE, settings), registry)
    assert found == []
    assert run is not None
    warning = uncorrected(run.spec)
    assert (warning is not None) == warned
    assert warning is None or "contract/logprobs/kl_k3" in warning


@pytest.mark.parametrize("gone", ["tokenizer.json", "chat_template.jinja", "model.safetensors", "config.json"])
def test_a_model_folder_without_an_essential_file_is_refused(workplace: Path, registry: Registry, gone: str) -> None:
    (workplace / "model" / gone).unlink()
    problem = only(registry)
    assert problem.rule in ("MIL701", "MIL702")
    assert problem.path == "model.path"


def test_a_name_on_the_hub_gets_the_way_to_a_folder(workplace: Path, registry: Registry) -> None:
    problem = only(registry, "model=HuggingFaceTB/SmolLM2-135M-Instruct")
    wanted = "`hf download HuggingFaceTB/SmolLM2-135M-Instruct --local-dir models/SmolLM2-135M-Instruct`"
    assert wanted in str(problem.do)
    (workplace / "models").mkdir()
    for path in ("models/x", "./a/b", "~/models", "a/b/c"):  # of a folder that is not there yet, or misspelt
        assert "if this is a name there" not in str(only(registry, f"model={path}").do)


def test_null_switches_evaluation_off_whatever_the_section_held(workplace: Path, registry: Registry) -> None:
    text = BASE.replace("data: train.jsonl", "data: {train: train.jsonl, eval: heldout.jsonl}")
    text += "eval: {every_steps: 2, prompts: 3, on: dedicated, engines: 1}\nplacement: {mode: separate}\n"
    for off in (["eval=null"], ["eval={every_steps: null}"]):
        run, found = check_run(parse(text, off), registry)
        assert found == []
        assert run is not None
        assert run.spec.eval.every_steps is None
        assert run.spec.eval.engines is None
    assert {p.path for p in problems(registry, "eval.every_steps=null", text=text)} == {
        "eval.prompts",
        "eval.on",
        "eval.engines",
    }
    assert "eval: null" in str(problems(registry, "eval.every_steps=null", text=text)[0].do)


def test_empty_and_unknown_data_is_refused(workplace: Path, registry: Registry) -> None:
    (workplace / "train.jsonl").write_text("")
    assert "is empty" in only(registry).message
    (workplace / "rows.csv").write_text("a,b")
    assert ".csv" in only(registry, "data=rows.csv").message
    (workplace / "folder").mkdir()
    assert "empty folder" in only(registry, "data=folder").message


def test_a_pipe_is_refused_and_not_waited_for(workplace: Path, registry: Registry) -> None:
    os.mkfifo(workplace / "pipe.jsonl")
    assert "neither a file nor a folder" in only(registry, "data.train=pipe.jsonl").message


@pytest.mark.parametrize("name", ["x" * 5000, "~nobody-of-that-name/model", "a\0b"])
def test_a_name_the_file_system_refuses_is_a_problem(workplace: Path, registry: Registry, name: str) -> None:
    assert only(registry, f"model={yaml12.dump(name)}").path == "model.path"
    assert only(registry, f"data={yaml12.dump(name + '.jsonl')}").path == "data.train"
    assert only(registry, f"rewards=[{yaml12.dump(name + '.py:f').strip()}]").path == "rewards.0"


def test_an_empty_path_is_not_taken_for_the_current_folder(workplace: Path, registry: Registry) -> None:
    assert only(registry, "model=''").message == "must have at least 1 character"


def test_the_checkpoints_own_limit_counts_where_the_run_file_gives_none(workplace: Path, registry: Registry) -> None:
    assert problems(registry, "rollout.sampling.max_tokens=1023") == []
    assert only(registry, "rollout.sampling.max_tokens=1023", "model.context_length=100").rule == "MIL601"


def test_longrope_is_for_contexts_in_which_it_is_one_table(workplace: Path, registry: Registry) -> None:
    assert problems(registry, "model=long", "model.context_length=512") == []
    assert only(registry, "model=long", "model.context_length=513").path == "model.context_length"
