"""Tables that are wrong in one way each."""

from dataclasses import replace

import pytest

pytest.importorskip("megatron.core", reason="tables are of backend megatron")

from miles_core.testing.architecture import ArchitectureConformance
from miles_core.testing.tiny import make_tiny_model
from miles_megatron.architectures.dense import LLAMA
from miles_megatron.architectures.pieces import ATTENTION, ENDS, MLP, NORMS


def swapped(rows, one, other):
    """The tensors of a row with two of them in each other's place."""
    change = {one: other, other: one}
    return tuple(
        replace(
            row, tensors=tuple(next((n.replace(a, b) for a, b in change.items() if a in n), n) for n in row.tensors)
        )
        for row in rows
    )


SWAPS_KEY_AND_VALUE = replace(LLAMA, rows=(*ENDS, *NORMS, *swapped(ATTENTION, "k_proj", "v_proj"), *MLP))
SWAPS_GATE_AND_UP = replace(LLAMA, rows=(*ENDS, *NORMS, *ATTENTION, *swapped(MLP, "gate_proj", "up_proj")))


class Faulty(ArchitectureConformance):
    @classmethod
    def make_model(cls, folder):
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
        make_tiny_model(folder, architecture="llama", layers=4, context=64, overrides=heads)


class TestSwapsKeyAndValue(Faulty):
    load = "tests.kits.faults.architecture:SWAPS_KEY_AND_VALUE"
    caught_by = {"test_log_probs_are_those_of_transformers": "log-probs differ"}


class TestSwapsGateAndUp(Faulty):
    load = "tests.kits.faults.architecture:SWAPS_GATE_AND_UP"
    caught_by = {"test_log_probs_are_those_of_transformers": "log-probs differ"}
