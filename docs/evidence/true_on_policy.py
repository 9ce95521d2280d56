"""True-on-policy at the Qwen3-0.6B shape: is the difference exactly 0, and what does it cost?

Random weights, bfloat16. Engine `local` samples; backend `fsdp` scores the same tokens, packed otherwise. With the
switch: many tokens, several ways to pack, then optimizer steps with a weight update each. Without: what the switch is
for. `--small` takes the tiny profile, to try the script on a CPU.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from miles_core.kinds.backend import BackendContext, LossSettings
from miles_core.kinds.engine import EngineContext, GenerateRequest
from miles_core.numerics.profiles import PROFILES
from miles_core.testing.backend_oracle import ADAMW
from miles_core.testing.tiny import write_tiny_tokenizer
from miles_core.types import SamplingParams, TrainBatch, WeightBucket
from miles_fsdp.backend import FsdpBackend
from miles_fsdp.options import FsdpOptions
from miles_local.engine import LocalEngine
from miles_local.options import LocalOptions

Row = tuple[list[int], list[int], list[float]]
"""Prompt, sampled tokens, their log-probs."""
OPTIMIZER = replace(ADAMW, lr=1e-5, total_steps=100, clip_grad_norm=1.0)
LOSS = LossSettings(load="miles_core.algorithms.losses:ppo_clip", options={"low": 0.2, "high": 0.28, "dual_clip": None})
started = time.perf_counter()


def say(text: str) -> None:
    print(f"[{time.perf_counter() - started:6.1f} s] {text}", flush=True)


def make_model(folder: Path, profile_name: str, vocab: int, device: str) -> None:
    """A random model of a registered shape; drawn on the device, since that is where it is quick."""
    profile = next(profile for profile in PROFILES if profile.name == profile_name)
    folder.mkdir()
    write_tiny_tokenizer(folder)
    config = transformers.Qwen3Config(
        vocab_size=vocab,
        hidden_size=profile.hidden_size,
        intermediate_size=profile.intermediate_size,
        num_hidden_layers=profile.num_hidden_layers,
        num_attention_heads=profile.num_attention_heads,
        num_key_value_heads=profile.num_key_value_heads,
        head_dim=profile.head_dim,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        initializer_range=profile.hidden_size**-0.5,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.to("cpu").save_pretrained(folder)


async def start_engine(folder: Path, device: str, *, exact: bool, rows: int) -> LocalEngine:
    context = EngineContext(model_path=str(folder), context_length=None, device=device, seed=0, true_on_policy=exact)
    engine = LocalEngine(LocalOptions(max_batch_size=rows), context)
    await engine.start()
    return engine


def start_backend(folder: Path, device: str, *, exact: bool, micro_batch_tokens: int) -> FsdpBackend:
    context = BackendContext(
        model_path=str(folder),
        device=device,
        rank=0,
        world_size=1,
        seed=0,
        optimizer=OPTIMIZER,
        loss=LOSS,
        reference=False,
        true_on_policy=exact,
    )
    return FsdpBackend(FsdpOptions(micro_batch_tokens=micro_batch_tokens), context)


async def generate(engine: LocalEngine, rows: int, tokens: int, *, first: int = 0) -> list[Row]:
    """Sample rows of equal length after prompts of unequal length."""

    async def one(number: int) -> Row:
        prompt = [3 + (number * 37 + at * 11) % 250 for at in range(8 + 13 * (number % 16))]
        request = GenerateRequest(
            request_id=str(number),
            session_id=str(number),
            token_ids=tuple(prompt),
            params=SamplingParams(max_tokens=tokens, seed=first + number),
        )
        ids: list[int] = []
        logprobs: list[float] = []
        async for chunk in engine.generate(request):
            ids += chunk.token_ids
            logprobs += chunk.logprobs
        return prompt, ids, logprobs

    return list(await asyncio.gather(*(one(number) for number in range(rows))))


def as_batch(rows: Sequence[Row], rng: np.random.Generator) -> TrainBatch:
    lengths = np.array([len(prompt) + len(ids) for prompt, ids, _ in rows], dtype=np.int64)
    mask = np.concatenate([np.arange(len(p) + len(ids)) >= len(p) for p, ids, _ in rows])
    sampled = np.concatenate([np.array(logprobs, dtype=np.float32) for _, _, logprobs in rows])
    logprobs = np.zeros(mask.shape, dtype=np.float32)
    logprobs[mask] = sampled
    return TrainBatch(
        lengths=lengths,
        group_ids=np.arange(len(rows), dtype=np.int64),
        rewards=np.zeros(len(rows), dtype=np.float32),
        temperatures=np.ones(len(rows), dtype=np.float32),
        token_ids=np.concatenate([np.array([*p, *ids], dtype=np.int32) for p, ids, _ in rows]),
        loss_mask=mask,
        rollout_logprobs=logprobs,
        versions=np.where(mask, 0, -1).astype(np.int64),
        advantages=np.where(mask, np.repeat(rng.standard_normal(len(rows)), lengths), 0.0).astype(np.float32),
        token_weights=(mask / mask.sum()).astype(np.float32),
        correction_weights=np.ones(mask.shape, dtype=np.float32),
    )


def compare(name: str, batch: TrainBatch, scored: np.ndarray[Any, Any]) -> None:
    mask = batch.loss_mask
    d = np.abs(scored[mask].astype(np.float64) - batch.rollout_logprobs[mask].astype(np.float64))
    equal = f"equal {np.mean(d == 0):.4%} of {d.size:,} tokens"
    say(f"  {name}: |d log-prob| max {d.max():.6g}, mean {d.mean():.6g}, {equal}")


def clocked(work: Any, device: str) -> tuple[Any, float]:
    if device != "cpu":
        torch.cuda.synchronize()
    began = time.perf_counter()
    found = work()
    if device != "cpu":
        torch.cuda.synchronize()
    return found, time.perf_counter() - began


class Handover:
    """Receiver of buckets in the same process."""

    def __init__(self) -> None:
        self.buckets: list[WeightBucket] = []

    def receive(self, version: int) -> Iterator[WeightBucket]:
        yield from self.buckets

    def close(self) -> None: ...


async def sample(folder: Path, device: str, *, exact: bool, rows: int, tokens: int, at_once: int) -> list[Row]:
    """Generate with or without the switch, at most `at_once` rows together."""
    engine = await start_engine(folder, device, exact=exact, rows=at_once)
    await generate(engine, min(rows, at_once), min(24, tokens))  # compiles kernels
    began = time.perf_counter()
    found = await generate(engine, rows, tokens, first=1000)
    took = time.perf_counter() - began
    sampled = sum(len(ids) for _, ids, _ in found)
    say(f"engine, true_on_policy {exact}, {at_once} rows at once: {sampled:,} tokens, {sampled / took:,.0f} tokens/s")
    await engine.close()
    return found


def score(folder: Path, device: str, batch: TrainBatch, *, exact: bool, micro: int) -> None:
    """Score and train on the batch with or without the switch: difference to what the engine recorded, and speed."""
    backend = start_backend(folder, device, exact=exact, micro_batch_tokens=micro)
    backend.log_probs(batch.select([0]))  # compiles kernels
    scored, seconds = clocked(lambda: backend.log_probs(batch), device)
    part = replace(batch, old_logprobs=scored).select(range(min(8, batch.num_sequences)))
    backend.train_step(part)
    _, training = clocked(lambda: backend.train_step(part), device)
    rates = f"scores {batch.num_tokens / seconds:,.0f}, trains {part.num_tokens / training:,.0f} tokens/s"
    say(f"trainer, true_on_policy {exact}, micro-batches of {micro:,} tokens: {rates}")
    compare("to the engine", batch, scored)
    backend.close()
    if device != "cpu":
        torch.cuda.empty_cache()


async def updates(folder: Path, device: str, *, steps: int, rows: int, tokens: int) -> None:
    """Sample, compare, train, publish, again; with the switch."""
    engine = await start_engine(folder, device, exact=True, rows=rows)
    backend = start_backend(folder, device, exact=True, micro_batch_tokens=4096)
    handover = Handover()
    await engine.open_receiver(lambda: handover)
    rng = np.random.default_rng(1)
    say(f"{steps} optimizer steps with a weight update each, {rows} x {tokens} tokens")
    for step in range(steps):
        handover.buckets = list(backend.export(step))
        await engine.receive(step)
        await engine.activate(step)
        batch = as_batch(await generate(engine, rows, tokens, first=step * 100), rng)
        scored = backend.log_probs(batch)
        metrics = backend.train_step(replace(batch, old_logprobs=scored))
        compare(f"step {step + 1}, grad norm {metrics.values['grad_norm']:.3f}", batch, scored)
    await engine.close()
    backend.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--tokens-without", type=int, default=128)
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    machine = torch.cuda.get_device_name() if device != "cpu" else "CPU"
    say(f"{time.strftime('%Y-%m-%d')}  {machine}  torch {torch.__version__}  transformers {transformers.__version__}")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "model"
        name, vocab = ("qwen3-tiny", 300) if options.small else ("qwen3-0.6b", 151936)
        make_model(folder, name, vocab, device)
        say(f"profile {name}, {vocab:,} tokens of vocabulary, bfloat16")
        run(folder, device, options)


def run(folder: Path, device: str, options: argparse.Namespace) -> None:
    rows, tokens = options.rows, options.tokens
    found = asyncio.run(sample(folder, device, exact=True, rows=rows, tokens=tokens, at_once=rows))
    few, short = min(5, rows), min(options.tokens_without, tokens)
    again = asyncio.run(sample(folder, device, exact=True, rows=few, tokens=short, at_once=3))
    pairs = list(zip(again, found, strict=False))
    same = all(ids == other[:short] for (_, ids, _), (_, other, _) in pairs)
    same &= all(logprobs == other[:short] for (_, _, logprobs), (_, _, other) in pairs)
    say(f"  the same tokens and log-probs as in the larger batch: {same}")
    batch = as_batch(found, np.random.default_rng(0))
    for micro in (4096, 16384):
        score(folder, device, batch, exact=True, micro=micro)
    say("the same tokens, with the switch off in the trainer alone")
    score(folder, device, batch, exact=False, micro=16384)
    say("with the switch off on both sides")
    plain = asyncio.run(sample(folder, device, exact=False, rows=rows, tokens=short, at_once=rows))
    score(folder, device, as_batch(plain, np.random.default_rng(0)), exact=False, micro=16384)
    asyncio.run(updates(folder, device, steps=options.steps, rows=rows, tokens=min(128, tokens)))


if __name__ == "__main__":
    main()
