"""Import the packages whose folders carry the same name before pytest derives module names from those folders.

In importlib mode pytest would otherwise register the folder `miles_core/` as the package `miles_core`.
"""

import miles_core  # noqa: F401
import miles_fsdp  # noqa: F401
import miles_megatron  # noqa: F401
import miles_transports  # noqa: F401
