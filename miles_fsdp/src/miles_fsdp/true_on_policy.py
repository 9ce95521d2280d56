"""True-on-policy in the trainer: the operators of `miles_core.numerics` over packed sequences.

Values come from the operators that engine `local` computes with; gradients from the ordinary packed attention.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import AttentionInterface

from miles_core.errors import PluginError
from miles_core.numerics import ops
from miles_core.numerics.patch import make_invariant
from miles_core.trainer.packing import Layout, attend
from miles_fsdp.model import LoadedModel

ATTENTION = "miles_packed_invariant"
"""Name of `invariant_attention` in the registry of transformers."""


def apply(loaded: LoadedModel, device: torch.device, dtype: torch.dtype) -> None:
    """Make a freshly loaded model compute batch-invariantly; before it is moved or sharded.

    Raises:
        ConfigError: no profile covers this model, device and dtype.
    """
    make_invariant(loaded.module, device, dtype)
    loaded.module.set_attn_implementation(ATTENTION)


def invariant_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    packed_layout: Layout | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention function as transformers calls it: query ``[1, Q, N, D]``, key and value ``[1, H, N, D]``.

    Returns:
        ``[1, N, Q, D]`` and no attention weights.
    """
    if packed_layout is None or attention_mask is not None:
        raise PluginError("attention over packed sequences needs their layout and no mask", where=type(module).__name__)
    layout = packed_layout

    def gradient(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in (query, keys, values))
        return attend(q, k, v, layout, scale=scaling)[0]

    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return ops.attention(q, k, v, layout.spans, scaling, gradient=gradient)[None], None


AttentionInterface.register(ATTENTION, invariant_attention)
