"""Numbers on the command line that a forecast can compute with."""

from __future__ import annotations

import math
from typing import Any

import click


class Finite(click.FloatRange):
    """A range of floats without NaN and infinity, which `click.FloatRange` lets through."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number", param, ctx)
        return number
