"""The training backend `megatron`."""

__version__ = "0.1.0"
