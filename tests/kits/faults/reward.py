"""Rewards that are wrong in one way each."""

from pathlib import Path

from miles_core.testing.reward import RewardConformance, scored_answer

FUNCTIONS = Path(__file__).with_name("reward_functions.py")


class Faulty(RewardConformance):
    def examples(self):
        return [(scored_answer("4"), 1.0), (scored_answer("2 + 2 = 4"), None), (scored_answer("5"), 0.0)]


class TestConvertsWhateverItGets(Faulty):
    load = f"{FUNCTIONS}:converts"
    caught_by = {
        "test_the_examples_score_as_they_should": "invalid literal for int()",
        "test_odd_answers_get_a_score_too": "invalid literal for int()",
    }


class TestGivesTheModelsNumberAsScore(Faulty):
    load = f"{FUNCTIONS}:echoes"
    caught_by = {
        "test_the_examples_score_as_they_should": "'5' scored 1.0, expected 0.0",
        "test_odd_answers_get_a_score_too": "which is no score",
    }


class TestNoisy(Faulty):
    load = f"{FUNCTIONS}:noisy"
    caught_by = {
        "test_the_examples_score_as_they_should": "expected",
        "test_equal_episodes_get_equal_scores": "scores differ between two calls",
    }


class TestEvaluatesTheAnswer(Faulty):
    load = f"{FUNCTIONS}:evaluates"
    caught_by = {"test_an_answer_is_never_executed": "the grader executed the model's answer"}


class TestBacktracksForEver(Faulty):
    load = f"{FUNCTIONS}:backtracks"
    deadline_s = 2.0  # the other answers take no time
    caught_by = {"test_odd_answers_get_a_score_too": "no score within 2 s"}


class TestDoesNotExist(Faulty):
    load = f"{FUNCTIONS}:no_such_function"
    caught_by = {
        "test_it_loads_in_a_worker": "does not load in a process of its own",
        "test_the_examples_score_as_they_should": "no_such_function",
        "test_odd_answers_get_a_score_too": "no_such_function",
        "test_equal_episodes_get_equal_scores": "no_such_function",
        "test_an_answer_is_never_executed": "no_such_function",
    }
