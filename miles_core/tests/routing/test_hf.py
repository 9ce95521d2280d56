"""Routers of transformers: what is recorded is what they chose, and replaying it keeps their own arithmetic."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from miles_core.errors import ContractError, PluginError
from miles_core.routing.hf import RouteRecorder, RouteReplay, find_routers
from miles_core.testing.tiny_moe import CONFIGS, EXPERTS, HEADS, LATENT, MOE_LAYERS, SIZES, make_model
from miles_core.types import UNRECORDED

IDS = torch.arange(3, 23)[None]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def logits_of(model: Any) -> Tensor:
    out: Tensor = model(input_ids=IDS, use_cache=False).logits[0]
    return out


def gates(model: Any, index: int) -> list[Tensor]:
    """Weights a router gives, in the order of forward passes from now on."""
    found: list[Tensor] = []
    find_routers(model)[index].module.register_forward_hook(lambda _m, _a, out: found.append(out[1]))
    return found


@pytest.mark.parametrize("name", CONFIGS)
def test_the_recorder_returns_what_each_layer_used(name: str) -> None:
    model = make_model(name)
    used: list[Tensor] = []
    for module in model.modules():
        if type(module).__name__.endswith("Experts"):
            module.register_forward_pre_hook(lambda _m, args: used.append(args[1]))
    recorder = RouteRecorder(find_routers(model))
    logits_of(model)
    routes = recorder.take()
    assert routes.shape == (20, MOE_LAYERS.get(name, 3), 2)
    assert torch.equal(routes, torch.stack(used, dim=1))
    with pytest.raises(PluginError, match="skipped"):
        recorder.take()


@pytest.mark.parametrize("name", CONFIGS)
def test_replaying_its_own_choice_changes_nothing(name: str) -> None:
    model = make_model(name)
    plain = logits_of(model)
    recorder = RouteRecorder(find_routers(model))
    logits_of(model)
    routes = recorder.take()
    replay = RouteReplay(find_routers(model), replay=True)
    replay.load(routes.to(torch.int16))
    assert torch.equal(logits_of(model), plain)


@pytest.mark.parametrize("name", CONFIGS)
def test_replay_forces_experts_and_weighs_them_with_the_routers_own_scores(name: str) -> None:
    model = make_model(name)
    routers = find_routers(model)
    layers = len(routers)
    routes = torch.stack([torch.randperm(EXPERTS)[:2] for _ in range(20 * layers)]).view(20, layers, 2)
    recorder = RouteRecorder(routers)
    hidden: list[Tensor] = []
    routers[-1].module.register_forward_pre_hook(lambda _m, args: hidden.append(args[0]))
    given = gates(model, -1)
    RouteReplay(routers, replay=True).load(routes)
    logits_of(model)
    assert torch.equal(recorder.take(), routes)
    expected = reference_gates(name, routers[-1].module, hidden[-1].reshape(20, -1), routes[:, -1])
    assert torch.allclose(given[-1].float(), expected, atol=1e-5)


def reference_gates(name: str, router: Any, hidden: Tensor, chosen: Tensor) -> Tensor:
    """Each architecture's published gating at given experts, written out."""
    scores = hidden.double() @ router.weight.double().T
    if name == "gpt-oss":
        return (scores + router.bias.double()).gather(1, chosen).softmax(-1).float()
    weights = scores.sigmoid() if name in ("deepseek-v3", "glm4-moe") else scores.softmax(-1)
    picked = weights.gather(1, chosen)
    return (picked / picked.sum(-1, keepdim=True) * getattr(router, "routed_scaling_factor", 1.0)).float()


@pytest.mark.parametrize("name", CONFIGS)
def test_gradient_flows_through_the_replayed_gates(name: str) -> None:
    """Against finite differences: the loss with fixed experts is smooth in the router's weight."""
    model = make_model(name).double()
    model.set_experts_implementation("eager")
    routers = find_routers(model)
    routes = torch.stack([torch.randperm(EXPERTS)[:2] for _ in range(20 * len(routers))]).view(20, len(routers), 2)
    RouteReplay(routers, replay=True).load(routes)
    weight: nn.Parameter = routers[-1].module.weight  # type: ignore[assignment]

    def loss() -> Tensor:
        return logits_of(model).log_softmax(-1)[:, 7].sum()

    loss().backward()
    assert weight.grad is not None
    at = divmod(int(weight.grad.abs().argmax()), weight.shape[1])
    assert abs(float(weight.grad[at])) > 1e-4
    with torch.no_grad():
        results = []
        for step in (1e-3, -2e-3):  # some routers compute their softmax in float32
            weight[at] += step
            results.append(float(loss()))
    assert (results[0] - results[1]) / 2e-3 == pytest.approx(float(weight.grad[at]), rel=1e-2)


def test_unrecorded_rows_take_their_own_choice_and_differences_are_counted() -> None:
    model = make_model("qwen3-moe")
    recorder = RouteRecorder(find_routers(model))
    logits_of(model)
    own = recorder.take()
    routes = own.flip(-1).clone()  # the same sets in another order
    routes[:5] = (own[:5] + 1) % EXPERTS
    routes[5:8] = UNRECORDED
    differs = int((own[:5].sort(-1).values != routes[:5].sort(-1).values).any(-1).sum())
    compare, force = make_model("qwen3-moe"), make_model("qwen3-moe")
    for model, replay in ((compare, False), (force, True)):
        control = RouteReplay(find_routers(model), replay=replay)
        recorder = RouteRecorder(find_routers(model))
        control.load(routes)
        with control.counting() as counts:
            logits_of(model)
        logits_of(model)  # outside of the block nothing is counted
        used = recorder.take()
        if replay:
            assert int(counts[1]) == 0
            assert torch.equal(used[:5], routes[:5])
            assert int(counts[0]) >= 5  # deeper layers see other hidden states too
        else:
            assert counts.tolist() == [differs, differs]
            assert torch.equal(used, own)


def test_nothing_loaded_is_the_plain_model() -> None:
    model = make_model("mixtral")
    plain = logits_of(model)
    control = RouteReplay(find_routers(model), replay=True)
    control.load(torch.zeros(20, 3, 2, dtype=torch.int16))
    assert not torch.equal(logits_of(model), plain)
    control.load(None)
    assert torch.equal(logits_of(model), plain)


@pytest.mark.parametrize(
    "routes",
    [torch.zeros(20, 2, 2), torch.zeros(20, 3, 3), torch.full((20, 3, 2), EXPERTS), torch.full((20, 3, 2), -2)],
)
def test_routes_of_another_model_are_refused(routes: Tensor) -> None:
    control = RouteReplay(find_routers(make_model("mixtral")), replay=True)
    with pytest.raises(ContractError, match="not of this model"):
        control.load(routes.to(torch.int16))


def test_routes_of_another_number_of_tokens_are_refused() -> None:
    model = make_model("mixtral")
    RouteReplay(find_routers(model), replay=True).load(torch.zeros(7, 3, 2, dtype=torch.int16))
    with pytest.raises((PluginError, RuntimeError)):
        logits_of(model)


def test_a_dense_model_has_no_routers() -> None:
    assert find_routers(transformers.AutoModelForCausalLM.from_config(transformers.Qwen3Config(**HEADS))) == []


@pytest.mark.parametrize(
    "config",
    [
        # Group limits mask the scores themselves: an expert of another group would weigh 0.
        lambda: transformers.DeepseekV2Config(
            **{**SIZES, "num_key_value_heads": 4},
            **LATENT,
            n_routed_experts=8,
            num_experts_per_tok=2,
            topk_method="group_limited_greedy",
            n_group=2,
            topk_group=1,
            moe_intermediate_size=16,
            first_k_dense_replace=1,
        ),
        # The router is part of the block.
        lambda: transformers.Llama4TextConfig(**HEADS, num_local_experts=4, num_experts_per_tok=1),
    ],
)
def test_architectures_that_cannot_replay_are_refused(config: Any) -> None:
    model = transformers.AutoModelForCausalLM.from_config(config())
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    with pytest.raises(PluginError, match="neither recorded nor replayed"):
        find_routers(model)


@pytest.mark.parametrize("half", [[3, UNRECORDED], [UNRECORDED, 3]])
def test_half_a_record_is_refused_before_anything_gathers_by_it(half: list[int]) -> None:
    control = RouteReplay(find_routers(make_model("qwen3-moe")), replay=True)
    routes = torch.tensor([0, 1]).expand(20, control.layers, 2).clone()
    control.load(routes)
    routes[4, 1] = torch.tensor(half)
    with pytest.raises(ContractError, match="for all of a token in a layer"):
        control.load(routes)
