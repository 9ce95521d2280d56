"""Conformance kit for recipes: a job returns an exit code, writes only into its run directory, and can be cancelled.

    class TestMine(RecipeConformance):
        def make(self, tmp_path): return MyRecipe(MyOptions(steps=1))

`make` should return the smallest job there is.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from miles_core.kinds.recipe import Recipe


class RecipeConformance:
    """Subclass it and say how to make the recipe."""

    deadline_s = 60.0
    """A job that has neither ended nor raised by then hangs."""

    def make(self, tmp_path: Path) -> Recipe:
        """A recipe; inputs it needs may be written to `tmp_path`."""
        raise NotImplementedError

    def config(self, tmp_path: Path) -> Any:
        """The resolved run-file that `run` is given."""
        return {"name": "kit", "seed": 0}

    async def _run(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[int, Path]:
        run_dir, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
        run_dir.mkdir()
        elsewhere.mkdir()
        monkeypatch.chdir(elsewhere)
        async with asyncio.timeout(self.deadline_s):
            return await self.make(tmp_path).run(run_dir, self.config(tmp_path)), elsewhere

    async def test_a_job_that_succeeds_returns_exit_code_0(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        code, _ = await self._run(tmp_path, monkeypatch)
        assert type(code) is int, f"`run` returned {code!r}, not an exit code"
        assert code == 0, f"the smallest job ended with exit code {code}"

    async def test_nothing_is_written_outside_the_run_directory(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        _, elsewhere = await self._run(tmp_path, monkeypatch)
        strays = sorted(path.name for path in elsewhere.iterdir())
        assert not strays, f"the job wrote {strays} to the current directory"

    async def test_no_task_outlives_the_job(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        before = asyncio.all_tasks()
        await self._run(tmp_path, monkeypatch)
        left = [task.get_name() for task in asyncio.all_tasks() - before if not task.done()]
        assert not left, f"still running after the job: {left}"

    async def test_cancelling_a_job_ends_it(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        task = asyncio.create_task(self._run(tmp_path, monkeypatch))
        await asyncio.sleep(0)
        await asyncio.sleep(0)  # the job has begun, as far as it ever waits
        if task.done():
            pytest.skip("the job never waits, so there is nothing to cancel")
        task.cancel()
        done, _ = await asyncio.wait({task}, timeout=self.deadline_s)
        assert done, "a cancelled job goes on"
        assert task.cancelled(), "a cancelled job must end as cancelled, not return or raise something else"
