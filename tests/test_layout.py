"""The tree holds what the architecture promises: kinds, hooks, kits, pages and scaffolds match, files stay small."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

from miles_core import hookspecs
from miles_core.capability import API, KINDS
from miles_core.cli.plugin_check import check_entry, rule_fields
from miles_core.known import KNOWN
from miles_core.registry import CORE, discover
from miles_core.signatures import protocol_of

ROOT = Path(__file__).parents[1]
CORE_SOURCE = ROOT / "miles_core" / "src" / "miles_core"
PROJECTS = sorted(path.parent for path in [*ROOT.glob("*/pyproject.toml"), *ROOT.glob("plugins/*/pyproject.toml")])
SOURCES = sorted(path for project in PROJECTS for path in project.glob("src/**/*.py"))

MAX_LINES = 400
MAX_FUNCTION_LINES = 75
MEDIAN_LINES = 150


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def kit_classes(kind: str) -> list[ast.ClassDef]:
    path = CORE_SOURCE / "testing" / f"{kind}.py"
    return [node for node in parsed(path).body if isinstance(node, ast.ClassDef) and node.name.endswith("Conformance")]


class TestKinds:
    """One kind is a hook, a protocol, a kit, a page and a scaffold, all of one name."""

    def test_every_kind_has_a_hookspec_and_every_hookspec_a_kind(self):
        hooks = {name for name, value in vars(hookspecs).items() if hasattr(value, "miles_spec")}
        assert hooks == {kind.hook for kind in KINDS.values()}

    def test_hooks_take_no_arguments_and_are_documented(self):
        for kind in KINDS.values():
            hook = getattr(hookspecs, kind.hook)
            assert not inspect.signature(hook).parameters, kind.hook
            assert "`load`" in (hook.__doc__ or ""), f"{kind.hook} does not say what `load` is"
            assert f"kinds.{kind.name}." in (hook.__doc__ or ""), f"{kind.hook} does not name its protocol"

    @pytest.mark.parametrize(
        ("folder", "pattern"),
        [
            (CORE_SOURCE / "kinds", "[a-z]*.py"),
            (ROOT / "docs" / "kinds", "*.md"),
            (CORE_SOURCE / "cli" / "scaffold", "*/implementation.py.txt"),
        ],
    )
    def test_the_files_of_a_folder_are_the_kinds(self, folder: Path, pattern: str):
        found = {path.parent.name if "/" in pattern else path.stem for path in folder.glob(pattern)}
        assert found == set(KINDS)

    @pytest.mark.parametrize("kind", KINDS)
    def test_every_kind_has_a_protocol_and_an_abstract_kit(self, kind: str):
        protocol = protocol_of(kind)
        assert protocol.__doc__
        (kit,) = kit_classes(kind)
        assert kit.name == f"{protocol.__name__}Conformance"
        tests = [node for node in kit.body if getattr(node, "name", "").startswith("test_")]
        assert len(tests) >= 3
        assert importlib.util.find_spec(f"miles_core.testing.{kind}")

    @pytest.mark.parametrize("kind", KINDS)
    def test_every_kit_has_a_planted_fault(self, kind: str):
        assert (ROOT / "tests" / "kits" / "faults" / f"{kind}.py").is_file()

    def test_the_guide_names_every_field_of_a_descriptor_and_every_state(self):
        guide = (ROOT / "docs" / "writing-a-plugin.md").read_text()
        capability = importlib.import_module("miles_core.capability")
        for name in capability.Capability.__dataclass_fields__:
            assert f"| `{name}` |" in guide, name
        for state in capability.State:
            assert f"| `{state}` |" in guide, state
        assert f"MILES_API = {API}" in guide


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_generate_kinds", ROOT / "docs" / "generate_kinds.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class TestPages:
    def test_pages_of_kinds_are_current(self, generate: ModuleType):
        assert generate.outdated() == [], "run `make docs`"

    def test_a_page_shows_protocol_example_and_kit(self, generate: ModuleType):
        page = generate.page("filter")
        for text in (
            "Hook: `miles_filters`",
            "class Filter(Protocol)",
            "`nonzero-std`",
            "FilterConformance",
            "def example(",
        ):
            assert text in page


class TestCapabilities:
    def test_known_names_are_exactly_those_of_our_plugins(self):
        ours = {place.distribution for place in KNOWN.values()}
        found = {(e.kind, e.name): e.distribution for e in discover().entries() if e.distribution in ours}
        assert found == {key: place.distribution for key, place in KNOWN.items()}

    def test_known_folders_exist(self):
        for place in KNOWN.values():
            project = tomllib.loads((ROOT / place.folder / "pyproject.toml").read_text())["project"]
            assert project["name"] == place.distribution
            assert not place.extra or place.extra in project["optional-dependencies"]

    def test_all_of_them_pass_the_check_that_other_peoples_must_pass(self):
        registry = discover()
        ours = {(entry.kind, entry.name) for entry in registry.entries() if entry.distribution == CORE} | KNOWN.keys()
        fields = rule_fields(registry.entries())
        found = [check_entry(entry, fields) for entry in registry.entries() if (entry.kind, entry.name) in ours]
        assert [result for result in found if result.level not in ("ok", "note")] == []
        assert sum(result.level == "ok" for result in found) > 50

    def test_summaries_fit_a_row_of_a_table(self):
        assert [e.name for e in discover().entries() if len(e.capability.summary) > 80] == []

    def test_rule_ids_are_unique(self):
        ids = [rule.id for entry in discover().entries() for rule in entry.capability.rules]
        assert len(ids) == len(set(ids))

    def test_tags_in_use_are_in_the_vocabulary(self):
        capability = importlib.import_module("miles_core.capability")
        for entry in discover().entries():
            assert entry.capability.provides <= capability.TAGS.keys(), entry.name


@pytest.mark.parametrize("project", PROJECTS, ids=lambda path: path.name)
class TestDistributions:
    """Every folder that is a distribution has the same shape."""

    def test_it_has_its_files(self, project: Path):
        for name in ("README.md", "CHANGELOG.md", "tests"):
            assert (project / name).exists(), f"{project.name} has no {name}"
        (package,) = project.glob("src/*/__init__.py")
        assert (package.parent / "py.typed").exists()

    def test_the_changelog_begins_with_the_version(self, project: Path):
        version = tomllib.loads((project / "pyproject.toml").read_text())["project"]["version"]
        first = re.search(r"^## (\S+)", (project / "CHANGELOG.md").read_text(), re.M)
        assert first
        assert first.group(1) == version

    def test_it_depends_on_the_core_only(self, project: Path):
        data = tomllib.loads((project / "pyproject.toml").read_text())["project"]
        ours = [each for each in data["dependencies"] if each.startswith("miles")]
        assert ours == ([] if data["name"] == CORE else ["miles-core>=0.1,<0.2"])

    def test_its_plugin_module_states_the_api_as_a_literal(self, project: Path):
        entry_points = tomllib.loads((project / "pyproject.toml").read_text())["project"]["entry-points"][
            "miles.plugins"
        ]
        for module in entry_points.values():
            path = project / "src" / Path(*module.split(".")).with_suffix(".py")
            assert re.search(rf"^MILES_API = {API}$", path.read_text(), re.M), path


def test_each_dependency_says_why_it_is_there_and_nothing_else_does():
    page = (ROOT / "docs" / "design" / "dependencies.md").read_text(encoding="utf-8")
    core, plugins, _ = page.split("\n## ")[1:]
    rows = [*re.findall(r"^\| (.+?) \|", core, re.M)[1:], *re.findall(r"^\| .+? \| (.+?) \|", plugins, re.M)[1:]]
    explained = [name for row in rows for name in row.split(", ")]
    declared = set()
    for project in PROJECTS:
        data = tomllib.loads((project / "pyproject.toml").read_text())["project"]
        extras = [each for extra in data.get("optional-dependencies", {}).values() for each in extra]
        names = {re.split(r"[^\w.-]", each)[0] for each in [*data["dependencies"], *extras]}
        declared |= names - {CORE}
    assert sorted(set(explained)) == sorted(declared)


class TestSizes:
    """Small tails: nobody opens a file of thousands of lines here."""

    @staticmethod
    def lines(path: Path) -> int:
        return len(path.read_text(encoding="utf-8").splitlines())

    def test_files_are_small(self):
        assert {str(path): self.lines(path) for path in SOURCES if self.lines(path) > MAX_LINES} == {}

    def test_most_files_are_smaller_still(self):
        sizes = sorted(self.lines(path) for path in SOURCES)
        assert sizes[len(sizes) // 2] <= MEDIAN_LINES

    def test_functions_fit_a_screen(self):
        long = {
            f"{path.name}:{node.name}": node.end_lineno - node.lineno + 1
            for path in SOURCES
            for node in ast.walk(parsed(path))
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            and node.end_lineno
            and node.end_lineno - node.lineno + 1 > MAX_FUNCTION_LINES
        }
        assert long == {}

    def test_no_module_has_a_name_that_says_nothing(self):
        vague = {"utils.py", "util.py", "common.py", "helpers.py", "misc.py"}
        assert [path for path in SOURCES if path.name in vague] == []

    def test_every_module_says_what_it_is(self):
        assert [str(path) for path in SOURCES if not ast.get_docstring(parsed(path))] == []


class TestImports:
    """import-linter's contracts hold; the linter itself runs in `make check`."""

    @pytest.mark.parametrize("name", ["registry", "cli.plugins", "session", "config", "builtin", "options"])
    def test_light_modules_stay_light(self, name: str):
        code = f"import sys, miles_core.{name}; print(sorted({{'torch', 'ray', 'transformers'}} & set(sys.modules)))"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == "[]"
