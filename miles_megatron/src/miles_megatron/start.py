"""Import Megatron Core for the first time: without its remarks on absent libraries, and uncompiled.

Everything else of this package may import Megatron plainly; whoever starts (the backend, a test) imports this first.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

# Read by CUDA when it starts: with one queue, a reduction that Megatron starts before a matrix product runs beside it.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")


def _as_written(function: Callable[..., Any], **_: Any) -> Callable[..., Any]:
    return function


with contextlib.ExitStack() as _while_importing:
    _while_importing.enter_context(warnings.catch_warnings())
    # TransformerEngine and Apex are neither needed nor offered here; Megatron says so of each file that looks for them.
    warnings.filterwarnings("ignore", message=r"(?s).*(Transformer ?Engine|Apex|apex|script_method|custom_layers).*")
    # Megatron compiles small functions; of those only a counter in each router runs here, not worth a compiler.
    _while_importing.enter_context(mock.patch.object(torch, "compile", _as_written))
    from megatron.core import distributed, optimizer, parallel_state  # noqa: F401
    from megatron.core.extensions import transformer_engine
    from megatron.core.models.gpt import gpt_layer_specs  # noqa: F401
    from megatron.core.pipeline_parallel import schedules  # noqa: F401
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.moe import moe_utils, token_dispatcher  # noqa: F401

# Two slips of 0.16.1 where TransformerEngine is absent: a name that is asked for but not defined, and stand-ins for its
# classes that latent attention takes for the real ones.
if not hasattr(moe_utils, "te_general_gemm"):
    moe_utils.te_general_gemm = None
if not transformer_engine.HAVE_TE:
    multi_latent_attention.HAVE_TE = False


@contextlib.contextmanager
def at_work(device: torch.device) -> Iterator[None]:
    """Run a block of Megatron on `device`: accommodated on a CPU, and without its notes to its own developers."""
    from miles_megatron.cpu import accommodated

    with warnings.catch_warnings(), accommodated(device):
        warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"megatron\.core\..*")
        warnings.filterwarnings("ignore", category=FutureWarning, message=r"`torch\.distributed\.")
        # Shards of float32 masters are views, whose gradients Megatron sets itself.
        warnings.filterwarnings(
            "ignore", category=UserWarning, message=r"The \.grad attribute of a Tensor that is not a"
        )
        yield
