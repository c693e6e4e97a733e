"""Keras 3 on Fluid, with PyTorch: epochs as iterations, exact resuming."""

from __future__ import annotations

import importlib
import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import fluid
from fluid import FluidExecutor, InvalidFieldError
from fluid.trainables.reporting_resident import ReportingResident
from fluid.trainables.resident import NotSavableError

pytestmark = [
    pytest.mark.frameworks("keras", "torch"),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"),
]


@pytest.fixture(scope="module", autouse=True)
def on_torch() -> Iterator[None]:
    """One thread, as tiny networks are slower on several, above all beside other tests."""
    torch = pytest.importorskip("torch")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KERAS_BACKEND", "torch")
        pytest.importorskip("keras")
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        yield
        torch.set_num_threads(before)


def train_function(**options: Any) -> Any:
    """Training that depends on all that a checkpoint must hold: dropout, buffers, moments, callbacks, shuffling."""

    def train(config: dict[str, Any]) -> None:
        import keras
        import numpy as np

        from fluid.integrations.keras import fit

        model = keras.Sequential(
            [
                *([] if config.get("lazy") else [keras.layers.Input((8,))]),
                keras.layers.Dense(16),
                keras.layers.BatchNormalization(),
                keras.layers.Dropout(0.3),
                keras.layers.Dense(1),
            ]
        )
        model.compile(keras.optimizers.Adam(config["lr"]), "mse", metrics=["mae"])
        x = np.random.default_rng(0).normal(size=(90, 8)).astype("float32")
        y = x.sum(1, keepdims=True)
        callbacks: list[Any] = []
        if config.get("plateau"):
            callbacks += [
                keras.callbacks.ReduceLROnPlateau(factor=0.5, patience=2, min_delta=0.5),
                keras.callbacks.EarlyStopping(patience=3, min_delta=10.0, restore_best_weights=True),
            ]
        if config.get("decay"):
            callbacks.append(keras.callbacks.LearningRateScheduler(lambda epoch, lr: lr * 0.9))
        given = {"epochs": 4, "batch_size": 16, "validation_split": 0.2, **options}
        fit(model, x, y, callbacks=callbacks, **given)

    return train


def seeded(train: Any, seed: int, **config: Any) -> ReportingResident:
    random.seed(seed)
    importlib.import_module("numpy").random.seed(seed)
    importlib.import_module("torch").manual_seed(seed)
    resident = ReportingResident(train)
    resident.setup({"lr": 0.05, **config})
    return resident


def run_out(resident: ReportingResident) -> list[Any]:
    found = []
    while not (step := resident.step()).finished:
        found.append(step.metrics)
    assert step.metrics is None
    resident.cleanup()
    return found


@pytest.mark.parametrize("config", [{"plateau": True}, {"decay": True, "lazy": True}], ids=["plateau", "decay"])
def test_a_trial_that_is_moved_has_the_same_losses(config: dict[str, Any], tmp_path: Path) -> None:
    train = train_function()
    undisturbed = run_out(seeded(train, 1, **config))
    assert len(undisturbed) == 4
    assert {"loss", "mae", "val_loss", "val_mae", "learning_rate"} <= undisturbed[0].keys()
    assert undisturbed[-1]["learning_rate"] < undisturbed[0]["learning_rate"]
    for after in (1, 3):
        first = seeded(train, 1, **config)
        before = [first.step().metrics for _ in range(after)]
        (tmp_path / f"{after}").mkdir()
        first.save(str(tmp_path / f"{after}"))
        assert before + run_out(first) == undisturbed, "saving disturbs nothing"
        moved = seeded(train, 99, **config)
        moved.restore(str(tmp_path / f"{after}"))
        assert before + run_out(moved) == undisturbed


def test_batches_are_iterations_that_cannot_be_saved(tmp_path: Path) -> None:
    trial = seeded(train_function(batches=2, epochs=2), 1)
    # 72 samples in batches of 16: after two and four of the five batches, and after the epoch.
    kinds, savable = [], []
    for _ in range(6):
        metrics = trial.step().metrics
        assert metrics is not None
        kinds.append("val_loss" in metrics)
        savable.append(trial.unsaved_iterations() == 0)
    assert kinds == savable == [False, False, True] * 2
    again = seeded(train_function(batches=2), 1)
    again.step()
    with pytest.raises(NotSavableError):
        again.save(str(tmp_path))
    again.cleanup()
    trial.cleanup()
    with pytest.raises(InvalidFieldError, match="batches=0"):
        seeded(train_function(batches=0), 1).step()


def test_outside_a_trial_fit_is_keras_s() -> None:
    keras, numpy = importlib.import_module("keras"), importlib.import_module("numpy")
    from fluid.integrations.keras import fit

    histories = []
    for ours in (True, False):
        keras.utils.set_random_seed(2)
        model = keras.Sequential([keras.layers.Input((8,)), keras.layers.Dense(1)])
        model.compile(loss="mse")
        x = numpy.ones((32, 8))
        options = {"epochs": 2, "callbacks": keras.callbacks.EarlyStopping("loss")}
        found = fit(model, x, x[:, 0], **options) if ours else model.fit(x, x[:, 0], verbose=0, **options)
        histories.append(found.history)
    assert histories[0] == histories[1]


def test_in_lanes_the_best_model_is_kept_and_stopped_trials_end_their_fit(tmp_path: Path) -> None:
    keras, numpy = importlib.import_module("keras"), importlib.import_module("numpy")
    ends = str(tmp_path / "ends")

    def build(width: int, lr: float) -> Any:
        import keras

        model = keras.Sequential([keras.layers.Input((8,)), keras.layers.Dense(width), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(lr), "mse")
        return model

    def train(config: dict[str, Any]) -> None:
        import keras
        import numpy

        from fluid.integrations.keras import fit

        keras.utils.set_random_seed(0)

        class AtEnd(keras.callbacks.Callback):  # type: ignore[misc]
            def on_train_end(self, logs: Any = None) -> None:
                with open(ends, "a") as file:
                    file.write("ended\n")

        x = numpy.random.default_rng(0).normal(size=(64, 8))
        y = x.sum(1)
        fit(build(**config), x, y, epochs=9, validation_data=(x, y), callbacks=AtEnd())

    space = {"width": 4, "lr": [1e-5, 1e-4, 1e-3, 1e-2]}
    with FluidExecutor(backend="local", devices=1, run_dir=tmp_path / "run", verbose=0, keep="best:1"):
        result = fluid.run(train, space, metric="val_loss", samples=6, budget=9, seed=1)
    assert not result.failures
    lengths = [trial.iteration for trial in result.trials]
    assert max(lengths) == 9 and min(lengths) == 1
    assert Path(ends).read_text().count("ended") == len(result.trials) == 6
    model = build(**result.best.config)
    model.load_weights(result.best.load_checkpoint() / "model.weights.h5")
    x = numpy.random.default_rng(0).normal(size=(64, 8))
    assert model.evaluate(x, x.sum(1), verbose=0) == pytest.approx(result.best.value, rel=1e-5)
    assert keras.backend.backend() == "torch"


@pytest.mark.parametrize("chdir", [False, True])
def test_a_file_that_trials_share_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chdir: bool) -> None:
    monkeypatch.chdir(tmp_path)

    def train(config: dict[str, Any]) -> None:
        import warnings

        import keras
        import numpy as np

        from fluid.integrations.keras import fit

        model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
        model.compile(loss="mse")
        warnings.simplefilter("always")  # pytest's filters reach trials.
        log = keras.callbacks.CSVLogger("log.csv")
        own = keras.callbacks.CSVLogger(str(fluid.trial_dir() / "own.csv"))
        fit(model, np.ones((8, 2)), np.ones(8), epochs=1, callbacks=[log, own])

    with FluidExecutor(backend="local", devices=1, run_dir=tmp_path / "run", verbose=0) as executor:
        options = {"chdir": chdir}
        space = {"lr": [0.1, 0.2]}
        result = fluid.run(
            train, space, metric="loss", algorithm="grid", budget=1, executor=executor, trial_options=options
        )
    for trial in result.trials:
        assert (trial.folder / "own.csv").exists()
        assert (trial.folder / "log.csv").exists() == chdir
        log = tmp_path / "run" / "trials" / trial.trial_id / "output.log"
        told = log.read_text().count("is one file for all trials") if log.exists() else 0
        assert told == (0 if chdir else 1)
    assert (tmp_path / "log.csv").exists() != chdir


def test_the_example(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[2]
    options = ["--samples", "3", "--epochs", "3", "--devices", "1"]
    command = [sys.executable, str(root / "examples" / "frameworks" / "keras_sweep.py"), *options]
    environment = {**os.environ, "HOME": str(tmp_path), "PYTHONPATH": str(root), "KERAS_BACKEND": "torch"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    found = re.search(r"right on ([\d.]+)% of the digits", done.stdout)
    assert found is not None and float(found[1]) > 60.0, done.stdout
