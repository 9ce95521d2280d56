"""report.html: one self-contained page about a run. No script, no font, no image from elsewhere."""

from __future__ import annotations

import datetime
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from miles_core.contracts.tokens import MISMATCH_KINDS
from miles_core.report.inspect import Piece, pieces
from miles_core.report.load import RunRecord, load_run, quarters
from miles_core.report.plots import Series, line_chart, stacked_bars
from miles_core.tokenizer import ChatTokenizer
from miles_core.tracking.names import find
from miles_core.tracking.rollouts import RolloutRow
from miles_core.tracking.run_dir import RunDir
from miles_core.tracking.verdict import verdict_of_steps

SHOWN_TOKENS = 700
SHOWN_EVENTS = 40
PHASES = ("rollout", "log_probs", "train", "publish", "save", "eval")
"""In the order of a step, which is the order in the bar."""


def write_report(run: Path) -> Path:
    """Write report.html into the run directory and return its path.

    Raises:
        DataError: `run` is no run directory.
        RunError: the page could not be written.
    """
    page = render(load_run(run))
    RunDir(run).write_text("report.html", page)
    return run / "report.html"


def render(run: RunRecord) -> str:
    """The page."""
    style = resources.files("miles_core.report").joinpath("report.css").read_text(encoding="utf-8")
    body = "\n".join(part for part in _sections(run) if part)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(run.name)} – Miles</title>\n<style>\n{style}</style>\n</head>\n"
        f"<body>\n{body}\n</body>\n</html>\n"
    )


def _sections(run: RunRecord) -> Iterable[str]:
    yield _header(run)
    yield _contracts(run)
    yield _charts(run)
    yield _samples(run)
    yield _events(run)
    yield _details("Run-file, every default written out", f"<pre>{escape(run.config_text)}</pre>", run.config_text)
    yield _details("Machine and versions", _facts(_flat(run.environment)), run.environment)


# --- header -----------------------------------------------------------------------------------------------------------


def _header(run: RunRecord) -> str:
    started = next((event["time"] for event in run.events if event["event"] == "start"), None)
    ended = run.events[-1]["time"] if run.events else None
    last = next((event for event in reversed(run.events) if event["event"] in ("stop", "start")), None)
    outcome = "running or killed" if last is None or last["event"] == "start" else str(last.get("outcome", "stopped"))
    facts = {
        "steps": f"{run.steps} of {run.planned}",
        "model": Path(str((run.config.get("model") or {}).get("path", "?"))).name,
        "environment": _pick(run.config.get("environment")),
        "algorithm": f"{_pick(run.config.get('advantage'))}, {_pick(run.config.get('loss'))}",
        "seed": str(run.config.get("seed", "?")),
    }
    if started is not None and ended is not None:
        begun = datetime.datetime.fromtimestamp(started, tz=datetime.UTC)
        facts["started"] = f"{begun:%Y-%m-%d %H:%M} UTC"
        facts["wall clock"] = _duration(ended - started)
    items = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in facts.items())
    mark = {"finished": "good", "failed": "bad"}.get(outcome, "plain")
    return (
        f'<header><h1>{escape(run.name)} <span class="badge {mark}">{escape(outcome)}</span></h1>'
        f'<dl class="facts">{items}</dl>{_headline(run)}</header>'
    )


def summary(run: RunRecord) -> list[str]:
    """What one wants to know first, a sentence each: first against last quarter, first against last evaluation."""
    rewards = [value for _, value in run.series("rollout/reward_mean")]
    sentences = [run.cut_short] if run.cut_short else []
    if found := quarters(rewards):
        (first, first_error), (last, last_error) = found
        error = math.hypot(first_error, last_error)
        size = f"{(last - first) / error:+.1f} standard errors" if error > 0 else "no spread"
        sentences.append(
            f"Training reward, first to last quarter of the steps: {first:.3f} → {last:.3f} "
            f"({last - first:+.3f}, {size})."
        )
    held_out = run.series("eval/reward_mean")
    if len(held_out) > 1:
        (first_step, first), (last_step, last) = held_out[0], held_out[-1]
        errors = dict(run.series("eval/reward_stderr"))
        sentences.append(
            f"Held-out reward, step {first_step} to {last_step}: {first:.3f} → {last:.3f} "
            f"(standard errors {errors.get(first_step, 0):.3f} and {errors.get(last_step, 0):.3f})."
        )
    if skipped := {name.removeprefix("eval/skipped/"): len(run.series(name)) for name in run.names("eval/skipped/")}:
        reasons = ", ".join(f"{reason} {count}" for reason, count in skipped.items())
        sentences.append(f"Evaluations skipped: {sum(skipped.values())} ({reasons}).")
    if state := verdict_of_steps(run.metrics, run.timings):
        sentences.append(f"The run was {state.verdict}: {state.sentence}.")
    return sentences


def _headline(run: RunRecord) -> str:
    text = re.sub(r"(\S+ → \S+)", r"<b>\1</b>", escape(" ".join(summary(run))))
    return f'<p class="headline">{text}</p>' if text else ""


def _pick(value: Any) -> str:
    return str(value.get("use", "?")) if isinstance(value, Mapping) else str(value)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"


# --- contracts --------------------------------------------------------------------------------------------------------


def _contracts(run: RunRecord) -> str:
    broken: dict[str, list[Mapping[str, Any]]] = {}
    for event in run.events:
        if event["event"] == "contract_broken":
            broken.setdefault(str(event["contract"]), []).append(event)
    cards = []
    for name, title in (
        ("tokens", "Same tokens"),
        ("routes", "Same routes"),
        ("logprobs", "Same log-probs"),
        ("versions", "Known version"),
    ):
        verdict, text = _verdict(run, name, broken.get(name, []))
        cards.append(f'<div class="card {verdict}"><h3>{title}</h3><p>{text}</p></div>')
    return f'<section><h2>The four contracts</h2><div class="cards">{"".join(cards)}</div></section>'


def _verdict(run: RunRecord, name: str, broken: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """(css class, sentence) of a contract over the whole run."""

    def values(metric: str) -> list[float]:
        return [value for _, value in run.series(f"contract/{name}/{metric}")]

    if broken:
        offenders = broken[-1].get("offenders") or ["?"]
        return "bad", f"Broken on {len(broken)} steps, last {broken[-1].get('step')}: {escape(str(offenders[0]))}"
    if name == "tokens" and (rows := values("checked_trajectories")):
        held = f"Held for all {sum(rows):,.0f} trajectories, {sum(values('trained_tokens')):,.0f} trained tokens."
        return "good", held + _canonical(values)
    if name == "logprobs" and (means := values("abs_diff_mean")):
        return "good", (
            f"Mean difference {sum(means) / len(means):.2g} nats, worst step {max(means):.2g}, "
            f"worst token {max(values('abs_diff_max')):.2g}."
        )
    if name == "versions" and (oldest := values("s_old_max")):
        typical, proven = values("token_staleness"), 0.0 not in values("proven")
        age = f"Oldest token {max(oldest):.0f} versions behind, typical {sum(typical) / len(typical):.2g}."
        return ("good", age) if proven else ("plain", f"{age} Not proven: no weights.verify and no weights.probes.")
    if name == "routes" and (coverage := values("coverage")):
        different = values("different_fraction")
        most = f"; at most {max(different):.2%} of (token, layer) pairs went to other experts" if different else ""
        return "good", f"Routes cover {min(coverage):.0%} of the tokens on every step{most}."
    if name == "routes" and run.metrics:
        return "plain", "Not applicable: the model is dense, or its routes are not recorded."
    if name == "logprobs" and values("available"):
        return "plain", "Unavailable: the run takes the engine's log-probs as old policy and recomputes none."
    return "plain", "Not measured."


def _canonical(values: Callable[[str], list[float]]) -> str:
    """How rows differ from canonical rendering: sampled text may, anything else is the token family's doing."""
    if not values("mismatch_rate"):
        return ""
    worst = {kind: max(values(f"mismatch/{kind}"), default=0.0) for kind in MISMATCH_KINDS}
    odd = [f"{kind} in {share:.0%}" for kind, share in worst.items() if share and kind != "assistant_text"]
    if odd:
        return f" Unlike canonical rendering, in the worst step: {', '.join(odd)} of the rows; see `miles inspect`."
    return f" Only sampled text differs from canonical rendering (at most {worst['assistant_text']:.0%} of the rows)."


# --- charts -----------------------------------------------------------------------------------------------------------


def _charts(run: RunRecord) -> str:
    def lines(title: str, help_of: str, **named: str) -> str:
        """A card of metrics by label; a label ending in ``_smooth`` gets a running mean."""
        series = [
            Series(
                label=label.removesuffix("_smooth").replace("_", " "),
                points=run.series(name),
                smooth="_smooth" in label,
            )
            for label, name in named.items()
        ]
        return _chart(title, help_of, line_chart(title, series))

    cards = [
        _reward_chart(run),
        lines(
            "Response length",
            "rollout/response_tokens_mean",
            mean_smooth="rollout/response_tokens_mean",
            longest="rollout/response_tokens_max",
        ),
        lines("Entropy", "train/entropy", entropy_smooth="train/entropy"),
        lines("KL within the step", "train/approx_kl", approx_KL_smooth="train/approx_kl"),
        lines("KL to the initial policy", "train/kl", KL_smooth="train/kl"),
        lines(
            "Mismatch of trainer and rollout",
            "contract/logprobs/abs_diff_mean",
            mean="contract/logprobs/abs_diff_mean",
            KL_k3="contract/logprobs/kl_k3",
        ),
        lines(
            "Experts that differ",
            "contract/routes/different_fraction",
            used="contract/routes/different_fraction",
            own_choice="contract/routes/own_different_fraction",
        ),
        lines("Largest mismatch", "contract/logprobs/abs_diff_max", worst_token="contract/logprobs/abs_diff_max"),
        lines(
            "Staleness",
            "contract/versions/s_old_max",
            oldest_token="contract/versions/s_old_max",
            typical_token="contract/versions/token_staleness",
        ),
        lines(
            "Clipped tokens",
            "train/clip_fraction_high",
            upper_bound="train/clip_fraction_high",
            lower_bound="train/clip_fraction_low",
        ),
        lines("Gradient norm", "train/grad_norm", norm_smooth="train/grad_norm"),
        lines("Learning rate", "train/lr", rate="train/lr"),
        lines(
            "Groups without signal",
            "rollout/groups_zero_std",
            equal_rewards="rollout/groups_zero_std",
            accepted="rollout/groups_accepted",
        ),
        lines("Cut by length", "rollout/truncated_fraction", truncated_smooth="rollout/truncated_fraction"),
        _phase_chart(run),
        _throughput_chart(run),
    ]
    shown = "".join(cards)
    if not shown:
        return '<section><h2>Curves</h2><p class="empty">No step was recorded.</p></section>'
    return f'<section><h2>Curves over the steps</h2><div class="charts">{shown}</div></section>'


def _reward_chart(run: RunRecord) -> str:
    errors = dict(run.series("eval/reward_stderr"))
    held_out = run.series("eval/reward_mean")
    series = [
        Series(label="training", points=run.series("rollout/reward_mean"), smooth=True),
        Series(label="held out", points=held_out, dots=True, errors=[errors.get(step, 0.0) for step, _ in held_out]),
    ]
    return _chart("Reward", "rollout/reward_mean", line_chart("Reward", series))


def _phase_chart(run: RunRecord) -> str:
    recorded = run.names("time/", clock=True)
    known = [f"time/{phase}_s" for phase in PHASES]
    others = [name for name in recorded if name not in (*known, "time/step_s", "time/start_s")]
    series = [
        Series(
            label=name.removeprefix("time/").removesuffix("_s").replace("_", " "),
            points=[(step, value) for step, value in run.series(name, clock=True) if step > 0],
        )
        for name in [*known, *others]
    ]
    return _chart("Seconds by phase", "time/{phase}_s", stacked_bars("Seconds by phase", "s", series))


def _throughput_chart(run: RunRecord) -> str:
    series = [
        Series(label=label, points=run.series(f"throughput/{name}_tokens_per_s", clock=True))
        for label, name in (("rollout", "rollout"), ("training", "train"))
    ]
    return _chart("Throughput", "throughput/rollout_tokens_per_s", line_chart("Throughput", series))


def _chart(title: str, metric: str, svg: str) -> str:
    if not svg:
        return ""
    found = find(metric)
    about = f"<figcaption>{escape(found.help)}</figcaption>" if found else ""
    unit = f" <small>{escape(found.unit)}</small>" if found and found.unit != title.lower() else ""
    return f"<figure><h3>{escape(title)}{unit}</h3>{svg}{about}</figure>"


# --- trajectories -----------------------------------------------------------------------------------------------------


def _samples(run: RunRecord) -> str:
    if not run.rollout_steps:
        return ""
    step = run.rollout_steps[-1]
    scored = sorted((row for row in run.rollouts(step) if row.reward is not None), key=lambda row: -(row.reward or 0.0))
    if not scored:
        return ""
    chosen = {"best": scored[0], "middle": scored[len(scored) // 2], "worst": scored[-1]}
    shown = {row.sample: (word, row) for word, row in reversed(chosen.items())}
    cards = "".join(_sample(word, row, run.tokenizer) for word, row in reversed(shown.values()))
    legend = (
        '<p class="legend"><span class="given">given</span><span class="t0">trained, ≤ 0.01</span>'
        '<span class="t1">≤ 0.1</span><span class="t2">≤ 0.5</span><span class="t3">&gt; 0.5 nats apart</span>'
        '<span class="tx">sampled, not scored</span></p>'
    )
    return f"<section><h2>Trajectories of step {step}</h2>{legend}{cards}</section>"


def _sample(word: str, row: RolloutRow, tokenizer: ChatTokenizer | None) -> str:
    versions = sorted({int(version) for version in row.versions if version >= 0})
    facts = f"reward {row.reward:.3g}, {row.status}, {int((row.versions >= 0).sum())} tokens, version " + (
        "–".join(map(str, dict.fromkeys((versions[0], versions[-1])))) if versions else "none"
    )
    found = pieces(row, tokenizer)
    shown = found if len(found) <= SHOWN_TOKENS else found[:SHOWN_TOKENS]
    tokens = "".join(_token(piece, row) for piece in shown)
    rest = f" <em>… {len(found) - len(shown)} more tokens</em>" if len(shown) < len(found) else ""
    return (
        f"<article><h3>{word} <small>sample {row.sample}, {escape(facts)}</small></h3>"
        f'<p class="tokens">{tokens}{rest}</p></article>'
    )


def _token(piece: Piece, row: RolloutRow) -> str:
    text = escape(piece.text)
    if not piece.sampled:
        return text if not text.strip() else f'<span class="given">{text}</span>'
    if not piece.trained or math.isnan(piece.log_ratio):
        return f'<span class="tx">{text}</span>'
    level = sum(abs(piece.log_ratio) > limit for limit in (0.01, 0.1, 0.5))
    at = piece.position
    says = f"rollout {row.logprobs[at]:.4f}, trainer {row.old_logprobs[at]:.4f}, version {piece.version}"
    return f'<span class="t{level}" title="{says}">{text}</span>'


# --- events and details -----------------------------------------------------------------------------------------------


def _events(run: RunRecord) -> str:
    if not run.events:
        return ""
    begun = float(run.events[0]["time"])
    loud = [event for event in run.events if event["event"] not in ("publish", "save", "placed", "prompts")]
    rows = []
    for event in loud[-SHOWN_EVENTS:]:
        facts = ", ".join(f"{k} {_short(v)}" for k, v in event.items() if k not in ("time", "event"))
        bad = " class=bad" if event["event"] in ("alarm", "error", "contract_broken", "stall", "tracker_off") else ""
        rows.append(
            f"<tr{bad}><td>{_duration(float(event['time']) - begun)}</td><td>{escape(str(event['event']))}</td>"
            f"<td>{escape(facts)}</td></tr>"
        )
    counts = {kind: sum(event["event"] == kind for event in run.events) for kind in ("publish", "save")}
    note = f"<p>{counts['publish']} weight versions published, {counts['save']} checkpoints saved.</p>"
    table = f'<div class="scroll"><table><tr><th>after</th><th>event</th><th></th></tr>{"".join(rows)}</table></div>'
    return f"<section><h2>Events</h2>{note}{table}</section>"


def _short(value: Any) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 300 else text[:300] + "…"


def _details(title: str, body: str, content: object) -> str:
    return f"<details><summary>{escape(title)}</summary>{body}</details>" if content else ""


def _facts(items: Mapping[str, str]) -> str:
    rows = "".join(f"<tr><td>{escape(name)}</td><td>{escape(value)}</td></tr>" for name, value in items.items())
    return f'<div class="scroll"><table>{rows}</table></div>'


def _flat(value: Mapping[str, Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, item in value.items():
        if isinstance(item, Mapping):
            found |= {f"{name}.{key}": text for key, text in _flat(item).items()}
        else:
            found[name] = ", ".join(map(str, item)) if isinstance(item, list) else str(item)
    return found
