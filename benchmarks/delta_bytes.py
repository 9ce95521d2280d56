"""How much of a model changes in real RL steps, and what disk-delta publishes for it, at several learning rates.

    python benchmarks/delta_bytes.py MODEL_DIR [--steps 5] [--lr 1e-6 3e-6 1e-5] [--encoding xor overwrite]

Runs the quickstart with each learning rate, held constant and without warm-up, and reads density and bytes from the
run's own timings. The backend keeps float32 masters and exports the checkpoint's bfloat16; the first steps of Adam move
every weight by about the learning rate, whatever the gradient's size, so they are the densest a run sees.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

QUICKSTART = Path(__file__).parents[1] / "examples" / "01-quickstart.yaml"


def run(model: Path, lr: float, encoding: str, arguments: argparse.Namespace, work: Path) -> list[dict[str, float]]:
    """Timings of every step after the first publish."""
    name = f"delta-{lr:g}-{encoding}"
    transport = {
        "use": "disk-delta",
        "encoding": encoding,
        "publish_dir": str(work / name / "published"),
        "local_dir": str(work / name / "local"),
        "snapshot_every": 0,
    }
    settings = {
        "name": name,
        "model.path": str(model),
        "optimizer.lr": lr,
        "optimizer.warmup_steps": 0,
        "optimizer.schedule": "constant",
        "optimizer.min_lr_ratio": 0.0,
        "transport": transport,
        "schedule.steps": arguments.steps,
        "eval": {"every_steps": None},
        "checkpoint.export_hf": False,
        "tracking.dir": str(work),
        "tracking.trackers": [],
    }
    command = [sys.executable, "-m", "miles_core.cli", "train", str(QUICKSTART), "--fresh"]
    for key, value in settings.items():
        command += ["--set", f"{key}={json.dumps(value)}"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stdout[-2000:] + done.stderr[-2000:])
    lines = (work / name / "timings.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines if json.loads(line)["step"] > 0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--lr", type=float, nargs="+", default=[1e-6, 3e-6, 1e-5])
    parser.add_argument("--encoding", nargs="+", default=["xor", "overwrite"])
    arguments = parser.parse_args()
    full = sum(path.stat().st_size for path in arguments.model.glob("*.safetensors"))
    print(f"torch {torch.__version__}, {platform.machine()}, full weights {full / 2**20:.1f} MiB")
    print(f"{'lr':>8} {'encoding':>10} {'step':>5} {'changed':>9} {'MiB':>8} {'of full':>8}", flush=True)
    for lr in arguments.lr:
        for encoding in arguments.encoding:
            with tempfile.TemporaryDirectory() as work:
                for line in run(arguments.model, lr, encoding, arguments, Path(work)):
                    wire = line["sync/wire_bytes"]
                    print(
                        f"{lr:8.0e} {encoding:>10} {line['step']:5d} {line['sync/density']:9.3%} "
                        f"{wire / 2**20:8.2f} {wire / full:8.3%}",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
