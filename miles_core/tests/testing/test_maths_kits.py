"""Core's own losses, advantages and corrections pass the kits that third parties subclass."""

from __future__ import annotations

from typing import ClassVar

from miles_core.algorithms import advantages, corrections, losses
from miles_core.kinds.advantage import Advantage
from miles_core.kinds.correction import Correction
from miles_core.kinds.loss import Loss
from miles_core.testing.advantage import AdvantageConformance
from miles_core.testing.correction import CorrectionConformance
from miles_core.testing.loss import LossConformance

GROUP = frozenset({"needs-group"})


class TestPpoClip(LossConformance):
    options: ClassVar = {"low": 0.1, "high": 0.15, "dual_clip": 3.0}

    def make(self) -> Loss:
        return losses.ppo_clip


class TestGspo(LossConformance):
    options: ClassVar = {"low": 0.05, "high": 0.05}

    def make(self) -> Loss:
        return losses.gspo


class TestCispo(LossConformance):
    options: ClassVar = {"high": 0.1}

    def make(self) -> Loss:
        return losses.cispo


class TestGrpo(AdvantageConformance):
    provides = GROUP

    def make(self) -> Advantage:
        return advantages.grpo


class TestGrpoWithoutStd(TestGrpo):
    options: ClassVar = {"std": False}


class TestDrGrpo(AdvantageConformance):
    provides = GROUP

    def make(self) -> Advantage:
        return advantages.dr_grpo


class TestRloo(AdvantageConformance):
    provides = GROUP

    def make(self) -> Advantage:
        return advantages.rloo


class TestReinforcePP(AdvantageConformance):
    def make(self) -> Advantage:
        return advantages.reinforce_pp


class TestReinforcePPBaseline(AdvantageConformance):
    def make(self) -> Advantage:
        return advantages.reinforce_pp_baseline


class TestGae(AdvantageConformance):
    provides = frozenset({"needs-values"})

    def make(self) -> Advantage:
        return advantages.gae


class TestTis(CorrectionConformance):
    def make(self) -> Correction:
        return corrections.tis


class TestClipOrPop(CorrectionConformance):
    options: ClassVar = {"low": 0.5, "high": 1.5}

    def make(self) -> Correction:
        return corrections.clip_or_pop


class TestMetricsOnly(CorrectionConformance):
    def make(self) -> Correction:
        return corrections.metrics_only


class TestSequenceVeto(CorrectionConformance):
    options: ClassVar = {"level": "sequence", "action": "veto", "low": 0.5, "high": 2.0}

    def make(self) -> Correction:
        return corrections.importance


class TestGeometricMask(CorrectionConformance):
    options: ClassVar = {"level": "geometric", "action": "mask", "low": 0.8, "high": 1.2}

    def make(self) -> Correction:
        return corrections.importance
