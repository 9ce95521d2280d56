"""Routers of Hugging Face MoE models: found, proved, listened to, and made to replay.

A router of transformers is a module ``hidden f[N, H] -> (logits f[N, E], weights f[N, K], experts i64[N, K])`` that
picks its experts with one ``topk`` over its E scores. Recording reads the third output. Replaying answers that one
call with the recorded experts and the router's own scores at them; everything else the architecture does (softmax
before or after, group limits, bias, normalisation, scaling) stays its own code, and so does the gradient through the
gates. Shared experts see no router and are untouched.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from miles_core.errors import ContractError, PluginError
from miles_core.types import UNRECORDED

_ROUTER = re.compile(r"(Top[kK]Router|TokenChoiceRouter)$")
_LAYER = re.compile(r"\.(\d+)\.")
_PROBE_TOKENS = 4


@dataclass(frozen=True, slots=True)
class Router:
    """One MoE layer's router."""

    name: str
    """Module path."""
    layer: int
    """Index of its decoder layer, dense ones counted."""
    module: nn.Module
    num_experts: int
    top_k: int


def find_routers(model: nn.Module) -> list[Router]:
    """The routers of all MoE layers in order of depth; empty for a dense model. Call before weights are sharded.

    Raises:
        PluginError: the model has experts whose routing is not of the form above.
    """
    routers = [_router(name, module) for name, module in model.named_modules() if _ROUTER.search(type(module).__name__)]
    blocks = [name for name, module in model.named_modules() if type(module).__name__.endswith("Experts")]
    routers.sort(key=lambda router: router.layer)
    depths = [router.layer for router in routers]
    if len(routers) != len(blocks) or len(set(depths)) != len(depths):
        raise _unsupported(model, f"{len(blocks)} groups of experts and {len(routers)} routers that can be recorded")
    if len({(router.num_experts, router.top_k) for router in routers}) > 1:
        raise _unsupported(model, "MoE layers that differ in their number of experts")
    for router in routers:
        if problem := _disobeys(router):
            raise _unsupported(model, f"{router.name}: {problem}")
    return routers


def _router(name: str, module: Any) -> Router:
    layer = _LAYER.search(name)
    experts, top_k = getattr(module, "num_experts", 0), getattr(module, "top_k", 0)
    return Router(name, int(layer[1]) if layer else -1, module, int(experts), int(top_k))


def _unsupported(model: nn.Module, found: str) -> PluginError:
    return PluginError(
        "the routes of this architecture can be neither recorded nor replayed",
        expected="one top-k router in each MoE layer, as Qwen3-MoE, Mixtral, DeepSeek-V3, GLM4-MoE and gpt-oss have",
        found=f"{type(model).__name__}: {found}",
        do="set rollout.routes: off",
    )


@torch.no_grad()
def _disobeys(router: Router) -> str | None:
    """Try the router on made-up tokens: what it does wrong, or None.

    Replaying the reverse of its own choice must reverse the weights, and replaying experts it would not choose must
    give them weights of their own: an architecture that masks scores before its top-k would weigh those 0.
    """
    weight = next(router.module.parameters())
    shape = (_PROBE_TOKENS, weight.shape[-1])
    hidden = torch.linspace(-1, 1, shape[0] * shape[1], dtype=torch.float32).view(shape)
    hidden = hidden.to(device=weight.device, dtype=weight.dtype)
    try:
        _, weights, own = router.module(hidden)
        reverse = own.flip(-1)
        with forced_experts(router, reverse) as seen:
            _, reversed_weights, used = router.module(hidden)
        others = torch.topk(torch.ones(shape[0], router.num_experts).scatter(1, own.cpu(), 0.0), router.top_k)[1]
        with forced_experts(router, others.to(weight.device)):
            _, other_weights, _ = router.module(hidden)
    except (TypeError, ValueError, RuntimeError, IndexError) as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    if len(seen) != 1 or not torch.equal(used, reverse):
        return f"{len(seen)} top-k calls over its experts"
    if not torch.allclose(reversed_weights.float(), weights.flip(-1).float(), atol=1e-5):
        return "its weights do not follow the experts"
    return "experts it does not choose itself weigh 0" if bool((other_weights == 0).all(-1).any()) else None


# --- recording --------------------------------------------------------------------------------------------------------


class RouteRecorder:
    """Collects what every router of a model chose, forward pass by forward pass."""

    def __init__(self, routers: list[Router]) -> None:
        self.layers, self.top_k, self.num_experts = len(routers), routers[0].top_k, routers[0].num_experts
        self._chosen: list[Tensor | None] = [None] * self.layers
        for index, router in enumerate(routers):
            router.module.register_forward_hook(partial(self._listen, index))

    def _listen(self, index: int, _module: nn.Module, _args: Any, output: Any) -> None:
        self._chosen[index] = output[2]

    def take(self) -> Tensor:
        """Experts of the latest forward pass: i64[N, L, K], in the routers' own order.

        Raises:
            PluginError: not every router ran.
        """
        chosen = [each for each in self._chosen if each is not None]
        self._chosen = [None] * self.layers
        if len(chosen) != self.layers:
            raise PluginError("a forward pass skipped MoE layers", expected=str(self.layers), found=str(len(chosen)))
        return torch.stack(chosen, dim=1)


# --- replaying --------------------------------------------------------------------------------------------------------


class _Forced(TorchFunctionMode):
    """Answers the router's top-k over its experts with given ones, and the scores it has for them."""

    def __init__(self, router: Router, choose: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._router, self._choose = router, choose
        self.own: list[Tensor] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func is not torch.topk and func is not Tensor.topk:
            return result
        scores = args[0]
        over_experts = scores.dim() == 2 and scores.shape[1] == self._router.num_experts
        if not over_experts or result[1].shape[-1] != self._router.top_k:
            return result  # of expert groups
        self.own.append(result[1])
        chosen = self._choose(result[1])
        return torch.return_types.topk((scores.gather(1, chosen), chosen))


@contextmanager
def forced_experts(router: Router, experts: Tensor) -> Iterator[list[Tensor]]:
    """Within the block `router` sends its tokens to `experts` i64[N, K]; yields the list of its own choices."""
    mode = _Forced(router, lambda own: experts)
    with mode:
        yield mode.own


class RouteReplay:
    """Makes a model's routers replay what `load` gives them, or just compare; stays for the model's life.

    Args:
        routers: From `find_routers`, of a model that is not sharded yet.
        replay: Force the recorded experts; False only compares.
    """

    def __init__(self, routers: list[Router], *, replay: bool) -> None:
        self.layers, self.top_k, self.num_experts = len(routers), routers[0].top_k, routers[0].num_experts
        self._replay = replay
        self._routes: Tensor | None = None
        self._differs: Tensor | None = None
        for index, router in enumerate(routers):
            router.module.forward = partial(self._forward, index, router, router.module.forward)

    def load(self, routes: Tensor | None) -> None:
        """Set the experts of the next forward pass. They stay until the next call: backward recomputes checkpointed
        layers with them.

        Args:
            routes: Integer [N, L, K], `UNRECORDED` where the router takes its own; None lets all take their own.

        Raises:
            ContractError: not the model's layers and experts.
        """
        if routes is not None and not self._possible(routes):
            raise ContractError(
                "routes contract: the recorded routes are not of this model",
                expected=f"[tokens, {self.layers}, {self.top_k}] of experts below {self.num_experts}, or of "
                f"{UNRECORDED} for all of a token in a layer",
                found=f"{list(routes.shape)}, {int(routes.min())} to {int(routes.max())}",
                do="serve and train the same checkpoint",
            )
        self._routes = None if routes is None else routes.long()

    def _possible(self, routes: Tensor) -> bool:
        """Asked before the gather: on a GPU an index that is no expert would end the process."""
        if routes.shape[1:] != (self.layers, self.top_k):
            return False
        if not routes.numel():
            return True
        lacking = routes == UNRECORDED
        whole = bool((lacking.any(-1) == lacking.all(-1)).all())
        return whole and bool(routes.min() >= UNRECORDED) and bool(routes.max() < self.num_experts)

    @contextmanager
    def counting(self, device: torch.device | None = None) -> Iterator[Tensor]:
        """Within the block, forward passes add to the yielded i64[2]: recorded (token, layer) pairs whose own choice,
        and whose used experts, are another set."""
        counts = self._differs = torch.zeros(2, dtype=torch.int64, device=device)
        try:
            yield counts
        finally:
            self._differs = None

    def _forward(self, index: int, router: Router, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._routes is None:
            return forward(*args, **kwargs)
        given = self._routes[:, index]
        recorded = given[:, :1] != UNRECORDED
        mode = _Forced(router, lambda own: torch.where(recorded, given, own) if self._replay else own)
        with mode:
            output = forward(*args, **kwargs)
        if len(mode.own) != 1 or output[2].shape != given.shape:
            raise PluginError(
                "a router did not take the experts it was given",
                expected=f"one choice of {list(given.shape)}",
                found=f"{len(mode.own)} choices of {list(output[2].shape)}",
                where=router.name,
                do="report the architecture; set rollout.routes: off",
            )
        if self._differs is not None:
            wanted = given.sort(-1).values
            for place, chosen in enumerate((mode.own[0], output[2])):
                differs = (chosen.sort(-1).values != wanted).any(-1, keepdim=True) & recorded
                self._differs[place] += differs.sum()
        return output
