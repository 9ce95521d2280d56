"""Aligned text columns; the last one wraps under itself in a terminal and stays on one line in a pipe."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Callable, Sequence

_MIN_LAST_COLUMN = 24


def render(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    width: int | None = None,
    style: Callable[[int, str], str] | None = None,
) -> str:
    """Lay out rows under a header.

    Args:
        header: Column titles.
        rows: As many texts each.
        width: Characters of a line; None does not wrap.
        style: Decorates a padded cell, given column and text; must not change what is visible.
    """
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header) - 1)]
    indent = sum(widths) + 2 * len(widths)
    room = max(width - indent, _MIN_LAST_COLUMN) if width else None
    lines = []
    for number, row in enumerate((header, *rows)):
        cells = [text.ljust(widths[column]) for column, text in enumerate(row[:-1])]
        if style and number:
            cells = [style(column, cell) for column, cell in enumerate(cells)]
        last = textwrap.wrap(row[-1], room) if room else [" ".join(row[-1].split())]
        lines.append("  ".join([*cells, *last[:1]]).rstrip())
        lines += [" " * indent + more for more in last[1:]]
    return "\n".join(lines)


def terminal_width() -> int | None:
    """Columns of the terminal on stdout, or None when stdout is not one."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None
