"""A journal brings every committed turn back, with the same ids, log-probs and routes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from miles_core.errors import RunError
from miles_core.session.assembly import assemble_all
from miles_core.session.leaves import keep_all
from miles_core.session.refusals import JournalDamaged
from miles_core.session.serving.journal import SUFFIX, Journal

U = {"role": "user", "content": "hello"}
OK = {"role": "assistant", "content": "ok"}
T = {"role": "user", "content": "ü"}


def same(ours: Any, theirs: Any) -> None:
    """Two sessions would be trained alike."""
    for a, b in zip(
        assemble_all(ours, prompt_id="p", picker=keep_all),
        assemble_all(theirs, prompt_id="p", picker=keep_all),
        strict=True,
    ):
        assert a.token_ids.tolist() == b.token_ids.tolist()
        assert np.array_equal(a.logprobs, b.logprobs, equal_nan=True)
        assert (a.spans, a.messages, a.status, a.temperature) == (b.spans, b.messages, b.status, b.temperature)
        assert (a.loss_mask == b.loss_mask).all()


@pytest.mark.parametrize("history", ["linear", "branching"])
async def test_a_server_goes_on_where_another_was(history: Any, serve: Any, engine: Any, tmp_path: Path) -> None:
    async with serve(history=history, journal=Journal(tmp_path)) as served:
        key = await served.create(temperature=0.5, seed=4)
        await served.chat(key, [U])
        await served.chat(key, [U, OK, T])
        await served.chat(key, [U, OK, U])  # retried, or a sibling
        before = served.store.get(key).session
    async with serve(history=history, journal=Journal(tmp_path)) as served:
        assert served.store.restore() == 1
        after = served.store.get(key).session
        same(before, after)
        seeds = engine.requests[-1].params.seed
        assert (await served.chat(key, [U, OK, U, OK, T])).status_code == 200
        prompt = engine.requests[-1].token_ids
        row = before.row_to(len(before.turns) - 1).tolist()
        assert prompt[: len(row)] == row
        assert engine.requests[-1].params.seed not in (None, seeds)
    async with serve(history=history, journal=Journal(tmp_path)) as served:
        served.store.restore()
        same(after, served.store.get(key).session)
        await served.http.delete(f"/sessions/{key}")
    assert not list(tmp_path.iterdir())


async def test_a_line_that_was_being_written_was_never_history(serve: Any, tmp_path: Path) -> None:
    async with serve(journal=Journal(tmp_path)) as served:
        key = await served.create()
        await served.chat(key, [U])
        await served.chat(key, [U, OK, T])
    file = tmp_path / f"{key}{SUFFIX}"
    whole = file.read_bytes()
    file.write_bytes(whole[:-7])
    async with serve(journal=Journal(tmp_path)) as served:
        served.store.restore()
        assert len(served.store.get(key).session.turns) == 1
        assert (await served.chat(key, [U, OK, T])).status_code == 200
    assert [json.loads(line) for line in file.read_bytes().splitlines()] == [
        json.loads(line) for line in whole.splitlines()
    ], "the turn was generated again under its own seed and written in full"


async def test_a_damaged_journal_is_named_and_never_half_read(serve: Any, engine: Any, tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    async with serve(journal=journal) as served:
        key = await served.create()
        await served.chat(key, [U])
        factory = served.store.factory
    file = tmp_path / f"{key}{SUFFIX}"
    file.write_bytes(file.read_bytes().replace(b'"shared":0', b'"shared":x'))
    with pytest.raises(JournalDamaged, match=key):
        journal.load(key, factory)
    assert factory.load() == (0,), "and its engine's slot is free again"


async def test_memory_that_runs_out_moves_sessions_to_the_journal(serve: Any, tmp_path: Path) -> None:
    async with serve(journal=Journal(tmp_path), max_bytes=3_000) as served:
        first = await served.create()
        await served.chat(first, [U])
        second = await served.create()
        await served.chat(second, [U])
        served.store.limit()
        assert first not in [entry.key for entry in served.store.entries]
        assert (await served.chat(first, [U, OK, T])).status_code == 200
        assert len(served.store.get(first).session.turns) == 2


async def test_a_session_that_only_the_journal_holds_idles_out_too(serve: Any, tmp_path: Path) -> None:
    now = [0.0]
    async with serve(journal=Journal(tmp_path), max_bytes=3_000, idle_timeout_s=60.0, clock=lambda: now[0]) as served:
        keys = []
        for _ in range(2):
            keys.append(await served.create())
            await served.chat(keys[-1], [U])
        served.store.limit()
        now[0] = 50.0
        assert (await served.chat(keys[0], [U, OK, T])).status_code == 200, "brought back, and used"
        served.store.limit()
        now[0] = 70.0
        served.store.sweep()
        assert [path.name.partition(".")[0] for path in tmp_path.iterdir()] == [keys[0]]
        gone = await served.http.get(f"/sessions/{keys[1]}")
        assert gone.status_code == 410
        assert "60 s" in gone.json()["error"]["message"]
        now[0] = 130.0
        served.store.sweep()
        assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("key", ["../secret", "x", "A" * 32, "0" * 31])
def test_no_name_leads_out_of_the_folder(key: str, tmp_path: Path) -> None:
    (tmp_path / "secret.session.jsonl").write_text("{}\n")
    folder = tmp_path / "journal"
    assert Journal(folder).load(key, None) is None  # type: ignore[arg-type]


async def test_a_turn_that_cannot_be_written_is_not_history(serve: Any, tmp_path: Path) -> None:
    async with serve(journal=Journal(tmp_path)) as served:
        key = await served.create()
        (tmp_path / f"{key}{SUFFIX}").unlink()
        found = await served.chat(key, [U])
        assert found.status_code == 500
        assert not served.store.get(key).session.turns


async def test_a_changed_byte_is_never_taken_for_what_was_sampled(serve: Any, tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    async with serve(journal=journal) as served:
        key = await served.create()
        await served.chat(key, [U])
        factory = served.store.factory
    file = tmp_path / f"{key}{SUFFIX}"
    whole = file.read_bytes()
    for at in range(0, len(whole), 3):
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(JournalDamaged, match=key):
            journal.load(key, factory)
    file.write_bytes(whole[:-1] + b"\x0b")
    with pytest.raises(JournalDamaged, match="something else than a new line"):
        journal.load(key, factory)
    file.write_bytes(b"[" * 100_000 + b"\n")
    with pytest.raises(JournalDamaged):
        journal.load(key, factory)


async def test_one_damaged_file_keeps_no_other_session_from_its_agent(serve: Any, tmp_path: Path) -> None:
    async with serve(journal=Journal(tmp_path)) as served:
        bad, good = await served.create(), await served.create()
        await served.chat(good, [U])
    damaged = tmp_path / f"{bad}{SUFFIX}"
    damaged.write_bytes(damaged.read_bytes().replace(b"1", b"2"))
    kept = damaged.read_bytes()
    async with serve(journal=Journal(tmp_path)) as served:
        assert served.store.restore() == 1
        (said,) = served.store.damaged
        assert str(damaged) in said
        assert (await served.chat(good, [U, OK, T])).status_code == 200
        found = await served.chat(bad, [U])
        assert (found.status_code, "journal" in found.text) == (500, True)
    assert damaged.read_bytes() == kept


def test_a_journal_has_one_server(tmp_path: Path) -> None:
    with Journal(tmp_path).held(), pytest.raises(RunError, match="another server"), Journal(tmp_path).held():
        pass
    with Journal(tmp_path).held():
        pass


async def test_a_session_that_comes_back_takes_a_place(serve: Any, tmp_path: Path) -> None:
    async with serve(journal=Journal(tmp_path), max_sessions=1) as served:
        first = await served.create()
        first_answer = await served.http.post(f"/sessions/{first}/v1/responses", json={"input": "hello"})
        second = await served.create()
        body = {"input": "go on", "previous_response_id": first_answer.json()["id"]}
        found = await served.http.post(f"/sessions/{first}/v1/responses", json=body)
        assert found.status_code == 200, "and ids of answers come back with it"
        assert [entry.key for entry in served.store.entries] == [first]
        with served.store.using(first):
            assert (await served.http.get(f"/sessions/{second}")).status_code == 503
    async with serve(journal=Journal(tmp_path), max_sessions=1) as served:
        assert (served.store.restore(), len(served.store)) == (2, 1)
