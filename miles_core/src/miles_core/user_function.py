"""Functions that a run-file names instead of a plugin's capability: ``module:attr``, or ``file.py:fn``; and what
is said of one that raises."""

from __future__ import annotations

import ast
import sys
import sysconfig
import traceback
import warnings
from collections.abc import Iterable, Iterator
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import CodeType

from miles_core.errors import PluginError

OURS = str(Path(__file__).parent)
STANDARD = sysconfig.get_path("stdlib")
PACKAGES = ("site-packages", "dist-packages")
"""Parts of the paths of installed code."""
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
                do=where_paths_start(place),
            )
        if missing := _not_bound(path, attribute):
            raise PluginError(f"{what} `{use}` cannot be loaded", found=missing, where=str(path), do="fix the file")
        place = str(path)
    return f"{place}:{attribute}"


def where_paths_start(text: str) -> str:
    """The remedy for a path of a run-file that is not there: where it starts, or should."""
    here = "relative paths start where you start miles"
    above = start_above(text)
    return f"start miles in {above}, where there is such a path; {here}" if above else here


def start_above(text: str) -> Path | None:
    """The nearest folder above the present one from which a relative path would be found."""
    if Path(text).is_absolute():
        return None
    return next((folder for folder in Path.cwd().parents if (folder / text).exists()), None)


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
    place, _, attribute = target.rpartition(":")
    if not place.endswith(".py"):
        return _not_in_module(place, attribute)
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


def _not_in_module(module: str, name: str) -> str | None:
    """Why importing a module could not give `name`; None if it could. It is found as an import finds it, and not run:
    that might load a library for seconds."""
    inside: Iterable[str] | None = None
    spec, full = None, ""
    for part in module.split("."):
        full = f"{full}.{part}" if full else part
        loaded = sys.modules.get(full)
        try:
            spec = loaded.__spec__ if loaded else _find(full, inside)
        except (ImportError, OSError, ValueError, KeyError):  # a finder's own trouble: the import itself will tell
            return None
        if spec is None:
            return None if loaded else f"there is no module `{full}` here"
        inside = spec.submodule_search_locations
        if inside is None and full != module and not loaded:
            return None  # a module that makes a package of itself when it runs
        inside = inside or ()
    if loaded := sys.modules.get(module):
        return None if hasattr(loaded, name) else f"module `{module}` has no `{name}`"
    if spec is None or not spec.has_location or not (spec.origin or "").endswith(".py"):
        return None
    missing = _not_bound(Path(str(spec.origin)), name)
    return f"module `{module}`: {missing}" if missing else None


def _find(full: str, inside: Iterable[str] | None) -> ModuleSpec | None:
    """What `importlib.util.find_spec` says, which would import the packages around a module."""
    places = None if inside is None else list(inside)
    return next((found for finder in sys.meta_path if (found := finder.find_spec(full, places))), None)


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
    return spec is not None and any(part in (spec.origin or "") for part in PACKAGES)


def in_words(error: BaseException) -> str:
    """What foreign code raised: ``Type: message (file.py:line)``, with the place on the first line.

    Of a group of exceptions, the first one is told.
    """
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    message, place = str(error).strip(), _place(error)
    head, _, rest = f"{type(error).__name__}{': ' if message else ''}{message}".partition("\n")
    located = f"{head} ({place})" if place else head
    return f"{located}\n{rest}" if rest else located


def _place(error: BaseException) -> str | None:
    """The innermost line of the user's own files that an error passed, else of installed packages; None if neither."""
    own, packages = None, None
    for frame in traceback.extract_tb(error.__traceback__):
        if any(part in frame.filename for part in PACKAGES):
            packages = frame
        elif not frame.filename.startswith(("<", OURS, STANDARD)):
            own = frame
    if (found := own or packages) is None:
        return None
    return f"{shown(Path(found.filename))}:{found.lineno}"


def shown(path: Path) -> Path:
    """Relative to the working directory, if it is below it."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
