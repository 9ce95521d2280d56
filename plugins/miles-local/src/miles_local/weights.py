"""The served weights under their Hugging Face names, and the staging area of the next version.

Names are those `save_pretrained` writes: a tied tensor comes once, under its source's name
(``model.embed_tokens.weight`` for a tied ``lm_head.weight``); persistent buffers take part; tensors that transformers
fuses in memory (the experts of a mixture) come as the checkpoint has them. Every name maps to a view of the live
parameter, so that copying into the views is the whole update.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from miles_core.errors import EngineError
from miles_core.types import NamedTensor, WeightBucket, WeightManifest
from miles_core.weights.digests import digest_tensors, manifest, name_some
from miles_core.weights.intake import Form, Intake


def checkpoint_views(model: nn.Module) -> dict[str, Tensor]:
    """Views of all parameters and persistent buffers, by checkpoint name.

    Raises:
        EngineError: transformers stores a tensor in a form that is no view of the checkpoint's.
    """
    from transformers.core_model_loading import revert_weight_conversion

    live: dict[str, Tensor] = {}
    seen: set[int] = set()
    tied = set(getattr(model, "all_tied_weights_keys", None) or {})
    # Sources before the names tied to them, so that the source's name wins.
    for name, tensor in sorted(model.state_dict(keep_vars=True).items(), key=lambda item: item[0] in tied):
        if id(tensor) not in seen:
            seen.add(id(tensor))
            live[name] = tensor.detach()
    views: dict[str, Tensor] = {}
    known: dict[tuple[str, torch.Size], list[_Slice]] = {}
    for name, tensor in live.items():
        wires = revert_weight_conversion(model, {name: tensor})
        form = re.sub(r"\d+", "#", name), tensor.shape  # all layers are alike, and one shows where experts lie
        for number, (wire_name, wire) in enumerate(wires.items()):
            shares = wire.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
            if shares or wire.numel() == 0:
                views[wire_name] = wire
                continue
            if form not in known:
                known[form] = _locate(model, name, tensor.shape)
            views[wire_name] = _view(model, name, tensor, known[form][number], wire_name, wire)
    # Together the tensors must give the same names as one by one, else a checkpoint tensor is made of several live
    # ones.
    together = revert_weight_conversion(model, {name: tensor.to("meta") for name, tensor in live.items()})
    if views.keys() != together.keys():
        raise _not_in_place(
            model, "one live tensor for each of a checkpoint's", name_some(sorted(views.keys() ^ together))
        )
    return views


_Slice = list[tuple[int, int]]
"""First index and length along each axis."""


def _locate(model: nn.Module, name: str, shape: torch.Size) -> list[_Slice]:
    """What transformers copies out of a tensor, in its order: found by converting positions instead of values.

    One conversion whatever the number of experts: each copies the whole tensor, and a model has thousands of them.
    """
    from transformers.core_model_loading import revert_weight_conversion

    positions = torch.arange(shape.numel()).view(shape)
    slices = []
    for found in revert_weight_conversion(model, {name: positions}).values():
        flat = found.reshape(-1)
        ends = [torch.unravel_index(flat[at], shape) for at in (0, -1)]
        slices.append([(int(first), int(last) - int(first) + 1) for first, last in zip(*ends, strict=True)])
    return slices


def _view(model: nn.Module, name: str, tensor: Tensor, part: _Slice, wire_name: str, wire: Tensor) -> Tensor:
    """The slice, once it is seen to be what transformers copied out."""
    view = tensor
    for axis, (first, length) in enumerate(part):
        view = view.narrow(axis, first, max(length, 0))
    view = view.squeeze() if view.dim() != wire.dim() and view.squeeze().shape == wire.shape else view
    if view.shape != wire.shape or not torch.equal(view, wire):
        raise _not_in_place(model, f"a slice of {name} for {wire_name}", "a rearranged copy")
    return view


def _not_in_place(model: nn.Module, expected: str, found: str) -> EngineError:
    return EngineError(
        "this architecture's weights cannot be updated in place",
        expected=expected,
        found=found,
        where=type(model).__name__,
        do="use another engine for this model",
    )


def replace(views: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    """Overwrite every view; the caller has checked that names, shapes and dtypes agree."""
    for name, view in views.items():
        view.copy_(tensors[name])


def scramble(views: Mapping[str, Tensor], seed: int) -> None:
    """Overwrite every tensor with noise that depends on its name and the seed."""
    for number, name in enumerate(sorted(views)):
        view = views[name]
        generator = torch.Generator().manual_seed((seed * 1_000_003 + number) % 2**63)
        if view.is_floating_point():
            noise = torch.empty(view.shape, dtype=torch.float32).normal_(std=0.05, generator=generator)
        else:
            noise = torch.randint(0, 2, view.shape, generator=generator)
        view.copy_(noise)


def digests(views: Mapping[str, Tensor]) -> dict[str, str]:
    return digest_tensors([NamedTensor(name=name, tensor=view) for name, view in views.items()])


class Staging:
    """Collects the buckets of one version beside the serving weights."""

    def __init__(self, version: int, views: Mapping[str, Tensor]) -> None:
        self.version = version
        self.tensors: dict[str, Tensor] = {}
        self._views = views
        forms = {name: Form(view.dtype, tuple(view.shape)) for name, view in views.items()}
        self._intake = Intake(version, forms, "engine local, staging")

    def take(self, buckets: Iterable[WeightBucket]) -> WeightManifest:
        """Take all buckets and account for them.

        Raises:
            EngineError: the buckets are not exactly this version of exactly these weights.
        """
        for bucket in buckets:
            self._intake.admit(bucket)
            for named in bucket.tensors:
                self.tensors[named.name] = named.tensor.detach().to(self._views[named.name].device)
        self._intake.finish()
        return manifest(self.version, (NamedTensor(name=name, tensor=t) for name, t in self.tensors.items()))
