"""Which part of a batch a rank takes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluid.elastic.loader import Shard
from fluid.errors import InvalidFieldError


@given(total=st.integers(1, 500), size=st.integers(1, 40))
def test_shards_are_the_batch_once_and_in_order(total: int, size: int) -> None:
    shards = [Shard.of(total, rank, size) for rank in range(size)]
    samples = [sample for shard in shards for sample in range(shard.start, shard.start + shard.count)]
    assert samples == list(range(total))
    assert max(shard.count for shard in shards) - min(shard.count for shard in shards) <= 1
    assert sum(shard.weight for shard in shards) == pytest.approx(1.0)


@given(total=st.integers(1, 20), size=st.integers(1, 40))
def test_nobody_is_without_a_sample_to_work_on(total: int, size: int) -> None:
    for rank in range(size):
        shard = Shard.of(total, rank, size)
        start, end = shard.bounds
        assert 0 <= start < end <= total
        assert end - start == max(1, shard.count)


def test_65_on_2() -> None:
    assert [Shard.of(65, rank, 2).count for rank in range(2)] == [32, 33]


def test_an_empty_batch_is_refused() -> None:
    with pytest.raises(InvalidFieldError, match="total=0"):
        Shard.of(0, 0, 1)


def test_taking_a_part_of_a_tensor() -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.arange(10).view(2, 5)
    assert Shard.of(5, 1, 2).take(tensor, 1).tolist() == [[2, 3, 4], [7, 8, 9]]
    assert Shard.of(1, 1, 3).take(tensor[:1]).tolist() == [[0, 1, 2, 3, 4]]
    with pytest.raises(InvalidFieldError, match="must be the batch"):
        Shard.of(5, 1, 2).take(tensor, 0)
