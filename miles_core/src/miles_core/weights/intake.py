"""Decides what an engine accepts as a weight version: exactly the expected tensors, each once, in buckets that come in
order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from miles_core.errors import EngineError
from miles_core.types import WeightBucket
from miles_core.weights.digests import name_some

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Form:
    """The dtype and shape that a tensor must have."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype} {self.shape}"


class Intake:
    """Checks the buckets of one version as they arrive. It holds no tensor.

    Args:
        version: The version to come.
        expected: Every tensor of the model by its Hugging Face name.
        where: The name of the engine, for errors.
    """

    def __init__(self, version: int, expected: Mapping[str, Form], where: str) -> None:
        self.version = version
        self._expected = expected
        self._where = where
        self._seen: set[str] = set()
        self._buckets = 0
        self._last = False

    def admit(self, bucket: WeightBucket) -> None:
        """Check the next bucket before anything is done with it.

        Raises:
            EngineError: it is out of order, or one of its tensors is unknown, has come before, or has another dtype or
                shape.
        """
        if bucket.version != self.version or bucket.index != self._buckets or self._last:
            raise self._error(
                "buckets came out of order",
                expected=f"bucket {self._buckets} of version {self.version}" if not self._last else "no more buckets",
                found=f"bucket {bucket.index} of version {bucket.version}",
            )
        self._buckets += 1
        self._last = bucket.last
        for named in bucket.tensors:
            self._check(named.name, Form(named.tensor.dtype, tuple(named.tensor.shape)))
            self._seen.add(named.name)

    def finish(self) -> None:
        """Check that nothing is missing, once the sender has finished.

        Raises:
            EngineError: tensors are missing, or no bucket was marked last.
        """
        missing = [name for name in self._expected if name not in self._seen]
        if missing or not self._last:
            raise self._error(
                f"{len(missing)} of {len(self._expected)} tensors are missing",
                expected="every tensor of the model, and a bucket marked last",
                found=f"{self._buckets} buckets without {name_some(missing)}" if missing else "no last bucket",
            )

    def _check(self, name: str, found: Form) -> None:
        form = self._expected.get(name)
        if form is None:
            close = name_some(sorted(self._expected)[:3])
            raise self._error(f"tensor {name} is unknown", expected=f"names such as {close}", found=name)
        if name in self._seen:
            raise self._error(f"tensor {name} was sent twice", expected="every tensor once", found=name)
        if found != form:
            raise self._error(f"tensor {name} does not fit", expected=str(form), found=str(found))

    def _error(self, message: str, *, expected: str, found: str) -> EngineError:
        return EngineError(
            f"weight version {self.version} was refused: {message}",
            expected=expected,
            found=found,
            where=self._where,
            do="compare the names, shapes and dtypes the backend exports with the served checkpoint's; "
            "the engine goes on serving the version it had",
        )
