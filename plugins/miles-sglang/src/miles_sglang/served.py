"""The weights a server serves at this moment, through this plugin's code inside it: read, or overwritten with noise."""

from __future__ import annotations

import asyncio
import json
import logging
import tempfile
from pathlib import Path
from typing import Any

import torch

from miles_core.errors import EngineError
from miles_core.types import NamedTensor
from miles_core.weights.digests import compare, manifest
from miles_sglang.checkpoint import Checkpoint
from miles_sglang.client import ServerGone
from miles_sglang.launch import LOADER, SERVERSIDE
from miles_sglang.server import Server
from miles_sglang.updates import checked, files_of, pack, read, session

log = logging.getLogger(__name__)


async def inside(server: Server, checkpoint: Checkpoint, request: dict[str, Any], *, shared: Path) -> dict[str, Any]:
    """Have `serverside` do a request; the caller holds the lock of updates.

    Args:
        shared: A folder that the server sees too; its answer is a file.

    Raises:
        EngineError: the server refused, has not this plugin's code or several ranks, or its layout of the model is not
            known.
    """
    where = server.where
    if server.ranks > 1:
        raise EngineError("a rank holds slices only", expected="tensor_parallel: 1", found="several ranks", where=where)
    await _has_loader(server)
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
        if not answer.exists():
            raise EngineError(
                "the server's answer about its weights did not arrive",
                expected=f"a file in {shared}, written by the server",
                found="none",
                where=where,
                do="name a folder that both hosts see: engine.staging_dir",
            )
        found: dict[str, Any] = json.loads(answer.read_text())
    if "error" in found:
        raise EngineError(
            "the served weights cannot be read", expected="a known layout", found=str(found["error"]), where=where
        )
    return found


async def prove(server: Server, checkpoint: Checkpoint, folder: Path, *, shared: Path) -> bool:
    """Compare every tensor that a server serves with the folder whose weights it must serve.

    Returns:
        False, with a warning in the log, when the server cannot tell what it serves.

    Raises:
        EngineError: it serves others.
        ServerGone: it does not answer.
    """
    try:
        answer = await inside(server, checkpoint, {"op": "digests", "names": sorted(checkpoint.forms)}, shared=shared)
    except ServerGone:
        raise
    except EngineError as error:
        log.warning("%s: it is not proven that the server serves the weights in %s: %s", server.where, folder, error)
        return False
    expected = await asyncio.to_thread(_digests, folder, checkpoint)
    if difference := compare(expected, answer["digests"]):
        raise EngineError(
            "the server serves other weights than it should",
            expected=f"{len(expected)} tensors as in {folder}",
            found=str(difference),
            where=server.where,
            do="name a server of this checkpoint; one that loads it from a folder must see the same files there",
        )
    return True


def _digests(folder: Path, checkpoint: Checkpoint) -> dict[str, str]:
    """Of the tensors of a folder, in the precision they are served in."""
    tensors = (
        NamedTensor(name=name, tensor=tensor.to(checkpoint.forms[name].dtype))
        for file in files_of(folder)
        for name, tensor in read(file)
        if name in checkpoint.forms
    )
    return dict(manifest(0, tensors).digests)


async def _has_loader(server: Server) -> None:
    """A server that does not know the loader ends itself when it is asked to use it."""
    info = await server.client.get("/server_info", timeout_s=60) if server.attached else {}
    loaders = info.get("custom_weight_loader") if isinstance(info, dict) else None
    if server.attached and LOADER not in (loaders or ()):
        raise EngineError(
            "this server cannot tell which weights it serves",
            expected=f"a server started with --custom-weight-loader {LOADER}, and PYTHONPATH={SERVERSIDE}",
            found=f"custom_weight_loader {loaders}",
            where=server.where,
            do="start it so, or set weights.verify: off and check_weight_update_equal: false",
        )
