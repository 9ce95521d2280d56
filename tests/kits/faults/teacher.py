"""Teachers that are wrong in one way each. The sound one scores a token by its distance to the one before it."""

import asyncio
from dataclasses import replace

import numpy as np

from miles_core.testing.teacher import TeacherConformance


class Sound:
    async def score(self, trajectory):
        await asyncio.sleep(0)
        ids = trajectory.token_ids.astype(np.float32)
        scores = np.full(ids.shape, np.nan, dtype=np.float32)
        scores[1:] = -np.log1p(np.abs(np.diff(ids))) - 0.01 * np.cumsum(ids)[:-1]
        return scores

    async def close(self):
        return None


class Faulty(TeacherConformance):
    def make(self, tmp_path):
        return self.teacher()


class TestShiftsLeft(Faulty):
    class teacher(Sound):
        async def score(self, trajectory):
            return np.roll(await super().score(trajectory), -1)

    caught_by = {"test_a_token_does_not_change_the_scores_before_it": "reaches scores before it"}


class TestShiftsRight(Faulty):
    class teacher(Sound):
        async def score(self, trajectory):
            return np.append(np.float32([np.nan]), (await super().score(trajectory))[:-1])

    caught_by = {"test_the_score_at_a_position_is_that_of_its_token": "does not change score"}


class TestSeesTheWholeRow(Faulty):
    class teacher(Sound):
        async def score(self, trajectory):
            return await super().score(trajectory) - np.float32(0.1 * trajectory.token_ids.mean())

    caught_by = {"test_a_token_does_not_change_the_scores_before_it": "reaches scores before it"}


class TestEchoesTheRollout(Faulty):
    class teacher(Sound):
        async def score(self, trajectory):
            scores = await super().score(trajectory)
            return np.where(trajectory.sampled, 0.5 * (scores + trajectory.logprobs), scores)

    caught_by = {"test_scores_are_the_teachers_and_not_the_rollouts": "the rollout's log-probs reach the scores"}


class TestScoresOnlyTheResponse(Faulty):
    class teacher(Sound):
        async def score(self, trajectory):
            return (await super().score(trajectory))[trajectory.sampled]

    caught_by = {
        "test_there_is_one_float32_log_prob_for_each_token": "shape (6,) for 8 tokens",
        "test_a_token_does_not_change_the_scores_before_it": "reaches scores before it",
        "test_the_score_at_a_position_is_that_of_its_token": "index 6 is out of bounds",
    }


class TestReturnsProbabilities(Faulty):
    class teacher(Sound):
        async def score(self, trajectory):
            return np.exp(await super().score(trajectory))

    caught_by = {"test_there_is_one_float32_log_prob_for_each_token": "a log-prob is positive"}


class TestMixesConcurrentRows(Faulty):
    class teacher(Sound):
        async def score(self, trajectory):
            self.row = trajectory
            await asyncio.sleep(0)
            ids = np.resize(self.row.token_ids, trajectory.length)
            return await super().score(replace(trajectory, token_ids=ids))

    caught_by = {"test_rows_scored_together_score_as_alone": "differs in company"}


class TestClosesOnce(Faulty):
    class teacher(Sound):
        def __init__(self):
            self.pool = object()

        async def close(self):
            del self.pool

    caught_by = {"test_close_is_idempotent": "pool"}
