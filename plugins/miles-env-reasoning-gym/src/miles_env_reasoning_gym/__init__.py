"""reasoning-gym tasks as a Miles environment and reward."""

__version__ = "0.1.0"
