"""What trials of a process have in common is there once from their set-up on, alone or in a pack."""

from __future__ import annotations

import gc
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from fused.test_shared import Frozen, of_seeds  # noqa: E402
from fused.trainables import Classifier, made  # noqa: E402

from fluid.fused import FusedPack, TensorData  # noqa: E402
from fluid.fused.data import _present, once_on  # noqa: E402

CPU = torch.device("cpu")


def test_trials_that_are_set_up_have_one_copy_of_equal_data() -> None:
    one, two = (made(Classifier, config) for config in of_seeds(0, 1))
    tensors = [trial._fused.data.tensors for trial in (one, two)]
    assert all(ours is theirs for ours, theirs in zip(*tensors, strict=True))
    data = len(images := tensors[0][0]) * images[0].numel() * 8 + len(tensors[0][1]) * 8
    assert one.shareable_bytes == data, "train and evaluation are one tensor here"
    assert FusedPack([one, two]).shared_bytes == data


def test_data_that_differs_in_one_bit_is_not_shared() -> None:
    ours = torch.tensor([0.0, 1.0, float("nan")])
    theirs = torch.tensor([-0.0, 1.0, float("nan")])
    assert once_on(ours, CPU) is ours and once_on(theirs, CPU) is theirs, "zeros have signs"
    assert once_on(ours.clone(), CPU) is ours, "what is not a number is equal to itself here"
    assert once_on(ours.double(), CPU).dtype == torch.float64
    view = torch.arange(12.0).reshape(3, 4).t()
    assert once_on(view, CPU) is view and once_on(view.clone(), CPU) is not view, "not in order: not compared"


def test_large_tensors_are_compared_to_their_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fluid.fused.data._COMPARED_BYTES", 64)
    ours = torch.zeros(1000)
    theirs = ours.clone()
    theirs[-1] = 1.0
    assert once_on(ours, CPU) is ours
    assert once_on(theirs, CPU) is theirs and once_on(torch.zeros(1000), CPU) is ours


def test_data_leaves_with_the_last_trial_that_has_it() -> None:
    gc.collect()
    once_on(torch.zeros(0), CPU)  # Forgets what others have left.
    before = len(_present)
    one, two = (made(Classifier, config) for config in of_seeds(0, 1))
    del one
    gc.collect()
    data = two._fused.data.train[0]
    assert once_on(data.clone(), CPU) is data
    del two, data
    gc.collect()
    once_on(torch.zeros(0), CPU)
    assert len(_present) == before


class Scaled(TensorData):
    """Writes to its tensors."""

    def train_batches(self, epoch: int, start: int) -> Any:
        self.train[0].mul_(0.5)
        return super().train_batches(epoch, start)


class OnScaled(Classifier):
    def data(self, config: dict[str, Any], seed: int) -> TensorData:
        data = super().data(config, seed)
        return Scaled(data.train, data.evaluation, batch_size=16, seed=seed)


def test_data_of_a_derived_class_may_be_written_to_and_is_each_trial_s_own() -> None:
    one, two = (made(OnScaled, config) for config in of_seeds(3, 3))
    assert one._fused.data.train[0] is not two._fused.data.train[0]
    assert one.step() == two.step()


def test_parameters_that_are_not_trained_are_shared_from_the_set_up_on() -> None:
    one, two, other = (made(Frozen, config) for config in (*of_seeds(0, 1), *of_seeds(2, features=1)))
    weights = [trial.model.get_parameter("first.weight").data_ptr() for trial in (one, two, other)]
    assert weights[0] == weights[1] != weights[2]
    assert one.shareable_bytes == made(Classifier, {}).shareable_bytes + (36 * 7 + 7) * 8
    assert FusedPack([one, two]).shared_bytes == one.shareable_bytes


def test_a_state_that_is_loaded_into_one_trial_changes_no_other() -> None:
    one, two, other = (made(Frozen, config) for config in (*of_seeds(0, 1), *of_seeds(2, features=1)))
    expected = two.model.get_parameter("first.weight").clone()
    one.load_elastic_state(other.elastic_state())
    weights = [trial.model.get_parameter("first.weight") for trial in (one, two, other)]
    assert torch.equal(weights[1], expected) and torch.equal(weights[0], weights[2])
    assert weights[0].data_ptr() == weights[2].data_ptr() != weights[1].data_ptr(), "it has what is equal in common"
