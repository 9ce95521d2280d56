"""The training loops, their stages, and all that opens, saves and repairs a run."""
