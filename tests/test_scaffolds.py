"""What `miles plugins new` writes installs, passes the check, and passes its own tests untouched."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import json
import os
import re
import subprocess
import sys
import tomllib
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from click.testing import CliRunner

from miles_core.capability import KINDS
from miles_core.cli import main
from miles_core.cli.new import create
from miles_core.errors import PluginError
from miles_core.known import KNOWN
from miles_core.registry import discover

NAME = "my-thing"
TESTED = [kind for kind in KINDS if importlib.util.find_spec(f"miles_core.testing.{kind}")]
"""`test_layout` holds every kind to having a kit."""


def run(command: list[str], folder: Path, path: list[Path], **more: str) -> subprocess.CompletedProcess[str]:
    pythonpath = os.pathsep.join([*map(str, path), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": pythonpath, "OMP_NUM_THREADS": "1", **more}
    return subprocess.run(
        [sys.executable, *command], cwd=folder, capture_output=True, text=True, check=False, env=environment
    )


def test_every_scaffold_passes_its_own_tests_untouched(tmp_path: Path) -> None:
    roots = {kind: create(kind, NAME, tmp_path) for kind in TESTED}
    report = tmp_path / "report.xml"
    # One pytest for all of them; what their own pyproject sets is set here by hand.
    command = [
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "--import-mode=importlib",
        "-W",
        "error",
    ]
    command += ["-o", "asyncio_mode=auto", "-o", "asyncio_default_fixture_loop_scope=function"]
    done = run([*command, f"--junitxml={report}", "."], tmp_path, [root / "src" for root in roots.values()])
    assert done.returncode == 0, done.stdout[-6000:]
    ran = {case.get("classname", "").split(".")[0] for case in ElementTree.parse(report).iter("testcase")}
    assert ran == {root.name for root in roots.values()}


def test_one_scaffold_needs_no_more_than_pytest_in_its_folder(tmp_path: Path) -> None:
    root = create("filter", NAME, tmp_path)
    done = run(["-m", "pytest", "-q", "-p", "no:cacheprovider"], root, [])
    assert done.returncode == 0, done.stdout


def test_scaffolds_install_and_pass_the_check(tmp_path: Path) -> None:
    roots = [create(kind, NAME, tmp_path) for kind in KINDS]
    site = tmp_path / "site"
    pip = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-build-isolation"]
    done = run([*pip, "--no-index", "--target", str(site), *map(str, roots)], tmp_path, [])
    assert done.returncode == 0, done.stderr
    # Only what was made here is of interest; importing every other engine and executor would take most of the time.
    others = ",".join({place.distribution for place in KNOWN.values()})
    code = "from miles_core.cli import main; main(['plugins', 'check', '--json'])"
    checked = run(["-c", code], tmp_path, [site], MILES_DISABLE_PLUGINS=others)
    results = {each["subject"]: each for each in json.loads(checked.stdout) if NAME in each["owner"]}
    assert {subject: each["found"] for subject, each in results.items() if each["level"] != "ok"} == {}
    assert set(results) == {f"{kind} {NAME}" for kind in KINDS} | {f"plugin {NAME}"}


@pytest.mark.parametrize("kind", KINDS)
class TestEveryKind:
    def test_the_distribution_has_the_shape_of_ours(self, tmp_path: Path, kind: str) -> None:
        root = create(kind, NAME, tmp_path)
        project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
        (package,) = root.glob("src/*")
        assert project["name"] == root.name == f"miles-{kind.replace('_', '-')}-{NAME}"
        assert project["entry-points"]["miles.plugins"] == {NAME: f"{package.name}.plugin"}
        assert project["dependencies"][0] == "miles-core>=0.1,<0.2"
        assert "## 0.1.0" in (root / "CHANGELOG.md").read_text()
        assert f"miles plugins show {kind} {NAME}" in (root / "README.md").read_text()
        assert (package / "py.typed").exists()

    def test_it_speaks_the_protocol_of_its_kind(self, tmp_path: Path, kind: str) -> None:
        """Every method, with every parameter that callers pass; its kit shows that they do what they should."""
        name = "".join(part.title() for part in kind.split("_"))
        protocol = getattr(importlib.import_module(f"miles_core.kinds.{kind}"), name)
        (source,) = create(kind, NAME, tmp_path).glob(f"src/*/{kind}.py")
        written: dict[str, list[ast.arguments]] = {}
        for node in ast.walk(ast.parse(source.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                written.setdefault(node.name, []).append(node.args)
        asked = {name: method for name, method in vars(protocol).items() if inspect.isfunction(method)}
        asked = {name: method for name, method in asked.items() if not name.startswith("_") or name == "__call__"}
        if "__call__" in asked and "__call__" not in written:
            return  # a plain function, under a name of its own
        for name, method in asked.items():
            parameters = list(inspect.signature(method).parameters)
            spelled = [[each.arg for each in (*args.args, *args.kwonlyargs)] for args in written.get(name, [])]
            assert parameters in spelled, f"{name}({', '.join(parameters)}) is not in {source.name}"

    def test_nothing_of_the_template_is_left(self, tmp_path: Path, kind: str) -> None:
        root = create(kind, NAME, tmp_path)
        for path in root.rglob("*"):
            if path.is_file():
                assert "$" not in path.read_text(), path

    @pytest.mark.parametrize("name", ["a", "class", "match", "list", "x-2"])
    def test_awkward_names_give_python_that_parses(self, tmp_path: Path, kind: str, name: str) -> None:
        root = create(kind, name, tmp_path)
        for path in root.rglob("*.py"):
            tree = ast.parse(path.read_text())
            names = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
            assert not names & {"list", "match", "class"}


class TestRefusals:
    @pytest.mark.parametrize("name", ["My-Thing", "my_thing", "2fast", "a--b", "-a", "a-", "../up", "a b", ""])
    def test_a_name_that_is_not_kebab_case(self, tmp_path: Path, name: str) -> None:
        with pytest.raises(PluginError, match="not kebab-case"):
            create("reward", name, tmp_path)
        assert list(tmp_path.iterdir()) == []

    def test_a_kind_that_does_not_exist(self, tmp_path: Path) -> None:
        with pytest.raises(PluginError, match="no kind 'rewards'"):
            create("rewards", NAME, tmp_path)

    def test_a_name_that_is_taken(self, tmp_path: Path) -> None:
        with pytest.raises(PluginError, match=r"claimed by miles-core 0\.1\.0"):
            create("loss", "gspo", tmp_path, discover())

    def test_a_folder_that_exists_is_left_alone(self, tmp_path: Path) -> None:
        root = create("reward", NAME, tmp_path)
        (root / "README.md").write_text("mine")
        with pytest.raises(PluginError, match="exists already"):
            create("reward", NAME, tmp_path)
        assert (root / "README.md").read_text() == "mine"


def test_the_command_says_what_it_wrote_and_what_comes_next(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["plugins", "new", "tito-family", NAME, "--into", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert re.search(r"src/miles_tito_family_my_thing/tito_family\.py", result.output)
    assert f"miles plugins show tito_family {NAME}" in result.output
