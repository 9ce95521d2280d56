"""Proof at start-up that packed sequences do not see each other in this model, on this device, as it is sharded.

An architecture with state that runs along the row (linear attention, state-space layers) or a mask of its own would
mix neighbours, and training would go on looking healthy. So two short sequences are scored packed, with the first one
changed, and alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from miles_core.errors import ConfigError
from miles_core.types import TrainBatch
from miles_fsdp.packing import pack

_LENGTH = 5
_ROUNDING = {torch.bfloat16: 5e-2}
"""Relative difference of log-probs that rounding alone can make; 1e-3 for wider dtypes."""


def check_packing(module: Any, vocab_size: int, device: torch.device, dtype: torch.dtype) -> None:
    """Raise unless the second of two packed sequences is scored as if it were alone. A collective when sharded.

    Raises:
        ConfigError: neighbours reach each other.
    """
    rng = np.random.default_rng(0)
    first, changed, second = rng.integers(0, vocab_size, (3, _LENGTH))
    with torch.no_grad():
        packed = module(pack(_batch(first, second), device))[0][-(_LENGTH - 1) :]
        beside = module(pack(_batch(changed, second), device))[0][-(_LENGTH - 1) :]
        alone = module(pack(_batch(second), device))[0]
    leak = float((packed - beside).abs().max())
    shift = float((packed - alone).abs().max())
    # Equal shapes round alike unless experts regroup tokens; alone, other kernels may run.
    allowed = _ROUNDING.get(dtype, 1e-3) * max(1.0, float(alone.abs().max()))
    if not (leak <= allowed / 4 and shift <= allowed):
        raise ConfigError(
            "packed sequences reach each other in this architecture",
            expected="log-probs of a sequence that do not depend on its neighbour",
            found=f"a difference of {leak:.3g} when the neighbour changes, {shift:.3g} to the sequence alone",
            where=type(module).__name__,
            do="set backend.micro_batch_tokens: 1, or backend.attn_implementation: sdpa",
        )


def _batch(*rows: np.ndarray[Any, Any]) -> TrainBatch:
    """A batch in which every token is scored."""
    count, total = len(rows), sum(row.shape[0] for row in rows)
    zeros = np.zeros(total, dtype=np.float32)
    return TrainBatch(
        lengths=np.array([row.shape[0] for row in rows], dtype=np.int64),
        group_ids=np.zeros(count, dtype=np.int64),
        rewards=np.zeros(count, dtype=np.float32),
        temperatures=np.ones(count, dtype=np.float32),
        token_ids=np.concatenate(rows).astype(np.int32),
        loss_mask=np.ones(total, dtype=np.bool_),
        rollout_logprobs=zeros,
        versions=np.zeros(total, dtype=np.int64),
        advantages=zeros,
        token_weights=zeros,
        correction_weights=zeros,
    )
