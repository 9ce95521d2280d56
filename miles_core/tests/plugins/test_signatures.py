"""The shape check: what has the wrong names, arguments or colour is told so without being called."""

from __future__ import annotations

import pytest

from miles_core.capability import KINDS
from miles_core.signatures import CONSTRUCTED_WITH, OBJECT_KINDS, faults, protocol_of


class Sound:
    def __init__(self, options):
        self.options = options

    async def open(self, source, engines):
        return None

    async def publish(self, version):
        return None

    async def close(self):
        return None


class WithoutClose(Sound):
    close = None


class Colour(Sound):
    def publish(self, version):
        return None


class Arguments(Sound):
    async def open(self, source):
        return None


class Constructor(Sound):
    def __init__(self):
        pass


def test_a_sound_class_has_no_fault():
    assert faults("transport", Sound) == []


@pytest.mark.parametrize(
    ("target", "fault"),
    [
        (WithoutClose, "has no method `close`"),
        (Colour, "`publish` must be async"),
        (Arguments, "`open` cannot be called as the protocol does: too many positional arguments"),
        (Constructor, "cannot be created as Constructor(options)"),
        (lambda options: None, "transport must be a class"),
    ],
)
def test_a_class_of_another_shape_is_told_what_differs(target, fault):
    (found,) = faults("transport", target)
    assert fault in found


@pytest.mark.parametrize(
    ("kind", "target", "options", "fault"),
    [
        ("matcher", lambda stored: True, (), "cannot be called as (stored, replayed): too many"),
        ("loss", lambda inputs, *, low: 0, (), "missing a required"),
        ("loss", lambda inputs, *, low: 0, ("low", "high"), "unexpected keyword argument 'high'"),
        ("correction", lambda ratio, mask: 0, (), "(log_ratio, mask, sequence_ids)"),
        ("filter", Sound, (), "filter must be a function"),
        ("reward", 3, (), "reward must be a function"),
    ],
)
def test_a_function_of_another_shape_is_told_what_differs(kind, target, options, fault):
    (found,) = faults(kind, target, options)
    assert fault in found


async def _score(scored):
    return 0.0


def test_only_rewards_may_be_async_functions():
    assert faults("reward", _score) == []
    assert faults("filter", _score) == ["filter must be a plain function, found an async one"]


def test_options_arrive_as_keyword_arguments():
    assert faults("loss", lambda inputs, low=0.2: 0, ("low",)) == []
    assert faults("loss", lambda inputs, **options: 0, ("low",)) == []


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_a_protocol_and_is_either_class_function_or_object(kind):
    protocol = protocol_of(kind)
    assert (kind in CONSTRUCTED_WITH) + ("__call__" in vars(protocol)) + (kind in OBJECT_KINDS) == 1


@pytest.mark.parametrize("kind", CONSTRUCTED_WITH)
def test_an_empty_class_misses_every_method_of_its_protocol(kind):
    wanted = [name for name, value in vars(protocol_of(kind)).items() if not name.startswith("_") and callable(value)]
    empty = type("Empty", (), {"__init__": lambda self, *arguments: None})
    assert set(faults(kind, empty)) >= {f"has no method `{name}`" for name in wanted}
