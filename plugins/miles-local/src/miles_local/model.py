"""The model and its key-values: everything that touches tensors. All calls come from one thread, between which
nothing runs.

Not here: which requests run (scheduler) and who waits for their tokens (engine).
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from miles_core.errors import EngineError
from miles_core.model_config import read_model_config
from miles_core.numerics.patch import make_invariant
from miles_core.numerics.rotary import steady_tokens
from miles_core.routing.codec import Routes, dtype_for
from miles_core.routing.hf import RouteRecorder, find_routers
from miles_local import attention, true_on_policy, weights
from miles_local.graphs import DecodeGraphs
from miles_local.kv import SlotStore
from miles_local.sampling import sample
from miles_local.scheduler import CopySlot, LoadSlot, Plan, SaveSlot

SUPPORTED_LAYERS = {"full_attention", "sliding_attention"}


@dataclass(frozen=True, slots=True)
class Sampled:
    """What a step drew, in the order of the plan's draws."""

    token_ids: list[int]
    logprobs: list[float]
    routes: Routes | None = None
    """[N, L, K] experts of the step's tokens, or None where none are recorded."""


class LocalModel:
    """A causal language model served from slots."""

    def __init__(self, model: nn.Module, device: torch.device, *, exact: bool = False) -> None:
        config: Any = model.config
        self.vocab_size = int(config.vocab_size)
        self.max_tokens: int | None = steady_tokens(config.get_text_config().to_dict())
        """Beyond it, keys in the cache would have been rotated otherwise than a new pass rotates them."""
        self.views: Mapping[str, Tensor] = weights.checkpoint_views(model)
        self._model = model
        self._device = device
        self._exact = exact
        self._store = SlotStore()
        self._graphs = DecodeGraphs(self._run, self._store, device) if exact and device.type == "cuda" else None
        self._recorder: RouteRecorder | None = None

    @classmethod
    def load(cls, model_path: str, *, device: str, dtype: str, exact: bool = False) -> LocalModel:
        """Load a checkpoint folder.

        Args:
            exact: Compute with the batch-invariant operators (true-on-policy).

        Raises:
            EngineError: the folder is absent or its architecture cannot be served from slots.
            ConfigError: config.json describes no known model; or `exact`, and no profile covers it.
        """
        folder = Path(model_path)
        if not (folder / "config.json").is_file():
            raise EngineError(
                "the model folder cannot be loaded",
                expected="a Hugging Face folder with config.json and safetensors",
                found="no config.json" if folder.is_dir() else "no such folder",
                where=model_path,
                do="give the path of a downloaded or exported checkpoint",
            )
        from transformers import AutoModelForCausalLM
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        ALL_ATTENTION_FUNCTIONS.register(attention.NAME, attention.slot_attention)
        ALL_ATTENTION_FUNCTIONS.register(true_on_policy.NAME, true_on_policy.invariant_attention)
        with _no_progress_bars():
            model = AutoModelForCausalLM.from_pretrained(
                folder,
                config=read_model_config(folder),
                dtype="auto" if dtype == "checkpoint" else getattr(torch, dtype),
                attn_implementation=true_on_policy.NAME if exact else attention.NAME,
                local_files_only=True,
            )
        _check_architecture(model, model_path)
        place = torch.device(device)
        if exact:
            make_invariant(model, place, model.dtype)
        return cls(model.to(place).eval(), place, exact=exact)

    def record_routes(self) -> None:
        """Have every step return its tokens' experts.

        Raises:
            EngineError: the model is dense.
            PluginError: its routers cannot be recorded.
        """
        routers = find_routers(self._model)
        if not routers:
            raise EngineError(
                "a dense model has no routes to record",
                expected="a model with MoE layers",
                found=type(self._model).__name__,
                do="set rollout.routes: off",
            )
        self._recorder = RouteRecorder(routers)

    @property
    def kv_bytes(self) -> int:
        return self._store.num_bytes

    @torch.inference_mode()
    def step(self, plan: Plan) -> Sampled:
        """Make the plan's copies, run its tokens through the model, and draw."""
        self._store.reserve(plan.slots, plan.capacity)
        for move in plan.moves:
            match move:
                case CopySlot(source, target, tokens):
                    self._store.copy(source, target, tokens)
                case SaveSlot(slot, tokens, entry):
                    entry.saved = self._store.save(slot, tokens)
                case LoadSlot(entry, slot, tokens):
                    assert entry.saved is not None
                    self._store.load(entry.saved, slot, tokens)
        logits = self._forward(plan)
        routes = None
        if self._recorder is not None:
            routes = self._recorder.take().to(torch.int32).cpu().numpy()
            routes = routes.astype(dtype_for(self._recorder.num_experts))
        if not plan.draws:
            return Sampled([], [], routes)
        token_ids, logprobs = sample(logits, plan.draws)
        if self._exact:
            logprobs = true_on_policy.logprobs(logits, token_ids, plan.draws)
        return Sampled(token_ids, logprobs, routes)

    def _forward(self, plan: Plan) -> Tensor:
        """Logits [S, V] after the plan's sampled tokens (one row of no meaning when it samples none)."""
        if self._graphs is not None and (replayed := self._graphs.logits(plan)) is not None:
            return replayed
        positions = torch.tensor(plan.positions, device=self._device)
        slots = torch.tensor(plan.token_slots, device=self._device)
        step = attention.StepAttention(self._store, slots * self._store.capacity + positions, plan.decode, plan.prefill)
        keep = torch.tensor(plan.sampled or (0,), device=self._device)
        return self._run(torch.tensor(plan.token_ids, device=self._device), positions, step, keep)

    def _run(
        self, token_ids: Tensor, positions: Tensor, step: attention.StepAttention, keep: Tensor | int = 0
    ) -> Tensor:
        """Logits after the tokens that `keep` indexes; 0 keeps all."""
        output = self._model(
            input_ids=token_ids[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=keep,
            slots=step,
        )
        logits: Tensor = output.logits[0]
        return logits

    def forget(self) -> None:
        """Drop all key-values."""
        self._store.clear()

    @torch.no_grad()
    def replace(self, tensors: Mapping[str, Tensor], *, keep_kv: bool = False) -> None:
        """Serve with other weights; key-values of the old ones are dropped unless the caller accounts for them."""
        weights.replace(self.views, tensors)
        if not keep_kv:
            self.forget()

    @torch.no_grad()
    def scramble(self, seed: int) -> None:
        weights.scramble(self.views, seed)
        self.forget()

    def digests(self, names: Collection[str] | None = None) -> dict[str, str]:
        return weights.digests({name: view for name, view in self.views.items() if names is None or name in names})


def _check_architecture(model: Any, model_path: str) -> None:
    config = model.config
    layers = set(getattr(config, "layer_types", None) or ())
    problem = None
    if not model._supports_attention_backend:
        problem = "it does not take a custom attention function"
    elif layers - SUPPORTED_LAYERS:
        problem = f"it has layers of type {', '.join(sorted(layers - SUPPORTED_LAYERS))}"
    elif getattr(config, "num_kv_shared_layers", None):
        problem = "its layers share key-values"
    elif "logits_to_keep" not in inspect.signature(model.forward).parameters:
        problem = "its forward has no `logits_to_keep`"
    if problem:
        raise EngineError(
            "engine `local` cannot serve this architecture",
            expected="a causal language model whose layers all attend, fully or in a sliding window",
            found=f"{type(model).__name__}: {problem}",
            where=model_path,
            do="use another engine for this model",
        )


class _no_progress_bars:
    """Loading prints no bars: the run has its own display."""

    def __enter__(self) -> None:
        from transformers.utils import logging

        self._were_on = logging.is_progress_bar_enabled()
        logging.disable_progress_bar()

    def __exit__(self, *_: object) -> None:
        from transformers.utils import logging

        if self._were_on:
            logging.enable_progress_bar()
