"""Packed attention is exact: no token sees a neighbour, whatever the lengths and the window."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_core.errors import ConfigError, PluginError
from miles_core.testing.backend_oracle import example_batch
from miles_core.testing.tiny import make_tiny_model
from miles_core.trainer.packing import lay_out, scored_positions
from miles_fsdp.model import PackedScorer, load_model
from miles_fsdp.packing import pack, packed_attention
from miles_fsdp.probe import check_packing

CPU = torch.device("cpu")


class Layer(torch.nn.Module):
    """Stands for an attention module; packed attention only names it in errors."""


def naive(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None) -> torch.Tensor:
    """Attention of one sequence by its formula. f[heads, T, d] -> f[T, heads, d]"""
    repeat = q.shape[0] // k.shape[0]
    k, v = k.repeat_interleave(repeat, 0), v.repeat_interleave(repeat, 0)
    scores = q @ k.transpose(1, 2) * 0.3
    distance = torch.arange(q.shape[1])[:, None] - torch.arange(q.shape[1])[None]
    seen = (distance >= 0) & (distance < (window or q.shape[1]))
    return (scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v).transpose(0, 1)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=7), st.sampled_from([None, 1, 3]), st.integers(0, 99))
def test_packed_attention_equals_each_sequence_alone(lengths: list[int], window: int | None, seed: int) -> None:
    torch.manual_seed(seed)
    total = sum(lengths)
    q, k, v = (torch.randn(1, heads, total, 5, dtype=torch.float64) for heads in (4, 2, 2))
    found, _ = packed_attention(
        Layer(), q, k, v, None, 0.3, packed_layout=lay_out(np.array(lengths), CPU), sliding_window=window
    )
    start = 0
    for length in lengths:
        span = slice(start, start + length)
        expected = naive(q[0, :, span], k[0, :, span], v[0, :, span], window)
        assert torch.allclose(found[0, span], expected, rtol=0, atol=1e-12)
        start += length


@pytest.mark.parametrize("length", [40, 600])
def test_bfloat16_attention_is_near_float64_above_and_below_the_widening(length: int) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, heads, length, 8).bfloat16() for heads in (2, 1, 1))
    found, _ = packed_attention(Layer(), q, k, v, None, 0.3, packed_layout=lay_out(np.array([length]), CPU))
    assert found.dtype == torch.bfloat16
    expected = naive(q[0].double(), k[0].double(), v[0].double(), None)
    assert float((found[0].double() - expected).abs().max()) < 2e-2


@given(st.lists(st.integers(0, 200), min_size=1, max_size=40))
def test_every_token_has_one_cell_and_padding_is_bounded(lengths: list[int]) -> None:
    layout = lay_out(np.array(lengths), CPU)
    cells = torch.cat([tile.gather for tile in layout.tiles]) if layout.tiles else torch.zeros(0, dtype=torch.int64)
    assert torch.equal(cells[layout.restore], torch.arange(sum(lengths)))
    assert layout.restore.unique().numel() == sum(lengths)
    assert cells.numel() <= 1.25 * sum(lengths)


def test_attention_that_would_be_wrong_is_refused() -> None:
    x = torch.randn(1, 1, 3, 4)
    layout = lay_out(np.array([3]), CPU)
    for wrong in ({}, {"packed_layout": layout, "softcap": 30.0}, {"packed_layout": layout, "s_aux": x}):
        with pytest.raises(PluginError, match="does not fit"):
            packed_attention(Layer(), x, x, x, None, **wrong)


def test_positions_restart_and_first_tokens_are_never_scored() -> None:
    batch = example_batch(np.random.default_rng(0), (3, 1, 4))
    every = pack(batch.select([0, 1, 2]), CPU)
    assert every.position_ids.tolist() == [[0, 1, 2, 0, 0, 1, 2, 3]]
    assert every.scored.tolist() == scored_positions(batch).tolist()
    assert not {0, 3, 4} & set(every.scored.tolist())


def test_an_empty_share_still_makes_a_forward_pass() -> None:
    batch = example_batch(np.random.default_rng(0), (3,))
    empty = pack(batch.select([]), CPU)
    assert empty.token_ids.shape == (1, 1)
    assert empty.scored.numel() == 0


@pytest.mark.parametrize(
    ("architecture", "attention"),
    [("llama", "packed"), ("llama", "sdpa"), ("llama", "eager"), ("qwen2", "packed"), ("qwen3-moe", "packed")],
)
def test_no_token_sees_its_neighbour_in_real_models(tmp_path: Path, architecture: Any, attention: str) -> None:
    make_tiny_model(tmp_path, architecture=architecture, dtype="float64")
    loaded = load_model(str(tmp_path), attention, torch.float64)
    scorer = PackedScorer(loaded.module, chunk_tokens=1024)
    batch = example_batch(np.random.default_rng(1), (5, 1, 9, 2, 5))
    with torch.no_grad():
        packed, entropy = scorer(pack(batch, CPU))
        alone = [scorer(pack(batch.select([i]), CPU)) for i in range(5)]
    rounding = 1e-5 if attention == "eager" else 1e-12  # eager takes its softmax in float32
    assert torch.allclose(packed, torch.cat([a[0] for a in alone]), rtol=0, atol=rounding)
    assert torch.allclose(entropy, torch.cat([a[1] for a in alone]), rtol=0, atol=rounding)


def test_the_probe_refuses_a_model_whose_sequences_reach_each_other(tmp_path: Path) -> None:
    make_tiny_model(tmp_path)
    loaded = load_model(str(tmp_path), "packed", torch.float32)
    loaded.module.forward = PackedScorer(loaded.module, chunk_tokens=1024)
    check_packing(loaded.module, 270, CPU, torch.float32)

    inner = loaded.module.model.layers[0].self_attn.forward

    def smeared(hidden_states: torch.Tensor, **kwargs: Any) -> Any:
        return inner(hidden_states=hidden_states.cumsum(1), **kwargs)

    loaded.module.model.layers[0].self_attn.forward = smeared
    with pytest.raises(ConfigError, match="reach each other"):
        check_packing(loaded.module, 270, CPU, torch.float32)
