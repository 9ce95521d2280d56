"""Data buffers that are wrong in one way each."""

from miles_core.options import BoundedBufferOptions
from miles_core.rollout.buffer import BoundedBuffer
from miles_core.testing.data_buffer import DataBufferConformance
from miles_core.testing.virtual_time import in_virtual_time


@in_virtual_time
class Faulty(DataBufferConformance):
    capacity = 4

    def make(self, context):
        return self.buffer(BoundedBufferOptions(), context)


class TestNeverFull(Faulty):
    class buffer(BoundedBuffer):
        async def put(self, finished):
            self.capacity += 1
            await super().put(finished)
            self.capacity -= 1

    caught_by = {"test_a_full_buffer_makes_puts_wait_and_a_get_lets_one_in": "a full buffer took another group"}


class TestDropsTheOldestSilently(Faulty):
    class buffer(BoundedBuffer):
        async def put(self, finished):
            if len(self._groups) == self.capacity and not self._context.judge(finished.group):
                self._groups.popleft()
            await super().put(finished)

    caught_by = {
        "test_a_full_buffer_makes_puts_wait_and_a_get_lets_one_in": "a full buffer took another group",
        "test_cancelled_calls_lose_nothing": "a cancelled put left group 50 in",
        "test_many_at_once_all_come_through": "groups are missing",
    }


class TestRejectsAtTheLimit(Faulty):
    class buffer(BoundedBuffer):
        async def get(self):
            found = await super().get()
            limit, age = self._context.max_weight_staleness, self._context.age(found.group)
            if limit is not None and age is not None and age >= limit:
                self._context.reject(found, "stale")
                return await self.get()
            return found

    caught_by = {
        "test_age_is_judged_when_a_group_is_taken_and_the_limit_itself_is_young_enough": "a group at the limit was not"
    }


class TestJudgesAgeOnTheWayIn(Faulty):
    class buffer(BoundedBuffer):
        async def get(self):
            async with self._changed:
                await self._changed.wait_for(lambda: bool(self._groups))
                self._changed.notify_all()
                return self._groups.popleft()

    caught_by = {"test_age_is_judged_when_a_group_is_taken_and_the_limit_itself_is_young_enough": "group 0 came out"}


class TestTakesUnversionedForStale(Faulty):
    class buffer(BoundedBuffer):
        async def get(self):
            found = await super().get()
            if self._context.max_weight_staleness is not None and self._context.age(found.group) is None:
                self._context.reject(found, "stale")
                return await self.get()
            return found

    caught_by = {"test_a_group_without_a_version_is_never_stale": "a group without a version was rejected"}


class TestRejectedGroupsWait(Faulty):
    class buffer(BoundedBuffer):
        async def put(self, finished):
            async with self._changed:
                await self._changed.wait_for(lambda: len(self._groups) < self.capacity)
            await super().put(finished)

    caught_by = {
        "test_a_rejected_group_never_waits_and_is_given_its_reason": "a group that cannot be trained waits for room"
    }


class TestLosesAGroupWithACancelledGet(Faulty):
    class buffer(BoundedBuffer):
        async def get(self):
            import asyncio

            try:
                return await super().get()
            except asyncio.CancelledError:
                self.capacity -= 1
                raise

    caught_by = {"test_cancelled_calls_lose_nothing": "a cancelled get took a group along"}
