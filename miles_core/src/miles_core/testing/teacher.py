"""Conformance kit for teachers: every token of a row gets a log-prob that depends on the tokens before it and on the
teacher alone.

    class TestMine(TeacherConformance):
        def make(self, tmp_path): return MyTeacher(MyOptions(model=tiny(tmp_path)))

Set `token_ids` if the teacher's vocabulary does not have the ids 3 to 12.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np

from miles_core.kinds.teacher import Teacher
from miles_core.types import Float32, Status, TokenSpan, Trajectory


def row(token_ids: tuple[int, ...], logprob: float = -1.0) -> Trajectory:
    """A trajectory of these tokens; the first two are the prompt."""
    length = len(token_ids)
    sampled = np.arange(length) >= 2
    trajectory = Trajectory(
        prompt_id="kit",
        session_id="kit",
        token_ids=np.asarray(token_ids, dtype=np.int32),
        sampled=sampled,
        loss_mask=sampled,
        logprobs=np.where(sampled, logprob, np.nan).astype(np.float32),
        spans=(TokenSpan(start=2, end=length, weight_version=0),),
        temperature=1.0,
        status=Status.COMPLETED,
    )
    trajectory.check()
    return trajectory


class TeacherConformance:
    """Subclass it and say how to make the teacher."""

    token_ids: tuple[int, ...] = (3, 4, 5, 6, 7, 8, 9, 10)
    """A row of at least five known ids."""
    other_ids: tuple[int, ...] = (11, 12, 4, 9)
    """Ids that may replace one of them."""

    def make(self, tmp_path: Path) -> Teacher:
        raise NotImplementedError

    async def _scores(self, tmp_path: Path, *rows: Trajectory) -> list[Float32]:
        teacher = self.make(tmp_path)
        try:
            return [await teacher.score(each) for each in rows]
        finally:
            await teacher.close()

    async def test_there_is_one_float32_log_prob_for_each_token(self, tmp_path: Path) -> None:
        for length in (len(self.token_ids), 3):
            (scores,) = await self._scores(tmp_path, row(self.token_ids[:length]))
            assert scores.shape == (length,), f"shape {scores.shape} for {length} tokens"
            assert scores.dtype == np.float32, f"dtype {scores.dtype}"
            known = scores[~np.isnan(scores)]
            assert known.size, "no token was scored"
            assert (known <= 0).all(), "a log-prob is positive"

    async def test_scores_are_the_teachers_and_not_the_rollouts(self, tmp_path: Path) -> None:
        one, two = await self._scores(tmp_path, row(self.token_ids, -1.0), row(self.token_ids, -2.0))
        np.testing.assert_array_equal(one, two, err_msg="the rollout's log-probs reach the scores")

    async def test_a_token_does_not_change_the_scores_before_it(self, tmp_path: Path) -> None:
        at = len(self.token_ids) - 2
        before, *after = await self._scores(tmp_path, row(self.token_ids), *self._replaced(at))
        for scores in after:
            np.testing.assert_allclose(
                scores[:at], before[:at], rtol=1e-4, atol=1e-5, err_msg=f"token {at} reaches scores before it"
            )

    async def test_the_score_at_a_position_is_that_of_its_token(self, tmp_path: Path) -> None:
        at = len(self.token_ids) - 2
        before, *after = await self._scores(tmp_path, row(self.token_ids), *self._replaced(at))
        assert any(not np.isclose(scores[at], before[at]) for scores in after), f"token {at} does not change score {at}"

    async def test_rows_scored_together_score_as_alone(self, tmp_path: Path) -> None:
        rows = [row(self.token_ids), row(self.token_ids[:4]), *self._replaced(2)]
        alone = await self._scores(tmp_path, *rows)
        teacher = self.make(tmp_path)
        try:
            together = await asyncio.gather(*(teacher.score(each) for each in rows))
        finally:
            await teacher.close()
        for index, (one, other) in enumerate(zip(alone, together, strict=True)):
            np.testing.assert_allclose(other, one, rtol=1e-4, atol=1e-5, err_msg=f"row {index} differs in company")

    async def test_close_is_idempotent(self, tmp_path: Path) -> None:
        teacher = self.make(tmp_path)
        await teacher.close()
        await teacher.close()

    def _replaced(self, at: int) -> list[Trajectory]:
        ids = np.asarray(self.token_ids, dtype=np.int32)
        others = [other for other in self.other_ids if other != ids[at]]
        return [replace(row(self.token_ids), token_ids=np.where(np.arange(ids.size) == at, i, ids)) for i in others]
