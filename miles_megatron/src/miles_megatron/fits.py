"""Whether a model can be cut as the options say: what Megatron would only find out in the middle of a run."""

from __future__ import annotations

from collections.abc import Iterator

from miles_core.errors import ConfigError
from miles_megatron.groups import Layout
from miles_megatron.options import MegatronOptions
from miles_megatron.tables import ModelShape


def check_fits(shape: ModelShape, layout: Layout, options: MegatronOptions) -> None:
    """Raise ConfigError naming everything that does not fit."""
    problems = list(misfits(shape, layout, options))
    if problems:
        raise ConfigError(
            "the model cannot be cut as the backend's options say",
            expected="sizes that divide, and combinations that Megatron computes",
            found="; ".join(found for _, found in problems),
            where=", ".join(dict.fromkeys(path for path, _ in problems)),
            do="change the sizes",
        )


def misfits(shape: ModelShape, layout: Layout, options: MegatronOptions) -> Iterator[tuple[str, str]]:
    """Each misfit as the option's path and a sentence."""
    tensor, context = layout.tensor, layout.context
    if shape.heads % tensor:
        yield "backend.tensor_parallel", f"{shape.heads} attention heads over {tensor} ranks"
    elif not shape.mla and shape.key_value_heads % tensor:
        yield "backend.tensor_parallel", f"{shape.key_value_heads} key-value heads over {tensor} ranks"
    elif (shape.heads // tensor) % context:
        yield "backend.context_parallel", f"{shape.heads // tensor} heads of each rank over {context} ranks"
    width = shape.fields["ffn_hidden_size"]
    if width % tensor:
        yield "backend.tensor_parallel", f"an MLP of width {width} over {tensor} ranks"
    pieces = layout.pipeline * layout.virtual
    if shape.layers % pieces:
        yield "backend.pipeline_parallel", f"{shape.layers} layers over {pieces} pieces"
    if layout.virtual > 1 and layout.pipeline == 1:
        yield "backend.virtual_pipeline", "a virtual pipeline without a pipeline"
    if not shape.experts:
        if layout.expert * layout.expert_tensor > 1:
            yield "backend.expert_parallel", "a model without experts"
        return
    if shape.experts % layout.expert:
        yield "backend.expert_parallel", f"{shape.experts} experts over {layout.expert} ranks"
    expert_width = shape.fields["moe_ffn_hidden_size"]
    if expert_width % layout.expert_tensor:
        yield "backend.expert_tensor_parallel", f"experts of width {expert_width} over {layout.expert_tensor} ranks"
    if tensor > 1 and not options.sequence_parallel:
        yield "backend.sequence_parallel", "experts under tensor parallelism without sequence parallelism"
