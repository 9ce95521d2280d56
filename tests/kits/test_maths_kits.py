"""The kits of loss, advantage and correction fail the wrong implementations they were written against, by name."""

from __future__ import annotations

import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

FAULTS = Path(__file__).parent / "faults"

HEADER = """
import importlib.util
from miles_core.testing.advantage import AdvantageConformance
from miles_core.testing.correction import CorrectionConformance
from miles_core.testing.loss import LossConformance

def planted(kind):
    spec = importlib.util.spec_from_file_location(kind, {folder!r} + "/" + kind + ".py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
"""
CLASS = """
class Test_{kind}_{fault}({base}Conformance):
    provides = frozenset({{"needs-group"}})
    def make(self):
        return planted({kind!r}).{fault}
"""

SPLIT = "test_value_and_gradient_do_not_depend_on_micro_batches_or_ranks"
PADDING = "test_value_and_gradient_do_not_depend_on_padding"
LOCAL = "test_a_token_depends_on_its_own_sequence_alone"
LOSS_MASK = "test_untrained_tokens_give_and_take_nothing"
DIRECTION = "test_the_first_step_follows_the_policy_gradient"
EXTREME = "test_extreme_ratios_stay_finite"
UNTRAINED = "test_what_untrained_tokens_hold_does_not_matter"
EQUAL = "test_equal_rewards_stay_finite"
ONE = "test_a_group_of_one_is_finite"
ONE_TOKEN = "test_one_trained_token_in_all_is_finite"
ORDER = "test_the_order_of_sequences_does_not_matter"
BASELINES = "test_groups_of_different_sizes_have_a_baseline_of_their_own"
UNIT = "test_equal_policies_need_no_correction"

CASES: list[tuple[str, str, set[str], str]] = [
    ("loss", "mean_over_micro_batch", {SPLIT}, "depends on the split"),
    ("loss", "mean_over_padded_tokens", {SPLIT, PADDING}, "depends on padding"),
    ("loss", "whitens_in_micro_batch", {SPLIT, LOCAL}, "changed the loss of another"),
    ("loss", "packed_sequence_ratio", {SPLIT, DIRECTION}, "depends on the split"),
    ("loss", "shifted_by_one", {SPLIT, PADDING, LOSS_MASK, DIRECTION}, "outside the mask received a gradient"),
    ("loss", "forgets_the_mask", {LOSS_MASK}, "must be 0 outside the mask"),
    ("loss", "wrong_sign", {DIRECTION}, "descent lowers the probability"),
    ("loss", "overflows", {EXTREME}, "at log-ratios of +-300"),
    ("loss", "attached_metrics", {"test_metrics_are_per_token_and_carry_no_gradient"}, "keeps the graph"),
    ("loss", "changes_its_input", {"test_the_loss_is_pure"}, "two calls"),
    ("advantage", "divides_by_zero_deviation", {EQUAL, ONE, ONE_TOKEN}, "all-equal rewards"),
    ("advantage", "divides_by_the_deviation_of_one", {ONE, ONE_TOKEN}, "a group of one"),
    ("advantage", "rounding_as_signal", {EQUAL}, "expected exactly 0"),
    ("advantage", "trains_prompts", {"test_untrained_tokens_have_no_advantage", UNTRAINED}, "0 outside the mask"),
    ("advantage", "float32_only", {"test_one_finite_value_per_token_in_the_dtype_of_the_rewards"}, "torch.float32"),
    ("advantage", "groups_by_position", {ORDER, BASELINES}, "reordering"),
    ("advantage", "one_baseline_for_all", {BASELINES}, "group of rewards 1, 0"),
    ("advantage", "wrong_sign", {"test_a_better_trajectory_has_the_larger_advantage", BASELINES}, "rewards 3, 0, 1"),
    ("advantage", "kl_of_prompt_tokens", {UNTRAINED}, "KL or values"),
    ("advantage", "changes_its_input", {UNTRAINED, "test_the_advantage_is_pure"}, "two calls"),
    ("correction", "zero_outside_the_mask", {"test_untrained_tokens_have_weight_one", UNIT}, "1 outside the mask"),
    ("correction", "unbounded", {EXTREME}, "+-1000"),
    ("correction", "log_ratio_as_weight", {"test_weights_are_finite_and_not_negative", UNIT}, "negative weight"),
    ("correction", "carries_gradient", {"test_the_weight_carries_no_gradient"}, "detach"),
    ("correction", "product_over_prompts", {UNTRAINED}, "changed a weight"),
    ("correction", "sequences_by_position", {ORDER}, "reordering"),
    ("correction", "metric_of_all_tokens", {UNTRAINED}, "changed the metric"),
    ("correction", "scalar_metric", {"test_metrics_are_per_token", UNTRAINED, EXTREME}, "expected [N]"),
]


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """Inner pytest over every planted fault: class -> failing test -> message.

    One process of its own for all: torch does not survive being imported twice in one.
    """
    folder = tmp_path_factory.mktemp("kits")
    classes = [CLASS.format(kind=kind, fault=fault, base=kind.title()) for kind, fault, _, _ in CASES]
    (folder / "test_planted.py").write_text(HEADER.format(folder=str(FAULTS)) + "".join(classes))
    (folder / "pytest.ini").write_text("[pytest]\n")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--junitxml=report.xml",
        "test_planted.py",
    ]
    subprocess.run(command, cwd=folder, capture_output=True, timeout=120, check=False)
    found: dict[str, dict[str, str]] = {f"Test_{kind}_{fault}": {} for kind, fault, _, _ in CASES}
    for case in ET.parse(folder / "report.xml").iter("testcase"):
        failed = case.find("failure")
        if failed is not None:
            by_test = found[str(case.get("classname")).split(".")[-1]]
            by_test[str(case.get("name")).split("[")[0]] = str(failed.get("message"))
    return found


@pytest.mark.parametrize(("kind", "fault", "tests", "says"), CASES, ids=[f"{case[0]}-{case[1]}" for case in CASES])
def test_the_kit_names_the_fault(
    failures: dict[str, dict[str, str]], kind: str, fault: str, tests: set[str], says: str
) -> None:
    found = failures[f"Test_{kind}_{fault}"]
    assert set(found) == tests
    assert any(says in message for message in found.values()), found
