"""Reading runs."""
