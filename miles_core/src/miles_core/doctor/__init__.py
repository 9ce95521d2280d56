"""A run, read for broken contracts: which one, since when, by what evidence, and what to try."""
