"""Each distribution works from its wheel with core alone beside it: it is complete and needs no other of ours."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = sorted(path.parent for path in (*ROOT.glob("*/pyproject.toml"), *ROOT.glob("plugins/*/pyproject.toml")))

# -S keeps the editable installs of the test environment out; third-party packages come in by their folder.
PROGRAM = """
import importlib, json, sys
wheels, packages, module = sys.argv[1], sys.argv[2], sys.argv[3]
sys.path[:0] = [wheels, packages]
from miles_core.registry import load_target
plugin = importlib.import_module(module)
loaded = []
for name in dir(plugin):
    if name.startswith("miles_"):
        for capability in getattr(plugin, name)():
            if not capability.needs:
                load_target(capability.load)
            if capability.options:
                load_target(capability.options)
            loaded.append(capability.name)
ours = sorted({m.partition(".")[0] for m in sys.modules if m.startswith("miles_")})
print(json.dumps({"loaded": loaded, "ours": ours}))
"""


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("wheels")
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "-q", "--no-deps"]
    command += ["--no-build-isolation", "-w", str(target), *map(str, FOLDERS)]
    subprocess.run(command, check=True, capture_output=True, timeout=240)
    return target


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_wheel_works_with_core_alone(wheels: Path, tmp_path: Path, folder: Path) -> None:
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    for name in {"miles-core", project["name"]}:
        (wheel,) = wheels.glob(
            f"{name.replace('-', '_')}-{project['version'] if name == project['name'] else '*'}-*.whl"
        )
        zipfile.ZipFile(wheel).extractall(tmp_path)
    (module,) = project["entry-points"]["miles.plugins"].values()
    done = subprocess.run(
        [sys.executable, "-S", "-c", PROGRAM, str(tmp_path), sysconfig.get_path("purelib"), module],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["loaded"]
    assert set(found["ours"]) == {"miles_core", module.partition(".")[0]}
