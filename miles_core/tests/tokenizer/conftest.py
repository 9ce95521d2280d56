from __future__ import annotations

from pathlib import Path

import pytest

from miles_core.testing.tiny import write_tiny_tokenizer


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    write_tiny_tokenizer(path)
    return path
