"""The tiny model folder is a real one: tokenizers, template and weights load as any checkpoint's would."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from miles_core.testing.tiny import CHAT_TEMPLATE, IM_END, IM_START, Architecture, make_tiny_model


def _bytes(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def test_equal_arguments_give_equal_bytes_and_leave_the_global_generator_alone(tmp_path: Path) -> None:
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    first = make_tiny_model(tmp_path / "a", seed=3)
    assert torch.equal(torch.rand(1), expected)
    assert _bytes(first) == _bytes(make_tiny_model(tmp_path / "b", seed=3))
    other = _bytes(make_tiny_model(tmp_path / "c", seed=4))
    assert other["model.safetensors"] != _bytes(first)["model.safetensors"]


def test_tokenizer_round_trips_any_text_and_has_fewer_than_400_tokens(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.get_vocab_size() < 400
    for text in ("the theory", "naïve 漢字 🙂\t\r\n", "  10 + 110\n\n", "\x00\x7f"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert len(tokenizer.encode("the").ids) == 1


def test_transformers_tokenizer_renders_the_chat_template_with_single_special_tokens(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(make_tiny_model(tmp_path))
    assert tokenizer.chat_template == CHAT_TEMPLATE
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (IM_START, IM_END)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert (ids.count(IM_START), ids.count(IM_END)) == (2, 1)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "qwen3-moe"])
def test_architecture_loads_and_depends_on_every_position(tmp_path: Path, architecture: Architecture) -> None:
    model = AutoModelForCausalLM.from_pretrained(make_tiny_model(tmp_path, architecture=architecture)).eval()
    ids = torch.arange(10, 30)[None]
    changed = ids.clone()
    changed[0, 0] += 1
    with torch.no_grad():
        difference = (model(ids).logits[0, -1] - model(changed).logits[0, -1]).abs().max()
    assert difference > 1e-3


def test_vocab_above_the_tokenizer_pads_the_embedding_and_dtype_is_kept(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, vocab=320, tie=False, dtype="bfloat16", layers=1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert model.get_input_embeddings().weight.shape[0] == 320
    assert model.dtype == torch.bfloat16
    assert model.lm_head.weight.data_ptr() != model.get_input_embeddings().weight.data_ptr()
