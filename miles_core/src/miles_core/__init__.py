"""Miles core: the loop, the four contracts, and the plugin framework."""

__version__ = "0.1.0"
