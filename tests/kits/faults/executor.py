"""Executors that are wrong in one way each; the sound one is `inprocess`."""

from dataclasses import replace

from miles_core.errors import EngineError, RunError
from miles_core.executors.inprocess import InProcessExecutor
from miles_core.testing.executor import ExecutorConformance


class Faulty(ExecutorConformance):
    def make(self):
        return self.executor()


class TestLosesTheRanksMessage(Faulty):
    class executor(InProcessExecutor):
        async def start_trainer(self, spec):
            trainer = await super().start_trainer(spec)
            step = trainer.train_step

            async def train_step(batch):
                try:
                    return await step(batch)
                except RunError as error:
                    if "not running" in error.message:
                        raise
                    raise RunError("a rank failed", where="trainer rank 0") from None

            trainer.train_step = train_step
            return trainer

    caught_by = {"test_a_failing_rank_is_named_with_its_own_message": "the rank's message is lost"}


class TestDoesNotNameTheRank(Faulty):
    class executor(InProcessExecutor):
        async def start_trainer(self, spec):
            trainer = await super().start_trainer(spec)
            step = trainer.train_step

            async def train_step(batch):
                try:
                    return await step(batch)
                except RunError as error:
                    raise RunError(error.message, where="somewhere") from error

            trainer.train_step = train_step
            return trainer

    caught_by = {"test_a_failing_rank_is_named_with_its_own_message": "the failing rank must be in `where`"}


class TestStartsOneEngineOnly(Faulty):
    class executor(InProcessExecutor):
        async def start_engines(self, spec):
            return await super().start_engines(replace(spec, count=1))

    caught_by = {
        "test_engines_are_started_and_stream_their_tokens": "",
        "test_an_engine_that_does_not_start_is_named": "DID NOT RAISE",
        "test_an_engine_is_replaced_and_its_requests_are_told": "list index out of range",
    }


class TestReplacesEveryEngineByTheLatestSpec(Faulty):
    class executor(InProcessExecutor):
        async def start_engines(self, spec):
            engines = await super().start_engines(spec)
            self._engine_specs = [spec] * len(self._engine_specs)
            return engines

    caught_by = {"test_engines_added_later_are_numbered_on_and_replaced_as_they_were": "planned failure to start"}


class TestDoesNotNameTheEngine(Faulty):
    class executor(InProcessExecutor):
        async def start_engines(self, spec):
            try:
                return await super().start_engines(spec)
            except EngineError as error:
                raise EngineError(error.message) from error

    caught_by = {"test_an_engine_that_does_not_start_is_named": "the failing engine must be in `where`"}


class TestDescribesTheTrainerOnly(Faulty):
    class executor(InProcessExecutor):
        async def describe(self):
            return {name: place for name, place in (await super().describe()).items() if "trainer" in name}

    caught_by = {"test_describe_says_where_everything_runs": "describe names"}


class TestHandsOutAModelThatIgnoresPause(Faulty):
    class executor(InProcessExecutor):
        async def start_engines(self, spec):
            engines = await super().start_engines(spec)
            for engine in engines:
                engine.pause = engine.resume
            return engines

    caught_by = {"test_a_paused_engine_keeps_its_requests": "a paused engine produced tokens"}


class TestLeavesEverythingRunning(Faulty):
    class executor(InProcessExecutor):
        async def close(self):
            return None

    caught_by = {"test_close_is_idempotent_and_ends_calls": "DID NOT RAISE"}
