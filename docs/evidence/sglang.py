"""Real SGLang on one GPU, trained by FSDP and by Megatron: a dense model of the Qwen3-0.6B shape and a mixture of
experts, random weights, synchronous and fully asynchronous, transports broadcast and cuda-ipc, the four contracts of
every step; on a second GPU, weights broadcast to the server's ranks over NCCL.

`--site FOLDER` holds SGLang's packages for this interpreter, away from Miles' own. `--small` shrinks the models to try
the script where `--python` and `--module` start SGLang on a CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

REWARD = "def score(scored):\n    return sum(c.islower() for c in scored.response) / max(len(scored.response), 1)\n"
ENV = {
    "FLASHINFER_DISABLE_VERSION_CHECK": "1",
    "SGLANG_IS_FLASHINFER_AVAILABLE": "false",
    "STUB_FILE": "/tmp/stubs.txt",
    "HF_HUB_OFFLINE": "1",
}
SERVER_ARGS: dict[str, Any] = {
    "attention_backend": "triton", "sampling_backend": "pytorch", "grammar_backend": "none",
    "cuda_graph_backend_prefill": "disabled", "cuda_graph_max_bs_decode": 64,
}  # fmt: skip


def make_model(folder: Path, *, moe: bool, small: bool) -> Path:
    """A random checkpoint in bfloat16, drawn on the GPU where there is one."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

    from miles_core.testing.tiny import write_tiny_tokenizer

    folder.mkdir(parents=True)
    rows = write_tiny_tokenizer(folder)
    shape: dict[str, Any] = {
        "vocab_size": rows, "hidden_size": 64 if small else 1024, "num_hidden_layers": 2 if small else 28,
        "num_attention_heads": 4 if small else 16, "num_key_value_heads": 2 if small else 8, "head_dim": 64,
        "intermediate_size": 128 if small else 3072, "max_position_embeddings": 2048, "tie_word_embeddings": True,
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2, "initializer_range": 0.03,
    }  # fmt: skip
    if moe:
        experts = {"num_experts": 8, "moe_intermediate_size": 32} if small else {
            "num_experts": 64, "moe_intermediate_size": 768, "num_hidden_layers": 18,
        }  # fmt: skip
        config: Any = Qwen3MoeConfig(
            **{**shape, **experts, "num_experts_per_tok": 2 if small else 4, "tie_word_embeddings": False}
        )
    else:
        config = Qwen3Config(**shape)
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    print(f"{folder.name}: {sum(p.numel() for p in model.parameters()) / 1e9:.2f} B parameters", flush=True)
    model.save_pretrained(folder)
    del model
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return folder


def run_file(args: argparse.Namespace, folder: Path, name: str, **sections: Any) -> Path:
    """Write a run-file; a section that is a mapping is merged into the common one."""
    engine: dict[str, Any] = {
        "use": "sglang", "python": args.python, "module": args.module, "python_path": [args.site] if args.site else [],
        "env": {**ENV, **dict(pair.split("=", 1) for pair in args.env)}, "memory_fraction": args.memory_fraction,
        "max_running_requests": 64, "server_args": {**SERVER_ARGS, **json.loads(args.server_args)},
    }  # fmt: skip
    run: dict[str, Any] = {
        "name": name,
        "seed": 1,
        "data": {"train": str(folder / "train.jsonl")},
        "rewards": [f"{folder / 'reward.py'}:score"],
        "rollout": {"sampling": {"max_tokens": args.tokens}, "reward_workers": 2},
        "schedule": {"steps": 1000, "groups_per_step": 8, "group_size": 8},
        "optimizer": {"lr": 1e-6},
        "backend": {"use": "fsdp", "micro_batch_tokens": 8192},
        "checkpoint": {"every_steps": 1000, "export_hf": False},
        "placement": {"device": args.device},
        "weights": {"verify": "sampled"},
        "tracking": {"dir": str(folder / "runs"), "trackers": []},
        "engine": engine,
    }
    for key, value in sections.items():
        run[key] = {**run.get(key, {}), **value} if isinstance(value, dict) else value
    path = folder / f"{name}.json"
    path.write_text(json.dumps(run))
    return path


def stopped_after(path: Path, metrics: Path, steps: int, deadline: float) -> tuple[str, str]:
    """Run until so many steps are written, then stop at once: nobody waits for the last step's checkpoint."""
    log = path.with_suffix(".log")
    with log.open("w") as output:
        command = [sys.executable, "-m", "miles_core.cli", "train", str(path), "--plain"]
        process = subprocess.Popen(command, stdout=output, stderr=output)
        while process.poll() is None and time.monotonic() < deadline:
            if metrics.exists() and len(metrics.read_text().splitlines()) >= steps:
                break
            time.sleep(0.2)
        found = f"exit {process.poll()}" if process.poll() is not None else f"stopped after {steps} steps"
        if time.monotonic() >= deadline:
            found = "out of time"
        for how, limit in ((signal.SIGINT, 1), (signal.SIGINT, 10), (signal.SIGKILL, 20)):
            if process.poll() is None:
                process.send_signal(how)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=limit)
        time.sleep(3)  # the guard ends the server of a killed run
    return found, log.read_text()


def train(folder: Path, path: Path, steps: int, deadline: float) -> None:
    """Run it and print what the contracts found; a run that fails is said so, and the next one goes on."""
    left = deadline - time.monotonic()
    if left < 45:
        print(f"{path.stem}: not run, {left:.0f} s left", flush=True)
        return
    began = time.monotonic()
    directory = folder / "runs" / path.stem
    done, said = stopped_after(path, directory / "metrics.jsonl", steps, time.monotonic() + left)
    print(f"=== {path.stem}: {done} after {time.monotonic() - began:.0f} s", flush=True)
    if not done.startswith("stopped after"):
        print(said[-3500:], flush=True)
        log = directory / "logs" / "engine-0.log"
        print(log.read_text()[-1500:] if log.exists() else "no engine log", flush=True)
    metrics, timings = (
        [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        for file in (directory / "metrics.jsonl", directory / "timings.jsonl")
    )
    keys = [key for key in (metrics[-1] if metrics else {}) if key.startswith("contract/") and "ratio" not in key]
    for line in metrics[:: max(1, len(metrics) // 4)]:
        figures = "  ".join(
            f"{key.removeprefix('contract/')} {line[key]:.3g}" for key in keys if line.get(key) is not None
        )
        print(f"step {line['step']}  reward {line.get('rollout/reward_mean', float('nan')):.3f}  {figures}", flush=True)
    later = timings[1:]
    wanted = ("time/", "throughput/", "sync/", "async/")
    names = sorted({key for step in later for key in step if key.startswith(wanted)})
    medians = {key: statistics.median(step[key] for step in later if key in step) for key in names}
    print(f"{len(timings)} steps, medians:", {k: float(f"{v:.4g}") for k, v in medians.items()}, flush=True)
    events = [json.loads(line) for line in (directory / "events.jsonl").read_text().splitlines()] if metrics else []
    print("broken contracts:", sum(event["event"] == "contract_broken" for event in events), flush=True)


OVERLAP: dict[str, Any] = {
    "corrections": ["tis"],
    "placement": {"mode": "separate"},
    "schedule": {"mode": "fully-async", "max_weight_staleness": 4},
}
MEGATRON: dict[str, Any] = {"backend": {"use": "megatron"}}
REPLAY: dict[str, Any] = {"rollout": {"routes": "replay", "sampling": {"max_tokens": 128}, "reward_workers": 2}}
NCCL: dict[str, Any] = {"engine": {"update": "distributed", "backend": "nccl"}}
RUNS: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "dense": [
        ("async-broadcast", {"transport": "broadcast", **OVERLAP}),
        ("megatron-sync-ipc", {"transport": "cuda-ipc", **MEGATRON}),
        ("megatron-async-broadcast", {"transport": "broadcast", **MEGATRON, **OVERLAP}),
        ("sync-ipc", {"transport": "cuda-ipc"}),
    ],
    "moe": [
        ("sync-ipc-replay", {"transport": "cuda-ipc", **REPLAY}),
        ("megatron-sync-ipc-replay", {"transport": "cuda-ipc", **MEGATRON, **REPLAY}),
        ("async-broadcast-replay", {"transport": "broadcast", **REPLAY, **OVERLAP}),
        ("megatron-async-broadcast-replay", {"transport": "broadcast", **MEGATRON, **REPLAY, **OVERLAP}),
    ],
    "nccl": [("sync-ipc", {"transport": "cuda-ipc", **NCCL})],
}
"""Of each lane, in the order in which they run while time lasts."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("lane", choices=sorted(RUNS))
    parser.add_argument("--folder", type=Path, default=Path("/tmp/miles-sglang"))
    parser.add_argument("--site", default="")
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--module", default="sglang.launch_server")
    parser.add_argument("--env", nargs="*", default=[])
    parser.add_argument("--server-args", default="{}")
    parser.add_argument("--memory-fraction", type=float, default=0.25)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--seconds", type=float, default=480)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--only", nargs="*", default=[], metavar="RUN", help="these runs of the lane, in this order")
    args = parser.parse_args()
    deadline = time.monotonic() + args.seconds
    folder: Path = args.folder / args.lane
    folder.mkdir(parents=True)
    (folder / "reward.py").write_text(REWARD)
    rows = [{"prompt": f"write about subject {number}"} for number in range(64)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = str(make_model(folder / "model", moe=args.lane == "moe", small=args.small))
    runs = dict(RUNS[args.lane])
    for name in args.only or runs:
        sections = runs[name]
        told = {**sections, "transport": sections["transport"] if args.device == "cuda" else "broadcast"}
        train(folder, run_file(args, folder, f"{args.lane}-{name}", model=model, **told), args.steps, deadline)


if __name__ == "__main__":
    main()
