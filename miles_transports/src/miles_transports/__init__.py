"""Weight transports for Miles: inprocess and broadcast."""

__version__ = "0.1.0"
