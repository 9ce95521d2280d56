"""The run-file: its schema, loading, resolution against what is installed, and the report of what is wrong with it."""
