"""What a GPU shows that CI cannot: the whole loop on CUDA, and the engine beside `model.generate`.

Random weights of the Qwen3-0.6B shape (28 layers, hidden 1024) with a small vocabulary, bfloat16. `--small` shrinks it
to try the script on a CPU.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

RUN_FILE = """\
name: gpu
model: {folder}/model
data: {folder}/train.jsonl
rewards: ['{folder}/reward.py:score']
rollout: {{sampling: {{max_tokens: {tokens}}}, reward_workers: 4}}
schedule: {{steps: 6, groups_per_step: 8, group_size: 8}}
optimizer: {{lr: 1.0e-6}}
backend: {{use: fsdp, micro_batch_tokens: 8192}}
check_weight_update_equal: true
checkpoint: {{export_hf: true}}
placement: {{device: {device}}}
tracking: {{dir: {folder}/runs, trackers: []}}
"""
REWARD = "def score(scored):\n    return sum(c.islower() for c in scored.response) / max(len(scored.response), 1)\n"


def make_folder(folder: Path, *, small: bool) -> None:
    from miles_core.testing.tiny import make_tiny_model

    shape: dict[str, Any] = {"layers": 2, "hidden": 64} if small else {"layers": 28, "hidden": 1024}
    extra = {} if small else {"num_attention_heads": 16, "num_key_value_heads": 8, "intermediate_size": 3072}
    make_tiny_model(
        folder / "model",
        architecture="qwen3",
        context=2048,
        dtype="bfloat16",
        overrides={"head_dim": 64, **extra},
        **shape,
    )
    rows = [{"prompt": f"write about subject {number}"} for number in range(64)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(REWARD)


def whole_run(folder: Path, *, device: str, tokens: int) -> None:
    (folder / "run.yaml").write_text(RUN_FILE.format(folder=folder, device=device, tokens=tokens))
    command = [sys.executable, "-m", "miles_core.cli", "train", str(folder / "run.yaml"), "--plain"]
    subprocess.run(command, check=True)
    run = folder / "runs" / "gpu"
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    timings = [json.loads(line) for line in (run / "timings.jsonl").read_text().splitlines()]
    print("\nwhole loop: step, |d log-prob| mean and max (nats), grad norm, rollout tok/s, train tok/s, step s")
    for line, clock in zip(metrics, timings, strict=True):
        if line["step"] > 0:
            print(
                f"  {line['step']}  {line['contract/logprobs/abs_diff_mean']:.4f}  "
                f"{line['contract/logprobs/abs_diff_max']:.3f}  {line['train/grad_norm']:.3f}  "
                f"{clock['throughput/rollout_tokens_per_s']:,.0f}  {clock['throughput/train_tokens_per_s']:,.0f}  "
                f"{clock['time/step_s']:.2f}"
            )
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    for event in events:
        if event["event"] in ("weights_equal", "alarm", "contract_broken"):
            print("  event:", {key: value for key, value in event.items() if key != "time"})


async def engine_ratio(folder: Path, *, device: str, batch: int, tokens: int) -> None:
    """Tokens per second of engine `local` and of `model.generate`, equal and skewed output lengths, in one process."""
    import torch
    from transformers import AutoModelForCausalLM

    from miles_core.kinds.engine import EngineContext, GenerateRequest
    from miles_core.types import SamplingParams
    from miles_local.engine import LocalEngine
    from miles_local.options import LocalOptions

    prompts = [[1, *(3 + (row * 7 + at) % 250 for at in range(32))] for row in range(batch)]
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.bfloat16).to(device)
    ids = torch.tensor(prompts, device=device)
    context = EngineContext(model_path=str(folder / "model"), context_length=None, device=device, seed=0)
    engine = LocalEngine(LocalOptions(max_batch_size=batch), context)
    await engine.start()

    async def one(number: int, prompt: list[int], limit: int) -> int:
        request = GenerateRequest(
            request_id=str(number),
            session_id=str(number),
            token_ids=tuple(prompt),
            params=SamplingParams(max_tokens=limit),
        )
        return sum([len(chunk.token_ids) async for chunk in engine.generate(request)])

    async def ours(limits: list[int]) -> float:
        started = time.perf_counter()
        counts = await asyncio.gather(*(one(n, p, limits[n]) for n, p in enumerate(prompts)))
        return sum(counts) / (time.perf_counter() - started)

    def theirs(limits: list[int]) -> float:
        started = time.perf_counter()
        model.generate(
            ids, do_sample=True, top_k=0, max_new_tokens=max(limits), min_new_tokens=max(limits), pad_token_id=2
        )
        return sum(limits) / (time.perf_counter() - started)

    equal = [tokens] * batch
    skewed = [tokens if number % 8 == 0 else tokens // 8 for number in range(batch)]
    print(f"\nengine local against model.generate, batch {batch}: useful tokens per second")
    for name, limits in (("equal", equal), ("skewed 8:1", skewed)):
        await ours(limits)  # warm-up of both
        theirs(limits)
        mine, other = await ours(limits), theirs(limits)
        print(f"  {name:<11} local {mine:,.0f}   generate {other:,.0f}   ratio {mine / other:.2f}")
    await engine.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--small", action="store_true")
    small = parser.parse_args().small
    import torch
    import transformers

    device = "cuda" if torch.cuda.is_available() else "cpu"
    name = torch.cuda.get_device_name() if device == "cuda" else platform.processor()
    print(f"{time.strftime('%Y-%m-%d')}  {name}  torch {torch.__version__}  transformers {transformers.__version__}")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        make_folder(folder, small=small)
        whole_run(folder, device=device, tokens=16 if small else 256)
        asyncio.run(
            engine_ratio(
                folder, device=f"{device}:0" if device == "cuda" else device, batch=32, tokens=32 if small else 256
            )
        )


if __name__ == "__main__":
    main()
