"""Trajectories for the terminal: one token by token, or all of a step as a table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from miles_core.report.load import RunRecord
from miles_core.tokenizer import ChatTokenizer
from miles_core.tracking.live import CONTRACTS
from miles_core.tracking.rollouts import RolloutRow

LEVELS = ((0.01, "green"), (0.1, "yellow"), (0.5, "dark_orange"), (math.inf, "bold red"))
"""|trainer - rollout log-prob| in nats, up to which a trained token has the colour."""
UNKNOWN = "cyan"
GIVEN = "dim"
WORST = 8


@dataclass(frozen=True, slots=True)
class Piece:
    """One token as shown."""

    text: str
    """What became visible with it; empty for a token that only begins a character."""
    position: int
    trained: bool
    sampled: bool
    log_ratio: float
    """NaN where unknown"""
    version: int


def pieces(row: RolloutRow, tokenizer: ChatTokenizer | None) -> list[Piece]:
    """The tokens of a row with their texts; ids in angle brackets without a tokenizer."""
    if tokenizer is None:
        texts = [f"<{token}>" for token in row.token_ids]
    else:
        stream = tokenizer.text_stream()
        texts = [stream.push([int(token)]) for token in row.token_ids]
        if texts:
            texts[-1] += stream.flush()
    ratios = row.log_ratio
    return [
        Piece(text, at, bool(row.loss_mask[at]), row.versions[at] >= 0, float(ratios[at]), int(row.versions[at]))
        for at, text in enumerate(texts)
    ]


def style(piece: Piece) -> str:
    """Dim where the model did not write, cyan where the trainer's log-prob is unknown, else by the mismatch."""
    if not piece.sampled:
        return GIVEN
    if not piece.trained or math.isnan(piece.log_ratio):
        return UNKNOWN
    return next(colour for limit, colour in LEVELS if abs(piece.log_ratio) <= limit)


def token_view(row: RolloutRow, tokenizer: ChatTokenizer | None) -> Text:
    """The row as text, each token in its colour, with a mark where another weight version takes over."""
    text = Text()
    version = -1
    for piece in pieces(row, tokenizer):
        if piece.sampled and piece.version != version:
            version = piece.version
            text.append(f"⟦v{version}⟧", style="reverse dim")
        text.append(piece.text, style=style(piece))
    return text


def legend() -> Text:
    text = Text("given", style=GIVEN)
    text.append("  sampled, not trained or not scored", style=UNKNOWN)
    for limit, colour in LEVELS:
        text.append(f"  ≤ {limit:g}" if math.isfinite(limit) else f"  > {LEVELS[-2][0]:g}", style=colour)
    text.append("  nats between trainer and rollout", style="dim")
    return text


def trajectory_view(row: RolloutRow, tokenizer: ChatTokenizer | None) -> RenderableType:
    """Facts, tokens and the tokens that differ most."""
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim")
    facts.add_column(overflow="fold")
    facts.add_row("step, sample", f"{row.step}, {row.sample} (group {row.group})")
    facts.add_row("prompt", escape(row.prompt_id))
    facts.add_row("session", escape(row.session_id))
    facts.add_row("status", escape(row.status + (f": {row.failure}" if row.failure else "")))
    facts.add_row("reward", "none" if row.reward is None else f"{row.reward:.4g}")
    for name, value in row.metadata.items():
        facts.add_row(escape(name), escape(str(value)))
    sampled = int((row.versions >= 0).sum())
    facts.add_row("tokens", f"{len(row.token_ids)}, {sampled} sampled, {int(row.loss_mask.sum())} trained")
    facts.add_row("temperature", f"{row.temperature:g}")
    known = np.abs(row.log_ratio[np.isfinite(row.log_ratio)])
    if known.size:
        facts.add_row("mismatch", f"mean {known.mean():.3g}, max {known.max():.3g} nats")
    return Group(facts, Text(), legend(), Text(), token_view(row, tokenizer), Text(), _worst(row, tokenizer))


def _worst(row: RolloutRow, tokenizer: ChatTokenizer | None) -> RenderableType:
    found = [piece for piece in pieces(row, tokenizer) if piece.trained and math.isfinite(piece.log_ratio)]
    found.sort(key=lambda piece: -abs(piece.log_ratio))
    if not found or found[0].log_ratio == 0:
        return Text("no trained token differs between trainer and rollout", style="dim")
    table = Table("position", "token", "text", "rollout", "trainer", "ratio", "version", title="largest differences")
    for piece in found[:WORST]:
        at = piece.position
        table.add_row(
            str(at),
            str(row.token_ids[at]),
            escape(repr(piece.text)),
            f"{row.logprobs[at]:.4f}",
            f"{row.old_logprobs[at]:.4f}",
            Text(f"{math.exp(min(piece.log_ratio, 50.0)):.4g}", style=style(piece)),
            str(piece.version),
        )
    return table


def summary_rows(rows: Sequence[RolloutRow]) -> list[dict[str, object]]:
    """One JSON-compatible object per trajectory, for the table and for ``--json``."""
    found: list[dict[str, object]] = []
    for row in rows:
        known = np.abs(row.log_ratio[np.isfinite(row.log_ratio)])
        versions = row.versions[row.versions >= 0]
        found.append(
            {
                "sample": row.sample,
                "group": row.group,
                "prompt": row.prompt_id,
                "status": row.status,
                "failure": row.failure,
                "reward": row.reward,
                "tokens": len(row.token_ids),
                "sampled": int(versions.size),
                "mismatch_mean": float(known.mean()) if known.size else None,
                "mismatch_max": float(known.max()) if known.size else None,
                "versions": sorted({int(version) for version in versions}),
                "text": row.text,
            }
        )
    return found


def summary_table(rows: Sequence[RolloutRow]) -> Table:
    """All trajectories of a step, one a line."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for heading in ("sample", "group", "status", "reward", "tokens", "mean |d|", "max |d|", "version"):
        table.add_column(heading, no_wrap=True)
    table.add_column("text", ratio=1)
    for item in summary_rows(rows):
        versions = item["versions"]
        assert isinstance(versions, list)
        table.add_row(
            str(item["sample"]),
            str(item["group"]),
            str(item["status"]),
            _number(item["reward"]),
            str(item["sampled"]),
            _number(item["mismatch_mean"]),
            _number(item["mismatch_max"]),
            "-".join(map(str, dict.fromkeys((versions[0], versions[-1])))) if versions else "",
            Text(" ".join(str(item["text"] or item["failure"] or "").split()), overflow="ellipsis", no_wrap=True),
        )
    return table


def _number(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else ""


def contracts_view(record: RunRecord, step: int) -> RenderableType:
    """What the four contracts measured on a step, one a line."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    for contract in CONTRACTS:
        table.add_row(contract, record.reading(contract, step))
    return table


def show(console: Console, record: RunRecord, step: int, sample: int | None, tokenizer: ChatTokenizer | None) -> None:
    """Print where the run was cut short, then the contracts of the step and its table, or the trajectory `sample`."""
    rows = record.rollouts(step)
    if record.cut_short:
        console.print(Text(f"{record.cut_short}\n", style="yellow"))
    if sample is None:
        console.print(Group(contracts_view(record, step), Text(), summary_table(rows)))
    else:
        console.print(trajectory_view(rows[sample], tokenizer))
