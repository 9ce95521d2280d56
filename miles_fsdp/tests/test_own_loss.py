"""A loss that is a function in a user's file, as `loss: my_loss.py:fn` in a run-file makes it."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from miles_core.kinds.backend import BackendContext, LossSettings
from miles_core.testing.backend_oracle import PROBE, SURROGATE, example_batch
from miles_core.testing.tiny import make_tiny_model
from miles_fsdp.backend import FsdpBackend
from miles_fsdp.options import FsdpOptions

LOSS = """
from miles_core.testing.backend_oracle import surrogate


def doubled(inputs):
    output = surrogate(inputs)
    return type(output)(per_token=2 * output.per_token)
"""


def test_a_loss_in_a_file_is_trained_on(tmp_path: Path) -> None:
    (tmp_path / "loss.py").write_text(LOSS)
    folder = make_tiny_model(tmp_path / "model", dtype="float32")
    losses = []
    for load in (SURROGATE, f"{tmp_path / 'loss.py'}:doubled"):
        context = BackendContext(
            model_path=str(folder),
            device="cpu",
            rank=0,
            world_size=1,
            seed=0,
            optimizer=PROBE,
            loss=LossSettings(load=load),
            reference=False,
        )
        backend = FsdpBackend(FsdpOptions(), context)
        losses.append(backend.train_step(example_batch(np.random.default_rng(0), [9, 6])).values["loss"])
        backend.close()
    assert losses[0] != 0
    np.testing.assert_allclose(losses[1], 2 * losses[0], rtol=1e-6)
