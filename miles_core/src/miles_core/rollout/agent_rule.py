"""Whether the agent that a run-file names can be started on this machine; checked before anything is."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Iterable
from pathlib import Path

from miles_core.errors import PluginError
from miles_core.rules import Facts, Finding
from miles_core.user_function import absent_import, function_target


def agent_starts(facts: Facts) -> Iterable[Finding]:
    """Silent where the run is not to be started."""
    if not facts.here:
        return
    function, command = (facts.values.get(f"environment.{name}") for name in ("function", "command"))
    if function is not None:
        if missing := _function(function):
            yield Finding(path="environment.function", found=missing)
    elif command is not None:
        cwd = Path(facts.values.get("environment.cwd") or ".")
        if not cwd.is_dir():
            yield Finding(path="environment.cwd", found=f"there is no folder {cwd}")
        elif missing := _program(command, cwd, facts.values.get("environment.env.PATH")):
            yield Finding(path="environment.command", found=missing)


def _function(named: str) -> str | None:
    try:
        return absent_import(function_target("agent", named))
    except PluginError as error:
        return f"{error.message}: {error.found}" if error.found else error.message


def _program(command: str, cwd: Path, path: str | None) -> str | None:
    """What is missing of the program that a command begins with, looked up as the process will."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        return f"{error} in the command"
    if not words:
        return "the command is blank"
    program = words[0]
    if os.path.dirname(program):
        found = os.access(cwd / program, os.X_OK) and (cwd / program).is_file()
    else:
        found = shutil.which(program, path=os.environ.get("PATH", os.defpath) if path is None else path) is not None
    return None if found else f"there is no program {program}"
