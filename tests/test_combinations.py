"""Every combination of first-party picks is accepted or refused with reasons, exactly as tests/combinations.json says.

The table lists the smallest sets of values that are refused; whatever contains none of them is accepted. After a wanted
change, `python tests/test_combinations.py` writes it anew.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from miles_core.capability import State
from miles_core.config.load import Source
from miles_core.config.resolve import check_run
from miles_core.known import KNOWN
from miles_core.registry import Registry, discover

TABLE = Path(__file__).with_name("combinations.json")

Combination = Mapping[str, str]

REQUIRED_OPTIONS: dict[tuple[str, str], dict[str, Any]] = {
    ("environment", "reasoning-gym"): {"task": "basic_arithmetic"},
    ("transport", "disk-delta"): {"publish_dir": "published", "local_dir": "copies"},
    ("environment", "agent"): {"command": "true"},
    ("reward", "http"): {"url": "http://127.0.0.1:1/score"},
}
WALKED = ("environment", "reward", "advantage", "correction", "transport", "executor")
"""Kinds whose picks meet one another in some rule: all their combinations are walked."""
ROTATED = ("loss", "matcher", "tito_family", "filter", "backend", "engine")
"""Kinds that meet none: each combination takes the next of their picks."""
SETTINGS = {
    "placement.trainer_ranks": ("1", "2"),
    "schedule.group_size": ("1", "4"),
    "objective.old_logprobs": ("trainer", "rollout"),
}


def names(registry: Registry, kind: str) -> list[str]:
    """First-party picks of a kind, without those that a missing library makes unusable."""
    return [
        entry.name
        for entry in registry.entries(kind)
        if entry.state is State.OK and (entry.distribution == "miles-core" or (kind, entry.name) in KNOWN)
    ]


def combinations(registry: Registry) -> Iterator[tuple[int, Combination]]:
    choices = {kind: names(registry, kind) for kind in WALKED}
    choices["correction"] = ["none", *choices["correction"]]
    choices |= {path: list(values) for path, values in SETTINGS.items()}
    for number, values in enumerate(itertools.product(*choices.values())):
        yield number, dict(zip(choices, values, strict=True))


def source(registry: Registry, number: int, combination: Combination) -> Source:
    def pick(kind: str, name: str) -> dict[str, Any]:
        return {"use": name, **REQUIRED_OPTIONS.get((kind, name), {})}

    rotated = {kind: (found := names(registry, kind))[number % len(found)] for kind in ROTATED}
    correction = combination["correction"]
    tree: dict[str, Any] = {
        "name": "x",
        "model": "model",
        "environment": pick("environment", combination["environment"]),
        "rewards": [pick("reward", combination["reward"])],
        "advantage": combination["advantage"],
        "corrections": [] if correction == "none" else [correction],
        "transport": pick("transport", combination["transport"]),
        "executor": combination["executor"],
        "placement": {
            "mode": "colocated" if combination["transport"] == "cuda-ipc" else "separate",
            "trainer_ranks": int(combination["placement.trainer_ranks"]),
        },
        "schedule": {"steps": 1, "group_size": int(combination["schedule.group_size"])},
        "objective": {"old_logprobs": combination["objective.old_logprobs"]},
        "rollout": {"filters": [rotated["filter"]]},
        "session": {"matcher": rotated["matcher"], "family": rotated["tito_family"]},
        **{kind: rotated[kind] for kind in ("loss", "backend", "engine")},
    }
    if combination["environment"] in ("chat", "agent"):
        tree["data"] = "train.jsonl"
    return Source(path=None, text="", tree=tree)


def walk(registry: Registry) -> dict[tuple[tuple[str, str], ...], frozenset[str]]:
    """Each combination with the ids of the rules it breaks, none when it is accepted."""
    results = {}
    for number, combination in combinations(registry):
        run, problems = check_run(source(registry, number, combination), registry, files=False)
        assert (run is None) == bool(problems)
        assert all(problem.rule and problem.do for problem in problems), (combination, problems)
        results[tuple(combination.items())] = frozenset(problem.rule or "" for problem in problems)
    return results


def refused_sets(results: Mapping[tuple[tuple[str, str], ...], frozenset[str]]) -> dict[str, list[str]]:
    """The smallest sets of one or two values that no accepted combination contains, with the rules at work.

    A set that is refused only because each way to complete it breaks some other rule is left out: it follows.
    """
    seen: dict[tuple[tuple[str, str], ...], frozenset[str] | None] = {}
    for values, ids in results.items():
        for size in (1, 2):
            for part in itertools.combinations(values, size):
                earlier = seen.get(part, ids)
                seen[part] = None if not ids or earlier is None else earlier & ids
    singles = {part[0] for part, ids in seen.items() if len(part) == 1 and ids is not None}
    smallest = {part: ids for part, ids in seen.items() if ids and (len(part) == 1 or not singles.intersection(part))}
    return {
        " and ".join(f"{key}={value}" for key, value in part): sorted(ids) for part, ids in sorted(smallest.items())
    }


def test_what_is_refused_is_what_the_table_says() -> None:
    results = walk(discover())
    table = json.loads(TABLE.read_text())
    assert refused_sets(results) == table
    sets = [frozenset(tuple(text.split("=", 1)) for text in entry.split(" and ")) for entry in table]
    wrong = [values for values, ids in results.items() if bool(ids) != any(each <= set(values) for each in sets)]
    assert wrong == []
    assert sum(not ids for ids in results.values()) > 100


if __name__ == "__main__":
    TABLE.write_text(json.dumps(refused_sets(walk(discover())), indent=1) + "\n")
    print(f"wrote {TABLE}")
