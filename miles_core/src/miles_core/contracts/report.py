"""What a contract check says: its verdict, its numbers, and who broke it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class Verdict(StrEnum):
    OK = "ok"
    BROKEN = "broken"
    UNAVAILABLE = "unavailable"  # nothing was measured: the run does not record what the check needs
    NOT_APPLICABLE = "not_applicable"  # the model has nothing this contract speaks of


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One contract on one step.

    Example:
        Report(name="routes", status=Verdict.NOT_APPLICABLE)
    """

    name: str
    """tokens | routes | logprobs | versions"""
    status: Verdict
    metrics: dict[str, float] = field(default_factory=dict)
    """Declared names under ``contract/<name>/``; figures may be there where no verdict can be."""
    offenders: tuple[str, ...] = ()
    """What broke it, at most `MAX_OFFENDERS` lines, worst first."""

    @property
    def figures(self) -> dict[str, float]:
        """`metrics`, and whether there was anything to measure."""
        measured = self.status in (Verdict.OK, Verdict.BROKEN)
        return {**self.metrics, f"contract/{self.name}/available": float(measured)}


MAX_OFFENDERS = 8
