"""`miles init`: a commented run-file for what is installed, with a task small enough to read."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import click

from miles_core.capability import KINDS, State
from miles_core.config.files import check_model
from miles_core.config.picks import default_pick
from miles_core.errors import ConfigError
from miles_core.registry import Registry, discover

RUN_FILE = """\
# What to train, on what, and how. Relative paths start where you start miles: these commands, where `miles init` ran.
#   {validate}  every problem at once
#   {dry_run}  what would run where
#   {train}  run it
# Every key is described on the page docs/run-file.md; `miles schema` prints a schema for your editor.
# An option of a pick goes beside its name: loss: {{use: ppo-clip, high: 0.28}}

name: {name}
seed: 0
model: {model}

# --- the task: prompts in, a score out ---
data: {data}  # one JSON object a line: prompt, and label where there is one
environment: chat  # {environment}
rewards: [{score}]  # a function of yours, or {reward}

# --- how trajectories are sampled ---
rollout:
  sampling: {{temperature: 1.0, max_tokens: 16}}
  filters: []  # {filter}

# --- what is learnt from them ---
advantage: grpo  # {advantage}
loss: ppo-clip  # {loss}
corrections: []  # {correction}
optimizer: {{lr: 3e-5, schedule: constant, warmup_steps: 0}}  # for 135M parameters; larger models take less

# --- what does the work ---
backend: {use_backend}
engine: {use_engine}
transport: {use_transport}
executor: {use_executor}
placement: {{mode: colocated, trainer_ranks: 1, engines: 1, device: auto}}

# --- how much of it, and what is kept ---
schedule: {{steps: 20, groups_per_step: 4, group_size: 4}}
checkpoint: {{every_steps: 10}}
# eval: {{every_steps: 10, prompts: 64}}      # with data: {{train: {data}, eval: heldout.jsonl}}
"""

COMMENT_COLUMN = 34

TRAIN_ROWS = """\
{"prompt": "What is 2 + 3? Answer with the number alone.", "label": "5"}
{"prompt": "What is 7 + 1? Answer with the number alone.", "label": "8"}
{"prompt": "What is 4 + 5? Answer with the number alone.", "label": "9"}
{"prompt": "What is 6 + 0? Answer with the number alone.", "label": "6"}
"""

REWARD = '''\
"""The score of one answer."""

import re


def score(scored):
    """1 if the last number of the answer is the label, else 0.

    `scored` has the prompt (with its label), the conversation and the text of the last answer.
    """
    numbers = re.findall(r"\\d+", scored.response)
    return float(numbers[-1:] == [str(scored.prompt.label)])
'''


@click.command("init")
@click.argument("directory", default=".", type=click.Path(file_okay=False, path_type=Path))
@click.option("--model", type=click.Path(path_type=Path), help="Hugging Face folder; found under models/ by default.")
def command(directory: Path, model: Path | None) -> None:
    """Write run.yaml, train.jsonl and reward.py into DIRECTORY; existing files are never touched."""
    files = {"run.yaml": "", "train.jsonl": TRAIN_ROWS, "reward.py": REWARD}
    if taken := [name for name in files if (directory / name).exists()]:
        raise ConfigError(
            f"{directory / taken[0]} exists already",
            expected="a folder without " + ", ".join(files),
            do="choose another: miles init OTHER_DIRECTORY",
        )
    if model is not None:
        for wrong in check_model("--model", str(model)):
            raise ConfigError(wrong.message, where="--model", do=wrong.do)
    found = model or _find_model(directory)
    files["run.yaml"] = run_file(discover(), directory, found)
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (directory / name).write_text(text, encoding="utf-8")
        click.echo(f"wrote {directory / name}")
    if found is None:
        click.echo("next: put the path of your model into run.yaml; `miles init --model PATH` does it for you")
    click.echo(f"then: miles validate {shlex.quote(str(directory / 'run.yaml'))}")


def run_file(registry: Registry, directory: Path, model: Path | None) -> str:
    """The text of the run-file; comments name what else is installed."""
    safe = re.sub(r"[^A-Za-z0-9._-]", "-", directory.resolve().name)[:100].lstrip("._-")
    alternatives = {kind: _alternatives(registry, kind) for kind in KINDS}
    picks = {f"use_{kind}": _pick(registry, kind) for kind in ("backend", "engine", "transport", "executor")}
    places = {
        "model": _quoted(str(model or "path/to/model"))
        + ("" if model else "  # yours to fill in: a Hugging Face folder"),
        "data": _quoted(str(directory / "train.jsonl")),
        "score": _quoted(f"{directory / 'reward.py'}:score"),
    }
    text = RUN_FILE.format(name=safe or "run", **_commands(directory), **places, **alternatives, **picks)
    return "\n".join(_aligned(line) for line in text.split("\n"))


def _commands(directory: Path) -> dict[str, str]:
    """The header's commands, padded to one width. They work where `miles init` ran, since its paths start there."""
    run_file = str(directory / "run.yaml")
    named = shlex.quote(run_file) if run_file.isprintable() else json.dumps(run_file)  # a comment has one line
    lines = {
        "validate": f"miles validate {named}",
        "dry_run": f"miles train {named} --dry-run",
        "train": f"miles train {named}",
    }
    width = max(map(len, lines.values()))
    return {name: line.ljust(width) for name, line in lines.items()}


def _aligned(line: str) -> str:
    code, mark, comment = line.partition("  # ")
    return f"{code.rstrip().ljust(COMMENT_COLUMN)}{mark}{comment}" if code.strip() and mark else line


def _quoted(text: str) -> str:
    """The text as a YAML scalar that may stand anywhere; a JSON string is one."""
    return text if re.fullmatch(r"[A-Za-z0-9_./-]+(:[A-Za-z0-9_]+)?", text) else json.dumps(text)


def _usable(registry: Registry, kind: str) -> list[str]:
    return [entry.name for entry in registry.entries(kind) if entry.state is State.OK]


def _alternatives(registry: Registry, kind: str) -> str:
    return "installed: " + (", ".join(_usable(registry, kind)) or "none")


def _pick(registry: Registry, kind: str) -> str:
    """The default where it is installed, else the first that is, with the others in a comment."""
    usable, default = _usable(registry, kind), default_pick(kind)
    chosen = default if default in usable or not usable else usable[0]
    return f"{chosen}  # {_alternatives(registry, kind)}"


def _find_model(directory: Path) -> Path | None:
    """The first model folder in the usual places."""
    for place in (directory, directory / "models", Path("models")):
        for config in sorted([*place.glob("config.json"), *place.glob("*/config.json")]):
            if any(config.parent.glob("*.safetensors")):
                return config.parent
    return None
