"""Runs inside an SGLang server, as its custom weight loader: reads or scrambles the weights it serves.

It imports torch, xxhash (which SGLang needs too) and the standard library alone. A request is one JSON object in the
name of the only tensor: `op`, `answer` (file to write), `shapes` (Hugging Face name to shape) and what the op needs.
Answers are JSON; a failure is an answer too, because an exception here would end the server.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import xxhash
from torch import Tensor, nn

THREADS = 8
"""Tensors digested at once."""
CHUNK_BYTES = 32 * 2**20
"""Pinned memory that each of them is copied through from a GPU."""
Shapes = Mapping[str, list[int]]

FUSED = (
    (re.compile(r"\.(q_proj|k_proj|v_proj)\."), "qkv_proj", ("q_proj", "k_proj", "v_proj")),
    (re.compile(r"\.(gate_proj|up_proj)\."), "gate_up_proj", ("gate_proj", "up_proj")),
)
"""Modules that a server stacks by rows, in this order."""
EXPERT = re.compile(r"^(.*\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight$")


def handle(model: nn.Module, named_tensors: list[tuple[str, Tensor]]) -> None:
    """SGLang's custom loader entry: see the module."""
    request = json.loads(named_tensors[0][0])
    try:
        answer = OPERATIONS[request["op"]](model, request)
    except Exception as error:  # noqa: BLE001 -- named boundary: an exception would end the server
        answer = {"error": f"{type(error).__name__}: {error}"}
    partial = request["answer"] + ".partial"
    try:
        with open(partial, "w") as file:
            json.dump(answer, file)
        os.replace(partial, request["answer"])
    except OSError as error:  # the folder is another host's: whoever asked finds no answer
        print(f"miles: the answer cannot be written: {error}", file=sys.stderr)


def digests(model: nn.Module, request: Mapping[str, Any]) -> dict[str, Any]:
    """Digests of the served tensors named, under their Hugging Face names: xxh3-128 of dtype, shape and bytes.

    Raises:
        LookupError: the model has parameters that no name of the checkpoint fills, such as a head of its own where the
        checkpoint ties it to the embeddings: they hold whatever memory held.
    """
    found = views(model, request["shapes"])
    filled = {view.untyped_storage().data_ptr() for view in found.values()}
    empty = [n for n, p in model.named_parameters() if p.numel() and p.untyped_storage().data_ptr() not in filled]
    if empty:
        raise LookupError(f"the checkpoint has no tensor for {', '.join(empty[:3])}; with a tied head, untie it there")
    names = request["names"]
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # threads copy in streams of their own
    with ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1)) as pool:
        return {"digests": dict(zip(names, pool.map(lambda name: digest(found[name]), names), strict=True))}


def scramble(model: nn.Module, request: Mapping[str, Any]) -> dict[str, Any]:
    """Overwrite every served tensor with noise of its name and the seed."""
    found = views(model, request["shapes"])
    with torch.no_grad():
        for number, name in enumerate(sorted(found)):
            generator = torch.Generator().manual_seed((request["seed"] * 1_000_003 + number) % 2**63)
            view = found[name]
            if view.is_floating_point():
                noise = torch.empty(view.shape, dtype=torch.float32).normal_(std=0.05, generator=generator)
            else:
                noise = torch.randint(0, 2, tuple(view.shape), generator=generator)
            view.copy_(noise)
    return {"tensors": len(found)}


OPERATIONS = {"digests": digests, "scramble": scramble}


def views(model: nn.Module, shapes: Shapes) -> dict[str, Tensor]:
    """The served tensor of every name, as a view.

    Raises:
        LookupError: names without one; the layout of this model is not known here.
    """
    served = {name: tensor.detach() for name, tensor in [*model.named_buffers(), *model.named_parameters()]}
    found = {name: locate(served, name, shapes) for name in shapes}
    lost = [name for name, view in found.items() if view is None]
    if lost:
        raise LookupError(f"no served tensor for {len(lost)} names, such as {', '.join(lost[:3])}")
    return {name: view for name, view in found.items() if view is not None}


def locate(served: Mapping[str, Tensor], name: str, shapes: Shapes) -> Tensor | None:
    """The view that holds what `name` loads, or None."""
    shape = tuple(shapes[name])
    if name in served:
        return _rows(served[name], 0, shape)
    expert = EXPERT.match(name)
    if expert:
        return _expert(served, expert.group(1), int(expert.group(2)), expert.group(3), shape)
    for pattern, joint, members in FUSED:
        match = pattern.search(name)
        fused = served.get(pattern.sub(f".{joint}.", name)) if match else None
        if match is None or fused is None:
            continue
        own = members.index(match.group(1))
        before = [pattern.sub(f".{member}.", name) for member in members[:own]]
        every = [pattern.sub(f".{member}.", name) for member in members]
        if sum(shapes[each][0] for each in every) != fused.shape[0]:
            return None
        return _rows(fused, sum(shapes[each][0] for each in before), shape)
    return None


def _expert(served: Mapping[str, Tensor], experts: str, index: int, part: str, shape: tuple[int, ...]) -> Tensor | None:
    """Experts are stacked: gate over up in one tensor, down in another."""
    stacked = served.get(f"{experts}.{'w2_weight' if part == 'down_proj' else 'w13_weight'}")
    if stacked is None or index >= stacked.shape[0]:
        return None
    own = stacked[index]
    if part == "down_proj":
        return own if tuple(own.shape) == shape else None
    if own.shape[0] != 2 * shape[0]:
        return None
    return _rows(own, 0 if part == "gate_proj" else shape[0], shape)


def _rows(tensor: Tensor, start: int, shape: tuple[int, ...]) -> Tensor | None:
    """Rows from `start`; embeddings have more of them than the vocabulary, for alignment."""
    if tuple(tensor.shape) == shape:
        return tensor
    if tensor.dim() != len(shape) or tuple(tensor.shape[1:]) != shape[1:] or tensor.shape[0] < start + shape[0]:
        return None
    return tensor.narrow(0, start, shape[0])


def digest(tensor: Tensor) -> str:
    """The same as the trainer's digest of an equal tensor."""
    found = xxhash.xxh3_128(f"{tensor.dtype}|{tuple(tensor.shape)}|".encode())
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if flat.device.type == "cpu":
        found.update(flat.numpy().data)
        return found.hexdigest()
    buffer = torch.empty(min(len(flat), CHUNK_BYTES), dtype=torch.uint8, pin_memory=flat.device.type == "cuda")
    for start in range(0, len(flat), CHUNK_BYTES):
        piece = flat[start : start + CHUNK_BYTES]
        found.update(buffer[: len(piece)].copy_(piece).numpy().data)
    return found.hexdigest()
