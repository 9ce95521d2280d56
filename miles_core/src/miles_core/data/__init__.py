"""Prompts: readers, order, exact resume."""
