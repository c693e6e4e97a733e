"""A fused trainable alone: as any trainable, under an executor, elastically, and under Ray Tune."""

from __future__ import annotations

import copy
import os
import pickle
import random
import signal
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import numpy as np  # noqa: E402
from elastic.quick import QuickRun  # noqa: E402
from fused.trainables import (  # noqa: E402
    Classifier,
    Convolutions,
    OwnData,
    Steps,
    Streamed,
    Tunable,
    difference,
    images,
    made,
    values,
)
from torch import nn  # noqa: E402

import fluid  # noqa: E402
from fluid.errors import FluidError, InvalidFieldError  # noqa: E402
from fluid.fused import SGD, FusedTrainable, TensorData  # noqa: E402
from fluid.search import choice  # noqa: E402
from fluid.trainables.pickling import dump_trainable  # noqa: E402
from fluid.trainables.trainable import can_save, is_elastic, kind_of, make_resident  # noqa: E402


def test_fluid_knows_it() -> None:
    assert kind_of(Classifier) == "class" and can_save(Classifier) and is_elastic(Classifier)


def test_it_trains_as_a_loop_written_by_hand() -> None:
    trial = made(Classifier, {"optimizer": {"lr": 0.1, "momentum": 0.9, "clip_norm": 0.5}, "seed": 3})
    model = copy.deepcopy(trial.model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x, y = images()
    for epoch in range(3):
        total = 0.0
        for picked in trial._fused.data.order(epoch).split(16):
            loss = nn.functional.cross_entropy(model(x.double()[picked]), y[picked])
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            total += loss.item() * len(picked)
        metrics = trial.step()
        assert metrics["loss"] == pytest.approx(total / 50, rel=1e-12)
        correct = (model(x.double()).argmax(-1) == y).double().mean().item()
        assert metrics["accuracy"] == pytest.approx(correct)
    assert all(
        torch.equal(ours, theirs) for ours, theirs in zip(model.parameters(), trial.model.parameters(), strict=True)
    )


def test_all_random_numbers_follow_from_the_seed() -> None:
    torch.manual_seed(1)
    one = made(Convolutions, {"seed": 4})
    first = one.step()
    torch.manual_seed(2)
    again, other = made(Convolutions, {"seed": 4}), made(Convolutions, {"seed": 5})
    assert again.step() == first and difference(one, again) == 0.0
    assert other.step()["loss"] != first["loss"]
    assert not torch.equal(one._fused.data.order(0), one._fused.data.order(1))


class WithOtherRandomness(Classifier):
    """Draws from the global generators in build() and in loss()."""

    def build(self, config: dict[str, Any]) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(36, 5), nn.Dropout(0.5)).double()


def test_the_global_generators_are_left_alone() -> None:
    def state() -> tuple[Any, ...]:
        return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()

    before = state()
    trial = made(WithOtherRandomness, {})
    first = trial.step()
    assert state() == before
    torch.manual_seed(99)
    assert made(WithOtherRandomness, {}).step() == first


@pytest.mark.parametrize("cls", [Convolutions, Steps])
def test_it_continues_from_a_checkpoint(cls: type[FusedTrainable], tmp_path: Path) -> None:
    config = {"kind": "adam", "optimizer": {"lr": 0.01, "schedule": lambda step: 1.0 / (1 + step)}}
    trial, other = made(cls, config), made(cls, config | {"seed": 8})
    for _ in range(3):
        trial.step()
    trial.save_checkpoint(str(tmp_path))
    other._fused.seed = other._fused.data.seed = 0  # The seed is the config's, not the checkpoint's.
    other.load_checkpoint(str(tmp_path))
    assert difference(trial, other) == 0.0
    assert [trial.step() for _ in range(2)] == [other.step() for _ in range(2)]
    assert difference(trial, other) == 0.0 and other.iteration == 5


def test_hyperparameters_are_those_of_the_config_after_taking_anothers_state(tmp_path: Path) -> None:
    donor = made(Classifier, {"optimizer": {"lr": 0.5, "momentum": 0.9}})
    donor.step()
    donor.save_checkpoint(str(tmp_path))
    trial = made(Classifier, {"optimizer": {"lr": 0.01, "momentum": 0.8}})
    trial.load_checkpoint(str(tmp_path))
    assert [trial.torch_optimizer.param_groups[0][name] for name in ("lr", "momentum")] == [0.01, 0.8]
    donor.step(), trial.step()
    assert difference(donor, trial) > 1e-3


def test_as_a_resident_of_a_lane(tmp_path: Path) -> None:
    residents = [make_resident(Convolutions, trial_id="t", folder=str(tmp_path)) for _ in range(2)]
    for resident in residents:
        resident.setup({})
    residents[0].step()
    (tmp_path / "saved").mkdir()
    residents[0].save(str(tmp_path / "saved"))
    residents[1].restore(str(tmp_path / "saved"))
    assert residents[0].step() == residents[1].step()


def test_a_class_of_a_script_is_pickled() -> None:
    def make() -> type[FusedTrainable]:
        class Local(Classifier):
            pass

        return Local

    loaded = pickle.loads(dump_trainable(make()))
    assert made(loaded, {}).step() == made(Classifier, {}).step()


# -- under an executor, elastically, under Ray Tune -------------------------------------------------------------


def expected(config: Mapping[str, Any], iterations: int) -> list[dict[str, Any]]:
    trial = made(Tunable, config)
    return [trial.step() for _ in range(iterations)]


class Dying(Tunable):
    """Kills its process in the third iteration, once."""

    def data(self, config: dict[str, Any], seed: int) -> TensorData:
        self.marker = Path(config["marker"])
        return super().data(config, seed)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        if self.iteration == 2 and not self.marker.exists():
            self.marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().loss(model, batch)


@pytest.mark.slow
def test_paused_restored_and_continued_under_an_executor(tmp_path: Path) -> None:
    config = {"lr": 0.1, "momentum": 0.5, "seed": 0, "marker": str(tmp_path / "marker")}
    with fluid.FluidExecutor(backend="local", devices=1, verbose=0, run_dir=tmp_path / "run"):
        trial = fluid.Trial(Dying, config, budget=60, trial_id="a")
        handle = fluid.submit_trialgroup(fluid.TrialGroup([trial]))
        results = handle.results()
        found = [next(results) for _ in range(3)]
        assert Path(config["marker"]).exists()
        handle.pause("a")
        other = fluid.submit_trialgroup(fluid.TrialGroup([fluid.Trial(Tunable, {"lr": 0.2}, budget=1)]))
        assert other.wait(60)
        handle.resume("a")
        found += list(results)
    assert [result.iteration for result in found] == list(range(1, 61))
    for ours, theirs in zip(found, expected(config, 60), strict=True):
        assert {name: ours.metrics[name] for name in theirs} == pytest.approx(theirs, rel=1e-6)


@pytest.mark.slow
def test_in_a_sweep(tmp_path: Path) -> None:
    with fluid.FluidExecutor(backend="local", devices=2, verbose=0, run_dir=tmp_path / "run"):
        space = {"lr": choice([0.01, 0.03, 0.1, 0.3]), "momentum": choice([0.0, 0.9]), "seed": 0}
        options = {"metric": "val_loss", "mode": "min", "algorithm": "sha", "samples": 6, "budget": 4, "seed": 0}
        result = fluid.run(Tunable, space, **options)
    assert len(result.trials) == 6
    assert result.best.value == pytest.approx(expected(result.best.config, 4)[-1]["val_loss"], rel=1e-6)


@pytest.mark.slow
def test_the_width_does_not_change_the_results() -> None:
    config = {"lr": 0.1, "momentum": 0.9, "seed": 2}
    with QuickRun(Tunable, config, 1) as run:
        found = []
        for width in (1, 2, 2, 1):
            run.resize(width)
            found += [result.metrics for result in run.run(1)]
            assert run.width == width
    for ours, theirs in zip(found, expected(config, 4), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-9)


class Synchronized(Convolutions):
    """Batch normalization over the whole batch."""

    def build(self, config: dict[str, Any]) -> nn.Module:
        return self.sync_batch_norm(super().build(config))


@pytest.mark.slow
def test_dropout_and_batch_normalization_on_two_devices() -> None:
    with QuickRun(Synchronized, {"p": 0.0, "q": 0.0}, 2) as run:
        wide = [result.metrics for result in run.run(2)]
    alone = made(Convolutions, {"p": 0.0, "q": 0.0})
    for found in wide:
        assert found == pytest.approx(alone.step(), rel=1e-6)
    with QuickRun(Synchronized, {"p": 0.3}, 2) as run:
        losses = [result.metrics["loss"] for result in run.run(2)]
    assert losses[0] != pytest.approx(wide[0]["loss"], rel=1e-3) and np.isfinite(losses).all()


@pytest.mark.ray
@pytest.mark.skipif(find_spec("ray") is None, reason="needs Ray")
def test_as_a_trainable_of_ray_tune(tmp_path: Path) -> None:
    from fluid.elastic import as_tune_trainable

    config = {"lr": 0.1}
    wrapped = as_tune_trainable(Tunable)(config)
    assert wrapped.train()["loss"] == expected(config, 1)[0]["loss"]
    wrapped.save_checkpoint(str(tmp_path))
    assert wrapped.reset_config({"lr": 0.2})
    wrapped.load_checkpoint(str(tmp_path))
    assert wrapped.elastic.torch_optimizer.param_groups[0]["lr"] == 0.2


# -- mistakes -----------------------------------------------------------------------------------------------------


class Wrong(Classifier):
    """Returns what its config says in place of something else."""

    def build(self, config: dict[str, Any]) -> Any:
        return config.get("model", super().build(config))

    def optimizer(self, config: dict[str, Any]) -> Any:
        return config.get("spec", SGD(lr=0.1))

    def data(self, config: dict[str, Any], seed: int) -> Any:
        return config.get("samples", super().data(config, seed))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model": None}, "build=None: must return a torch.nn.Module"),
        ({"model": nn.Flatten()}, "with parameters to train"),
        ({"spec": 0.1}, "optimizer=0.1: must return an SGD"),
        ({"samples": [1]}, "must return a TensorData"),
        ({"seed": -1}, "seed=-1: must be at least 0"),
        ({"seed": "x"}, "seed='x': must be a number"),
    ],
)
def test_what_the_methods_return_is_checked(config: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidFieldError, match=message):
        made(Wrong, config)


def test_missing_methods_are_named() -> None:
    class Empty(FusedTrainable):
        pass

    with pytest.raises(NotImplementedError, match="Empty must define build"):
        made(Empty, {})


def test_a_loss_among_the_evaluated_metrics_is_refused() -> None:
    class Clash(Classifier):
        def evaluate(self, model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
            return {"loss": self.loss(model, batch)}

    with pytest.raises(InvalidFieldError, match="'loss' is the training loss"):
        made(Clash, {}).step()


def test_a_loss_that_is_no_number_is_refused() -> None:
    class Many(Classifier):
        def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
            return model(batch[0])

    with pytest.raises(InvalidFieldError, match="one number"):
        made(Many, {}).step()


@pytest.mark.parametrize("name", ["loss", "model", "optimizer", "step"])
def test_attributes_that_hide_what_the_class_needs_are_refused(name: str) -> None:
    class Hiding(Classifier):
        def build(self, config: dict[str, Any]) -> nn.Module:
            setattr(self, name, 1)
            return super().build(config)

    with pytest.raises(FluidError, match=rf"self.{name}"):
        made(Hiding, {})


def test_an_epoch_shorter_than_it_says_is_refused() -> None:
    class Short(OwnData):
        def __len__(self) -> int:
            return 5

    class Liar(Streamed):
        def data(self, config: dict[str, Any], seed: int) -> Any:
            return Short(seed)

    with pytest.raises(InvalidFieldError, match="epoch 0 has fewer batches"):
        made(Liar, {}).step()


def test_without_evaluate_only_the_loss_is_reported() -> None:
    class Plain(Classifier):
        evaluate = FusedTrainable.evaluate

    assert made(Plain, {}).step().keys() == {"loss"}
    assert values(made(Plain, {})).keys() == values(made(Classifier, {})).keys()
