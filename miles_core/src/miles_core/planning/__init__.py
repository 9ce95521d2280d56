"""Models of cost, made before anything is launched: memory of a rank, time of a weight update, overlap of a schedule."""
