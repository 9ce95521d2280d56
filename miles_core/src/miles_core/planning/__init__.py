"""Models of cost, before anything is launched: memory of a rank, time of a weight update, overlap of a schedule."""
