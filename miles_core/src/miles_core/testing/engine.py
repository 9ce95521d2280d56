"""Conformance kit for engines: tokens, log-probs and versions are those of an independent forward pass of transformers.

    class TestMine(EngineConformance):
        provides = frozenset({"version-spans", "verifies-weights", "streams"})
        def make(self, context: EngineContext) -> Engine: return MyEngine(MyOptions(), context)

The kit makes two tiny random models of one architecture, serves the first, publishes the second, and compares with
transformers in float32. It tells from greedy choices which weights sampled a token, so that wrong log-probs and wrong
weights fail different tests. What only some engines can do is tested if `provides` has its tag. The engine is created
in the process of the tests.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any, TypeVar

import torch

from miles_core.testing.engine_oracle import (
    PROMPTS,
    SPOILT,
    Models,
    answers,
    ask,
    buckets_of,
    check_filtered,
    collect,
    greedy,
    logprobs_of,
    publish,
    refused,
    spoil,
    weights_of,
)
from miles_core.testing.engine_pauses import EnginePauses
from miles_core.testing.engine_routes import EngineRoutes
from miles_core.types import FinishReason, NamedTensor
from miles_core.weights.digests import digest_tensor

T = TypeVar("T")


class EngineConformance(EnginePauses, EngineRoutes):
    """Subclass it and say how to make the engine, not yet started."""

    # --- sampling -----------------------------------------------------------------------------------------------------

    def test_logprobs_are_those_of_a_full_forward(self, models: Models) -> None:
        async def test() -> None:
            async with self.serving(models.served) as (engine, _):
                requests = [
                    ask(prompt, name=str(i), max_tokens=4 + 3 * i, temperature=t, seed=i)
                    for i, (prompt, t) in enumerate(zip(PROMPTS, (1.0, 0.7, 1.0, 1.3, 0.0, 1.0), strict=True))
                ]
                for request, answer in zip(requests, await answers(engine, requests), strict=True):
                    # Temperature 0 means the argmax, with the log-prob of temperature 1.
                    temperature = request.params.temperature or 1.0
                    expected = logprobs_of(models.served, request.token_ids, answer.token_ids, temperature)
                    worst = (expected - torch.tensor(answer.logprobs)).abs().max().item()
                    assert worst <= self.tolerance, (
                        f"log-probs are off by {worst:.2g} nats at temperature {request.params.temperature}, "
                        f"prompt of {len(request.token_ids)} tokens"
                    )
                    assert len(answer.token_ids) == request.params.max_tokens
                    assert answer.finish_reason is FinishReason.LENGTH

        self.run(test)

    def test_filters_restrict_what_is_sampled_and_never_renormalise(self, models: Models) -> None:
        async def test() -> None:
            filters: list[dict[str, Any]] = [{"top_k": 3}, {"top_p": 0.3}, {"min_p": 0.5}]
            async with self.serving(models.served) as (engine, _):
                for limits in filters:
                    requests = [ask(p, name=str(i), max_tokens=8, seed=i, **limits) for i, p in enumerate(PROMPTS)]
                    if not self.refused_filters.isdisjoint(limits):
                        with refused(f"{limits} was accepted, and the engine says that it cannot") as error:
                            await answers(engine, requests)
                        assert all(name in error[0] for name in limits), f"the error does not name it: {error[0]}"
                        continue
                    for request, answer in zip(requests, await answers(engine, requests), strict=True):
                        check_filtered(models.served, request, answer, self.tolerance)

        self.run(test)

    def test_temperature_zero_takes_the_argmax(self, models: Models) -> None:
        async def test() -> None:
            async with self.serving(models.served) as (engine, _):
                requests = [ask(p, name=str(i), max_tokens=6, temperature=0.0) for i, p in enumerate(PROMPTS)]
                for request, answer in zip(requests, await answers(engine, requests), strict=True):
                    assert answer.token_ids == greedy(models.served, request.token_ids, 6)

        self.run(test)

    def test_a_seed_decides_the_tokens_whatever_else_runs(self, models: Models) -> None:
        async def test() -> None:
            asked = ask(PROMPTS[0], max_tokens=12, seed=5)
            others = [ask(p, name=str(i), max_tokens=3 + i, seed=99 + i) for i, p in enumerate(PROMPTS)]
            async with self.serving(models.served) as (engine, _):
                (alone,) = await answers(engine, [asked])
                *_, among = await answers(engine, [*others, asked])
            async with self.serving(models.served, seed=1, index=3) as (engine, _):
                elsewhere, other_seed = await answers(engine, [asked, ask(PROMPTS[0], name="b", max_tokens=12, seed=6)])
            assert among.token_ids == alone.token_ids, "the rest of the batch changed what a seed samples"
            assert elsewhere.token_ids == alone.token_ids, "another engine samples other tokens from the same seed"
            assert other_seed.token_ids != alone.token_ids, "the seed has no effect"

        self.run(test)

    def test_members_of_a_group_without_a_seed_differ_and_runs_repeat(self, models: Models) -> None:
        async def test() -> list[list[int]]:
            async with self.serving(models.served) as (engine, _):
                requests = [ask(PROMPTS[0], name=str(i), max_tokens=8) for i in range(4)]
                return [answer.token_ids for answer in await answers(engine, requests)]

        first, second = self.run(test), self.run(test)
        assert len({tuple(ids) for ids in first}) == 4, "members of a group sampled the same tokens"
        assert first == second, "two engines of equal seed gave different tokens to equal requests"

    def test_stop_tokens_and_stop_strings_end_a_row_and_stay_in_it(self, models: Models) -> None:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(models.served / "tokenizer.json"))
        path = greedy(models.served, PROMPTS[2], 10)
        ends = path.index(path[6]) + 1
        text = tokenizer.decode(path[3:5], skip_special_tokens=False)
        spelled = next(n for n in range(1, 11) if text in tokenizer.decode(path[:n], skip_special_tokens=False))

        async def test() -> None:
            async with self.serving(models.served) as (engine, _):
                token, string = await answers(
                    engine,
                    [
                        ask(PROMPTS[2], name="a", temperature=0.0, max_tokens=10, stop_token_ids=(path[6],)),
                        ask(PROMPTS[2], name="b", temperature=0.0, max_tokens=10, stop=("never said", text)),
                    ],
                )
            assert token.token_ids == path[:ends], "a sampled stop token must end the row and stay in it"
            assert token.finish_reason is FinishReason.STOP
            assert string.token_ids == path[:spelled], f"stop string {text!r} must end the row, its tokens stay"
            assert string.finish_reason is FinishReason.STOP

        self.run(test)

    def test_the_checkpoints_generation_config_changes_nothing(self, models: Models, tmp_path: Path) -> None:
        folder = tmp_path / "model"
        shutil.copytree(models.served, folder)
        every_token = list(range(3, 275))
        settings = {"do_sample": True, "temperature": 0.1, "top_k": 1, "eos_token_id": every_token}
        (folder / "generation_config.json").write_text(json.dumps(settings))

        async def sampled(model: Path) -> list[int]:
            async with self.serving(model) as (engine, _):
                (answer,) = await answers(engine, [ask(PROMPTS[0], max_tokens=10, seed=3)])
                return answer.token_ids

        assert self.run(lambda: sampled(folder)) == self.run(lambda: sampled(models.served))

    def test_what_does_not_fit_is_refused_with_numbers(self, models: Models) -> None:
        async def test() -> None:
            async with self.serving(models.served, context_length=32) as (engine, _):
                for request, words in (
                    (ask(range(3, 35)), ("32 tokens",)),
                    (ask([1, 275, 4]), ("275", "274")),
                    (ask([1, -1]), ("-1",)),
                ):
                    with refused(f"a prompt that cannot be served was answered (must say {words})") as error:
                        await answers(engine, [request])
                    assert all(word in error[0] for word in words), f"the error does not say {words}: {error[0]}"
                (answer,) = await answers(engine, [ask(range(3, 33), max_tokens=50)])
                assert len(answer.token_ids) == 2, "the answer must end where the context does"
                assert answer.finish_reason is FinishReason.LENGTH

        self.run(test)

    def test_turns_of_a_session_continue_their_row(self, models: Models) -> None:
        async def test() -> None:
            async with self.serving(models.served) as (engine, _):
                row = list(PROMPTS[2])
                for turn in range(3):
                    asked = ask(row, name=f"turn {turn}", session="s", max_tokens=5, temperature=0.0)
                    (answer,) = await answers(engine, [asked])
                    assert answer.token_ids == greedy(models.served, row, 5), f"turn {turn} continues another row"
                    assert 0 <= answer.cached_tokens < len(row), "more tokens reused than the prompt has"
                    row += [*answer.token_ids, 2, 40 + turn]

        self.run(test)

    # --- aborts, pauses, the end --------------------------------------------------------------------------------------

    def test_tokens_are_streamed(self, models: Models) -> None:
        self.require("streams")

        async def test() -> None:
            async with self.serving(models.served) as (engine, _):
                (answer,) = await answers(engine, [ask(PROMPTS[0], max_tokens=16)])
                assert answer.chunks > 1, "all tokens came in one chunk"

        self.run(test)

    def test_closing_the_iterator_aborts_that_request_alone(self, models: Models) -> None:
        async def test() -> None:
            async with self.serving(models.served) as (engine, _):
                abandoned: Any = engine.generate(ask(PROMPTS[1], name="abandoned", max_tokens=80))
                other = asyncio.create_task(
                    collect(engine.generate(ask(PROMPTS[0], name="other", max_tokens=10, temperature=0.0)))
                )
                await anext(abandoned)
                await abandoned.aclose()
                assert (await other).token_ids == greedy(models.served, PROMPTS[0], 10)
                stats = await engine.stats()
                assert stats["running"] + stats["waiting"] == 0, f"the aborted request goes on: {dict(stats)}"

        self.run(test)

    def test_closing_the_engine_ends_requests_with_an_error(self, models: Models) -> None:
        async def test() -> None:
            async with self.serving(models.served) as (engine, _):
                stream = engine.generate(ask(PROMPTS[0], max_tokens=90))
                await anext(stream)
                await engine.close()
                with refused("a request went on after close"):
                    await collect(stream)
                with refused("a request was taken after close"):
                    await answers(engine, [ask(PROMPTS[0])])

        self.run(test)

    # --- weights ------------------------------------------------------------------------------------------------------

    def test_staged_weights_are_invisible_until_activated(self, models: Models) -> None:
        async def test() -> None:
            tensors = [NamedTensor(name=name, tensor=t) for name, t in weights_of(models.published).items()]
            async with self.serving(models.served) as (engine, feed):
                asked = ask(PROMPTS[2], max_tokens=6, temperature=0.0)
                assert await engine.version() == -1
                with refused("a version was activated that nobody staged"):
                    await engine.activate(0)
                feed.buckets = buckets_of(0, tensors)
                await engine.pause()
                received = await engine.receive(0)
                assert dict(received.digests) == {named.name: digest_tensor(named.tensor) for named in tensors}
                with refused("version 1 was activated, version 0 was staged"):
                    await engine.activate(1)
                await engine.resume()
                (staged,) = await answers(engine, [asked])
                assert await engine.version() == -1, "the version advanced before activate"
                old = greedy(models.served, PROMPTS[2], 6)
                assert staged.token_ids == old, "staged weights were served before activate"
                await engine.pause()
                await engine.activate(0)
                await engine.resume()
                (active,) = await answers(engine, [asked])
                assert await engine.version() == 0
                assert active.token_ids == greedy(models.published, PROMPTS[2], 6), "the old weights are still served"

        self.run(test)

    def test_a_version_that_is_not_exactly_the_weights_is_refused(self, models: Models) -> None:
        tensors = [NamedTensor(name=name, tensor=t) for name, t in weights_of(models.published).items()]

        async def test() -> None:
            async with self.serving(models.served) as (engine, feed):
                for fault in SPOILT:
                    feed.buckets, named = spoil(tensors, fault)
                    await engine.pause()
                    with refused(f"a version with fault {fault!r} was staged") as error:
                        await engine.receive(0)
                    assert named in error[0], f"the error for fault {fault!r} does not name {named}: {error[0]}"
                    with refused(f"a version with fault {fault!r} was activated"):
                        await engine.activate(0)
                    await engine.resume()
                    (answer,) = await answers(engine, [ask(PROMPTS[2], max_tokens=4, temperature=0.0)])
                    assert answer.token_ids == greedy(models.served, PROMPTS[2], 4), (
                        f"the refused version with fault {fault!r} is served"
                    )
                await publish(engine, feed, models.published, 0)
                assert await engine.version() == 0, "a good version is refused after a bad one"

        self.run(test)

    def test_it_generates_with_the_old_weights_while_it_stages_the_new_ones(self, models: Models) -> None:
        self.require("stages-aside")

        async def test() -> None:
            async with self.serving(models.served) as (engine, feed):
                tensors = [NamedTensor(name=name, tensor=t) for name, t in weights_of(models.published).items()]
                feed.buckets = buckets_of(0, tensors)
                await engine.receive(0)
                (answer,) = await answers(engine, [ask(PROMPTS[2], max_tokens=4, temperature=0.0)])
                assert answer.versions == [-1] * 4, "a staged version is served before it is activated"
                assert answer.token_ids == greedy(models.served, PROMPTS[2], 4), "staging changed the served weights"
                await engine.pause()
                await engine.activate(0)
                await engine.resume()
                (answer,) = await answers(engine, [ask(PROMPTS[2], max_tokens=4, temperature=0.0)])
                assert answer.token_ids == greedy(models.published, PROMPTS[2], 4), "another version was activated"

        self.run(test)

    def test_no_prefix_outlives_its_weights(self, models: Models) -> None:
        async def test() -> None:
            async with self.serving(models.served) as (engine, feed):
                asked = ask(PROMPTS[2], session="s", max_tokens=6, temperature=0.0)
                await answers(engine, [asked])
                await answers(engine, [asked])
                await publish(engine, feed, models.published, 0)
                (answer,) = await answers(engine, [asked])
                assert answer.cached_tokens == 0, "a prefix of the old weights was reused"
                assert answer.token_ids == greedy(models.published, PROMPTS[2], 6), (
                    "the new weights continued a prefix of the old ones"
                )

        self.run(test)

    def test_noise_reaches_every_tensor_and_a_publish_replaces_all_of_it(self, models: Models) -> None:
        self.require("verifies-weights")
        expected = [
            {name: digest_tensor(tensor) for name, tensor in weights_of(folder).items()}
            for folder in (models.served, models.published)
        ]

        async def test() -> None:
            async with self.serving(models.served) as (engine, feed):
                assert dict(await engine.digests()) == expected[0], "digests are not those of the loaded checkpoint"
                await engine.scramble(7)
                noise = await engine.digests()
                kept = [name for name in expected[0] if noise.get(name) == expected[0][name]]
                assert not kept, f"scramble left {', '.join(kept)} alone"
                await publish(engine, feed, models.published, 0)
                assert dict(await engine.digests()) == expected[1], "the publish did not replace every tensor"

        self.run(test)
