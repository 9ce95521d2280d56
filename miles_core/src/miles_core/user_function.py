"""Functions that a run-file names instead of a plugin's capability: ``module:attr``, or ``file.py:fn``."""

from __future__ import annotations

import ast
import sys
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
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


def absent_import(target: str) -> str | None:
    """What a function's module certainly cannot import on this machine, for an error; None if nothing.

    Of a file, only imports before any other code are judged: what comes first may extend `sys.path`, or catch the
    error. So may a module that belongs to no installed distribution.

    Args:
        target: As `function_target` gives it; a file of which it approved.
    """
    place = target.rpartition(":")[0]
    if not place.endswith(".py"):
        top = place.partition(".")[0]
        return f"there is no module `{top}` here" if _is_absent(top) else None
    for node in ast.parse(Path(place).read_bytes()).body:
        if isinstance(node, ast.Import):
            names = [each.name for each in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module] if node.module and not node.level else []
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue  # what the module is about
        else:
            return None
        for top in (name.partition(".")[0] for name in names):
            if _is_absent(top):
                return f"line {node.lineno} of {place} imports `{top}`, and there is no such module here"
            if not _is_distributed(top):
                return None
    return None


def _is_absent(module: str) -> bool:
    try:
        return module not in sys.modules and find_spec(module) is None
    except (ImportError, OSError, ValueError):  # a finder's own trouble: the import itself will tell
        return False


def _is_distributed(module: str) -> bool:
    if module in sys.stdlib_module_names:
        return True
    found = sys.modules.get(module)
    spec = found.__spec__ if found is not None else find_spec(module)
    return spec is not None and any(part in (spec.origin or "") for part in ("site-packages", "dist-packages"))
