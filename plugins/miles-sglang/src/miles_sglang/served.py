"""The weights a server serves at this moment, through this plugin's code inside it: read, or overwritten with noise."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch

from miles_core.errors import EngineError
from miles_sglang.checkpoint import Checkpoint
from miles_sglang.launch import LOADER
from miles_sglang.server import Server
from miles_sglang.updates import checked, pack, session


async def inside(
    server: Server, checkpoint: Checkpoint, request: dict[str, Any], *, shared: Path, where: str
) -> dict[str, Any]:
    """Have `serverside` do a request; the caller holds the lock of updates.

    Args:
        shared: A folder that the server sees too; its answer is a file.

    Raises:
        EngineError: the server refused, or its layout of the model is not known.
    """
    shapes = {name: list(form.shape) for name, form in checkpoint.forms.items()}
    with tempfile.TemporaryDirectory(dir=shared) as folder:
        answer = Path(folder) / "answer.json"
        text = json.dumps({**request, "shapes": shapes, "answer": str(answer)})
        body = {
            "serialized_named_tensors": [pack([(text, torch.zeros(1))])],
            "load_format": LOADER,
            "flush_cache": False,
        }
        async with session(server.client, server.dialect):
            await checked(server.client, "/update_weights_from_tensor", body)
        found: dict[str, Any] = json.loads(answer.read_text())
    if "error" in found:
        raise EngineError(
            "the served weights cannot be read", expected="a known layout", found=str(found["error"]), where=where
        )
    return found
