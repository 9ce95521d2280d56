"""Plugins of other people, built and installed by pip into a folder of their own, as the `miles` command sees them.

`sample_plugin` is sound. Each of `broken_plugins` fails in its own way, and none may harm the rest.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from miles_core.known import KNOWN

HERE = Path(__file__).parent
SAMPLE = HERE / "sample_plugin"
BROKEN = sorted(path.parent for path in HERE.glob("broken_plugins/*/pyproject.toml"))


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment variables under which all of them are installed."""
    target = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--no-build-isolation", "--no-index", "--target", str(target), str(SAMPLE), *map(str, BROKEN)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    path = os.pathsep.join([str(target), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {name: value for name, value in os.environ.items() if name != "MILES_DISABLE_PLUGINS"} | {"PYTHONPATH": path}


def miles(environment: dict[str, str], *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    code = "from miles_core.cli import main; main(prog_name='miles')"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False, env=environment | more
    )


def listed(environment: dict[str, str], **more: str) -> list[dict[str, Any]]:
    done = miles(environment, "plugins", "list", "--json", **more)
    assert done.returncode == 0, done.stderr
    rows: list[dict[str, Any]] = json.loads(done.stdout)
    return rows


@pytest.fixture(scope="module")
def rows(environment: dict[str, str]) -> list[dict[str, Any]]:
    return listed(environment)


def row_of(rows: list[dict[str, Any]], distribution: str, name: str | None = None) -> dict[str, Any]:
    (row,) = [row for row in rows if (row["distribution"], row["name"]) == (distribution, name)]
    return row


def test_an_installed_plugin_is_found(rows):
    row = row_of(rows, "acme-miles-length", "acme-length")
    assert (row["kind"], row["version"], row["state"]) == ("reward", "1.2.0", "ok")


def test_a_capability_whose_need_is_missing_is_unavailable_with_the_line_to_type(rows):
    row = row_of(rows, "acme-miles-length", "acme-judge")
    assert row["state"] == "unavailable"
    assert row["do"] == "pip install 'acme-miles-length[judge]'"


@pytest.mark.parametrize(
    ("distribution", "state", "reason", "do"),
    [
        ("broken-import-raises", "broken", "No module named 'bar_cuda_that_is_not_there'", "MILES_DISABLE_PLUGINS="),
        ("broken-import-exits", "broken", "calls sys.exit(3)", "MILES_DISABLE_PLUGINS="),
        ("broken-other-api", "incompatible", "plugin API 99", "for this miles-core"),
        ("broken-needs-newer-core", "incompatible", "needs miles-core<10,>=9", "for this miles-core"),
        ("broken-hook-typo", "broken", "unknown hook `miles_filter`", "did you mean `miles_filters`?"),
        ("broken-wrapper", "broken", "`miles_filters` is a wrapper", "return descriptors"),
    ],
)
def test_a_plugin_that_fails_is_listed_with_reason_and_remedy(rows, distribution, state, reason, do):
    row = row_of(rows, distribution)
    assert row["state"] == state
    assert reason in row["reason"]
    assert do in row["do"]


def test_every_broken_plugin_has_a_case_here(rows):
    bad = {row["distribution"] for row in rows if row["state"] in ("broken", "incompatible", "conflict")}
    assert {f"broken-{path.name}" for path in BROKEN} <= bad


def test_two_that_claim_one_name_are_both_conflicts_and_disabling_one_settles_it(environment, rows):
    for one, other in (("broken-claims-a", "broken-claims-b"), ("broken-claims-b", "broken-claims-a")):
        row = row_of(rows, one, "twice")
        assert row["state"] == "conflict"
        assert row["reason"] == f"also claimed by {other}"
        assert row["do"] == f"MILES_DISABLE_PLUGINS={other} keeps the one of {one}"
    settled = listed(environment, MILES_DISABLE_PLUGINS="broken-claims-a")
    assert row_of(settled, "broken-claims-b", "twice")["state"] == "ok"
    assert row_of(settled, "broken-claims-a")["state"] == "disabled"


def test_core_is_whole_whatever_is_installed_beside_it(rows):
    core = [row for row in rows if row["distribution"] == "miles-core"]
    assert len(core) > 15
    assert {row["state"] for row in core} <= {"ok", "unavailable"}


def test_show_explains_options_and_rules_of_a_third_party(environment):
    done = miles(environment, "plugins", "show", "reward", "acme-length")
    assert done.returncode == 0
    assert "Length of the best answer, in characters." in done.stdout
    assert "acme-length-no-rloo" in done.stdout


def test_check_passes_the_sound_one_and_fails_because_of_the_others(environment):
    others = ",".join({place.distribution for place in KNOWN.values()})  # heavy to import, and not the matter here
    done = miles(environment, "plugins", "check", "--json", MILES_DISABLE_PLUGINS=others)
    results = {(each["owner"], each["subject"]): each for each in json.loads(done.stdout)}
    assert results["acme-miles-length 1.2.0", "reward acme-length"]["level"] == "ok"
    assert results["acme-miles-length 1.2.0", "reward acme-judge"]["level"] == "note"
    assert results["broken-import-raises 0.1.0", "plugin import-raises"]["level"] == "failure"
    assert done.returncode == 1


def test_the_function_behind_the_name_is_the_third_partys(environment):
    code = (
        "from miles_core.registry import discover, load_target\n"
        "from miles_core.kinds.reward import Scored\n"
        "from miles_core.types import Prompt\n"
        "capability = discover().get('reward', 'acme-length').capability\n"
        "options = load_target(capability.options)(target_chars=3)\n"
        "prompt = Prompt(id='p', messages=())\n"
        "scored = Scored(prompt=prompt, messages=(), response='12345', truncated=False, metadata={})\n"
        "print(load_target(capability.load)(scored, **options.model_dump()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert float(done.stdout) == pytest.approx(1 / 3)
