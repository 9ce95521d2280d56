"""Recipes that are wrong in one way each."""

import asyncio
import contextlib
from pathlib import Path

from miles_core.testing.recipe import RecipeConformance
from miles_core.testing.virtual_time import in_virtual_time


class Sound:
    async def run(self, run_dir, config):
        await asyncio.sleep(0.01)
        (run_dir / "out.txt").write_text("done")
        return 0


@in_virtual_time
class Faulty(RecipeConformance):
    def make(self, tmp_path):
        return self.recipe()


class TestReturnsNothing(Faulty):
    class recipe(Sound):
        async def run(self, run_dir, config):
            await super().run(run_dir, config)

    caught_by = {"test_a_job_that_succeeds_returns_exit_code_0": "returned None, not an exit code"}


class TestReturnsTrueForSuccess(Faulty):
    class recipe(Sound):
        async def run(self, run_dir, config):
            return await super().run(run_dir, config) == 0

    caught_by = {"test_a_job_that_succeeds_returns_exit_code_0": "returned True, not an exit code"}


class TestWritesToTheCurrentDirectory(Faulty):
    class recipe(Sound):
        async def run(self, run_dir, config):
            return await super().run(Path(), config)

    caught_by = {"test_nothing_is_written_outside_the_run_directory": "out.txt"}


class TestLeavesATaskBehind(Faulty):
    class recipe(Sound):
        async def run(self, run_dir, config):
            self.heartbeat = asyncio.create_task(asyncio.sleep(5), name="heartbeat")
            return await super().run(run_dir, config)

    caught_by = {"test_no_task_outlives_the_job": "heartbeat"}


class TestSwallowsCancellation(Faulty):
    class recipe(Sound):
        async def run(self, run_dir, config):
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.01)
            return 0

    caught_by = {"test_cancelling_a_job_ends_it": "must end as cancelled"}
