"""Its import raises, as where a compiled extension is missing."""

import bar_cuda_that_is_not_there  # noqa: F401

MILES_API = 1
