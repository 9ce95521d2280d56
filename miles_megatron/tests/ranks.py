"""Ranks that run scenarios one after the other and write what they found; started by `run_ranks` in `together.py`.

Run as ``python ranks.py RANK WORLD FOLDER cpu|cuda SCENARIO...``.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from miles_core.trainer.checkpoint import meet

sys.path.insert(0, str(Path(__file__).parent))

import scenarios


def main() -> None:
    rank, world, folder, device = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    collectives = "gloo" if device == "cpu" else "nccl"
    dist.init_process_group(collectives, init_method=f"file://{folder}/meeting", rank=rank, world_size=world)
    place = scenarios.Place(rank, world, folder, device)
    for name in sys.argv[5:]:
        torch.save(scenarios.ALL[name](place), folder / f"{name}-{rank}.pt")
        meet()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
