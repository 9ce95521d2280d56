"""Transports that are wrong in one way each; the sound one is `inprocess`."""

import functools
from dataclasses import replace

from miles_core.errors import TransportError
from miles_core.kinds.transport import Staged
from miles_core.testing.transport import TransportConformance
from miles_core.types import NamedTensor, WeightManifest
from miles_transports.inprocess import Exchange, InProcessReceiver, InProcessSender, InProcessTransport
from miles_transports.options import InProcessOptions


class Sound(InProcessTransport):
    """`inprocess`, with ends that a subclass may replace."""

    sender = InProcessSender
    receiver = InProcessReceiver

    async def open(self, source, engines):
        exchange = Exchange(len(engines), 4)
        await source.open_sender(functools.partial(self.sender, exchange))
        for index, engine in enumerate(engines):
            await engine.open_receiver(functools.partial(self.receiver, exchange, index))
        self._exchange, self._source, self._engines = exchange, source, tuple(engines)


class Faulty(TransportConformance):
    test_cancelling_a_publish_frees_both_ends = None  # takes over a second: only where it is the point

    def make(self):
        return self.transport(InProcessOptions())


class TestSendsTheLiveTensors(Faulty):
    class transport(Sound):
        class sender(InProcessSender):
            def send(self, bucket):
                for engine in range(self._exchange.num_engines):
                    self._exchange.put(engine, bucket)

    caught_by = {
        "test_received_tensors_do_not_follow_the_trainers_next_step": "serves other values of",
        "test_engines_do_not_share_storage": "serves other values of",
    }


class TestSendsOneCopyToEveryEngine(Faulty):
    class transport(Sound):
        class sender(InProcessSender):
            def send(self, bucket):
                copies = tuple(NamedTensor(name=each.name, tensor=each.tensor.clone()) for each in bucket.tensors)
                for engine in range(self._exchange.num_engines):
                    self._exchange.put(engine, replace(bucket, tensors=copies))

    caught_by = {"test_engines_do_not_share_storage": "serves other values of"}


class TestRoundsToHalfPrecision(Faulty):
    """Loses bits on the way; shapes and dtypes look right."""

    class transport(Sound):
        class sender(InProcessSender):
            def send(self, bucket):
                def rounded(named):
                    wide = named.tensor.is_floating_point() and named.tensor.element_size() >= 4
                    tensor = named.tensor.half().to(named.tensor.dtype) if wide else named.tensor
                    return NamedTensor(name=named.name, tensor=tensor)

                super().send(replace(bucket, tensors=tuple(map(rounded, bucket.tensors))))

    caught_by = {
        "test_every_tensor_arrives_on_every_engine_bit_for_bit": "staged other tensors than were sent",
        "test_a_second_version_follows_on_the_same_connection": "serves other values of",
        "test_received_tensors_do_not_follow_the_trainers_next_step": "serves other values of",
        "test_engines_do_not_share_storage": "serves other values of",
        "test_a_failing_export_is_raised_and_the_next_version_arrives": "incomplete",
        "test_a_failing_engine_is_named_and_the_next_version_arrives": "incomplete",
        "test_the_same_version_can_be_tried_again": "incomplete",
        "test_an_engine_that_joins_late_serves_only_once_it_holds_the_present_version": "did not arrive as it was sent",
    }


REFUSED_BY_STRICT_ENGINES = (
    "test_every_tensor_arrives_on_every_engine_bit_for_bit",
    "test_buckets_arrive_in_order_and_only_the_final_one_is_last",
    "test_publish_stages_and_does_not_activate_pause_or_resume",
    "test_a_second_version_follows_on_the_same_connection",
    "test_received_tensors_do_not_follow_the_trainers_next_step",
    "test_engines_do_not_share_storage",
    "test_one_engine_and_one_bucket_are_enough",
    "test_a_failing_export_is_raised_and_the_next_version_arrives",
    "test_a_failing_engine_is_named_and_the_next_version_arrives",
    "test_the_same_version_can_be_tried_again",
    "test_an_engine_that_joins_late_serves_only_once_it_holds_the_present_version",
)
"""What a version that is not the one sent breaks: everything in which one has to arrive."""


def refused(words):
    """What catches a version that strict engines refuse with `words`.

    In the retry, engine 1 may refuse it before engine 0 comes to its planned failure, which then meets the second try.
    """
    retry = {"test_the_same_version_can_be_tried_again": "was not staged on every engine"}
    return dict.fromkeys(REFUSED_BY_STRICT_ENGINES, words) | retry


def changed(bucket, change):
    """The bucket with each tensor replaced by `change(named)`, or left out where that is None."""
    return replace(bucket, tensors=tuple(filter(None, map(change, bucket.tensors))))


class TestDropsOneTensor(Faulty):
    class transport(Sound):
        class sender(InProcessSender):
            def send(self, bucket):
                super().send(changed(bucket, lambda named: None if named.name == "model.norm.weight" else named))

    caught_by = refused("missing tensors: model.norm.weight")


class TestRenamesATiedWeight(Faulty):
    """Sends the storage that two names share under one of them only."""

    class transport(Sound):
        class sender(InProcessSender):
            def send(self, bucket):
                tied = {"lm_head.weight": "model.embed_tokens.weight"}
                super().send(changed(bucket, lambda named: replace(named, name=tied.get(named.name, named.name))))

    caught_by = refused("tensor 'model.embed_tokens.weight' came twice")


class TestEndsTheVersionOneBucketEarly(Faulty):
    class transport(Sound):
        class sender(InProcessSender):
            def send(self, bucket):
                super().send(replace(bucket, last=bucket.last or bucket.index == 3))

    caught_by = refused("missing tensors: model.norm.weight")
    del caught_by["test_one_engine_and_one_bucket_are_enough"]


class TestActivatesWhatItStaged(Faulty):
    class transport(Sound):
        async def publish(self, version):
            staged = await super().publish(version)
            for engine in self._engines:
                await engine.activate(version)
                engine._staged = None
                engine.stage_directly(version, engine.weights)
            return staged

    caught_by = {
        "test_publish_stages_and_does_not_activate_pause_or_resume": "activation is not its business",
        "test_an_engine_that_joins_late_serves_only_once_it_holds_the_present_version": "'activate 1', 'activate 1'",
    }


class TestNumbersBucketsByEngine(Faulty):
    class transport(Sound):
        class receiver(InProcessReceiver):
            def receive(self, version):
                for bucket in super().receive(version):
                    yield replace(bucket, index=0)

    caught_by = {
        "test_buckets_arrive_in_order_and_only_the_final_one_is_last": "got (index, last)",
        # Failures are planned at bucket 2 and later, which never comes.
        "test_a_failing_engine_is_named_and_the_next_version_arrives": "publish returned though",
        "test_the_same_version_can_be_tried_again": "publish returned though",
    }


class TestReportsWhatWasSentAsReceived(Faulty):
    """Takes the engines' failure for its own success: the log of the sender instead of their acknowledgements."""

    class transport(Sound):
        async def publish(self, version):
            try:
                return await super().publish(version)
            except TransportError:
                if self._exchange is None:
                    raise
                empty = WeightManifest(version=version, digests={}, num_bytes=0)
                return Staged(sent=empty, received=tuple(empty for _ in self._engines))

    caught_by = {
        "test_a_failing_export_is_raised_and_the_next_version_arrives": "publish returned though",
        "test_a_failing_engine_is_named_and_the_next_version_arrives": "publish returned though",
        "test_an_engine_that_never_receives_does_not_block_the_others": "publish returned though",
        "test_the_same_version_can_be_tried_again": "publish returned though",
    }


class TestHidesTheCause(Faulty):
    class transport(Sound):
        async def publish(self, version):
            try:
                return await super().publish(version)
            except TransportError:
                raise TransportError("the publish failed") from None

    caught_by = {
        "test_a_failing_export_is_raised_and_the_next_version_arrives": "the cause is not in the error",
        "test_a_failing_engine_is_named_and_the_next_version_arrives": "the failed engine is not in the error",
        "test_an_engine_that_never_receives_does_not_block_the_others": "the dead engine is not in the error",
    }


class TestIsSpentAfterAFailure(Faulty):
    """One failed publish ends the transport, where only the publish should have ended."""

    class transport(Sound):
        async def publish(self, version):
            if getattr(self, "spent", False):
                raise TransportError("the transport is broken")
            try:
                return await super().publish(version)
            except TransportError:
                self.spent = True
                raise

    caught_by = {
        "test_a_failing_export_is_raised_and_the_next_version_arrives": "the transport is broken",
        "test_a_failing_engine_is_named_and_the_next_version_arrives": "the transport is broken",
        "test_the_same_version_can_be_tried_again": "the transport is broken",
    }


class TestSwallowsCancellation(Faulty):
    class transport(Sound):
        async def publish(self, version):
            import asyncio

            try:
                return await super().publish(version)
            except asyncio.CancelledError:
                raise TransportError("cancelled") from None

    test_cancelling_a_publish_frees_both_ends = TransportConformance.test_cancelling_a_publish_frees_both_ends
    caught_by = {"test_cancelling_a_publish_frees_both_ends": "cancelled"}


class TestClosesOnce(Faulty):
    class transport(Sound):
        async def close(self):
            self._exchange.end("closed")
            self._exchange = None

    caught_by = {
        "test_close_is_idempotent_and_ends_publishing": "NoneType",
    }


class TestPublishesAfterClose(Faulty):
    class transport(Sound):
        async def close(self):
            return None

    caught_by = {"test_close_is_idempotent_and_ends_publishing": "publish returned though"}
