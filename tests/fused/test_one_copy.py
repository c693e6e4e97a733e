"""What trials of a process have in common is there once from their set-up on, alone or in a pack."""

from __future__ import annotations

import copy
import gc
import warnings
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from fused.test_shared import Frozen, of_seeds  # noqa: E402
from fused.trainables import Classifier, Single, made  # noqa: E402
from torch import nn  # noqa: E402

from fluid.errors import FluidError  # noqa: E402
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


def test_what_memory_alone_does_not_tell_is_not_shared() -> None:
    numbers = torch.randn(6, dtype=torch.complex64)
    assert once_on(numbers, CPU) is numbers
    for lazy in (numbers.conj(), numbers.conj().resolve_conj().conj(), torch._neg_view(numbers)):
        assert once_on(lazy, CPU) is lazy
    own = torch.ones(6).as_subclass(type("Own", (torch.Tensor,), {}))
    assert once_on(ones := torch.ones(6), CPU) is ones and once_on(own, CPU) is own
    for _ in range(2):
        with warnings.catch_warnings():  # That they are deprecated is told once.
            warnings.simplefilter("ignore")
            quantized = torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8)
        assert once_on(quantized, CPU) is quantized


def test_numbers_that_do_not_begin_at_a_whole_word_are_compared() -> None:
    ours = torch.arange(9, dtype=torch.int16)[1:]
    assert once_on(ours, CPU) is ours
    assert once_on(ours.clone(), CPU) is ours and once_on(ours + 1, CPU) is not ours


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


class Centring(Classifier):
    """Writes to its batches for evaluation."""

    def evaluate(self, model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
        x, y = batch
        return super().evaluate(model, (x.sub_(x.mean() + 1.0), y))


def test_a_batch_for_evaluation_may_be_written_to() -> None:
    expected = made(Centring, of_seeds(0)[0]).step()
    one, two = (made(Centring, config) for config in of_seeds(1, 0))
    one.step()
    assert two.step() == expected


class Teacher(Single):
    """Half of the scores are those of a mean of past weights."""

    #: Batches before the first write.
    waits = 0

    class Net(nn.Module):
        def __init__(self, waits: int) -> None:
            super().__init__()
            self.own = nn.Linear(36, 5)
            nn.init.zeros_(self.own.weight)
            nn.init.zeros_(self.own.bias)
            self.mean = copy.deepcopy(self.own).requires_grad_(False)
            self.calls, self.waits = 0, waits

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.flatten(1)
            self.calls += self.training
            if self.training and self.calls > self.waits:
                for mean, own in zip(self.mean.parameters(), self.own.parameters(), strict=True):
                    mean.data.lerp_(own.data + 0.1, 0.5)
            return self.own(x) + self.mean(x)

    def build(self, config: dict[str, Any]) -> nn.Module:
        return self.Net(self.waits)


def test_trials_that_write_to_what_they_share_fail_and_later_ones_share_nothing() -> None:
    class Writer(Teacher):
        pass

    trials = [made(Writer, config) for config in of_seeds(0, 1, 2)]
    while trials:
        with pytest.raises(FluidError, match=r"written to mean.weight.*make it a buffer"):
            trials.pop().step()
        gc.collect()
    later = [made(Writer, config) for config in of_seeds(0, 1)]
    assert later[0].step() == made(Teacher, of_seeds(0)[0]).step() and later[1].step()


def test_a_write_that_begins_later_is_found_while_others_share() -> None:
    class Late(Teacher):
        waits = 4  # An iteration.

    one, two = (made(Late, config) for config in of_seeds(0, 1))
    one.step()
    two.step()
    with pytest.raises(FluidError, match=r"written to mean.weight.*make it a buffer"):
        one.step()
    with pytest.raises(FluidError, match=r"written to mean.weight"):
        two.step()


def test_a_trial_that_shares_with_none_may_write_to_what_it_does_not_train() -> None:
    class Writer(Teacher):
        pass

    first = made(Writer, of_seeds(0)[0])
    results = [first.step() for _ in range(2)]
    second = made(Writer, of_seeds(0)[0])
    assert [second.step() for _ in range(2)] == results, "it has values of its own, whatever the first one writes"
    assert first.step() == second.step()


class Tied(Single):
    """A parameter that is not trained has the memory of one that is, another one that of a buffer."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own = nn.Linear(36, 5)
            nn.init.zeros_(self.own.weight)
            self.same = nn.Parameter(self.own.weight.detach(), requires_grad=False)
            self.register_buffer("calls", torch.zeros(6))
            self.shift = nn.Parameter(self.calls[1:], requires_grad=False)
            self.register_buffer("graph", torch.eye(3).to_sparse())  # Without an address.

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls[:5].add_(self.own.bias.detach())
            return self.own(x.flatten(1)) + nn.functional.linear(x.flatten(1), self.same, self.shift)

    def build(self, config: dict[str, Any]) -> nn.Module:
        return self.Net()


def test_memory_that_a_model_writes_to_by_another_name_is_its_own() -> None:
    configs = of_seeds(0, 1)
    expected = [[trial.step() for _ in range(3)] for trial in (made(Tied, config) for config in configs)]
    trials = [made(Tied, config) for config in configs]
    assert [
        list(each) for each in zip(*([trial.step() for trial in trials] for _ in range(3)), strict=True)
    ] == expected


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
