"""The generated pages say what the code says now."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from miles_core.config import translate
from miles_core.config.spec import RunSpec

DOCS = Path(__file__).parents[1] / "docs"


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_generate", DOCS / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_pages_are_current(generate: ModuleType) -> None:
    assert generate.outdated() == [], "run `make docs`"


def test_a_changed_page_is_noticed(generate: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in generate.PAGES:
        (tmp_path / name).write_text((DOCS / name).read_text() + "edited by hand\n")
    monkeypatch.setattr(generate, "DOCS", tmp_path)
    assert generate.outdated() == list(generate.PAGES)
    assert generate.main(["--check"]) == 1
    assert generate.main([]) == 0
    assert generate.main(["--check"]) == 0


def test_the_run_file_page_has_every_key() -> None:
    page = (DOCS / "run-file.md").read_text()
    keys = {path.split(".")[-1] for path in translate.known_paths(RunSpec)} - {"use", "weight"}
    assert [key for key in sorted(keys) if f"| `{key}` |" not in page] == []
