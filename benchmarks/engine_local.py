"""Throughput of engine `local` against `model.generate` on the same model, batch and machine.

    python benchmarks/engine_local.py MODEL_FOLDER [--batch 32] [--new-tokens 64] [--repeats 3] [--device cpu]

Two workloads, each measured on both sides in turn, so that a busy machine burdens both alike:

* uniform: one batch, every request as long as the others;
* skewed: several batches' worth of requests, most short and some long. `generate` pads every batch to its longest
  request; the engine refills a slot as soon as it is free. Only tokens that were asked for count.

Prompts are random and distinct: no prefix is shared. Both sides sample at temperature 1 from the full vocabulary; the
engine also returns log-probs.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from miles_core.kinds.engine import EngineContext, GenerateRequest
from miles_core.types import SamplingParams
from miles_local.engine import LocalEngine
from miles_local.options import LocalOptions


@dataclass(frozen=True)
class Workload:
    """Prompts with the number of tokens wanted from each."""

    name: str
    prompts: list[list[int]]
    lengths: list[int]
    goal: float
    """Ratio engine / generate that the project promises."""

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


def make_workloads(vocab: int, batch: int, prompt_tokens: int, new_tokens: int) -> list[Workload]:
    generator = torch.Generator().manual_seed(0)

    def prompts(count: int) -> list[list[int]]:
        return torch.randint(3, vocab, (count, prompt_tokens), generator=generator).tolist()

    # One in eight requests is eight times as long as the rest: answers with and without a long chain of thought.
    skewed = [new_tokens * 2 if i % 8 == 5 else new_tokens // 4 for i in range(3 * batch)]
    return [
        Workload("uniform", prompts(batch), [new_tokens] * batch, 1.0),
        Workload("skewed", prompts(3 * batch), skewed, 1.5),
    ]


def run_generate(model: Any, work: Workload, batch: int) -> None:
    for start in range(0, len(work.prompts), batch):
        ids = torch.tensor(work.prompts[start : start + batch], device=model.device)
        longest = max(work.lengths[start : start + batch])
        with torch.inference_mode():
            out = model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                do_sample=True,
                top_k=0,
                max_new_tokens=longest,
                min_new_tokens=longest,
                pad_token_id=0,
            )
        assert out.shape[1] == ids.shape[1] + longest


async def run_engine(engine: LocalEngine, work: Workload, repeat: int) -> None:
    async def one(index: int) -> int:
        name = f"{work.name}-{repeat}-{index}"
        request = GenerateRequest(
            request_id=name,
            session_id=name,
            token_ids=tuple(work.prompts[index]),
            params=SamplingParams(max_tokens=work.lengths[index], seed=index + 1000 * repeat),
        )
        return sum([len(chunk.token_ids) async for chunk in engine.generate(request)])

    sampled = await asyncio.gather(*(one(index) for index in range(len(work.prompts))))
    assert sum(sampled) == work.tokens


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def compare(
    options: argparse.Namespace, loop: asyncio.AbstractEventLoop, engine: LocalEngine, model: Any, work: Workload
) -> bool:
    """Measure both sides `repeats` times in turn; print tokens per second and the ratio of the medians."""
    times: dict[str, list[float]] = {"generate": [], "engine": []}
    for repeat in range(options.repeats):
        times["generate"].append(seconds(lambda: run_generate(model, work, options.batch)))
        asked = run_engine(engine, work, repeat)
        times["engine"].append(seconds(lambda asked=asked: loop.run_until_complete(asked)))  # type: ignore[misc]
        print(f"  {work.name}: " + ", ".join(f"{name} {found[-1]:.1f} s" for name, found in times.items()), flush=True)
    rates = {name: work.tokens / statistics.median(found) for name, found in times.items()}
    ratio = rates["engine"] / rates["generate"]
    print(
        f"{work.name}: {len(work.prompts)} requests, {work.tokens} tokens: generate {rates['generate']:.0f} tokens/s, "
        f"engine {rates['engine']:.0f} tokens/s, ratio {ratio:.2f} (goal {work.goal})"
    )
    return ratio >= work.goal


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    return parser.parse_args()


def main() -> int:
    """Print both ratios; 0 when both reach their goals, 1 otherwise."""
    options = parse_arguments()
    torch.set_num_threads(options.threads)
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(options.model, dtype="auto").to(options.device).eval()
    model.generation_config.eos_token_id = None
    loop = asyncio.new_event_loop()
    engine = LocalEngine(
        LocalOptions(max_batch_size=options.batch, prefix_cache=False),
        EngineContext(model_path=str(options.model), context_length=None, device=options.device, seed=0),
    )
    loop.run_until_complete(engine.start())
    works = make_workloads(model.config.vocab_size, options.batch, options.prompt_tokens, options.new_tokens)
    print(
        f"{time.strftime('%Y-%m-%d')} {platform.machine()}, {options.threads} threads, {options.device}, {model.dtype}"
    )
    warm_up = Workload("warm-up", works[0].prompts[:4], [4] * 4, 0.0)
    run_generate(model, warm_up, options.batch)
    loop.run_until_complete(run_engine(engine, warm_up, 0))
    good = [compare(options, loop, engine, model, work) for work in works]
    loop.run_until_complete(engine.close())
    loop.close()
    return 0 if all(good) else 1


if __name__ == "__main__":
    raise SystemExit(main())
