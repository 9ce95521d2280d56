"""What of engine `sglang`'s options nothing would read, or no server could do; checked before anything starts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from miles_core.rules import Facts, Finding
from miles_sglang.options import SglangOptions

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
