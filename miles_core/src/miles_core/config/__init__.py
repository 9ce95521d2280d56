"""The run-file: its schema, loading, resolution against what is installed, and the report of everything wrong with it."""
