"""Functions that a run-file names instead of a plugin's capability: ``module:attr``, or ``file.py:fn``."""

from __future__ import annotations

import ast
import dis
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import CodeType

from miles_core.errors import PluginError

ONLY_RUNNING_TELLS = frozenset({
    "__builtins__", "__dict__", "__getattr__", "__globals__", "__import__", "__setattr__", "_getframe",
    "currentframe", "eval", "exec", "f_globals", "getmodule", "global_enum", "globals", "import_module", "locals",
    "modules", "resolve_name", "setattr", "vars",
})  # fmt: skip
"""Code that says one of these may bind names that no statement of it shows."""


def function_target(what: str, use: str, base: Path | None = None) -> str:
    """What `load_target` takes for a function named in a run-file: ``module:attr``, or ``file.py:fn`` made absolute.

    Args:
        what: What the function is for, in errors.
        base: Where relative paths start; None is the working directory.

    Raises:
        PluginError: it is neither, or the file does not exist, is no Python, or certainly binds no such name.
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
    """Why importing a Python file would not give `name`; None if it would, or if only running it would tell.

    The file is compiled, as for an import, and not run.
    """
    try:
        source = path.read_bytes()
        with warnings.catch_warnings(action="ignore"):
            codes = list(_codes(compile(source, path, "exec", dont_inherit=True)))
    except (OSError, SyntaxError, ValueError, LookupError, RecursionError, MemoryError) as error:
        return f"{type(error).__name__}: {error}"
    if any(("*",) in code.co_consts or not ONLY_RUNNING_TELLS.isdisjoint(code.co_names) for code in codes):
        return None
    try:
        with warnings.catch_warnings(action="ignore"):
            top = compile(_lasting(ast.parse(source), name), path, "exec", dont_inherit=True)
    except RecursionError:  # syntax trees may be less deep than what compiles without one
        return None
    bound = [*_stored(top, "STORE_NAME"), *(each for code in codes for each in _stored(code, "STORE_GLOBAL"))]
    if name in bound:
        return None
    return f"no `{name}` in it; it binds {', '.join(list(dict.fromkeys(bound))[:8]) or 'nothing'}"


def _lasting(tree: ast.Module, name: str) -> ast.Module:
    """What may leave `name` bound: nothing before a `del` of it, and no body that type checkers alone read."""
    nodes = list(ast.walk(tree))
    if "TYPE_CHECKING" not in _plain(each for each in nodes if isinstance(getattr(each, "ctx", None), ast.Store)):
        for node in nodes:
            match node:
                case ast.If(test=(ast.Name(id="TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING")) as test):
                    node.test = ast.copy_location(ast.Constant(value=False), test)
    deleted = [n for n, each in enumerate(tree.body) if isinstance(each, ast.Delete) and name in _plain(each.targets)]
    return ast.Module(body=tree.body[deleted[-1] + 1 :] if deleted else tree.body, type_ignores=[])


def _plain(nodes: Iterable[ast.AST]) -> list[str]:
    return [each.id for each in nodes if isinstance(each, ast.Name)]


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _codes(each)


def _stored(code: CodeType, how: str) -> Iterator[str]:
    return (each.argval for each in dis.get_instructions(code) if each.opname == how)
