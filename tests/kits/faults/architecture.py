"""Tables that are wrong in one way each."""

from dataclasses import replace

import pytest

pytest.importorskip("megatron.core", reason="tables are of backend megatron")

import torch

from miles_core.testing.architecture import ArchitectureConformance
from miles_core.testing.tiny import make_tiny_model
from miles_core.testing.tiny_moe import save_model
from miles_megatron.architectures.dense import LLAMA, QWEN2, describe_qwen2
from miles_megatron.architectures.pieces import ATTENTION, ENDS, MLP, NORMS
from miles_megatron.architectures.sparse import QWEN3_MOE
from miles_megatron.layouts import COLUMNS, GATE_UP, REPLICATED, ROWS


def swapped(rows, one, other):
    """The tensors of a row with two of them in each other's place."""
    change = {one: other, other: one}
    return tuple(
        replace(
            row, tensors=tuple(next((n.replace(a, b) for a, b in change.items() if a in n), n) for n in row.tensors)
        )
        for row in rows
    )


def laid_out(architecture, tensor, layout):
    """The table with another layout for the row of a tensor."""
    rows = tuple(replace(row, layout=layout) if tensor in row.tensors[0] else row for row in architecture.rows)
    return replace(architecture, rows=rows)


SWAPS_GATE_AND_UP = replace(LLAMA, rows=(*ENDS, *NORMS, *ATTENTION, *swapped(MLP, "gate_proj", "up_proj")))
EXPORTS_GATE_AS_UP = laid_out(
    LLAMA, "gate_proj", replace(GATE_UP, join=lambda shards, heads: GATE_UP.join(shards, heads)[::-1])
)
CUTS_ANOTHER_AXIS = laid_out(LLAMA, "down_proj", ROWS)
JOINS_ALONG_ANOTHER_AXIS = laid_out(LLAMA, "o_proj", replace(COLUMNS, join=ROWS.join))
CUTS_GATE_FROM_UP = laid_out(
    LLAMA,
    "gate_proj",
    replace(
        GATE_UP,
        split=lambda tensors, shards, heads: list(torch.cat(list(tensors)).chunk(shards)),
        join=lambda shards, heads: list(torch.cat(list(shards)).chunk(2)),
    ),
)
"""One rank gets all of gate, the other all of up: nothing is lost, and nothing is right."""
MISSES_EXPERTS_BY_ONE = laid_out(
    QWEN3_MOE,
    "mlp.gate.weight",
    replace(
        REPLICATED,
        split=lambda tensors, shards, heads: [tensors[0].roll(1, 0)] * shards,
        join=lambda shards, heads: [shards[0].roll(-1, 0)],
    ),
)
FORGETS_BIAS = replace(
    QWEN2,
    left_out=(r".*_proj\.bias",),
    describe=lambda config: (
        lambda shape: replace(shape, fields={**shape.fields, "add_qkv_bias": False})  # or it would be asked for
    )(describe_qwen2(config)),
)


class Faulty(ArchitectureConformance):
    """On one rank alone, where the fault shows already."""

    architecture = "llama"

    @classmethod
    def make_model(cls, folder):
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
        make_tiny_model(folder, architecture=cls.architecture, layers=2, context=64, overrides=heads)

    @pytest.fixture(scope="class")
    @classmethod
    def two_ranks(cls):
        return []


class FaultyOnTwo(Faulty):
    layouts = {"tensor": {"tensor_parallel": 2, "sequence_parallel": True}}
    two_ranks = ArchitectureConformance.two_ranks


HERE = "tests.kits.faults.architecture"
LOG_PROBS = {"test_log_probs_are_those_of_transformers": "log-probs differ"}


class TestSwapsGateAndUp(Faulty):
    load = f"{HERE}:SWAPS_GATE_AND_UP"
    caught_by = LOG_PROBS


class TestExportsGateAsUp(Faulty):
    load = f"{HERE}:EXPORTS_GATE_AS_UP"
    caught_by = {"test_every_tensor_comes_back_bit_for_bit": "lost or changed"}


class TestForgetsBias(Faulty):
    load = f"{HERE}:FORGETS_BIAS"
    architecture = "qwen2"
    caught_by = LOG_PROBS


class TestMissesExpertsByOne(Faulty):
    load = f"{HERE}:MISSES_EXPERTS_BY_ONE"
    caught_by = LOG_PROBS

    @classmethod
    def make_model(cls, folder):
        save_model("qwen3-moe", folder)


class TestCutsAnotherAxis(FaultyOnTwo):
    load = f"{HERE}:CUTS_ANOTHER_AXIS"
    caught_by = {
        "test_every_tensor_comes_back_from_two_ranks": "does not fit",
        "test_log_probs_of_two_ranks_are_the_same": "does not fit",
    }


class TestJoinsAlongAnotherAxis(FaultyOnTwo):
    load = f"{HERE}:JOINS_ALONG_ANOTHER_AXIS"
    caught_by = {"test_every_tensor_comes_back_from_two_ranks": "lost or changed"}


class TestCutsGateFromUp(FaultyOnTwo):
    load = f"{HERE}:CUTS_GATE_FROM_UP"
    caught_by = {"test_log_probs_of_two_ranks_are_the_same": "log-probs differ"}
