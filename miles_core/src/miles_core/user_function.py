"""Functions that a run-file names instead of a plugin's capability: ``module:attr``, or ``file.py:fn``."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from types import CodeType

from miles_core.errors import PluginError

ONLY_RUNNING_TELLS = frozenset({"__dict__", "__getattr__", "eval", "exec", "globals", "setattr", "vars"})
"""Code that says one of these may bind names that it does not spell."""


def function_target(what: str, use: str, base: Path | None = None) -> str:
    """What `load_target` takes for a function named in a run-file: ``module:attr``, or ``file.py:fn`` made absolute.

    Args:
        what: What the function is for, in errors.
        base: Where relative paths start; None is the working directory.

    Raises:
        PluginError: it is neither, or the file does not exist, is no Python, or cannot bind such a name.
    """
    place, _, attribute = use.rpartition(":")
    if not attribute.isidentifier() or not place:
        raise PluginError(f"`{use}` is neither module:function nor file.py:function")
    if place.endswith(".py"):
        path = ((base or Path.cwd()) / place).resolve()
        if not path.is_file():
            raise PluginError(
                f"the file of {what} `{use}` does not exist",
                found=str(path),
                do="relative paths start where you start miles",
            )
        if missing := _not_bound(path, attribute):
            raise PluginError(f"{what} `{use}` cannot be loaded", found=missing, where=str(path), do="fix the file")
        place = str(path)
    return f"{place}:{attribute}"


def _not_bound(path: Path, name: str) -> str | None:
    """Why importing a Python file could not give `name`; None if it could.

    The file is compiled, as for an import, and not run. A sound one is never refused; one that is let through and
    still lacks the name, because it deletes it or means another scope's, is told when it is imported.
    """
    try:
        with warnings.catch_warnings(action="ignore"):
            top = compile(path.read_bytes(), path, "exec", dont_inherit=True)
    except (OSError, SyntaxError, ValueError, LookupError, RecursionError, MemoryError) as error:
        return f"{type(error).__name__}: {error}"
    codes = list(_codes(top))
    names = {each for code in codes for each in code.co_names}  # all but local variables and what comments say
    if name in names or names & ONLY_RUNNING_TELLS or any(("*",) in code.co_consts for code in codes):
        return None
    defined = [each.co_name for each in top.co_consts if isinstance(each, CodeType) and each.co_name.isidentifier()]
    return f"no `{name}` in it; it defines {', '.join(defined[:8]) or 'no function'}"


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _codes(each)
