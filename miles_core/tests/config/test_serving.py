"""A server's run-file: what only training reads is neither asked for nor judged."""

from __future__ import annotations

from pathlib import Path

import pytest

from miles_core.config.load import parse
from miles_core.config.resolve import check_run
from miles_core.driver.serve import UNREAD
from miles_core.registry import Registry


def found(registry: Registry, text: str) -> list[str]:
    run, problems = check_run(parse(text), registry, unread=UNREAD)
    assert (run is None) == bool(problems)
    return [problem.path for problem in problems]


@pytest.mark.usefixtures("workplace")
class TestServing:
    @pytest.mark.parametrize(
        "more",
        [
            "",
            "name: [3]\nschedule: often\n",
            "data: nosuch.jsonl\nrewards: [nosuch.py:score]\nloss: nosuch\n",
            "optimizer: {lr: -1}\nobjective: {kl_coef: 1, kl_estimator: k1}\n",
            "rollout: {filters: [nosuch], routes: record, reward_workers: many, max_concurrent: 0}\n",
            "backend: plain\nweights: {verify: always}\nengine: mute\n",
            "transport: ring\nbackend: nosuch\nplacement: {trainer_ranks: 9}\n",
            "precision: {true_on_policy: true}\nmodel: exact\n",
        ],
    )
    def test_what_only_training_reads_does_not_matter(self, registry: Registry, more: str) -> None:
        assert found(registry, more if "model:" in more else f"model: moe\n{more}") == []

    @pytest.mark.parametrize(
        ("text", "paths"),
        [
            ("{}", ["model"]),
            ("model: nosuch\n", ["model.path"]),
            ("model: model\nengine: nosuch\n", ["engine"]),
            ("model: model\nsession: {history: bushy, family: nosuch}\n", ["session.history", "session.family"]),
            ("model: model\nplacement: {engines: 0}\nexecutor: nosuch\n", ["placement.engines", "executor"]),
            ("model: model\nrollout: {route: record}\n", ["rollout.route"]),
            ("model: model\nsesion: {}\n", ["sesion"]),
        ],
    )
    def test_what_the_server_reads_is_judged_as_ever(self, registry: Registry, text: str, paths: list[str]) -> None:
        assert sorted(found(registry, text)) == sorted(paths)

    def test_the_run_has_no_kind_that_nobody_reads(self, registry: Registry, workplace: Path) -> None:
        run, _ = check_run(parse("model: model\nloss: gspo\n"), registry, unread=UNREAD)
        assert run is not None
        assert set(run.one) == {"engine", "executor", "matcher"}
        assert run.spec.model.path == str(workplace / "model")
