"""Tiny random model folders: real architectures and a real tokenizer, small enough for a unit test.

The weights are drawn at unit scale (not at 0.02, as checkpoints start), so that every key, value and position matters
to the output: a stale cache or a position off by one changes tokens visibly instead of vanishing in rounding.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Architecture = Literal["llama", "qwen2", "qwen3", "qwen3-moe"]
Dtype = Literal["float32", "float64", "bfloat16", "float16"]

IM_START, IM_END = 1, 2
"""Ids of ``<|im_start|>`` (BOS) and ``<|im_end|>`` (EOS and PAD)."""

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKER_TOKENS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
# A few merges, so that text has several tokenisations and a seam between prompt and response can merge.
MERGES = ("t h", "th e", "i n", "a n", "Ġ t", "Ġ a", "Ċ Ċ", "e r", "o n", "s t", "Ġ 1", "1 0")

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def make_tiny_model(
    directory: str | Path,
    *,
    seed: int = 0,
    architecture: Architecture = "llama",
    layers: int = 2,
    hidden: int = 32,
    vocab: int | None = None,
    context: int = 512,
    tie: bool = True,
    dtype: Dtype = "float32",
    overrides: Mapping[str, Any] | None = None,
) -> Path:
    """Write a Hugging Face folder of a random model, its byte-level tokenizer and a ChatML template.

    Args:
        directory: Created when absent.
        seed: Decides every weight; equal arguments give equal bytes.
        hidden: Width; two query heads share one key-value head, of ``hidden / 2`` dimensions each.
        vocab: Rows of the embedding; None is the tokenizer's size (275), more gives ids without a token.
        context: ``max_position_embeddings``.
        tie: Share input and output embeddings.
        dtype: Of the stored weights; float64 exists for exact comparisons.
        overrides: Further fields of the model's config.

    Returns:
        The folder.
    """
    import torch
    from transformers import AutoModelForCausalLM

    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    rows = write_tiny_tokenizer(directory)
    config = _config(architecture, layers, hidden, rows if vocab is None else max(vocab, rows), context, tie)
    for name, value in (overrides or {}).items():
        setattr(config, name, value)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        _randomise_ones(model)
    _save(model.to(getattr(torch, dtype)), directory)
    return directory


def write_tiny_tokenizer(
    directory: str | Path,
    *,
    special: Sequence[str] = SPECIAL_TOKENS,
    markers: Sequence[str] = MARKER_TOKENS,
    bos: str | None = "<|im_start|>",
    eos: str | None = "<|im_end|>",
    template: str = CHAT_TEMPLATE,
    words: str | None = None,
) -> int:
    """Write ``tokenizer.json`` and ``tokenizer_config.json``: control tokens, all bytes, a few merges.

    Args:
        special, markers: The control tokens, from id 0 on; markers are added but not special, as ``<think>`` often is.
        bos, eos: Named special tokens; None names none.
        words: Regular expression that cuts text into words before merging; None cuts as GPT-2 does.

    Returns:
        The number of tokens.
    """
    tokens = [*special, *markers, *_byte_alphabet(), *(merge.replace(" ", "") for merge in MERGES)]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    cut = byte_level if words is None else _cut_by(words, byte_level)
    added = [
        {
            "id": index,
            "content": text,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": text in special,
        }
        for index, text in enumerate([*special, *markers])
    ]
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": {token: index for index, token in enumerate(tokens)},
        "merges": [merge.split(" ") for merge in MERGES],
    }
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": cut,
        "post_processor": None,
        "decoder": byte_level,
        "model": model,
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **({} if bos is None else {"bos_token": bos}),
        **({} if eos is None else {"eos_token": eos, "pad_token": eos}),
        "clean_up_tokenization_spaces": False,
        "chat_template": template,
    }
    directory = Path(directory)
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")
    return len(tokens)


def _cut_by(words: str, byte_level: dict[str, Any]) -> dict[str, Any]:
    split = {"type": "Split", "pattern": {"Regex": words}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [split, {**byte_level, "use_regex": False}]}


def _byte_alphabet() -> list[str]:
    """The printable character that stands for each byte in byte-level BPE (GPT-2's table)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    stand_in = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(stand_in)) for byte in range(256)]


def _config(architecture: Architecture, layers: int, hidden: int, vocab: int, context: int, tie: bool) -> Any:
    from transformers import LlamaConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

    classes = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config, "qwen3-moe": Qwen3MoeConfig}
    extra: dict[str, Any] = {}
    if architecture.startswith("qwen3"):
        extra["head_dim"] = hidden // 2
    if architecture == "qwen3-moe":
        extra |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": hidden, "decoder_sparse_step": 1}
    return classes[architecture](
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=context,
        initializer_range=hidden**-0.5,
        tie_word_embeddings=tie,
        bos_token_id=IM_START,
        eos_token_id=IM_END,
        pad_token_id=IM_END,
        **extra,
    )


def _save(model: Any, directory: Path) -> None:
    """Save without transformers' progress bars, which would fill a test's output."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model.save_pretrained(directory)
    finally:
        if shown:
            logging.enable_progress_bar()


def _randomise_ones(model: Any) -> None:
    """Move norms off 1 and biases off 0: a tensor at its initial value hides that nobody sent it."""
    import torch

    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
