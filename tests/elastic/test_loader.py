"""The elastic loader: the same global batches at every width."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from torch.utils.data import Dataset, TensorDataset  # noqa: E402

from fluid.elastic.loader import ElasticLoader, Shard  # noqa: E402
from fluid.errors import InvalidFieldError  # noqa: E402


class Context:
    """A rank, which notes its shards."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size = rank, size
        self.shard: Shard | None = None

    def begin_batch(self, shard: Shard) -> None:
        self.shard = shard


class Squares(Dataset):  # type: ignore[misc]
    """A dataset that is read sample by sample."""

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> int:
        return index * index


def loader(samples: int = 23, batch_size: int = 5, rank: int = 0, size: int = 1, **options: Any) -> ElasticLoader:
    dataset = TensorDataset(torch.arange(samples))
    return ElasticLoader(Context(rank, size), dataset, batch_size, **options)


def joined(batches: list[list[int]]) -> list[int]:
    return [sample for batch in batches for sample in batch]


def whole(batches: Any) -> list[list[int]]:
    return [batch[0].tolist() for batch in batches]


@given(samples=st.integers(1, 60), batch_size=st.integers(1, 20), size=st.integers(1, 7), seed=st.integers(0, 3))
def test_the_ranks_batches_together_are_the_batch_of_one(samples: int, batch_size: int, size: int, seed: int) -> None:
    alone = loader(samples, batch_size, seed=seed)
    ranks = [loader(samples, batch_size, rank, size, seed=seed) for rank in range(size)]
    for _ in range(2):
        for batch, parts in zip(alone, zip(*ranks, strict=True), strict=True):
            counted = [p[0][: r._context.shard.count].tolist() for p, r in zip(parts, ranks, strict=True)]  # type: ignore[attr-defined]
            assert joined(counted) == batch[0].tolist()


def test_an_epoch_has_every_sample_once_and_an_order_of_its_own() -> None:
    one = loader()
    first, second = joined(whole(one)), joined(whole(one))
    assert sorted(first) == sorted(second) == list(range(23))
    assert first != second
    assert one.epoch == 2
    assert joined(whole(loader())) == first
    assert joined(whole(loader(seed=1))) != first


def test_without_shuffling_and_without_the_rest() -> None:
    assert whole(loader(7, 3, shuffle=False)) == [[0, 1, 2], [3, 4, 5], [6]]
    assert whole(loader(7, 3, shuffle=False, drop_last=True)) == [[0, 1, 2], [3, 4, 5]]
    assert [len(loader(7, 3)), len(loader(7, 3, drop_last=True))] == [3, 2]


def test_it_goes_on_where_it_was_at_another_width() -> None:
    expected = whole(loader())
    one = loader()
    got = whole(one.take(2))
    state = one.state_dict()
    assert state == {"epoch": 0, "position": 2, "seed": 0}
    others = [loader(rank=rank, size=2) for rank in range(2)]
    for other in others:
        other.load_state_dict(state)
    rest = [whole(other) for other in others]
    assert got + [a + b for a, b in zip(*rest, strict=True)] == expected


def test_a_batch_after_which_the_loop_is_left_counts() -> None:
    one = loader()
    for _ in one:
        break
    assert one.state_dict()["position"] == 1


def test_taking_batches_over_the_end_of_an_epoch() -> None:
    one, other = loader(), loader()
    expected = whole(other) + whole(other)
    assert whole(one.take(3)) + whole(one.take(6)) == expected[:9]
    assert (one.epoch, one.state_dict()["position"]) == (1, 4)


def test_a_dataset_read_by_samples_has_the_same_order() -> None:
    by_sample = ElasticLoader(Context(), Squares(), 5)
    assert [batch.tolist() for batch in by_sample] == [[i * i for i in batch] for batch in whole(loader())]


def test_options_of_the_data_loader() -> None:
    one = ElasticLoader(Context(), Squares(), 5, shuffle=False, collate_fn=sum)
    assert list(one.take(1)) == [0 + 1 + 4 + 9 + 16]


def test_what_cannot_be_loaded_is_refused() -> None:
    with pytest.raises(InvalidFieldError, match="dataset"):
        ElasticLoader(Context(), iter([]), 5)
    with pytest.raises(InvalidFieldError, match="batch_size"):
        loader(batch_size=0)
    with pytest.raises(InvalidFieldError, match="too few samples"):
        loader(3, 5, drop_last=True)
    with pytest.raises(InvalidFieldError, match="samplers are not supported"):
        loader(sampler=[1])
    with pytest.raises(InvalidFieldError, match="batches=0"):
        next(loader().take(0))
