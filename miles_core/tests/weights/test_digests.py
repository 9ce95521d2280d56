"""A digest tells tensors apart by dtype, shape and bytes, and a comparison names what differs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from miles_core.types import NamedTensor
from miles_core.weights.digests import FEW_BYTES, compare, digest_tensor, digest_tensors, manifest, name_some


def test_digest_ignores_layout_but_not_dtype_shape_or_one_bit() -> None:
    base = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    assert digest_tensor(base) == digest_tensor(base.t().contiguous().t())
    assert len(digest_tensor(base)) == 32
    one_bit = base.clone()
    one_bit.view(torch.int32)[2, 3] += 1
    others = [base.reshape(4, 3), base.reshape(12), base.view(torch.int32), base.double(), base.bfloat16(), one_bit]
    assert len({digest_tensor(tensor) for tensor in [base, *others]}) == 1 + len(others)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool])
def test_digest_takes_any_dtype_and_empty_or_scalar_tensors(dtype: torch.dtype) -> None:
    digests = {digest_tensor(torch.zeros(shape).to(dtype)) for shape in [(), (0,), (1,), (2, 2)]}
    assert len(digests) == 4


def test_negative_zero_and_nan_payloads_count_as_bytes() -> None:
    assert digest_tensor(torch.tensor([0.0])) != digest_tensor(torch.tensor([-0.0]))
    assert digest_tensor(torch.tensor([float("nan")])) == digest_tensor(torch.tensor([float("nan")]))


def test_manifest_counts_bytes_and_refuses_a_name_that_comes_twice() -> None:
    named = [NamedTensor(name="a", tensor=torch.zeros(3)), NamedTensor(name="b", tensor=torch.zeros(2).bfloat16())]
    found = manifest(4, named)
    assert (found.version, found.num_bytes, set(found.digests)) == (4, 16, {"a", "b"})
    with pytest.raises(ValueError, match="'a' comes twice"):
        manifest(4, [named[0], named[0]])


def test_many_bytes_are_digested_by_threads_and_differ_in_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("miles_core.weights.digests.os.cpu_count", lambda: 4)
    values = torch.arange(3 * FEW_BYTES // 4, dtype=torch.int32)
    named = [
        NamedTensor(name=f"t{number}", tensor=tensor)
        for number, tensor in enumerate([*values.chunk(7), values.view(2, -1).t(), values[:0], values[0]])
    ]
    assert digest_tensors(named) == {each.name: digest_tensor(each.tensor) for each in named}
    with pytest.raises(ValueError, match="'t3' comes twice"):
        digest_tensors([*named, named[3]])


NAMED_DIGESTS = st.dictionaries(st.sampled_from("abcdef"), st.sampled_from("xyz"))


@given(NAMED_DIGESTS, NAMED_DIGESTS)
def test_comparison_is_empty_exactly_for_equal_mappings(left: dict[str, str], right: dict[str, str]) -> None:
    differences = compare(left, right)
    assert bool(differences) == (left != right)
    named = {*differences.missing, *differences.unexpected, *differences.changed}
    assert named == {name for name in left.keys() | right.keys() if left.get(name) != right.get(name)}
    assert all(name in str(differences) for name in named)


def test_long_lists_of_names_are_cut_with_a_count() -> None:
    assert name_some([f"n{i}" for i in range(10)]).endswith("n7 and 2 more")
