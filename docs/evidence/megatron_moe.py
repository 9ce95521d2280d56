"""Megatron on H200s: a mixture of experts of 3 billion parameters beside fsdp, and every layout of two GPUs.

python megatron_moe.py model FOLDER            write the random model, and prompts for the run
python megatron_moe.py bench FOLDER BACKEND    steps on synthetic batches: tokens per second, MFU, peak memory
python megatron_moe.py run FOLDER BACKEND      20 RL steps with engine `local`
python megatron_moe.py pair FOLDER OPTION=N…   steps on two GPUs under a layout
"""

from __future__ import annotations

import faulthandler
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

SHAPE = {
    "hidden_size": 2048,
    "num_hidden_layers": 14,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "intermediate_size": 4096,
    "moe_intermediate_size": 512,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "decoder_sparse_step": 1,
    "max_position_embeddings": 4096,
    "norm_topk_prob": True,
}
VOCAB = 32768
PEAK_FLOPS = 989e12
"""bfloat16, dense, of one H200."""
ROWS, LENGTH = 32, 1024
RUN_LIMIT_S = 150
STEPS = 20

RUN_FILE = """\
name: {backend}
model: {folder}/model
data: {folder}/train.jsonl
rewards: ['{folder}/reward.py:score']
rollout: {{sampling: {{max_tokens: 64}}, reward_workers: 2}}
schedule: {{steps: 1000, groups_per_step: 4, group_size: 8}}
optimizer: {{lr: 1.0e-6}}
backend: {{use: {backend}, micro_batch_tokens: 16384}}
check_weight_update_equal: true
checkpoint: {{every_steps: 100, export_hf: false}}
placement: {{device: cuda}}
tracking: {{dir: {folder}/runs, trackers: []}}
"""
REWARD = "def score(scored):\n    return sum(c.islower() for c in scored.response) / max(len(scored.response), 1)\n"


def write_model(folder: Path) -> None:
    import transformers

    from miles_core.testing.tiny import write_tiny_tokenizer

    (folder / "model").mkdir(parents=True)
    write_tiny_tokenizer(folder / "model")
    config = transformers.Qwen3MoeConfig(vocab_size=VOCAB, tie_word_embeddings=False, pad_token_id=2, **SHAPE)
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e9:.2f} billion parameters, {active() / 1e9:.2f} active")
    model.save_pretrained(folder / "model")
    (folder / "reward.py").write_text(REWARD)
    rows = [{"prompt": f"write about subject {number}"} for number in range(64)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def active() -> float:
    """Parameters that one token passes through, embeddings left out but for the head."""
    hidden, heads = SHAPE["hidden_size"], SHAPE["num_attention_heads"] + 2 * SHAPE["num_key_value_heads"]
    attention = hidden * SHAPE["head_dim"] * (heads + SHAPE["num_attention_heads"])
    experts = 3 * hidden * SHAPE["moe_intermediate_size"] * SHAPE["num_experts_per_tok"]
    return SHAPE["num_hidden_layers"] * (attention + experts + hidden * SHAPE["num_experts"]) + hidden * VOCAB


def flops_per_token() -> float:
    """Forward and backward, causal attention at `LENGTH` included; recomputation would not count."""
    width = SHAPE["num_attention_heads"] * SHAPE["head_dim"]
    return 6 * active() + 3 * SHAPE["num_hidden_layers"] * 2 * 2 * width * LENGTH / 2


def batch(seed: int) -> Any:
    from dataclasses import replace

    from miles_core.testing.backend_oracle import example_batch

    made = example_batch(np.random.default_rng(seed), (LENGTH,) * ROWS, vocab=VOCAB)
    return replace(made, ref_logprobs=None)


def steps(backend: str, folder: Path, options: dict[str, Any], *, rank: int, world: int, count: int = 4) -> None:
    from miles_core.kinds.backend import BackendContext, LossSettings, OptimizerSettings

    context = BackendContext(
        model_path=str(folder / "model"),
        device=f"cuda:{rank}",
        rank=rank,
        world_size=world,
        seed=0,
        optimizer=OptimizerSettings(
            lr=1e-6,
            betas=(0.9, 0.95),
            eps=1e-8,
            weight_decay=0.0,
            schedule="constant",
            warmup_steps=0,
            min_lr_ratio=0.0,
            total_steps=100,
            clip_grad_norm=1.0,
        ),
        loss=LossSettings(load="miles_core.algorithms.losses:ppo_clip"),
        reference=False,
    )
    started = time.perf_counter()
    if backend == "megatron":
        from miles_megatron.backend import MegatronBackend
        from miles_megatron.options import MegatronOptions

        made: Any = MegatronBackend(MegatronOptions(micro_batch_tokens=16384, **options), context)
    else:
        from miles_fsdp.backend import FsdpBackend
        from miles_fsdp.options import FsdpOptions

        made = FsdpBackend(FsdpOptions(micro_batch_tokens=16384, **options), context)
    loaded = time.perf_counter() - started
    times = []
    for number in range(count):
        torch.cuda.synchronize()
        started = time.perf_counter()
        metrics = made.train_step(batch(number)).values
        torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    if rank == 0:
        best = min(times[1:])
        rate = ROWS * LENGTH / best
        print(
            f"{backend} {options} x{world}: {rate:,.0f} tokens/s, "
            f"MFU {rate * flops_per_token() / PEAK_FLOPS / world:.3f}, "
            f"step {best:.2f} s (first {times[0]:.2f}), peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB, "
            f"load {loaded:.1f} s, loss {metrics['loss']:.6f}, grad norm {metrics['grad_norm']:.5f}",
            flush=True,
        )
    made.close()


def run(folder: Path, backend: str) -> None:
    (folder / f"{backend}.yaml").write_text(RUN_FILE.format(folder=folder, backend=backend))
    command = [sys.executable, "-m", "miles_core.cli", "train", str(folder / f"{backend}.yaml"), "--plain"]
    started = time.perf_counter()
    directory = folder / "runs" / backend
    with (folder / f"{backend}.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        while process.poll() is None and time.perf_counter() < started + RUN_LIMIT_S:
            metrics_file = directory / "metrics.jsonl"
            if metrics_file.exists() and len(metrics_file.read_text().splitlines()) >= STEPS:
                break  # nobody waits for the last step's checkpoint
            time.sleep(0.2)
        code = process.poll()
        process.kill()
        process.wait()
    print(f"{backend}: exit {code} after {time.perf_counter() - started:.0f} s", flush=True)
    if code is not None:
        print((folder / f"{backend}.log").read_text()[-3000:], flush=True)
    timings = [json.loads(line) for line in (directory / "timings.jsonl").read_text().splitlines()][1:STEPS]
    metrics = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()][1:]
    print(
        f"  {len(metrics) + 1} steps; those after the first: |d log-prob| mean",
        [round(m["contract/logprobs/abs_diff_mean"], 4) for m in metrics],
    )
    figures = [key for key in timings[0] if key.startswith(("time/", "throughput/", "sync/")) and "digest" not in key]
    medians = {key: statistics.median(step[key] for step in timings if key in step) for key in figures}
    print("  medians", {key: float(f"{value:.4g}") for key, value in medians.items()}, flush=True)
    for line in (directory / "events.jsonl").read_text().splitlines():
        if json.loads(line)["event"] in ("weights_equal", "alarm", "contract_broken"):
            print(" ", line, flush=True)


def pair(folder: Path, backend: str, options: dict[str, Any]) -> None:
    """Start one process for each of two GPUs."""
    (folder / "meeting").unlink(missing_ok=True)
    command = [sys.executable, __file__, "rank", str(folder), backend, json.dumps(options)]
    ranks = [subprocess.Popen([*command, str(rank)]) for rank in range(2)]
    for rank in ranks:
        rank.wait(timeout=120)


def one_rank(folder: Path, backend: str, options: dict[str, Any], rank: int) -> None:
    import torch.distributed as dist

    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    steps(backend, folder, options, rank=rank, world=2, count=3)
    dist.destroy_process_group()


def main() -> None:
    verb, folder, *rest = sys.argv[1:]
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    place = Path(folder)
    if verb != "run":
        faulthandler.dump_traceback_later(65)  # says where, should something hang
    if verb == "model":
        write_model(place)
    elif verb == "bench":
        steps(rest[0], place, json.loads(rest[1]), rank=0, world=1)
    elif verb == "run":
        run(place, rest[0])
    elif verb == "pair":
        pair(place, rest[0], json.loads(rest[1]))
    else:
        one_rank(place, rest[0], json.loads(rest[1]), int(rest[2]))


if __name__ == "__main__":
    main()
