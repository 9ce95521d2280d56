"""What of engine `sglang`'s options nothing would read, or no server could do; checked before anything starts."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterable
from typing import Any

from miles_core.rules import Facts, Finding
from miles_sglang.launch import environment
from miles_sglang.options import ServerOptions, SglangOptions

STARTS = ("python", "module", "python_path", "env", "server_args", "memory_fraction", "max_running_requests", "log_dir")
"""Options that decide how a server is started."""


def starting_is_ours(facts: Facts) -> Iterable[Finding]:
    """Options of a start need servers that Miles starts."""
    if not _urls(facts):
        return
    for name in STARTS:
        path, default = f"engine.{name}", SglangOptions.model_fields[name].default
        inner = [key for key in facts.values if key.startswith(f"{path}.")]
        if inner or facts.values.get(path, default) not in (default, None):
            yield Finding(path=path, found=f"{name} with engine.urls, whose servers run already")


LOOK = "import sys; from importlib.util import find_spec; print('looked'); sys.exit(0 if find_spec(sys.argv[1]) else 3)"
ABSENT = 3
LOOK_S = 30.0
"""Seconds that an interpreter may take to start and look; a busy network file system is slow."""


def sglang_is_there(facts: Facts) -> Iterable[Finding]:
    """The interpreter exists and finds SGLang, which it does not import. Silent where the servers are started on hosts
    that may be others, and where none is started."""
    if not facts.here or _urls(facts) or "places-processes" in facts.tags.get("executor", ()):
        return
    written = facts.values.get("engine.python")
    variables = {
        key.removeprefix("engine.env."): str(value)
        for key, value in facts.values.items()
        if key.startswith("engine.env.")
    }
    folders = tuple(map(str, facts.values.get("engine.python_path") or ()))
    started = environment(ServerOptions(python_path=folders, env=variables))
    program = shutil.which(written or sys.executable, path=started.get("PATH"))
    if program is None:
        yield Finding(path="engine.python", found=f"there is no program {written or sys.executable}")
        return
    module = str(facts.values.get("engine.module", ServerOptions().module)).partition(".")[0]
    try:
        looked = subprocess.run(
            [program, "-c", LOOK, module], env=started, capture_output=True, text=True, timeout=LOOK_S, check=False
        )
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        yield Finding(path="engine.python", found=f"{program} cannot be asked for `{module}`: {error}")
        return
    if looked.returncode == ABSENT:
        yield Finding(path="engine.python", found=f"{program} has no module `{module}`")
    elif looked.returncode != 0 or "looked" not in looked.stdout.split():
        said = (looked.stderr.strip().splitlines() or [f"exit code {looked.returncode}"])[-1]
        yield Finding(path="engine.python", found=f"{program} is no Python: {said}")


def addresses_fit(facts: Facts) -> Iterable[Finding]:
    """Each engine has one address, each address one engine."""
    urls = [url.rstrip("/") for url in _urls(facts)]
    engines = facts.values.get("placement.engines", 1)
    if urls and len(urls) != engines:
        yield Finding(path="engine.urls", found=f"addresses: {len(urls)}, placement.engines: {engines}")
    for url in sorted({url for url in urls if urls.count(url) > 1}):
        yield Finding(path="engine.urls", found=f"{url} more than once")
    for url in urls:
        if not url.startswith(("http://", "https://")):
            yield Finding(path="engine.urls", found=f"{url}, which does not begin with http://")


def one_rank(facts: Facts) -> Iterable[Finding]:
    ranks = facts.values.get("engine.tensor_parallel", 1)
    if isinstance(ranks, int) and ranks > 1:
        yield Finding(path="engine.tensor_parallel", found=f"weights are to be verified over {ranks} ranks")


def no_min_p(facts: Facts) -> Iterable[Finding]:
    for path, value in facts.values.items():
        if path.endswith("sampling.min_p") and isinstance(value, int | float) and value > 0:
            yield Finding(path=path, found=f"min_p {value} with engine.deterministic")


def _urls(facts: Facts) -> tuple[Any, ...]:
    return tuple(facts.values.get("engine.urls") or ())
