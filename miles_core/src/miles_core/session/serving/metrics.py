"""Counters of a session server in Prometheus' text format."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

Labels = tuple[tuple[str, str], ...]

HELP: Mapping[str, tuple[str, str]] = {
    "miles_sessions_open": ("gauge", "Open sessions"),
    "miles_session_bytes": ("gauge", "Rows and messages of open sessions, about"),
    "miles_requests_in_flight": ("gauge", "Turns being generated"),
    "miles_sessions_created_total": ("counter", "Sessions created, or restored from the journal"),
    "miles_sessions_closed_total": ("counter", "Sessions closed, by reason"),
    "miles_requests_total": ("counter", "Requests answered, by protocol and status"),
    "miles_request_seconds_total": ("counter", "Time from request to last byte, by protocol"),
    "miles_clients_gone_total": ("counter", "Turns aborted because their client went away"),
    "miles_turns_total": ("counter", "Turns committed, by finish reason"),
    "miles_prompt_tokens_total": ("counter", "Prompt tokens of committed turns"),
    "miles_cached_tokens_total": ("counter", "Prompt tokens whose KV was reused"),
    "miles_sampled_tokens_total": ("counter", "Sampled tokens of committed turns"),
    "miles_overridden_fields_total": ("counter", "Sampling fields of agents that the session's own replaced"),
    "miles_samples_total": ("counter", "Trajectories collected, by status"),
    "miles_tito_session_mismatch_total": ("counter", "Differences from canonical rendering, by family and kind"),
    "miles_tito_session_checked_total": ("counter", "Trajectories compared with their canonical rendering, by family"),
}


@dataclass(slots=True)
class ServerMetrics:
    values: Counter[tuple[str, Labels]] = field(default_factory=Counter)

    def add(self, name: str, value: float = 1, **labels: str) -> None:
        assert name in HELP, name
        self.values[name, tuple(sorted(labels.items()))] += value  # type: ignore[assignment]

    def get(self, name: str, **labels: str) -> float:
        """The sum over all series that have these labels."""
        wanted = set(labels.items())
        return sum(value for (found, having), value in self.values.items() if found == name and wanted <= set(having))

    def render(self, gauges: Mapping[str, float]) -> str:
        """The page of metrics; the caller gives the gauges."""
        lines: list[str] = []
        for name, (kind, text) in HELP.items():
            lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
            lines += [f"{name} {gauges[name]:g}"] if name in gauges else list(self._series(name))
        return "\n".join(lines) + "\n"

    def _series(self, name: str) -> Iterator[str]:
        found = [(labels, value) for (each, labels), value in self.values.items() if each == name]
        for labels, value in sorted(found):
            spelled = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels)
            yield f"{name}{{{spelled}}} {value:.17g}" if spelled else f"{name} {value:.17g}"
        if not found:
            yield f"{name} 0"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
