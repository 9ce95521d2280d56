"""Executors that ship with core."""
