"""The seed of one turn, from the session's seed."""

from __future__ import annotations

import hashlib


def turn_seed(seed: int | None, generation: int) -> int | None:
    """Seed of a session's generation number `generation`; None stays None.

    The number counts committed generations, discarded ones included: a retried turn samples anew, while a turn whose
    engine call failed is repeated exactly. 48 bits, so that JSON readers and every engine hold it exactly.
    """
    if seed is None:
        return None
    return int.from_bytes(hashlib.blake2b(f"{seed}/{generation}".encode(), digest_size=6).digest(), "big")
