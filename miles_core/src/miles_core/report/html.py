"""report.html of a run."""

from __future__ import annotations

from pathlib import Path


def write_report(run_dir: Path) -> Path:
    """Write ``report.html`` into the run directory and return its path."""
    target = run_dir / "report.html"
    target.write_text(f"<!doctype html><title>{run_dir.name}</title><h1>{run_dir.name}</h1>\n")
    return target
