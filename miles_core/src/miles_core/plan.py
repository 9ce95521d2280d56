"""What a run will do, computed from its run-file alone: who runs where, how much, how large. Takes no resources.

`miles train --dry-run` prints it; the run directory keeps it as plan.json.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from miles_core.config.checks_async import uncorrected
from miles_core.config.model_folder import ModelFolder, ModelFolderError, read_model_folder
from miles_core.config.resolve import Resolved, ResolvedRun
from miles_core.config.spec import RunSpec
from miles_core.machine import Host
from miles_core.numerics.profiles import RULES, find_profile
from miles_core.planning.memory import Planner
from miles_core.planning.sizes import read_sizes
from miles_core.registry import load_target

FLOAT32_BYTES = 4
PROMPT_TOKENS_GUESS = 512
"""Tokens assumed for a prompt where only its upper bound is known; shown as an assumption."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """One capability the run will load."""

    kind: str
    name: str
    distribution: str
    version: str
    load: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where one trainer rank or engine runs."""

    role: str
    """``trainer``, ``engine``, or ``eval engine`` of a dedicated fleet."""
    index: int
    process: str
    """``driver``, or ``its own``."""
    device: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Amounts:
    """Numbers of the run, most of them derived from several keys of the run-file."""

    mode: str
    in_flight: int
    """Trajectories under way at most."""
    max_weight_staleness: int | None
    steps: int
    optimizer_steps: int
    """Of the whole run, if no step is skipped."""
    groups_started: int
    """In the first wave of a step."""
    trajectories_per_step: int
    """That are trained on."""
    trajectories: int
    """Of the whole run."""
    sampled_tokens_per_step: int
    """At most, one completion per trajectory."""
    evaluations: int
    trajectories_per_evaluation: int
    checkpoints: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryItem:
    """One entry of the estimate."""

    role: str
    """``trainer`` or ``engine``: for each rank or replica."""
    what: str
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The whole plan."""

    name: str
    run_dir: str
    device: str
    host: Host
    model: str
    parameters: int | None
    components: tuple[Component, ...]
    places: tuple[Place, ...]
    amounts: Amounts
    memory: tuple[MemoryItem, ...]
    """Without activations of engines and the framework's own needs."""
    kernels: tuple[tuple[str, str], ...] = ()
    """What engine and trainer agree on with `precision.true_on_policy`: (what, how)."""
    notes: tuple[str, ...] = ()
    """What deserves a look before starting."""

    def as_json(self) -> dict[str, Any]:
        """For plan.json."""
        return asdict(self)

    def bytes_of(self, role: str) -> int:
        """Estimate for one trainer rank or one engine."""
        return sum(item.num_bytes for item in self.memory if item.role == role)


def derive_run_dir(spec: RunSpec) -> Path:
    """The directory a run writes into."""
    return Path(spec.tracking.dir) / spec.name


def make_plan(run: ResolvedRun, host: Host, *, held_out: int | None = None) -> Plan:
    """Plan a validated run for a machine; reads the model folder's config and tensor headers, nothing else.

    Args:
        run: The run.
        host: What it is to run on.
        held_out: Prompts there are to evaluate on, where somebody counted them.
    """
    spec = run.spec
    wanted = spec.placement.device
    device = wanted if wanted != "auto" else "cuda" if host.devices else "cpu"
    try:
        model = read_model_folder(Path(spec.model.path))
    except ModelFolderError:
        model = None  # validated before; it vanished since, and whoever loads it will say so
    amounts = _amounts(spec, held_out)
    plan = Plan(
        name=spec.name,
        run_dir=str(derive_run_dir(spec)),
        device=device,
        host=host,
        model=spec.model.path,
        parameters=model.parameters if model else None,
        components=_components(run),
        places=_places(run, device),
        amounts=amounts,
        memory=(*_trainer_memory(run, model), *_engine_memory(spec, model, amounts)) if model else (),
        kernels=_kernels(spec, model),
    )
    return _with_notes(plan, run)


def _components(run: ResolvedRun) -> tuple[Component, ...]:
    picks: list[Resolved] = [*run.one.values(), *(each for many in run.many.values() for each in many)]
    return tuple(
        Component(
            kind=pick.kind,
            name=pick.capability.name,
            distribution=pick.distribution,
            version=pick.version,
            load=pick.capability.load,
        )
        for pick in picks
    )


def _places(run: ResolvedRun, device: str) -> tuple[Place, ...]:
    placement = run.spec.placement
    own = "places-processes" in run.one["executor"].capability.provides
    process = "its own" if own else "driver"
    # Ranks come first; engines share their devices, or take the next ones.
    first_engine = 0 if placement.mode == "colocated" else placement.trainer_ranks
    ranks = [("trainer", index, index) for index in range(placement.trainer_ranks)]
    engines = [("engine", index, first_engine + index) for index in range(placement.engines)]
    fleet = range(placement.engines, placement.engines + (run.spec.eval.engines or 0))
    engines += [("eval engine", index, first_engine + index) for index in fleet]
    return tuple(
        Place(
            role=role, index=index, process=process, device=f"cuda:{slot if own else 0}" if device == "cuda" else "cpu"
        )
        for role, index, slot in [*ranks, *engines]
    )


def _amounts(spec: RunSpec, held_out: int | None) -> Amounts:
    schedule, every_eval, every_save = spec.schedule, spec.eval.every_steps, spec.checkpoint.every_steps
    per_step = schedule.groups_per_step * schedule.group_size
    prompts = spec.eval.prompts if held_out is None else min(spec.eval.prompts, held_out)
    groups_started = math.ceil(schedule.groups_per_step * spec.rollout.over_sample - 1e-9)
    return Amounts(
        mode=schedule.mode,
        in_flight=spec.max_in_flight,
        max_weight_staleness=schedule.max_weight_staleness,
        steps=schedule.steps,
        optimizer_steps=schedule.steps * schedule.minibatches,
        groups_started=groups_started,
        trajectories_per_step=per_step,
        trajectories=per_step * schedule.steps,
        sampled_tokens_per_step=groups_started * schedule.group_size * spec.rollout.sampling.max_tokens,
        evaluations=1 + math.ceil(schedule.steps / every_eval) if every_eval else 0,
        trajectories_per_evaluation=prompts * spec.eval.samples_per_prompt if every_eval else 0,
        checkpoints=math.ceil(schedule.steps / every_save) if every_save else 1,
    )


def _trainer_memory(run: ResolvedRun, model: ModelFolder) -> tuple[MemoryItem, ...]:
    """Of the fullest rank, as the backend divides what it holds; whole where the backend or the folder does not say."""
    reference = run.spec.objective.kl_coef > 0
    backend = run.one.get("backend")
    if backend is not None and backend.capability.memory is not None:
        planner: Planner = load_target(backend.capability.memory)
        try:
            sizes = read_sizes(model.path)
        except ModelFolderError:
            pass  # layers or widths of an architecture that names them otherwise
        else:
            rank = planner(backend.options, sizes, run.spec.placement.trainer_ranks, reference)
            return tuple(MemoryItem(role="trainer", what=item.what, num_bytes=item.num_bytes) for item in rank.items)
    whole = model.parameters * FLOAT32_BYTES
    items = [("float32 master weights", whole), ("float32 gradients", whole), ("AdamW moments", 2 * whole)]
    items += [("reference policy", model.stored_bytes)] if reference else []
    return tuple(
        MemoryItem(role="trainer", what=f"{what}, not divided as far as is known", num_bytes=num_bytes)
        for what, num_bytes in items
    )


def _engine_memory(spec: RunSpec, model: ModelFolder, amounts: Amounts) -> tuple[MemoryItem, ...]:
    items = [
        MemoryItem(role="engine", what="weights", num_bytes=model.stored_bytes),
        MemoryItem(role="engine", what="weights of the next version, while it arrives", num_bytes=model.stored_bytes),
    ]
    per_token = model.kv_bytes_per_token(_element_bytes(model))
    if per_token is not None:
        rows, tokens = _rows_per_engine(spec, amounts), _tokens_per_row(spec, model)
        what = f"keys and values of {rows} rows of {tokens} tokens"
        items.append(MemoryItem(role="engine", what=what, num_bytes=rows * tokens * per_token))
    return tuple(items)


def _element_bytes(model: ModelFolder) -> int:
    """Bytes of an element of the dtype that most parameters have."""
    return round(model.stored_bytes / model.parameters) if model.parameters else FLOAT32_BYTES


def _rows_per_engine(spec: RunSpec, amounts: Amounts) -> int:
    at_once = amounts.in_flight
    if spec.schedule.mode != "fully-async":
        at_once = min(at_once, amounts.groups_started * spec.schedule.group_size)
    return math.ceil(at_once / spec.placement.engines)


def _tokens_per_row(spec: RunSpec, model: ModelFolder) -> int:
    limit = spec.model.context_length or model.context_length
    likely = PROMPT_TOKENS_GUESS + spec.rollout.sampling.max_tokens
    return min(likely, limit) if limit else likely


def _kernels(spec: RunSpec, model: ModelFolder | None) -> tuple[tuple[str, str], ...]:
    if not spec.precision.true_on_policy or model is None:
        return ()
    return (("profile", str(find_profile(model.config))), *RULES)


def _with_notes(plan: Plan, run: ResolvedRun) -> Plan:
    notes: list[str] = []
    placement = run.spec.placement
    own = any(place.process == "its own" for place in plan.places)
    slots = len({place.device for place in plan.places})
    if plan.device == "cuda" and slots > plan.host.devices:
        notes.append(f"needs {slots} CUDA devices; this machine has {plan.host.devices}")
    if plan.device == "cuda" and placement.mode == "separate" and not own:
        notes.append("placement.mode is separate, but this executor puts everything on one device")
    if warning := uncorrected(run.spec):
        notes.append(warning)
    if run.spec.data and run.spec.data.eval and run.spec.eval.every_steps is None:
        notes.append("evaluation is off, so nothing reads data.eval")
    if "tito_family" not in run.one:
        notes.append("session.family is null: the one installed family that claims the checkpoint is taken at start")
    return replace(plan, notes=tuple(notes))


def _fit(plan: Plan) -> str:
    """What the estimate comes to beside what there is."""
    need, what = _need(plan), "this machine's main memory" if plan.device == "cpu" else "the memory of a device"
    limit = plan.host.memory_bytes if plan.device == "cpu" else plan.host.device_bytes
    if limit is None:
        return f"{show_bytes(need)} of {what}, which nobody told"
    verdict = "fits" if need <= limit else "DOES NOT FIT"
    return f"{show_bytes(need)} of {what}, {show_bytes(limit)}: {verdict}"


def _need(plan: Plan) -> int:
    """Bytes on the fullest device, or of all together on CPU."""
    on: dict[str, int] = {}
    for place in plan.places:
        on[place.device] = on.get(place.device, 0) + plan.bytes_of(place.role)
    return max(on.values(), default=0)


def show_bytes(count: int) -> str:
    """``1.2 GiB``"""
    value, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}"


def render(plan: Plan) -> str:
    """The plan for a terminal."""
    size = f"{plan.parameters / 1e6:,.1f} M parameters" if plan.parameters else "size unknown"
    loads = [
        (each.kind, each.name, f"{each.distribution} {each.version}".strip(), each.load) for each in plan.components
    ]
    memory = [(_ROLES[each.role], show_bytes(each.num_bytes), each.what) for each in plan.memory]
    memory += [(_ROLES[role], show_bytes(plan.bytes_of(role)), "together") for role in _ROLES if plan.memory]
    lines = [
        f"run      {plan.name} in {plan.run_dir}",
        f"model    {plan.model} ({size})",
        f"machine  {_host_text(plan.host)}; device {plan.device}",
        *_table("loads", loads),
        *_table("places", _place_rows(plan.places)),
        *_table("amounts", _amount_rows(plan.amounts)),
        *_table("memory estimate for full micro-batches, without activations of engines", memory),
        *(["  " + _fit(plan)] if memory else []),
        *_table("kernel contract of engine and trainer (true-on-policy)", plan.kernels),
        *_table("notes", [(note,) for note in plan.notes]),
    ]
    return "\n".join(lines)


_ROLES = {"trainer": "each trainer rank", "engine": "each engine"}


def _amount_rows(a: Amounts) -> list[tuple[str, str, str]]:
    rows = [
        ("steps", f"{a.steps:,}", f"{a.optimizer_steps:,} optimizer steps"),
        ("trajectories a step", f"{a.trajectories_per_step:,}", f"{a.trajectories:,} in all"),
        _under_way(a),
        ("sampled tokens a step", f"{a.sampled_tokens_per_step:,}", "at most, with one completion each"),
        ("checkpoints", f"{a.checkpoints:,}", ""),
    ]
    if a.evaluations:
        rows.append(("evaluations", f"{a.evaluations:,}", f"{a.trajectories_per_evaluation:,} trajectories each"))
    return rows


def _place_rows(places: Sequence[Place]) -> list[tuple[str, str, str]]:
    """A line for those of one role: they are on one device, or on one each in order."""
    rows = []
    for (role, process), group in itertools.groupby(places, key=lambda each: (each.role, each.process)):
        same = list(group)
        first, last = same[0], same[-1]
        name = f"{role} {first.index}" if first is last else f"{role}s {first.index} to {last.index}"
        devices = list(dict.fromkeys((first.device, last.device)))
        rows.append((name, " to ".join(devices), f"process: {process}"))
    return rows


def _under_way(a: Amounts) -> tuple[str, str, str]:
    if a.mode != "fully-async":
        return ("groups started a step", f"{a.groups_started:,}", f"in the first wave; {a.mode}")
    age = "any number of" if a.max_weight_staleness is None else f"at most {a.max_weight_staleness:,}"
    return ("trajectories in flight", f"{a.in_flight:,}", f"fully-async; trained {age} versions later")


def _host_text(host: Host) -> str:
    parts = [f"{host.cpus} CPUs"]
    if host.memory_bytes:
        parts.append(show_bytes(host.memory_bytes))
    if host.devices:
        each = f" of {show_bytes(host.device_bytes)}" if host.device_bytes else ""
        parts.append(f"{host.devices} CUDA devices{each}")
    return ", ".join(parts)


def _table(title: str, rows: Sequence[tuple[str, ...]]) -> list[str]:
    """A titled block of aligned columns; nothing when there are no rows."""
    if not rows:
        return []
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    body = ["  ".join([*map(str.ljust, row, widths), row[-1]]).rstrip() for row in rows]
    return ["", title, *(f"  {line}" for line in body)]
