"""What the engine read and how it scaled, told by a third party: the checkpoint itself, in float32 on the CPU.

On the first step both sides hold the checkpoint of the run, so plain transformers can say which of them agrees with it.
When the engine does not, its log-probs are compared with what the checkpoint gives under other prompts: whichever
reproduces them is what the engine read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from miles_core.config.model_folder import ModelFolderError, read_model_folder
from miles_core.doctor.evidence import Evidence, Float64
from miles_core.tokenizer import ChatTokenizer
from miles_core.tracking.rollouts import RolloutRow

MAX_PARAMETERS = 2_000_000_000
"""Larger checkpoints are not loaded into a terminal command."""
MAX_ROWS = 4
ROUNDING = 0.05
"""Nats: the checkpoint in float32 against an engine in bfloat16 stays below; so a hypothesis must, too."""
GAIN = 0.3
"""And it must leave at most this part of the difference that the row's own prompt leaves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rescored:
    """Mean |difference| in nats to the checkpoint's log-probs, over the first turns of a few rows."""

    engine: float
    trainer: float
    by_prompt: Mapping[str, float]
    """The engine's, had it read the prompt in this form."""

    @property
    def read(self) -> str | None:
        """The form of the prompt that the engine read instead, if one explains its log-probs."""
        form, gap = min(self.by_prompt.items(), key=lambda pair: pair[1], default=("", float("inf")))
        return form if gap <= min(ROUNDING, GAIN * self.engine) else None


def rescore(evidence: Evidence) -> Rescored | None:
    """Score the first step's rows with the run's checkpoint.

    Returns:
        None when that step, the checkpoint or its tokenizer is gone, or the checkpoint is too large.
    """
    tokenizer = evidence.record.tokenizer
    model = _load(evidence.setting("model.path"))
    if tokenizer is None or model is None or not evidence.steps or evidence.steps[0].step != 1:
        return None
    turns = [turn for row in evidence.steps[0].rows if (turn := _first_turn(row)) is not None][:MAX_ROWS]
    if not turns:
        return None
    engine, trainer = [], []
    forms: dict[str, list[Float64]] = {}
    for row, start, end in turns:
        prompt = row.token_ids[:start].tolist()
        answer, temperature = row.token_ids[start:end].tolist(), row.temperature or 1.0
        sampled = row.logprobs[start:end].astype(np.float64)
        own = _logprobs(model, prompt, answer, temperature)
        engine.append(sampled - own)
        trainer.append((row.old_logprobs[start:end] - own)[np.isfinite(row.old_logprobs[start:end])])
        for form, other in _other_prompts(tokenizer, prompt).items():
            forms.setdefault(form, []).append(sampled - _logprobs(model, other, answer, temperature))
    complete = {form: _mean(found) for form, found in forms.items() if len(found) == len(turns)}
    return Rescored(engine=_mean(engine), trainer=_mean(trainer), by_prompt=complete)


def _first_turn(row: RolloutRow) -> tuple[RolloutRow, int, int] | None:
    """Row, first and last + 1 position of its first sampled stretch."""
    sampled = row.versions >= 0
    if not sampled.any() or not sampled[0:1].size or sampled[0]:
        return None
    start = int(np.argmax(sampled))
    end = start + int(np.argmin(sampled[start:])) if not sampled[start:].all() else len(sampled)
    return row, start, end


def _other_prompts(tokenizer: ChatTokenizer, prompt: Sequence[int]) -> dict[str, list[int]]:
    """Forms in which engines are known to read a prompt instead; only those that differ from it."""
    text = tokenizer.decode(prompt)
    bos = tokenizer.bos_id
    forms = {
        "decoded and encoded again": tokenizer.encode(text),
        "decoded without special tokens and encoded again": tokenizer.encode(
            tokenizer.decode(prompt, skip_special=True)
        ),
        "with special tokens spelled as text": tokenizer.encode(text, allow_special=False),
        "without its first token": list(prompt[1:]),
        "without surrounding white space": tokenizer.encode(text.strip()),
        **({"with a second BOS in front": [bos, *prompt]} if bos is not None else {}),
    }
    return {form: ids for form, ids in forms.items() if ids and ids != list(prompt)}


def _load(path: Any) -> Any:
    if not isinstance(path, str):
        return None
    try:
        if read_model_folder(Path(path)).parameters > MAX_PARAMETERS:
            return None
    except ModelFolderError:
        return None
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, local_files_only=True).eval()


def _logprobs(model: Any, prompt: Sequence[int], answer: Sequence[int], temperature: float) -> Float64:
    """f64[len(answer)]"""
    import torch

    ids = torch.tensor([[*prompt, *answer]])
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].double() / temperature
    found: Float64 = logits.log_softmax(-1).gather(1, torch.tensor(answer)[:, None])[:, 0].numpy()
    return found


def _mean(differences: Sequence[Float64]) -> float:
    every = np.concatenate(differences) if differences else np.zeros(0)
    return float(np.abs(every).mean()) if every.size else float("nan")
