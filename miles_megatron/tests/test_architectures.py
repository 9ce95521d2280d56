"""The architecture kit over every table that comes with the backend."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest

from miles_core.testing.architecture import DENSE, SPARSE, ArchitectureConformance, Layouts

from .models import write_models

pytestmark = pytest.mark.slow  # test_shapes holds the same tables in other shapes
TABLES = "miles_megatron.architectures"


class Kit(ArchitectureConformance):
    model: ClassVar[str]

    @classmethod
    def make_model(cls, folder: Path) -> None:
        write_models(folder, cls.model)
        for file in (folder / cls.model).iterdir():
            file.rename(folder / file.name)


class TestGlm4Moe(Kit):
    """Has what the others have: biases, norms of heads, shared experts, a router's bias, a dense layer."""

    load, model = f"{TABLES}.sparse:GLM4_MOE", "glm4-moe"
    layouts: ClassVar[Layouts] = SPARSE


class TestQwen3Moe(Kit):
    load, model = f"{TABLES}.sparse:QWEN3_MOE", "qwen3-moe"
    layouts: ClassVar[Layouts] = SPARSE


class TestDeepseekV3(Kit):
    load, model = f"{TABLES}.sparse:DEEPSEEK_V3", "deepseek-v3"
    layouts: ClassVar[Layouts] = SPARSE


class TestLlama(Kit):
    load, model = f"{TABLES}.dense:LLAMA", "llama"
    layouts: ClassVar[Layouts] = DENSE


class TestQwen2(Kit):
    load, model = f"{TABLES}.dense:QWEN2", "qwen2"
    layouts: ClassVar[Layouts] = DENSE


class TestQwen3(Kit):
    load, model = f"{TABLES}.dense:QWEN3", "qwen3"
    layouts: ClassVar[Layouts] = DENSE
