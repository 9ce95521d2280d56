"""Ray executor for Miles: trainer ranks and engines as Ray actors."""

__version__ = "0.1.0"
