"""The modules that Megatron's layer specs are filled with, beside Megatron's own.

Megatron's versions of these want TransformerEngine or one CUDA library; these need torch alone, run on any device, and
know packed rows. Everything else (linear layers, embeddings, dispatch, routers, blocks, schedules) is Megatron's.

Letters: n tokens of this rank, h heads, d width of a head, H hidden width, F width of an expert, E experts of a rank.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from miles_core.trainer.packing import attend
from miles_megatron.exchange import heads_to_tokens, tokens_to_heads
from miles_megatron.packed import Packed


class Norm(nn.Module):
    """RMSNorm, whose weight's gradient Megatron sums over the ranks that share a sequence."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = nn.Parameter(torch.empty(hidden_size, dtype=config.params_dtype, device=device))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self._eps = eps

    def forward(self, hidden: Tensor) -> Tensor:
        return F.rms_norm(hidden, self.weight.shape, self.weight, self._eps)


class PackedAttention(MegatronModule):  # type: ignore[misc]
    """Causal attention within each sequence of a packed row; over context-parallel ranks each takes some heads.

    A rank holds n tokens of all its heads. Before attention it gives tokens for heads (all-to-all), so that it holds
    the whole row of 1 / cp of them; afterwards the exchange is undone. The row may be cut anywhere.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        softmax_scale: float | None = None,
        pg_collection: Any = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        self._scale = softmax_scale
        self._context = pg_collection.cp

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        packed_seq_params: Packed,
        **_: Any,
    ) -> Tensor:
        """f[n, 1, h, d] or f[n, h, d] each  ->  f[n, 1, h * d of the values]"""
        q, k, v = (x[:, 0] if x.dim() == 4 else x for x in (query, key, value))
        if self._context.size() > 1:
            heads = math.lcm(k.shape[1], self._context.size())
            k, v = (x.repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
            q, k, v = (tokens_to_heads(x, self._context) for x in (q, k, v))
        assert packed_seq_params.layout is not None
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        out = attend(q, k, v, packed_seq_params.layout, scale=self._scale)[0]
        if self._context.size() > 1:
            out = heads_to_tokens(out, self._context)
        return out.reshape(out.shape[0], 1, -1)


class Rotation(nn.Module):
    """Rotation angles of each packed token, in place of Megatron's tables from position 0 on.

    Megatron asks for a length and then for the angles of that length; here the "length" is the micro-batch itself.
    """

    def __init__(self, inverse_frequencies: Tensor, scale: float, *, latent: bool) -> None:
        """
        Args:
            inverse_frequencies: f32[rotated / 2]
            scale: Of the rotated vectors; handed on for latent attention, elsewhere a field of the config.
        """
        super().__init__()
        self.register_buffer("inverse_frequencies", inverse_frequencies, persistent=False)
        self._scale = scale
        self._latent = latent

    def get_rotary_seq_len(
        self, context: Any, block: Any, hidden: Any, config: Any, packed_seq_params: Packed
    ) -> Packed:
        return packed_seq_params

    def forward(self, packed: Packed, packed_seq: bool = False, cp_group: Any = None) -> Any:
        """f32[n, 1, 1, rotated], or (f32[n, 1, rotated], scale) for latent attention."""
        assert packed.positions is not None
        angles = packed.positions.float()[:, None] * self.inverse_frequencies  # type: ignore[operator]
        both = torch.cat([angles, angles], -1)
        return (both[:, None], self._scale) if self._latent else both[:, None, None]


class Experts(MegatronModule):  # type: ignore[misc]
    """The routed experts of one layer on this rank: gated MLPs as two grouped matrix products."""

    def __init__(self, num_local_experts: int, config: TransformerConfig, pg_collection: Any = None) -> None:
        super().__init__(config=config)
        self._group = pg_collection.expt_tp
        self.expert_group = pg_collection.ep
        width = config.moe_ffn_hidden_size // self._group.size()
        self.gate_up = self._parameter(num_local_experts, 2, width, config.hidden_size, axis=2)
        """[E, 2, F / etp, H]"""
        self.down = self._parameter(num_local_experts, config.hidden_size, width, axis=2)
        """[E, H, F / etp]"""

    def _parameter(self, *shape: int, axis: int) -> nn.Parameter:
        config = self.config
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        parameter = nn.Parameter(torch.empty(shape, dtype=config.params_dtype, device=device))
        # Sharded over other ranks than the rest: not summed with it, and counted on each rank in the gradient's norm.
        parameter.allreduce = False  # type: ignore[attr-defined]
        set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=axis, stride=1)
        return parameter

    def forward(self, tokens: Tensor, tokens_per_expert: Tensor, probabilities: Tensor) -> tuple[Tensor, None]:
        """f[T, H] sorted by expert, i[E], f[T]  ->  f[T, H] weighted by `probabilities`, partial over the group."""
        ends = tokens_per_expert.to(tokens.device).cumsum(0).to(torch.int32)
        gate_up = self.gate_up.flatten(1, 2).transpose(1, 2)
        hidden = _grouped(tokens, gate_up, ends)
        gate, up = hidden.chunk(2, -1)
        weighted = F.silu(gate) * up * probabilities[:, None].to(tokens.dtype)
        return _grouped(weighted, self.down.transpose(1, 2), ends), None


def _grouped(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """f[T, a] in groups that end at i32[E], f[E, a, b]  ->  f[T, b]: each group times its matrix."""
    even = all(width * rows.element_size() % 16 == 0 for width in matrices.shape[1:])
    if not even or (rows.is_cuda and rows.dtype != torch.bfloat16):  # torch groups nothing else
        sizes = torch.diff(ends, prepend=ends.new_zeros(1)).tolist()
        return torch.cat([part @ matrix for part, matrix in zip(torch.split(rows, sizes), matrices, strict=True)])
    product: Tensor = F.grouped_mm(rows, matrices, offs=ends)
    return product


class SameEverywhere(nn.Module):
    """A linear layer that every tensor-parallel rank holds whole, such as the down-projections of latent attention."""

    def __init__(self, config: TransformerConfig, inputs: int, outputs: int) -> None:
        super().__init__()
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, dtype=config.params_dtype, device=device))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor) -> tuple[Tensor, None]:
        return F.linear(hidden, self.weight), None
