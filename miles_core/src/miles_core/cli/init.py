"""`miles init`: a commented run-file for what is installed, with a task small enough to read."""

from __future__ import annotations

from pathlib import Path

import click

from miles_core.capability import KINDS, State
from miles_core.config.picks import default_pick
from miles_core.errors import ConfigError
from miles_core.registry import Registry, discover

RUN_FILE = """\
# What to train, on what, and how. Relative paths start where you start miles.
#   miles validate run.yaml            every problem at once
#   miles train run.yaml --dry-run     what would run where
#   miles train run.yaml               run it
# Every key is described on the page docs/run-file.md; `miles schema` prints a schema for your editor.
# An option of a pick goes beside its name: loss: {{use: ppo-clip, high: 0.28}}

name: {name}
seed: 0
model: {model}

# --- the task: prompts in, a score out ---
data: train.jsonl                   # one JSON object a line: prompt, and label where there is one
environment: chat                   # {environment}
rewards: [reward.py:score]          # a function of yours, or {reward}

# --- how trajectories are sampled ---
rollout:
  sampling: {{temperature: 1.0, max_tokens: 64}}
  filters: []                       # {filter}

# --- what is learnt from them ---
advantage: grpo                     # {advantage}
loss: ppo-clip                      # {loss}
corrections: []                     # {correction}
optimizer: {{lr: 1e-6, schedule: constant, warmup_steps: 0}}

# --- what does the work ---
backend: {use_backend}
engine: {use_engine}
transport: {use_transport}
executor: {use_executor}
placement: {{mode: colocated, trainer_ranks: 1, engines: 1, device: auto}}

# --- how much of it, and what is kept ---
schedule: {{steps: 20, groups_per_step: 4, group_size: 4}}
checkpoint: {{every_steps: 10}}
# eval: {{every_steps: 10, prompts: 64}}      # with data: {{train: train.jsonl, eval: heldout.jsonl}}
"""

TRAIN_ROWS = """\
{"prompt": "What is 2 + 3? Answer with the number alone.", "label": "5"}
{"prompt": "What is 7 + 1? Answer with the number alone.", "label": "8"}
{"prompt": "What is 4 + 5? Answer with the number alone.", "label": "9"}
{"prompt": "What is 6 + 0? Answer with the number alone.", "label": "6"}
"""

REWARD = '''\
"""The score of one answer."""


def score(scored):
    """1 for the label alone, 0.5 when the answer contains it, else 0.

    `scored` has the prompt (with its label), the conversation and the text of the last answer.
    """
    answer, label = scored.response.strip(), str(scored.prompt.label)
    return 1.0 if answer == label else 0.5 if label in answer else 0.0
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
    found = model or _find_model(directory)
    files["run.yaml"] = run_file(discover(), name=directory.resolve().name, model=found)
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (directory / name).write_text(text, encoding="utf-8")
        click.echo(f"wrote {directory / name}")
    if found is None:
        click.echo("next: put the path of your model into run.yaml")
    start = "" if directory.resolve() == Path.cwd() else f"cd {directory} && "
    click.echo(f"then: {start}miles validate run.yaml")


def run_file(registry: Registry, *, name: str, model: Path | None) -> str:
    """The text of the run-file; comments name what else is installed."""
    safe = "".join(letter if letter.isalnum() or letter in "._-" else "-" for letter in name).lstrip("._-")
    alternatives = {kind: _alternatives(registry, kind) for kind in KINDS}
    picks = {f"use_{kind}": _pick(registry, kind) for kind in ("backend", "engine", "transport", "executor")}
    place = str(model.resolve()) if model else "path/to/model"
    note = "" if model else "                # yours to fill in: a Hugging Face folder"
    return RUN_FILE.format(name=safe or "run", model=f"{_quoted(place)}{note}", **alternatives, **picks)


def _quoted(path: str) -> str:
    # A plain YAML scalar may hold neither of these; a path rarely does.
    return f'"{path}"' if any(mark in path for mark in (": ", " #", "'")) or not path.isprintable() else path


def _usable(registry: Registry, kind: str) -> list[str]:
    return [entry.name for entry in registry.entries(kind) if entry.state is State.OK]


def _alternatives(registry: Registry, kind: str) -> str:
    return "installed: " + (", ".join(_usable(registry, kind)) or "none")


def _pick(registry: Registry, kind: str) -> str:
    """The default where it is installed, else the first that is, with the others in a comment."""
    usable, default = _usable(registry, kind), default_pick(kind)
    chosen = default if default in usable or not usable else usable[0]
    return f"{str(chosen).ljust(max(35 - len(kind), 1))} # {_alternatives(registry, kind)}"


def _find_model(directory: Path) -> Path | None:
    """The first model folder in the usual places."""
    for place in (directory, directory / "models", Path("models")):
        for config in sorted([*place.glob("config.json"), *place.glob("*/config.json")]):
            if any(config.parent.glob("*.safetensors")):
                return config.parent
    return None
