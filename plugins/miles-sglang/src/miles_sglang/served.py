"""The weights a server serves at this moment, through this plugin's code inside it: read, or overwritten with noise."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch

from miles_core.errors import EngineError
from miles_sglang.checkpoint import Checkpoint
from miles_sglang.launch import LOADER, SERVERSIDE
from miles_sglang.server import Server
from miles_sglang.updates import checked, pack, session


async def inside(
    server: Server, checkpoint: Checkpoint, request: dict[str, Any], *, shared: Path, where: str
) -> dict[str, Any]:
    """Have `serverside` do a request; the caller holds the lock of updates.

    Args:
        shared: A folder that the server sees too; its answer is a file.

    Raises:
        EngineError: the server refused, has not this plugin's code, or its layout of the model is not known.
    """
    await _has_loader(server, where)
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


async def _has_loader(server: Server, where: str) -> None:
    """A server that does not know the loader ends itself when it is asked to use it."""
    info = await server.client.get("/server_info", timeout_s=60) if server.attached else {}
    loaders = info.get("custom_weight_loader") if isinstance(info, dict) else None
    if server.attached and LOADER not in (loaders or ()):
        raise EngineError(
            "this server cannot tell which weights it serves",
            expected=f"a server started with --custom-weight-loader {LOADER}, and PYTHONPATH={SERVERSIDE}",
            found=f"custom_weight_loader {loaders}",
            where=where,
            do="start it so, or set weights.verify: off and check_weight_update_equal: false",
        )
