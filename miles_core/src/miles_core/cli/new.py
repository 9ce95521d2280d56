"""`miles plugins new KIND NAME`: a complete distribution whose tests pass before anything is changed.

The files are templates in `scaffold/`: `common/` for what every distribution has, and one folder a kind with the
smallest implementation that passes its conformance kit. ``$name`` stands for a value; nothing else is special in them.
"""

from __future__ import annotations

import builtins
import keyword
import re
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from string import Template

import click

from miles_core import __version__
from miles_core.capability import API, KINDS
from miles_core.errors import PluginError
from miles_core.registry import FUNCTION_KINDS, Registry, discover
from miles_core.signatures import OBJECT_KINDS

_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
_EXTRA = {
    "architecture": ("miles-megatron>=0.1,<0.2", "transformers>=5.0"),
    "backend": ("transformers>=5.0",),
    "engine": ("transformers>=5.0",),
}
"""What the scaffold of a kind needs beside the core."""

_CLAIMED = "# Nothing: the checkpoint's config.json picks it."


@click.command("new")
@click.argument("kind")
@click.argument("name")
@click.option(
    "--into", type=click.Path(file_okay=False, path_type=Path), default=Path(), help="Folder to create it in."
)
def command(kind: str, name: str, into: Path) -> None:
    """Create a plugin of your own: package, options, tests that subclass the conformance kit."""
    kind = kind.replace("-", "_")
    root = create(kind, name, into, discover())
    for path in sorted(root.rglob("*")):
        if path.is_file():
            click.echo(f"  {path}")
    click.echo(
        f"\nNext:\n  pip install --no-build-isolation -e '{root}[test]'\n  python -m pytest {root}\n"
        f"  miles plugins show {kind} {name}"
    )


def create(kind: str, name: str, into: Path, registry: Registry | None = None) -> Path:
    """Write the distribution.

    Args:
        kind: A kind of `KINDS`.
        name: Kebab-case name of the capability.
        into: Folder that will hold the new one; created when absent.
        registry: What is installed, to refuse a name that is taken; None skips that.

    Returns:
        The new folder.

    Raises:
        PluginError: the kind is unknown, the name is not kebab-case or taken, or the folder exists.
    """
    if kind not in KINDS:
        raise PluginError(f"there is no kind {kind!r}", expected=", ".join(KINDS))
    if not _NAME.fullmatch(name):
        raise PluginError(
            f"the name {name!r} is not kebab-case", expected="lower-case letters, digits and single hyphens"
        )
    taken = [each.owner for each in registry.entries(kind) if each.name == name] if registry else []
    if taken:
        raise PluginError(
            f"{kind} `{name}` is claimed by {taken[0]}; with a second claim neither could be picked",
            do="choose another name",
        )
    values = _values(kind, name)
    root = into / values["distribution"]
    if root.exists():
        raise PluginError(f"{root} exists already", do="choose another name, or another folder with --into")
    for relative, template in _templates(kind):
        path = root / _fill(relative, values)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(_fill(template, values), encoding="utf-8")
    return root


def _values(kind: str, name: str) -> dict[str, str]:
    snake, camel = name.replace("-", "_"), "".join(part.capitalize() for part in name.split("-"))
    kind_hyphen, kind_camel = kind.replace("_", "-"), "".join(part.capitalize() for part in kind.split("_"))
    reserved = keyword.iskeyword(snake) or keyword.issoftkeyword(snake) or hasattr(builtins, snake)
    function = f"{snake}_{kind}" if reserved or snake == kind else snake
    package = f"miles_{kind}_{snake}"
    cls = camel if camel.endswith(kind_camel) else f"{camel}{kind_camel}"
    options = Template(_fields(kind)).substitute(name=name)
    minor = ".".join(__version__.split(".")[:2])
    section = KINDS[kind].section
    return {
        "api": str(API),
        "class_name": cls,
        "dependencies": ", ".join(
            f'"{each}"' for each in (f"miles-core>={minor},<{_next_minor(minor)}", *_EXTRA.get(kind, ()))
        ),
        "distribution": f"miles-{kind_hyphen}-{name}",
        "function": function,
        "hook": KINDS[kind].hook,
        "kind": kind,
        "kind_words": kind.replace("_", " "),
        "kit": f"{kind_camel}Conformance",
        "name": name,
        "options_argument": f'\n            options="{package}.options:{camel}Options",' if options else "",
        "options_class": f"{camel}Options",
        "options_fields": options,
        "package": package,
        "run_file": _CLAIMED if kind in OBJECT_KINDS else _run_file(section, name, KINDS[kind].many),
        "table": snake.upper(),
        "target": function if kind in FUNCTION_KINDS else snake.upper() if kind in OBJECT_KINDS else cls,
        "what": KINDS[kind].summary,
    }


def _next_minor(minor: str) -> str:
    major, number = minor.split(".")
    return f"{major}.{int(number) + 1}"


def _run_file(section: str | None, name: str, many: bool) -> str:
    if section is None:
        return "# No section of a run-file reads this kind in this release."
    *outer, last = section.split(".")
    lines = [f"{'  ' * depth}{part}:" for depth, part in enumerate(outer)]
    return "\n".join([*lines, f"{'  ' * len(outer)}{last}: {f'[{name}]' if many else name}"])


def _fields(kind: str) -> str:
    """The body of the kind's option model, empty when the kind takes no options."""
    path = _folder().joinpath(kind, "options.txt")
    return path.read_text(encoding="utf-8").rstrip() if path.is_file() else ""


def _templates(kind: str) -> list[tuple[str, str]]:
    """Relative path and text of every file, placeholders in both."""
    common = [
        ("pyproject.toml", "pyproject.toml.txt"),
        ("README.md", "README.md.txt"),
        ("CHANGELOG.md", "CHANGELOG.md.txt"),
        ("src/$package/__init__.py", "init.py.txt"),
        ("src/$package/py.typed", "py.typed.txt"),
        ("src/$package/plugin.py", "plugin.py.txt"),
    ]
    if _fields(kind):
        common.append(("src/$package/options.py", "options.py.txt"))
    own = [("src/$package/$kind.py", "implementation.py.txt"), ("tests/test_$kind.py", "test.py.txt")]
    folder = _folder()
    return [
        (target, folder.joinpath(place, source).read_text(encoding="utf-8"))
        for place, pairs in (("common", common), (kind, own))
        for target, source in pairs
    ]


def _folder() -> Traversable:
    return files("miles_core.cli").joinpath("scaffold")


def _fill(text: str, values: dict[str, str]) -> str:
    return Template(text).substitute(values)
