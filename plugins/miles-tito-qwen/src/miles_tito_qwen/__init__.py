"""Qwen token families for Miles."""

__version__ = "0.1.0"
