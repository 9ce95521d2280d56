"""`python -m miles_core.cli` is `miles`."""

from miles_core.cli import main

main(prog_name="miles")
