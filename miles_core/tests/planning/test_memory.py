"""Memory of a rank against published figures and against counting by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from miles_core.planning.memory import Layout, Work, fsdp, megatron
from miles_core.planning.sizes import Sizes, count, read_sizes
from miles_core.testing.tiny import make_tiny_model

GLM = Sizes(
    dense=(230_000_000,) * 78,
    experts=(9_270_000_000,) * 78,
    embedding=952_000_000,
    head=952_000_000,
    other=36_000_000,
    hidden=6144,
    vocabulary=154_880,
    query_width=16_384,
    key_width=16_384,
    ffn_width=9 * 2048,
    ffn_copies=3 * 8 * 6144,
)
"""A mixture of 744 billion parameters, most of them in routed experts."""

CASE = Layout(gpus=32, tp=2, pp=4, cp=4, ep=8, sequence_parallel=True, distributed_optimizer=True)
WORK = Work(micro_batch_tokens=8192, recompute=True)


def test_the_published_case_needs_about_279_gb_of_optimizer_state_a_rank() -> None:
    assert GLM.total == pytest.approx(744e9, rel=0.01)
    assert CASE.dp == 1
    assert CASE.expert_dp == 1
    # The even share of 32 ranks is 279 GB; stages of 20 and 18 layers put a little more on the fullest.
    assert GLM.total * 12 / 32 == pytest.approx(279e9, rel=0.01)
    assert megatron(GLM, CASE, WORK).of("optimizer state") == pytest.approx(279e9, rel=0.05)


def test_expert_parallelism_takes_no_gpus_of_its_own() -> None:
    with pytest.raises(ValueError, match="does not divide"):
        Layout(gpus=32, tp=2, pp=4, cp=8)
    assert replace(CASE, ep=4).expert_dp == 2


def test_every_parameter_is_held_once_by_the_ranks_of_one_replica() -> None:
    """Weights summed over the stages of a TP1 EP1 layout are the model's, tied or not."""
    layout = Layout(gpus=4, pp=4)
    for sizes in (GLM, replace(GLM, head=0)):
        stages = [layout.layers_of(stage, sizes.layers) for stage in range(4)]
        assert sorted(i for stage in stages for i in stage) == list(range(78))
    assert megatron(GLM, Layout(gpus=1), WORK).of("weights") == 2 * GLM.total


@pytest.mark.parametrize("distributed", [True, False])
def test_the_distributed_optimizer_divides_state_by_replicas_and_nothing_else(distributed: bool) -> None:
    found = megatron(GLM, Layout(gpus=16, ep=8, distributed_optimizer=distributed), WORK)
    experts = sum(GLM.experts) / 8
    dense = GLM.total - sum(GLM.experts)
    assert found.of("weights") == pytest.approx(2 * (dense + experts))
    owned = dense / 16 + experts / 2 if distributed else dense + experts
    assert found.of("optimizer state") == pytest.approx(12 * owned)


def test_recomputation_keeps_one_input_per_layer() -> None:
    kept = megatron(GLM, CASE, WORK).of("activations")
    assert kept < 0.2 * megatron(GLM, CASE, replace(WORK, recompute=False)).of("activations")


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "qwen3-moe"])
def test_sizes_from_config_alone_are_those_of_the_stored_tensors(tmp_path: Path, architecture: str) -> None:
    folder = make_tiny_model(tmp_path, architecture=architecture, tie=False)  # type: ignore[arg-type]
    stored = read_sizes(folder)
    for file in folder.glob("*.safetensors"):
        file.unlink()
    assert read_sizes(folder) == stored
    assert (sum(stored.experts) > 0) == (architecture == "qwen3-moe")


def test_hub_names_of_single_experts_are_counted_as_experts() -> None:
    shapes = {
        "model.embed_tokens.weight": (10, 4),
        "model.layers.0.mlp.experts.0.up_proj.weight": (8, 4),
        "model.layers.0.mlp.experts.1.up_proj.weight": (8, 4),
        "model.layers.0.mlp.shared_experts.up_proj.weight": (8, 4),
        "model.layers.0.self_attn.q_norm.weight": (4,),
        "model.norm.weight": (4,),
        "lm_head.weight": (10, 4),
    }
    config = {"hidden_size": 4, "num_attention_heads": 1, "intermediate_size": 8, "vocab_size": 10}
    sizes = count(shapes, config)
    assert (sizes.dense, sizes.experts, sizes.embedding, sizes.head, sizes.other) == ((36,), (64,), 40, 40, 4)
    assert sizes.normalises_heads


def test_layers_behind_the_last_one_and_buffers_are_not_trained() -> None:
    shapes = {
        "model.embed_tokens.weight": (10, 4),
        "model.layers.0.mlp.up_proj.weight": (8, 4),
        "model.layers.0.mlp.gate.weight": (2, 4),
        "model.layers.0.mlp.gate.e_score_correction_bias": (2,),
        "model.layers.1.mlp.up_proj.weight": (8, 4),
        "model.layers.1.eh_proj.weight": (4, 8),
    }
    config = {"hidden_size": 4, "num_attention_heads": 1, "intermediate_size": 8, "num_hidden_layers": 1}
    sizes = count(shapes, config)
    assert (sizes.dense, sizes.whole) == ((40,), (8,))


def test_every_context_rank_packs_rows_of_its_own_tokens() -> None:
    one = megatron(GLM, Layout(gpus=4), WORK)
    assert megatron(GLM, Layout(gpus=4, cp=4), WORK).of("activations") == one.of("activations")


def test_interleaving_keeps_more_micro_batches() -> None:
    """The factor 1 + (p - 1) / (p v) of Korthikanti et al."""
    plain, interleaved = (
        megatron(GLM, Layout(gpus=3, pp=3, vpp=vpp), replace(WORK, recompute=False)) for vpp in (1, 2)
    )
    assert interleaved.of("activations") == pytest.approx(plain.of("activations") * (1 + 2 / 6))
    held = [layer for stage in range(3) for layer in Layout(gpus=3, pp=3, vpp=2).layers_of(stage, 78)]
    assert sorted(held) == list(range(78))


def test_replicas_of_fsdp_hold_their_own_shards() -> None:
    assert fsdp(GLM, 8, WORK, replicas=4).of("optimizer") == pytest.approx(fsdp(GLM, 2, WORK).of("optimizer"))


def test_fsdp_shares_state_and_gathers_one_layer() -> None:
    one, eight = fsdp(GLM, 1, WORK), fsdp(GLM, 8, WORK)
    assert eight.of("optimizer state") == pytest.approx(one.of("optimizer state") / 8, rel=1e-6)
    assert eight.of("gathered") == 2 * (9_500_000_000 + 952_000_000 * 2 + 36_000_000)
    assert one.of("gathered") == 0
