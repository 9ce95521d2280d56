"""Weights & Biases tracker for Miles."""

__version__ = "0.1.0"
