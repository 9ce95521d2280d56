"""What a run writes while it goes."""
