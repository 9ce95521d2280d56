"""Options of engine `local`."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, PositiveInt


class LocalOptions(BaseModel):
    """How much the engine does at once, and in which precision."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    max_batch_size: PositiveInt = 64
    """Requests decoded together; more wait for a free slot."""
    kv_tokens: PositiveInt = 131072
    """Tokens of key-value memory for running requests, counted as requests times the longest of them; the youngest
    request goes back to waiting when it is not enough. One request always runs."""
    prefill_tokens: PositiveInt = 4096
    """Prompt tokens computed in one step; longer prompts take several, so that others go on decoding in between."""
    prefix_cache: bool = True
    """Reuse key-values of equal prefixes: between the members of a group and between the turns of a session."""
    prefix_cache_tokens: PositiveInt = 16384
    """Tokens of finished requests kept for later prefixes; the least recently used go first."""
    dtype: Literal["checkpoint", "float64", "float32", "bfloat16", "float16"] = "checkpoint"
    """Precision of weights and key-values. Published weights must come in it: the engine never rounds them."""
