"""Rewards short answers."""
