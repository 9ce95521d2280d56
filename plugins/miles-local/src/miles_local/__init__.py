"""Embedded rollout engine for Miles: Hugging Face models with continuous batching."""

__version__ = "0.1.0"
