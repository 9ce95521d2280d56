"""The operators on a GPU: right against float64, and blind to how many rows there are, where, and beside what."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from miles_core.numerics import ops
from miles_core.numerics.spans import Span, Spans

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
PIECES = (slice(0, 1), slice(5, 6), slice(3, 60), slice(63, 129), slice(0, 300))


@pytest.fixture
def draw() -> torch.Generator:
    return torch.Generator("cuda").manual_seed(5)


def random(draw: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=draw, device="cuda").bfloat16()


def relative_error(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize(("inner", "outer"), [(1024, 3072), (3072, 1024), (2560, 151936), (64, 275)])
def test_a_row_of_a_matrix_product_depends_on_itself_alone(inner: int, outer: int, draw: torch.Generator) -> None:
    x, weight = random(draw, 700, inner), random(draw, outer, inner)
    whole = ops.linear(x, weight)
    assert relative_error(whole[:64], x[:64].double() @ weight.double().t()) < 4e-3
    for piece in PIECES:
        assert torch.equal(ops.linear(x[piece], weight), whole[piece])


def test_norms_silu_and_logsumexp_are_per_row(draw: torch.Generator) -> None:
    x, up, weight = random(draw, 300, 1024), random(draw, 300, 1024), random(draw, 1024)
    norm, silu = ops.rms_norm(x, weight, 1e-6), ops.silu_mul(x, up)
    logits = 4 * random(draw, 300, 20000).float()
    total = ops.logsumexp(logits)
    wide = x.double()
    plain = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    assert relative_error(norm, plain) < 6e-3
    assert relative_error(silu, F.silu(wide) * up.double()) < 4e-3
    assert relative_error(total, logits.double().logsumexp(-1)) < 1e-6
    for piece in PIECES:
        assert torch.equal(ops.rms_norm(x[piece], weight, 1e-6), norm[piece])
        assert torch.equal(ops.silu_mul(x[piece], up[piece]), silu[piece])
        assert torch.equal(ops.logsumexp(logits[piece]), total[piece])


@pytest.mark.parametrize(("heads", "kv_heads"), [(16, 8), (32, 8)])
def test_decoding_and_prefilling_in_pieces_give_the_same_bits(heads: int, kv_heads: int, draw: torch.Generator) -> None:
    lengths = (1500, 3, 64, 777)
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    total = sum(lengths)
    q, k, v = random(draw, total, heads, 128), random(draw, total, kv_heads, 128), random(draw, total, kv_heads, 128)
    packed = [Span(start, n, 0, start) for start, n in zip(starts, lengths, strict=True)]
    whole = ops.attention(q, k, v, Spans(packed), 0.1)
    for span in packed:
        own = slice(span.kv_row, span.kv_row + span.count)
        parts = (x[own].double().transpose(0, 1)[None] for x in (q, k, v))
        plain = F.scaled_dot_product_attention(*parts, is_causal=True, scale=0.1, enable_gqa=True)[0].transpose(0, 1)
        assert relative_error(whole[own], plain) < 6e-3
        pieces = Spans([Span(at, min(100, span.count - at), at, span.kv_row) for at in range(0, span.count, 100)])
        assert torch.equal(ops.attention(q[own], k, v, pieces, 0.1), whole[own])
    places = [span.kv_row + at for span in packed for at in range(0, span.count, 41)]
    decode = [Span(0, 1, at, span.kv_row) for span in packed for at in range(0, span.count, 41)]
    decode = [Span(i, 1, s.start, s.kv_row) for i, s in enumerate(decode)]
    assert torch.equal(ops.attention(q[places], k, v, Spans(decode), 0.1), whole[places])
