"""The miles command."""
