from __future__ import annotations

import subprocess
import sys

from miles_core.session.default_family import DefaultFamily
from miles_core.session.factory import choose_family
from miles_core.testing.tiny import write_tiny_tokenizer
from miles_core.tokenizer import ChatTokenizer
from miles_tito_chatml.family import ChatMLFamily


def test_listing_the_plugin_imports_nothing_heavy() -> None:
    code = (
        "import sys, miles_tito_chatml.plugin, miles_core.tito.options;"
        "print([m for m in ('torch', 'tokenizers', 'transformers', 'jinja2') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_family_is_chosen_for_a_chatml_checkpoint(tmp_path) -> None:  # type: ignore[no-untyped-def]
    write_tiny_tokenizer(tmp_path)
    tokenizer = ChatTokenizer.from_dir(tmp_path)
    assert choose_family(tokenizer, {"chatml": ChatMLFamily, "default": DefaultFamily}) == ("chatml", None)
