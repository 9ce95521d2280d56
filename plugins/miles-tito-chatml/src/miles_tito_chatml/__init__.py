"""ChatML token family for Miles (SmolLM2 and relatives)."""

__version__ = "0.1.0"
