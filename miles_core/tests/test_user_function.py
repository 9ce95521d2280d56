"""A file that a run-file names is refused before it runs only where its import could not give the function."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from miles_core.errors import PluginError
from miles_core.registry import load_target
from miles_core.user_function import absent_import, function_target, in_words

GIVEN = {
    "globals": "globals()['sco' + 're'] = len\n",
    "a global statement": "def setup():\n    global score\n    def score(s): ...\nsetup()\n",
    "a global statement, called after del": "def f():\n    global score\n    score = 1\nscore = 2\ndel score\nf()\n",
    "a class's global statement": "class A:\n    global score\n    def score(s): ...\n",
    "exec": "exec('def score(s): ...')\n",
    "setattr": "import sys\nsetattr(sys.modules[__name__], 'score', len)\n",
    "its own module": "from sys import modules\nmodules[__name__].score = len\n",
    "a walrus": "[score := each for each in [len]]\n",
    "a star import": "from math import *\n",
    "__getattr__": "def __getattr__(name):\n    if name == 'score':\n        return len\n    raise AttributeError\n",
    "del, then def": "score = 1\ndel score\ndef score(s): ...\n",
    "else of TYPE_CHECKING": "import typing\nif typing.TYPE_CHECKING:\n    x = 1\nelse:\n    score = len\n",
    "a TYPE_CHECKING of its own": "TYPE_CHECKING = True\nif TYPE_CHECKING:\n    score = len\n",
    "an annotated value": "score: object = len\n",
    "a match": "match (len,):\n    case (score,): pass\n",
    "a mark of byte order": "\ufeffdef score(s): ...\n",
    "a bad escape": "def score(s): return '\\d' is s\n",
    "deeper than syntax trees": "if not len: pass\n" + "elif not len: pass\n" * 1500 + "score = len\n",
}


@pytest.mark.parametrize("text", [pytest.param(text, id=name) for name, text in GIVEN.items()])
@pytest.mark.filterwarnings("ignore")
def test_what_an_import_gives_is_not_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "m.py").write_text(text)
    name = "sqrt" if "*" in text else "score"
    assert load_target(function_target("reward", f"m.py:{name}", tmp_path)) is not None


NOT_GIVEN = {
    "an annotation": ("score: object\n", "no `score` in it; it defines no function"),
    "a local name": ("def f():\n    score = 1\n", "no `score` in it; it defines f"),
    "no encoding of text": ("# coding: rot13\nfpber = 1\n", "'rot13' is not a text encoding"),
    "an unknown encoding": ("# coding: nosuch\nscore = 1\n", "SyntaxError: "),
    "too deep": ("x = " + "+".join(["1"] * 50_000) + "\nscore = 1\n", "RecursionError: "),
    "a zero byte": ("score = 1\0", "null bytes"),
    "return outside a function": ("score = 1\nreturn\n", "SyntaxError: 'return' outside function"),
}


LATER = {
    "never run": "if False:\n    def score(s): ...\n",
    "for type checkers": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    score = 1\n",
    "deleted": "score = 1\ndel score\n",
    "a method": "class A:\n    def score(s): ...\n",
}


@pytest.mark.parametrize("text", [pytest.param(text, id=name) for name, text in LATER.items()])
def test_what_only_the_import_finds_missing_is_refused_by_it(tmp_path: Path, text: str) -> None:
    (tmp_path / "m.py").write_text(text)
    with pytest.raises(PluginError, match="score"):
        load_target(function_target("reward", "m.py:score", tmp_path))


@pytest.mark.parametrize(("text", "found"), [pytest.param(*each, id=name) for name, each in NOT_GIVEN.items()])
def test_what_no_import_gives_is_refused_with_what_python_says(tmp_path: Path, text: str, found: str) -> None:
    (tmp_path / "m.py").write_text(text)
    with pytest.raises(PluginError, match=re.escape(found)):
        function_target("reward", "m.py:score", tmp_path)
    with pytest.raises(PluginError):
        load_target(f"{tmp_path}/m.py:score")


OWN = "own_module_of_a_test"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("import json, nosuch.part\n", 1),
        ('"""What it is about."""\nfrom __future__ import annotations\nimport json\nfrom nosuch import x\n', 4),
        ("import pytest\nimport nosuch\n", 2),
        ("import json\nfrom pathlib import Path\n", None),
        ("try:\n    import nosuch\nexcept ImportError:\n    nosuch = None\n", None),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import nosuch\n", None),
        ("import sys\nsys.path.insert(0, '.')\nimport nosuch\n", None),
        (f"import {OWN}\nimport nosuch\n", None),  # which may extend the path
        ("def score(scored):\n    import nosuch\n", None),
    ],
)
def test_an_import_that_certainly_fails_is_found_without_running_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, line: int | None
) -> None:
    (tmp_path / f"{OWN}.py").write_text("raise RuntimeError('it was run')")
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "scores.py").write_text(text)
    found = absent_import(f"{tmp_path}/scores.py:score")
    told = f"line {line} of {tmp_path}/scores.py imports `nosuch`, and there is no such module here"
    assert found == (told if line else None)


@pytest.mark.parametrize("target", ["json:loads", "nosuch.part:score", "x" * 5000 + ":score"])
def test_a_module_is_looked_up_and_not_imported(target: str) -> None:
    found = absent_import(target)
    assert (found is None) == (target == "json:loads")


@pytest.mark.parametrize(
    ("target", "found"),
    [
        ("json:loads", None),
        ("json:nosuch", "`nosuch`"),
        ("os.path:join", None),
        ("os.path:nosuch", "`os.path` has no `nosuch`"),
        ("os.nosuch:score", "no module `os.nosuch`"),
        ("own_package.inner.scores:score", None),
        ("own_package.inner.scores:scoer", "no `scoer` in it; it defines score"),
        ("own_package.inner.nosuch:score", "no module `own_package.inner.nosuch`"),
        ("own_package.lazy:anything", None),
        ("own_package.spaces.scores:score", None),
        ("torch.nn.functional:relu", None),
        ("torch.nosuch:relu", "no module `torch.nosuch`"),
    ],
)
def test_a_function_of_a_module_is_looked_for_without_importing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str, found: str | None
) -> None:
    files = {
        "own_package/__init__.py": "raise SystemExit('was run')\n",
        "own_package/inner/__init__.py": "",
        "own_package/inner/scores.py": "def score(s): ...\nraise SystemExit('was run')\n",
        "own_package/lazy.py": "def __getattr__(name): ...\n",
        "own_package/spaces/scores.py": "def score(s): ...\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    told = absent_import(target)
    assert (told is None) if found is None else (found in str(told)), told
    assert not [name for name in sys.modules if name.startswith("own_package")]


def test_a_path_that_another_folder_would_find_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "reward.py").write_text("def score(s): ...\n")
    monkeypatch.chdir(tmp_path / "mine")
    with pytest.raises(PluginError) as refused:
        function_target("reward", "mine/reward.py:score")
    assert f"start miles in {tmp_path}, where" in str(refused.value.do)
    with pytest.raises(PluginError) as refused:
        function_target("reward", "mine/nosuch.py:score")
    assert refused.value.do == "relative paths start where you start miles"


RAISING = """import json

def score(text):
    return json.loads(text)

def group(s):
    raise ExceptionGroup('', [_caught()])

def _caught():
    try:
        raise ValueError('one\\ntwo')
    except ValueError as error:
        return error

def bare(s):
    assert s
"""


def test_what_was_raised_is_told_with_the_users_own_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "reward.py").write_text(RAISING)

    def told(name: str, argument: str) -> str:
        with pytest.raises(Exception) as raised:
            load_target(f"{tmp_path}/reward.py:{name}")(argument)
        return in_words(raised.value)

    monkeypatch.chdir(tmp_path)
    assert told("score", "nothing").endswith("(reward.py:4)"), "its call into the standard library, not json's own line"
    assert told("group", "") == "ValueError: one (reward.py:11)\ntwo", "the place is on the first line, the one shown"
    monkeypatch.chdir("/")
    assert told("bare", "") == f"AssertionError ({str(tmp_path).lstrip('/')}/reward.py:16)"


def test_an_error_of_ours_has_no_line_of_the_user() -> None:
    with pytest.raises(PluginError) as raised:
        function_target("reward", "nothing")
    raised.value.__traceback__ = raised.value.__traceback__ and raised.value.__traceback__.tb_next
    assert in_words(raised.value) == "PluginError: `nothing` is neither module:function nor file.py:function"
