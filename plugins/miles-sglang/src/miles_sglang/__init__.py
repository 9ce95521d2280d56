"""SGLang servers as rollout engines and teachers."""

__version__ = "0.1.0"
