"""The CPU operators: right against float64, and independent of everything but the row, bit for bit."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from miles_core.numerics import cpu, ops
from miles_core.numerics.spans import Span, Spans

SHAPES = [(32, 32), (32, 16), (64, 32), (16, 275), (1024, 151), (96, 333)]
"""Inner and outer widths: the tiny profile's, and odd ones beside wide ones."""


@pytest.fixture
def rng() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def shifted(x: Tensor, elements: int) -> Tensor:
    """The same values at another alignment in memory."""
    buffer = x.new_zeros(x.numel() + elements)
    view = buffer[elements:].view(x.shape)
    return view.copy_(x)


def test_exp_is_accurate_exact_at_its_ends_and_blind_to_place(rng: torch.Generator) -> None:
    x = -90 * torch.rand(5000, generator=rng)
    found = cpu.exp(x)
    wanted = x.double().exp()
    assert ((found.double() - wanted).abs() <= 2.0 * 2**-23 * wanted)[x > cpu.EXP_FLOOR].all()
    ends = torch.tensor([0.0, -0.0, float("-inf"), -87.1])
    assert cpu.exp(ends).tolist() == [1.0, 1.0, 0.0, 0.0]
    assert math.isnan(float(cpu.exp(torch.tensor([float("nan")]))))
    for first, count in ((0, 1), (1, 7), (3, 33), (17, 100)):
        assert torch.equal(cpu.exp(x[first : first + count]), found[first : first + count])


def test_log_and_sqrt_are_accurate(rng: torch.Generator) -> None:
    x = torch.rand(5000, generator=rng) * torch.logspace(-6, 6, 5000)
    torch.testing.assert_close(cpu.log(x.double()), x.double().log(), rtol=1e-14, atol=1e-14)
    assert cpu.log(torch.ones(2)).tolist() == [0.0, 0.0]
    assert np.array_equal(cpu.sqrt(x).numpy(), np.sqrt(x.numpy()))


def test_a_librarys_silu_does_depend_on_place_and_ours_does_not(rng: torch.Generator) -> None:
    x = 10 * torch.randn(4000, generator=rng)
    ones = torch.ones_like(x)
    pieces = [slice(first, first + count) for first in range(0, 300, 3) for count in (1, 7, 33)]
    whole = cpu.silu_mul(x, ones)
    assert all(torch.equal(cpu.silu_mul(x[p], ones[p]), whole[p]) for p in pieces)
    torch.testing.assert_close(whole.double(), F.silu(x.double()), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("width", [1, 2, 3, 7, 64, 100, 1000])
def test_tree_sum_is_the_sum_in_an_order_of_the_width_alone(width: int, rng: torch.Generator) -> None:
    x = torch.randn(40, width, generator=rng)
    found = cpu.tree_sum(x)
    torch.testing.assert_close(found.double(), x.double().sum(-1), rtol=1e-5, atol=1e-5)
    assert all(torch.equal(cpu.tree_sum(x[i : i + 1]), found[i : i + 1]) for i in range(40))
    assert torch.equal(cpu.tree_sum(shifted(x, 3)), found)
    assert torch.equal(cpu.tree_sum(x.t().contiguous().t()), found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("inner", "outer"), SHAPES)
def test_a_row_of_a_matrix_product_depends_on_itself_alone(
    inner: int, outer: int, dtype: torch.dtype, rng: torch.Generator
) -> None:
    weight = (torch.randn(outer, inner, generator=rng) / inner**0.5).to(dtype)
    x = torch.randn(2 * cpu.ROWS + 5, inner, generator=rng).to(dtype)
    whole = cpu.linear(x, weight)
    wanted = x.double() @ weight.double().t()
    torch.testing.assert_close(whole.double(), wanted, rtol=2e-2 if dtype == torch.bfloat16 else 1e-4, atol=1e-2)
    for row in range(len(x)):  # at every place of a tile, among other neighbours, at other alignments
        assert torch.equal(cpu.linear(x[row : row + 1], weight)[0], whole[row])
        place = row % cpu.ROWS
        moved = torch.randn(cpu.ROWS, inner, generator=rng).to(dtype)
        moved[place] = x[7]
        assert torch.equal(cpu.linear(moved, weight)[place], whole[7])
    for elements in (1, 3, 8):
        assert torch.equal(cpu.linear(shifted(x, elements), shifted(weight, elements)), whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_is_that_of_the_architecture(dtype: torch.dtype, rng: torch.Generator) -> None:
    x, weight = torch.randn(33, 48, generator=rng).to(dtype), torch.rand(48, generator=rng).to(dtype)
    found, inverse = cpu.rms_norm(x, weight, 1e-6)
    wide = x.double()
    r = 1 / (wide.square().mean(-1) + 1e-6).sqrt()
    torch.testing.assert_close(inverse.double(), r, rtol=1e-6, atol=0)
    torch.testing.assert_close(found.double(), wide * r[:, None] * weight.double(), rtol=2e-2, atol=1e-2)
    assert torch.equal(cpu.rms_norm(x[9:10], weight, 1e-6)[0][0], found[9])


def test_logsumexp_of_a_row(rng: torch.Generator) -> None:
    x = 20 * torch.randn(17, 275, generator=rng)
    x[3, :200] = float("-inf")
    found = ops.logsumexp(x)
    torch.testing.assert_close(found.double(), x.double().logsumexp(-1), rtol=1e-6, atol=1e-6)
    assert all(torch.equal(ops.logsumexp(x[i : i + 1]), found[i : i + 1]) for i in range(17))
    assert (x.amax(-1) <= found).all(), "a log-prob above 0"


LENGTHS = (5, 1, 17, 130, 64)


@pytest.fixture(params=[(4, 2, 16), (2, 1, 16), (3, 3, 8)], ids=str)
def qkv(request: pytest.FixtureRequest, rng: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    heads, kv_heads, dims = request.param
    total = sum(LENGTHS)
    q = torch.randn(total, heads, dims, generator=rng)
    return q, torch.randn(total, kv_heads, dims, generator=rng), torch.randn(total, kv_heads, dims, generator=rng)


def packed() -> Spans:
    starts = np.cumsum(LENGTHS) - LENGTHS
    return Spans([Span(int(start), n, 0, int(start)) for start, n in zip(starts, LENGTHS, strict=True)])


def test_attention_is_causal_softmax_attention_within_each_sequence(qkv: tuple[Tensor, Tensor, Tensor]) -> None:
    found = ops.attention(*qkv, packed(), 0.3)
    for span in packed().spans:
        own = slice(span.first_token, span.first_token + span.count)
        q, k, v = (x[own].double().transpose(0, 1)[None] for x in qkv)
        wanted = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3, enable_gqa=True)
        torch.testing.assert_close(found[own].double(), wanted[0].transpose(0, 1), rtol=1e-5, atol=1e-5)


def test_decoding_prefilling_in_pieces_and_packing_give_the_same_bits(qkv: tuple[Tensor, Tensor, Tensor]) -> None:
    q, k, v = qkv
    whole = ops.attention(q, k, v, packed(), 0.3)
    for span in packed().spans:
        row, n = span.kv_row, span.count
        for position in range(0, n, 9):
            one = ops.attention(q[row + position][None], k, v, Spans([Span(0, 1, position, row)]), 0.3)
            assert torch.equal(one[0], whole[row + position])
        for piece in (3, 50):
            parts = [Span(at, min(piece, n - at), at, row) for at in range(0, n, piece)]
            assert torch.equal(ops.attention(q[row : row + n], k, v, Spans(parts), 0.3), whole[row : row + n])
    # Decoding all sequences together: one query each, of very different lengths.
    last = [span.first_token + span.count - 1 for span in packed().spans]
    spans = Spans([Span(i, 1, span.count - 1, span.kv_row) for i, span in enumerate(packed().spans)])
    assert torch.equal(ops.attention(q[last], k, v, spans, 0.3), whole[last])


def test_memory_beyond_a_sequence_does_not_reach_it(qkv: tuple[Tensor, Tensor, Tensor]) -> None:
    q, k, v = qkv
    whole = ops.attention(q, k, v, packed(), 0.3)
    k, v = k.clone(), v.clone()
    k[5:], v[5:] = float("nan"), float("nan")  # everything but the first sequence
    assert torch.equal(ops.attention(q[:5], k, v, Spans([Span(0, 5, 0, 0)]), 0.3), whole[:5])
