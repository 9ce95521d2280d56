"""What each release of SGLang can do: the versions this plugin was tested with, and how the others differ."""

from __future__ import annotations

from dataclasses import dataclass

from packaging.version import InvalidVersion, Version

from miles_core.errors import EngineError

TESTED = (Version("0.5.17"), Version("0.5.21"), Version("0.5.23"))
"""Releases that this plugin was run against; the README says how far. Others are negotiated by their number."""


@dataclass(frozen=True, slots=True)
class Feature:
    """Something the adapter uses where it is there."""

    since: Version
    lacking: str
    """What happens without it."""


FEATURES = {
    "version-spans": Feature(
        Version("0.5.19"), "in-place pauses are refused: no reply tells which weights made a token"
    ),
    "ready-route": Feature(Version("0.5.20"), "readiness is asked for with a health check that generates a token"),
    "update-sessions": Feature(Version("0.5.21"), "weights are loaded without a session around them"),
    "safe-retract": Feature(
        Version("0.5.21"), "a pause aborts requests and sends them again: retracting and flushing ends such a server"
    ),
}


@dataclass(frozen=True, slots=True)
class Dialect:
    """How to talk to one server."""

    version: Version

    @classmethod
    def of(cls, text: str, where: str) -> Dialect:
        """Read the version a server reports.

        Raises:
            EngineError: no version, or one too old to serve safely.
        """
        try:
            version = Version(text)
        except InvalidVersion as error:
            raise EngineError("the server does not say its version", found=text, where=where) from error
        if version < TESTED[0]:
            raise EngineError(
                "this SGLang is too old",
                expected=f"sglang from {TESTED[0]} to {TESTED[-1]}",
                found=f"sglang {version}",
                where=where,
                do="upgrade the server's environment",
            )
        return cls(version)

    def has(self, feature: str) -> bool:
        return self.version >= FEATURES[feature].since

    def remarks(self) -> list[str]:
        """What a user of this version should know, one sentence each."""
        lines = [f"{name} came with {f.since}: {f.lacking}" for name, f in FEATURES.items() if not self.has(name)]
        if self.version not in TESTED:
            lines.insert(0, f"not one of the releases that were tested, {', '.join(map(str, TESTED))}")
        return lines
