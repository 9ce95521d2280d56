"""What a diagnosis says of one contract."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One broken contract."""

    contract: str
    """tokens | routes | logprobs | versions"""
    cause: str
    """Short name of the likely cause."""
    since: int
    """First step (for versions in publishing: weight version) that shows it."""
    says: str
    """One sentence."""
    evidence: tuple[str, ...]
    try_: tuple[str, ...]
