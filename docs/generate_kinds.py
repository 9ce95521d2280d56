"""Write docs/kinds/, one page for each kind of capability, or with --check say which pages are out of date.

    python docs/generate_kinds.py [--check]

The introduction of a page is below; the rest is read from the protocol, the kit, the scaffold and the descriptors, so
that the example on a page is the one whose tests run.
"""

from __future__ import annotations

import ast
import re
import sys
import tempfile
from pathlib import Path

from miles_core.capability import KINDS
from miles_core.cli.new import create
from miles_core.known import KNOWN
from miles_core.registry import CORE, FUNCTION_KINDS, discover
from miles_core.signatures import CONSTRUCTED_WITH, OBJECT_KINDS

DOCS = Path(__file__).parent
SOURCE = DOCS.parent / "miles_core" / "src" / "miles_core"
NOTE = "<!-- Written by docs/generate_kinds.py; run `make docs` after changing what it reads. -->"

INTRODUCTION = {
    "backend": """\
A backend is one rank of the trainer. It computes log-probs, takes optimizer steps, saves, and exports its weights.
Write one to train with another parallelism or another library. Every rank is handed the whole update's batch and
takes its own share; denominators are in `token_weights` already, so the gradient may not depend on how the batch
was split.""",
    "engine": """\
An engine samples tokens and reports, for each, the log-prob under the temperature-scaled, full-vocabulary policy
and the weight version that made it. Write one to roll out with another inference server. Weights become visible
only through `activate`, complete and all at once.""",
    "transport": """\
A transport moves one complete weight version from the trainer to every engine, or nothing at all. It builds the two
ends in the processes where they live and joins them; pausing and activating engines is the driver's business.""",
    "tito_family": """\
A TITO family turns messages into tokens and back for one family of models, by appending only. The token row of a
session is the truth and messages are views of it: sampled ids are never encoded again. A family that claims a
checkpoint is used without being named.""",
    "matcher": """\
An agent sends its whole history with every request. A matcher tells whether a replayed message is the one the
session stored at that place. Be strict where you can: a message that passes as equal though it is not trains tokens
in a context they were not sampled in.""",
    "advantage": """\
An advantage turns the rewards of a batch into one number for each token. It is called in the driver on the whole
batch, after failed trajectories were taken out; groups may differ in size.""",
    "correction": """\
A correction turns the log-ratio between trainer and rollout into a weight for each token. It bounds how far a
mismatch can push the gradient; it does not make the two sides equal. Several corrections multiply.""",
    "loss": """\
A loss gives one number for each token of a micro-batch. It computes no mean and no count: reduction weights belong
to the whole update and are applied by the backend, and a token's loss may depend on its own sequence alone.""",
    "teacher": """\
A teacher scores the tokens of a trajectory under another model, for distillation. No section of a run-file reads
this kind in this release; the protocol and the kit are there so that teachers can be written and tested.""",
    "environment": """\
An environment runs one episode against a session: it asks for assistant messages, runs tools, and reports what
happened. It may bring its own prompts. It never sees token ids, owns its sandbox, and leaves nothing behind when it
is cancelled.""",
    "reward": """\
A reward scores a finished episode. It runs in a worker process that is killed at its deadline, so it may hang or
crash without harming the run; what fails is counted and kept out of loss and baseline, never scored 0.

You need no plugin for one of your own: `rewards: [reward.py:score]` in a run-file names a function of a file.""",
    "filter": """\
A filter keeps or drops a finished, scored group before it reaches the batch. Returning None keeps it; a short
snake_case reason drops it and counts it under that name.

You need no plugin for one of your own: `filters: [mine.py:keep]` names a function of a file.""",
    "data_buffer": """\
A data buffer holds finished groups between a rollout that never stops and a trainer that takes batches. Write one to
hand groups out in another order, or to keep them elsewhere. Failures and filters are judged when a group is put in,
its age when it is taken; a put that waits holds the rollout back.""",
    "architecture": """\
An architecture is a table: one row for each parameter of Megatron, with the tensors of a Hugging Face checkpoint that
make it and their layout. Backend `megatron` reads, cuts, trains and exports any model by it, and needs no code of ours.
The checkpoint picks it: a capability called `acme-for-causal-lm` is used for every folder whose config.json names
`AcmeForCausalLM`. An installed table goes before a built-in one.""",
    "precision": """\
A precision quantises exported weights exactly as an engine will, and both sides ask it which tensors to skip. No
section of a run-file reads this kind in this release; the protocol and the kit are there so that formats can be
written and tested.""",
    "executor": """\
An executor places trainer ranks and engines and hands the driver one object for each side. It owns every process it
starts and leaves none behind. Workers import exactly what the plan names; they discover no plugins.""",
    "tracker": """\
A tracker receives the metrics of every step, beside `metrics.jsonl`, which is always written. It is called in the
driver's event loop and may not wait; one that raises is reported and switched off, and the run goes on.""",
    "recipe": """\
A recipe is a complete job beyond the RL loop. No section of a run-file reads this kind in this release; the
protocol and the kit are there so that recipes can be written and tested.""",
}


def page(kind: str) -> str:
    """The whole text of one kind's page."""
    return (
        "\n\n".join(
            [
                f"# {kind.replace('_', ' ').capitalize().replace('Tito', 'TITO')}",
                NOTE,
                INTRODUCTION[kind],
                _facts(kind),
                "## What there is",
                _capabilities(kind),
                "## The smallest one",
                f"`miles plugins new {kind.replace('_', '-')} example` writes it as `{kind}.py`, with tests that pass:",
                f"```python\n{_smallest(kind)}\n```",
                "## The protocol",
                f"From `miles_core.kinds.{kind}`:",
                f"```python\n{_protocol(kind)}\n```",
                "## What the kit checks",
                f"Subclass `miles_core.testing.{kind}.{_camel(kind)}Conformance`, as the scaffold's tests do.",
                _checks(kind),
            ]
        ).rstrip()
        + "\n"
    )


def _facts(kind: str) -> str:
    row = KINDS[kind]
    how_many = "any number" if row.many else "one"
    where = f"`{row.section}`, {how_many}" if row.section else "nowhere in this release"
    if kind in OBJECT_KINDS:
        where, load = "nowhere; the checkpoint picks it", "an object with the attributes of the protocol"
    elif kind in FUNCTION_KINDS:
        load = "a function" + (", or `module:function` or `file.py:function` written in the run-file")
    else:
        load = f"a class, created with `({', '.join(CONSTRUCTED_WITH[kind])})`"
    return f"* Hook: `{row.hook}`\n* Picked in a run-file at: {where}\n* `load` is: {load}"


def _capabilities(kind: str) -> str:
    ours = {CORE, *(place.distribution for place in KNOWN.values())}
    rows = [
        f"| `{entry.name}` | {entry.distribution} | {entry.capability.summary} |"
        for entry in discover().entries(kind)
        if entry.distribution in ours
    ]
    if not rows:
        return "None of ours in this release."
    return "\n".join(["| name | from | when to choose it |", "|---|---|---|", *rows])


def _smallest(kind: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        root = create(kind, "example", Path(folder))
        (path,) = root.glob(f"src/*/{kind}.py")
        return path.read_text(encoding="utf-8").strip()


def _protocol(kind: str) -> str:
    """The kind's module without its docstring and imports."""
    text = (SOURCE / "kinds" / f"{kind}.py").read_text(encoding="utf-8")
    body = [
        node
        for node in ast.parse(text).body
        if not isinstance(node, ast.Import | ast.ImportFrom | ast.If) and not _is_docstring(node)
    ]
    lines = text.splitlines()
    first = min([body[0].lineno, *(each.lineno for each in getattr(body[0], "decorator_list", []))])
    return "\n".join(lines[first - 1 :]).strip()


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and node.lineno == 1


def _checks(kind: str) -> str:
    path = SOURCE / "testing" / f"{kind}.py"
    tree = ast.parse(path.read_text(encoding="utf-8"))
    (kit,) = [
        node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == f"{_camel(kind)}Conformance"
    ]
    tests = [node.name for node in kit.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return "\n".join(f"* {_sentence(name)}" for name in tests if name.startswith("test_"))


def _sentence(name: str) -> str:
    return re.sub(r"_", " ", name.removeprefix("test_"))


def _camel(kind: str) -> str:
    return "".join(part.capitalize() for part in kind.split("_"))


def outdated() -> list[str]:
    """Pages whose text is not what would be written now, and pages of kinds that do not exist."""
    stale = [
        kind for kind in KINDS if not _path(kind).is_file() or _path(kind).read_text(encoding="utf-8") != page(kind)
    ]
    return [*stale, *sorted({path.stem for path in (DOCS / "kinds").glob("*.md")} - KINDS.keys())]


def _path(kind: str) -> Path:
    return DOCS / "kinds" / f"{kind}.md"


def main(arguments: list[str]) -> int:
    """Write all pages; with --check only compare."""
    if "--check" in arguments:
        for kind in outdated():
            print(f"docs/kinds/{kind}.md is out of date: run `make docs`")
        return 1 if outdated() else 0
    (DOCS / "kinds").mkdir(exist_ok=True)
    for kind in KINDS:
        _path(kind).write_text(page(kind), encoding="utf-8")
        print(f"wrote docs/kinds/{kind}.md")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
