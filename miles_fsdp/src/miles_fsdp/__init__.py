"""PyTorch FSDP2 training backend for Miles."""

__version__ = "0.1.0"
