"""Takes prompts to scored groups of trajectories."""
