"""Log-prob and entropy against their definitions in float64, whatever the chunks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from miles_fsdp.logprobs import score, score_hidden

K, H, V = 11, 6, 23


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    logits = (3 * torch.randn(K, V, dtype=torch.float64)).to(dtype)
    return logits, torch.randint(0, V, (K,)), torch.rand(K, dtype=torch.float64) + 0.5


def definition(logits: Tensor, targets: Tensor, inverse_temperature: Tensor) -> tuple[Tensor, Tensor]:
    log_p = torch.log_softmax(logits.double() * inverse_temperature[:, None], dim=-1)
    return log_p.gather(-1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def test_values_are_those_of_the_definition() -> None:
    logits, targets, inverse = inputs()
    for found, expected in zip(score(logits, targets, inverse), definition(logits, targets, inverse), strict=True):
        assert torch.allclose(found, expected, rtol=0, atol=1e-12)


def test_gradients_of_both_outputs_are_those_of_autograd() -> None:
    logits, targets, inverse = inputs()
    logits.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: score(x, targets, inverse), (logits,))
    assert torch.autograd.gradcheck(lambda x: score(x, targets, inverse, entropy_grad=False)[0], (logits,))


def test_bfloat16_logits_are_normalised_in_float32() -> None:
    logits, targets, inverse = inputs(torch.bfloat16)
    logprobs, entropy = score(logits, targets, inverse)
    assert logprobs.dtype == entropy.dtype == torch.float32
    expected = definition(logits, targets, inverse)
    # bfloat16 would be off by 1e-2 here.
    assert torch.allclose(logprobs.double(), expected[0], rtol=0, atol=1e-5)
    assert torch.allclose(entropy.double(), expected[1], rtol=0, atol=1e-5)


def test_the_temperature_is_not_rounded_to_the_logits_dtype() -> None:
    logits, targets, _ = inputs(torch.bfloat16)
    inverse = torch.full((K,), 1 / 0.7, dtype=torch.float64)
    found, _ = score(logits, targets, inverse)
    assert torch.allclose(found.double(), definition(logits, targets, inverse)[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("value", [1e4, -1e4, float("-inf")])
def test_extreme_logits_stay_finite(value: float) -> None:
    logits, targets, inverse = inputs()
    logits[:, 0] = value
    logits.requires_grad_()
    targets = targets.clamp_min(1)
    logprobs, entropy = score(logits, targets, inverse)
    (logprobs.sum() + entropy.sum()).backward()
    assert torch.isfinite(logprobs).all()
    assert torch.isfinite(entropy).all()
    assert torch.isfinite(logits.grad).all()


@pytest.mark.parametrize("chunk", [1, 4, 10, 11, 100])
def test_chunks_change_neither_values_nor_gradients(chunk: int) -> None:
    _, targets, inverse = inputs()
    hidden = torch.randn(K, H, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(V, H, dtype=torch.float64, requires_grad=True)
    factors = torch.randn(2, K, dtype=torch.float64)
    results = []
    for way in ("whole", "chunked"):
        if way == "whole":
            logprobs, entropy = definition(hidden @ weight.T, targets, inverse)
        else:
            logprobs, entropy = score_hidden(lambda x: x @ weight.T, hidden, targets, inverse, chunk_tokens=chunk)
        grads = torch.autograd.grad((factors[0] * logprobs + factors[1] * entropy).sum(), (hidden, weight))
        results.append((logprobs.detach(), entropy.detach(), *grads))
    for whole, chunked in zip(*results, strict=True):
        assert torch.allclose(whole, chunked, rtol=0, atol=1e-10)


def test_logits_of_more_than_a_chunk_never_exist() -> None:
    _, targets, inverse = inputs()
    weight = torch.randn(V, H, dtype=torch.float64, requires_grad=True)
    alive: list[int] = []
    kept: list[torch.Size] = []

    def head(hidden: Tensor) -> Tensor:
        alive.append(hidden.shape[0])
        return hidden @ weight.T

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden = torch.randn(K, H, dtype=torch.float64, requires_grad=True)
        logprobs, _ = score_hidden(head, hidden, targets, inverse, chunk_tokens=4)
    assert max(alive) == 4
    assert not [shape for shape in kept if V in shape and shape[0] != V], "logits were kept for backward"
    logprobs.sum().backward()
