"""Functions that a run-file names instead of a plugin's capability: ``module:attr``, or ``file.py:fn``."""

from __future__ import annotations

import ast
import symtable
import tokenize
from pathlib import Path

from miles_core.errors import PluginError


def function_target(what: str, use: str, base: Path | None = None) -> str:
    """What `load_target` takes for a function named in a run-file: ``module:attr``, or ``file.py:fn`` made absolute.

    Args:
        what: What the function is for, in errors.
        base: Where relative paths start; None is the working directory.

    Raises:
        PluginError: it is neither, or the file does not exist, is no Python, or binds no such name.
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
            raise PluginError(f"{what} `{use}` cannot be loaded", found=missing, where=str(path), do="mend the file")
        place = str(path)
    return f"{place}:{attribute}"


def _not_bound(path: Path, name: str) -> str | None:
    """Why the top level of a Python file would not have `name`, or None. The file is read, not run."""
    try:
        with tokenize.open(path) as file:
            source = file.read()
        top = symtable.symtable(source, str(path), "exec")
        imports = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)]
    except (SyntaxError, ValueError) as error:  # ValueError: a zero byte, or another encoding
        return f"{type(error).__name__}: {error}"
    if "__getattr__" in top.get_identifiers() or any(each.names[0].name == "*" for each in imports):
        return None  # only running it would tell
    bound = [each.get_name() for each in top.get_symbols() if each.is_assigned() or each.is_imported()]
    if name in bound:
        return None
    return f"no `{name}` in it; it binds {', '.join(bound[:8]) or 'nothing'}"
