"""Weight transports for Miles: inside a process, on a GPU, between hosts, over storage."""

__version__ = "0.1.0"
