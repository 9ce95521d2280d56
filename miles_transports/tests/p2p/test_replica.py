"""Re-sharding and fusing at the source, for any order of arrival and any number of ranks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from miles_core.errors import TransportError
from miles_core.types import NamedTensor
from miles_transports.p2p.replica import FUSED, HUGGING_FACE, Parameter, Replica, restore

LAYER = "model.layers.0."


def model() -> dict[str, torch.Tensor]:
    """Weights and biases of one layer with grouped queries."""
    random = torch.Generator().manual_seed(0)
    shapes = {
        "model.embed_tokens.weight": (12, 8),
        f"{LAYER}self_attn.q_proj.weight": (16, 8),
        f"{LAYER}self_attn.q_proj.bias": (16,),
        f"{LAYER}self_attn.k_proj.weight": (8, 8),
        f"{LAYER}self_attn.k_proj.bias": (8,),
        f"{LAYER}self_attn.v_proj.weight": (8, 8),
        f"{LAYER}self_attn.v_proj.bias": (8,),
        f"{LAYER}self_attn.o_proj.weight": (8, 16),
        f"{LAYER}self_attn.o_proj.bias": (8,),
        f"{LAYER}mlp.gate_proj.weight": (12, 8),
        f"{LAYER}mlp.up_proj.weight": (12, 8),
        f"{LAYER}mlp.down_proj.weight": (8, 12),
        f"{LAYER}input_layernorm.weight": (8,),
        f"{LAYER}mlp.experts.3": (2, 2),
    }
    return {name: torch.randn(shape, generator=random) for name, shape in shapes.items()}


def named(tensors: dict[str, torch.Tensor], order: list[str]) -> list[NamedTensor]:
    return [NamedTensor(name=name, tensor=tensors[name]) for name in order]


def sent(order: list[str], size: int, cut: int) -> list[list[Parameter]]:
    """What each rank gets when the tensors come in two buckets."""
    tensors = model()
    ranks = []
    for rank in range(size):
        replica = Replica(FUSED, rank, size)
        first, second = named(tensors, order[:cut]), named(tensors, order[cut:])
        ranks.append([*replica.load(first), *replica.load(second)])
        replica.finish()
    return ranks


@given(st.permutations(list(model())), st.sampled_from([1, 2, 4]), st.integers(0, 14))
def test_what_every_rank_was_sent_restores_the_model_whatever_the_order(order: list[str], size: int, cut: int) -> None:
    restored = {tensor.name: tensor.tensor for tensor in restore(FUSED, sent(order, size, cut))}
    expected = model()
    assert restored.keys() == expected.keys()
    assert all(torch.equal(restored[name], tensor) for name, tensor in expected.items())


def test_each_rank_gets_its_slice_of_queries_then_keys_then_values() -> None:
    tensors = model()
    for rank, parameters in enumerate(sent(list(tensors), 2, 0)):
        fused = next(p for p in parameters if p.name == f"{LAYER}self_attn.qkv_proj.weight")
        parts = [tensors[f"{LAYER}self_attn.{part}_proj.weight"].chunk(2)[rank] for part in "qkv"]
        assert torch.equal(fused.tensor, torch.cat(parts))
        assert fused.rows == (8, 4, 4)
        rows = next(p for p in parameters if p.name == f"{LAYER}self_attn.o_proj.weight")
        assert torch.equal(rows.tensor, tensors[f"{LAYER}self_attn.o_proj.weight"].chunk(2, dim=1)[rank])


def test_a_fused_parameter_waits_for_its_last_part_and_forgets_no_value() -> None:
    tensors = model()
    replica = Replica(FUSED, 0, 1)
    q, k, v = (f"{LAYER}self_attn.{part}_proj.weight" for part in "qkv")
    live = tensors[q].clone()
    assert list(replica.load([NamedTensor(name=q, tensor=live)])) == []
    live.zero_()  # the trainer's next step may overwrite what it exported
    assert list(replica.load(named(tensors, [k]))) == []
    (fused,) = replica.load(named(tensors, [v]))
    assert torch.equal(fused.tensor, torch.cat([tensors[q], tensors[k], tensors[v]]))


def test_a_version_that_ends_with_a_part_missing_is_an_error_that_names_it() -> None:
    replica = Replica(FUSED, 0, 1)
    list(replica.load(named(model(), [f"{LAYER}mlp.gate_proj.weight"])))
    with pytest.raises(TransportError, match=r"gate_up_proj\.weight has only gate_proj"):
        replica.finish()


def test_a_part_that_comes_twice_is_refused() -> None:
    replica = Replica(FUSED, 0, 1)
    part = named(model(), [f"{LAYER}mlp.gate_proj.weight"])
    list(replica.load(part))
    with pytest.raises(TransportError, match="came twice"):
        list(replica.load(part))


def test_a_dimension_that_does_not_divide_is_refused() -> None:
    with pytest.raises(TransportError, match="cannot be divided"):
        list(Replica(FUSED, 0, 5).load(named(model(), [f"{LAYER}mlp.down_proj.weight"])))


def test_the_plain_layout_passes_everything_through() -> None:
    tensors = model()
    out = list(Replica(HUGGING_FACE, 0, 1).load(named(tensors, list(tensors))))
    assert [parameter.name for parameter in out] == list(tensors)
    assert all(parameter.tensor is tensors[parameter.name] for parameter in out)
