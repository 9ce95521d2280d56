"""What only opening a part tells, found before a run: the data's first rows, and the token family on its tokenizer.

For `miles validate` and `miles train`, as `config.resolve.Look`. Loads no weights, and no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from miles_core.config.checks import Found
from miles_core.config.resolve import ResolvedRun
from miles_core.config.spec import DataSpec
from miles_core.data.readers import read_prompts
from miles_core.data.rows import Split
from miles_core.data.source import columns_of
from miles_core.driver.families import pick_family
from miles_core.errors import MilesError
from miles_core.machine import count_devices
from miles_core.plan import Plan
from miles_core.registry import Registry
from miles_core.tokenizer import ChatTokenizer

ROWS = 100
"""Rows that are read of each split."""


def first_look(run: ResolvedRun, registry: Registry, *, warn: Callable[[str], None]) -> Iterator[Found]:
    """Everything that the start of the run would fail on.

    Args:
        warn: Told what the start of the run would warn of.
    """
    _device(run, warn)
    data = run.spec.data
    if data is not None:
        yield from _rows(data, "train", data.train)
        if data.eval is not None and run.spec.eval.every_steps is not None:
            yield from _rows(data, "eval", data.eval)
    try:
        tokenizer = ChatTokenizer.from_dir(run.spec.model.path)
    except MilesError as error:
        yield _found("MIL702", "model.path", error)
    else:
        yield from _family(run, registry, tokenizer, warn)


def held_out(run: ResolvedRun) -> int | None:
    """Prompts that an evaluation finds in `data`, counted as far as it needs; None where only the run will know."""
    data = run.spec.data
    if data is None or data.eval is None or run.spec.eval.every_steps is None:
        return None
    first = run.spec.eval.prompts
    prompts, problems = read_prompts(
        data.eval, columns=columns_of(data), split="eval", bad_rows=data.bad_rows, first=first
    )
    return None if problems else len(prompts)


def _device(run: ResolvedRun, warn: Callable[[str], None]) -> None:
    """A run-file may be meant for another machine, and processes of their own may be placed on one."""
    own = "places-processes" in run.one["executor"].capability.provides
    if run.spec.placement.device == "cuda" and not own and not count_devices():
        warn(
            "placement.device is cuda, and no device file of NVIDIA's is here: unless torch sees a device, "
            "`miles train` refuses"
        )


def require_device(plan: Plan) -> None:
    """Refuse a run of this process on CUDA where there is none, before anything is opened. What other processes find
    is theirs to say: they may be on other hosts.

    Raises:
        ConfigError: `placement.device` is cuda, and neither device files nor torch know of one.
    """
    if not plan.host.devices and not any(place.process == "its own" for place in plan.places):
        from miles_core.executors.inprocess import require_cuda

        require_cuda(plan.device)  # a device file is not everywhere where a device is


def _rows(data: DataSpec, split: Split, path: str) -> Iterator[Found]:
    try:
        read_prompts(path, columns=columns_of(data), split=split, bad_rows=data.bad_rows, first=ROWS)
    except (MilesError, OSError) as error:
        yield _found("MIL706", f"data.{split}", error)


def _family(
    run: ResolvedRun, registry: Registry, tokenizer: ChatTokenizer, warn: Callable[[str], None]
) -> Iterator[Found]:
    try:
        pick_family(run, registry, tokenizer, warn=warn)
    except Exception as error:  # noqa: BLE001 - a plugin's own code, which would end the run in the same way
        yield _found("MIL707", "session.family", error)


def _found(id: str, path: str, error: Exception) -> Found:
    if not isinstance(error, MilesError):
        return Found(id=id, path=path, message=f"{type(error).__name__}: {error}", do="tell whoever wrote it")
    found = (error.found or "").partition("\n")[0]  # of many rows, the first
    parts = (error.message, error.expected and f"expected {error.expected}", found)
    return Found(id=id, path=path, message="; ".join(filter(None, parts)), do=error.do or "correct it", reads=(path,))
