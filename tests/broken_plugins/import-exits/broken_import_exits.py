"""Its import ends the process."""

import sys

MILES_API = 1
sys.exit(3)
