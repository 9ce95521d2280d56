"""The mathematics of the update, as pure tensor functions."""
